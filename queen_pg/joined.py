"""Responses in one piece: the HTTP server writes a response's head, and then its body.

Each write to a socket is a system call, wakes the reader, and is a packet of its own. For the small
answers of a broker that is a good part of what they cost.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = b"HTTP/"


class JoiningProtocol(HttpToolsProtocol):
    """The server's protocol, on a transport that joins heads with what follows."""

    def connection_made(self, transport: Any) -> None:
        """Begin to serve a connection."""
        super().connection_made(cast(asyncio.Transport, Joining(transport, self.loop)))


class Joining:
    """A transport that keeps a response's head until the next write, or the loop's next turn."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send data behind what is kept, unless it is a head."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(HEAD):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Send what is kept, and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)
