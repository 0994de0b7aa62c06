"""Responses in one piece: what is written to a connection, and when."""

import asyncio
from typing import Any, cast

from queen_pg.joined import Joining

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Transport:
    """Notes what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def joining() -> tuple[Any, Transport]:
    transport = Transport()
    return Joining(cast(Any, transport), asyncio.get_running_loop()), transport


async def test_a_head_goes_with_its_body() -> None:
    joined, transport = joining()
    joined.write(HEAD)
    joined.write(b"{}")
    assert transport.written == [HEAD + b"{}"]
    await asyncio.sleep(0)
    assert transport.written == [HEAD + b"{}"]


async def test_a_head_without_a_body_goes_with_the_empty_one() -> None:
    joined, transport = joining()
    joined.write(HEAD)
    joined.write(b"")
    assert transport.written == [HEAD]


async def test_a_head_whose_body_takes_longer_does_not_wait_for_it() -> None:
    joined, transport = joining()
    joined.write(HEAD)
    await asyncio.sleep(0)
    assert transport.written == [HEAD]
    joined.write(b"{}")
    joined.write(b"{}")
    assert transport.written == [HEAD, b"{}", b"{}"]


async def test_two_answers_in_a_row_are_whole() -> None:
    joined, transport = joining()
    for _ in range(2):
        joined.write(HEAD)
        joined.write(b"{}")
    joined.write(HEAD)
    await asyncio.sleep(0)
    assert b"".join(transport.written) == 2 * (HEAD + b"{}") + HEAD


async def test_what_is_kept_is_sent_before_the_end() -> None:
    joined, transport = joining()
    joined.write(HEAD)
    joined.close()
    assert transport.written == [HEAD]
    assert joined.is_closing()
    await asyncio.sleep(0)
    assert transport.written == [HEAD]
