"""A TCP proxy between a broker and its database, which can break connections on command."""

import asyncio
import contextlib
import socket
from typing import Literal

CHUNK = 65536
COMMIT_POINTS = ("before", "after")

CommitPoint = Literal["before", "after"]


class Proxy:
    """Forwards connections to a port of 127.0.0.1, until it is told otherwise."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self._cut_at: CommitPoint | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End, with every connection."""
        if self._server is not None:
            self._server.close()
        self.cut()

    def cut(self) -> None:
        """Reset every connection now; new ones are accepted."""
        for writer in list(self._writers):
            _reset(writer)

    def refuse(self, refusing: bool) -> None:
        """Reset what is there and whatever comes, or stop doing so."""
        self._refusing = refusing
        if refusing:
            self.cut()

    def swallow(self, swallowing: bool) -> None:
        """Forward nothing and close nothing, like a network without a route; or forward again."""
        if swallowing:
            self._flowing.clear()
        else:
            self._flowing.set()

    def cut_at(self, point: CommitPoint | None) -> None:
        """Reset each connection as it sends its next call (before), or as that is answered (after).

        A call is a transaction: before means that it never began, after that it was committed
        and nobody was told.
        """
        self._cut_at = point

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(
                "127.0.0.1", self._target_port
            )
        except OSError:
            _reset(writer)
            return
        self._writers |= {writer, server_writer}
        try:
            await asyncio.gather(
                self._forward(reader, server_writer, "before", writer),
                self._forward(server_reader, writer, "after", server_writer),
            )
        finally:
            self._writers -= {writer, server_writer}

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        point: CommitPoint,
        back: asyncio.StreamWriter,
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                if self._cut_at == point:
                    _reset(writer)
                    _reset(back)
                    return
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, as a dying peer does."""
    with contextlib.suppress(OSError, RuntimeError):
        raw = writer.get_extra_info("socket")
        if raw is not None and hasattr(raw, "setsockopt"):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.transport.abort()
