"""An application that stores rows and pushes messages, and is killed: `… URL KILLS SEED`.

Each transaction writes one row and pushes one message of the same number, in one of three ways. The
parent forks a few such writers, and again and again kills one at a random moment: the process, by
SIGKILL, or its session, from the server. It prints how many kills met an open transaction.
"""

import json
import os
import random
import select
import signal
import sys
import time

import psycopg

from queen_pg import client as queen

WRITERS = 4
# Longer than a transaction takes, so that kills fall before, into and behind it.
DELAY_SECONDS_MAX = 0.02

INSIDE = """
select count(*) from pg_stat_activity where pid = %s and backend_xid is not null
"""


def write(url: str, pipe: int, seed: int) -> None:
    """Run transactions for ever; say which session they are in, and that each one begins."""
    chance = random.Random(seed)
    with psycopg.connect(url) as connection:
        os.write(pipe, f"{connection.info.backend_pid}\n".encode())
        while True:
            partition = f"p{chance.randrange(20)}"
            os.write(pipe, b".")
            with connection.transaction():
                row = connection.execute(
                    "insert into app_row default values returning number"
                ).fetchone()
                push(connection, chance.randrange(3), partition, row[0])
                if chance.random() < 0.1:
                    connection.execute("select pg_sleep(0.005)")


def push(connection: psycopg.Connection, how: int, partition: str, number: int) -> None:
    """Push the number, by one of the functions that push."""
    message = {"queue": "rows", "partition": partition, "payload": number}
    if how == 0:
        queen.push(connection, "rows", number, partition, transaction_id=str(number))
    elif how == 1:
        queen.push_many(connection, [message])
    else:
        step = {"operations": [{"type": "push", "items": [message]}]}
        assert queen.transaction(connection, step)["success"]


class Writer:
    """One forked writer, and what the parent knows of it."""

    def __init__(self, url: str, seed: int) -> None:
        self._pipe, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                write(url, theirs, seed)
            finally:
                # Whatever ended it, the parent's work is not the child's to go on with.
                os._exit(0)
        os.close(theirs)
        self.session = int(self._line())

    def _line(self) -> str:
        text = b""
        while not text.endswith(b"\n"):
            byte = os.read(self._pipe, 1)
            assert byte, "a writer ended before it began"
            text += byte
        return text.decode()

    def begun(self) -> None:
        """Return when the next transaction begins."""
        while select.select([self._pipe], [], [], 0)[0]:
            if not os.read(self._pipe, 4096):
                return
        os.read(self._pipe, 1)

    def end(self) -> None:
        """Kill the process, if it is not dead yet."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pipe)


def main(url: str, kills: int, seed: int) -> None:
    """Write and kill."""
    chance = random.Random(seed)
    writers = [Writer(url, chance.random()) for _ in range(WRITERS)]
    met = 0
    # Connected after the first forks, and used by nobody else.
    with psycopg.connect(url, autocommit=True) as killer:
        for _ in range(kills):
            place = chance.randrange(WRITERS)
            writer = writers[place]
            writer.begun()
            time.sleep(chance.random() * DELAY_SECONDS_MAX)
            met += killer.execute(INSIDE, [writer.session]).fetchone()[0]
            if chance.random() < 0.5:
                killer.execute("select pg_terminate_backend(%s)", [writer.session])
            writer.end()
            writers[place] = Writer(url, chance.random())
    for writer in writers:
        writer.end()
    print(json.dumps({"met": met}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
