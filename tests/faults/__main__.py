"""`python -m tests.faults`: the campaign by hand, every workload under every fault, several times.

Prints a line per round and a table of verdicts; writes all rounds as JSON if asked. Exits 1 if a
round was invalid.
"""

import argparse
import asyncio
import random
import sys
from collections import Counter
from pathlib import Path

import msgspec

from tests.faults.campaign import Round, clear, play
from tests.faults.nemesis import FAULTS
from tests.faults.stage import PGBOUNCER, stage
from tests.faults.workloads import WORKLOADS


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each pair")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long the clients run")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--pooled", action="store_true", help=f"with PgBouncer ({PGBOUNCER})")
    parser.add_argument("--json", type=Path, help="where to write all rounds")
    return parser.parse_args()


async def campaign(options: argparse.Namespace) -> list[Round]:
    """Play all rounds on one stage."""
    rounds: list[Round] = []
    async with stage(pooled=options.pooled) as standing:
        for number in range(options.rounds):
            for workload in options.workloads:
                for fault in options.faults:
                    await clear(standing)
                    seed = options.seed + number
                    played = await play(standing, workload, fault, seed, options.seconds)
                    rounds.append(played)
                    print(
                        f"{workload:14} {fault:20} {seed:8} {played.verdict:8} {played.operations}",
                        flush=True,
                    )
                    for violation in played.violations:
                        print(f"    {violation}", flush=True)
    return rounds


def main() -> int:
    """Run the campaign and print its counts."""
    options = arguments()
    rounds = asyncio.run(campaign(options))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rounds)))
    print(f"\nseeds {options.seed} to {options.seed + options.rounds - 1}")
    for workload in options.workloads:
        counts = Counter(each.verdict for each in rounds if each.workload == workload)
        calls = sum(sum(each.operations.values()) for each in rounds if each.workload == workload)
        print(
            f"{workload:14} valid {counts['valid']:4}  invalid {counts['invalid']:4}  "
            f"unknown {counts['unknown']:4}  operations {calls}"
        )
    return int(any(each.verdict == "invalid" for each in rounds))


if __name__ == "__main__":
    sys.exit(main())
