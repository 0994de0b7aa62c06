"""`python -m tests.faults`: the campaign by hand, every workload under every fault, several times.

Prints a line per round and a table of verdicts; writes all rounds as JSON if asked. Exits 1 if a
round was invalid.
"""

import argparse
import asyncio
import random
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import msgspec

from tests.faults.campaign import Round, clear, play
from tests.faults.nemesis import FAULTS, POINTLESS, SMALL_DISK
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
    ordinary = [fault for fault in options.faults if fault != SMALL_DISK]
    for faults in (ordinary, [SMALL_DISK] if SMALL_DISK in options.faults else []):
        if not faults:
            continue
        async with stage(pooled=options.pooled, small_disk=faults == [SMALL_DISK]) as standing:
            for number, workload, fault in product(
                range(options.rounds), options.workloads, faults
            ):
                if (workload, fault) in POINTLESS:
                    continue
                await clear(standing)
                played = await play(
                    standing, workload, fault, options.seed + number, options.seconds
                )
                rounds.append(played)
                report(played)
    return rounds


def report(played: Round) -> None:
    """Print one round."""
    print(
        f"{played.workload:14} {played.fault:20} {played.seed:8} {played.verdict:8}"
        f" {played.operations}",
        flush=True,
    )
    for violation in played.violations:
        print(f"    {violation}", flush=True)


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
