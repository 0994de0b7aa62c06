"""A network link to a server on loopback, which can be cut: for everybody, or for one client."""

import contextlib
import selectors
import socket
import threading

CHUNK = 65536
# A client may ask for encryption, in two ways of 8 bytes each; the message after that names its
# application, among other things.
ASK_FOR_ENCRYPTION_BYTES = 16


class Link:
    """Passes bytes between a port of its own and a server's, in a thread of its own.

    A cut link is a black hole: nothing arrives, and nobody is told.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._hello: dict[socket.socket, bytes] = {}
        self._cut: set[bytes] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=f"link {self.port}", daemon=True)
        self._thread.start()

    def cut(self, word: bytes = b"") -> None:
        """Lose everything of the clients whose first message holds the word; of all by default."""
        self._cut.add(word)

    def mend(self) -> None:
        """Let new connections through; those that lost bytes are ended."""
        lossy = bool(self._cut)
        self._cut.clear()
        for one in list(self._pairs) if lossy else ():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End."""
        self._ending = True
        self._thread.join()
        for one in (self._listener, *self._pairs):
            one.close()

    def _run(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._pass(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        self._pairs[client] = server
        self._pairs[server] = client
        self._hello[client] = b""
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(one, selectors.EVENT_READ)

    def _pass(self, source: socket.socket) -> None:
        if source not in self._pairs:
            return
        target = self._pairs[source]
        try:
            data = source.recv(CHUNK)
            client = source if source in self._hello else target
            if source is client and len(self._hello[client]) <= ASK_FOR_ENCRYPTION_BYTES:
                self._hello[client] += data
            if data and not any(word in self._hello[client] for word in self._cut):
                target.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (source, target):
                self._selector.unregister(one)
                self._pairs.pop(one, None)
                self._hello.pop(one, None)
                one.close()
