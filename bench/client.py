"""An HTTP client that costs little: raw sockets, one epoll loop, a generator per connection.

A program is a generator. What it yields is sent, or waited for: the bytes of a request give it the
Response, a float is an instant of the monotonic clock to go on at. The measured machine runs the
load too, so each microsecond here is taken from the broker.
"""

import heapq
import select
import socket
from collections.abc import Generator, Sequence
from typing import NamedTuple

from .window import clock

READ_BYTES = 1 << 18


class Response(NamedTuple):
    """What was answered."""

    status: int
    body: bytes


Program = Generator["bytes | float", Response, None]


class _Connection:
    def __init__(self, program: Program, address: tuple[str, int]) -> None:
        self.program = program
        self.buffer = b""
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> Response | None:
        """Read what is there; return the response once it is whole."""
        chunk = self.socket.recv(READ_BYTES)
        if not chunk:
            raise ConnectionError("the broker closed the connection")
        data = self.buffer + chunk if self.buffer else chunk
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self.buffer = data
            return None
        start = data.find(b"content-length: ", 0, end)
        length = int(data[start + 16 : data.index(b"\r\n", start)]) if start >= 0 else 0
        end += 4
        if len(data) < end + length:
            self.buffer = data
            return None
        self.buffer = b""
        return Response(int(data[9:12]), data[end : end + length])


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """Return the bytes of a request with a JSON body."""
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def exchange(address: tuple[str, int], message: bytes) -> Response:
    """Send one request on a connection of its own."""
    answer: list[Response] = []

    def program() -> Program:
        answer.append((yield message))

    Engine([program()], address).run(clock() + 600)
    return answer[0]


class Engine:
    """Runs programs, each on a connection of its own."""

    def __init__(self, programs: Sequence[Program], address: tuple[str, int]) -> None:
        self._connections = [_Connection(program, address) for program in programs]
        self._timers: list[tuple[float, int]] = []
        self._running = 0

    def run(self, until: float) -> None:
        """Run the programs until they end, or until an instant, and close the connections."""
        poll = select.epoll()
        by_number = {each.socket.fileno(): each for each in self._connections}
        for number in by_number:
            poll.register(number, select.EPOLLIN)
        self._running = len(by_number)
        for number, connection in by_number.items():
            self._advance(number, connection, None)
        timers = self._timers
        while self._running and (now := clock()) < until:
            while timers and timers[0][0] <= now:
                number = heapq.heappop(timers)[1]
                self._advance(number, by_number[number], None)
            wait = max(min(timers[0][0] if timers else until, until) - clock(), 0)
            for number, _ in poll.poll(wait):
                connection = by_number[number]
                response = connection.receive()
                if response is not None:
                    self._advance(number, connection, response)
        poll.close()
        for connection in self._connections:
            connection.program.close()
            connection.socket.close()

    def _advance(self, number: int, connection: _Connection, response: Response | None) -> None:
        try:
            step = (
                next(connection.program) if response is None else connection.program.send(response)
            )
        except StopIteration:
            self._running -= 1
            return
        if isinstance(step, bytes):
            connection.socket.sendall(step)
        else:
            heapq.heappush(self._timers, (step, number))
