"""How many clients the listening socket keeps in its queue is ours to say, whatever serves HTTP."""

import asyncio
import socket
import struct
import sys

import pytest

from queen_pg import serve
from queen_pg.config import Settings
from tests.support.broker import free_port

# Neither of the HTTP server's defaults, and below what a system allows.
BACKLOG = 77
ACT_SECONDS = 30.0
# struct tcp_info: eight bytes, then numbers; a listening socket tells its limit in the sixth.
TCP_INFO = struct.Struct("8x6I")


def longest_queue(listening: socket.socket) -> int:
    """Return how many connections may wait until they are accepted."""
    told = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    longest: int = TCP_INFO.unpack(told)[-1]
    return longest


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is asked of Linux")
async def test_the_http_server_keeps_our_backlog(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets: list[socket.socket] = []
    listening_on = serve._listening

    def listening(settings: Settings) -> socket.socket:
        sockets.append(listening_on(settings))
        return sockets[-1]

    monkeypatch.setattr(serve, "BACKLOG", BACKLOG)
    monkeypatch.setattr(serve, "_listening", listening)
    settings = Settings(pg_url=database, host="127.0.0.1", port=free_port())
    stop = asyncio.Event()
    working = asyncio.create_task(serve._work(settings, lambda: None, stop))
    try:
        async with asyncio.timeout(ACT_SECONDS):
            await answered(settings.port)
        assert [longest_queue(each) for each in sockets] == [BACKLOG]
    finally:
        stop.set()
        await working


async def answered(port: int) -> None:
    """Wait until HTTP is spoken at a port, so that the HTTP server has the socket."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
            continue
        writer.write(b"GET /health HTTP/1.1\r\nHost: broker\r\nConnection: close\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 ")
        writer.close()
        await writer.wait_closed()
        return
