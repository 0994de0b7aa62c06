"""The messages of PostgreSQL's output plugin pgoutput, protocol version 1, values as text."""

import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Unchanged:
    """A large value that an update left as it was: the log does not repeat it."""


UNCHANGED: Final = Unchanged()

Row = dict[str, Any]
"""A row's columns: text, None, or UNCHANGED."""


class Begin(msgspec.Struct, frozen=True):
    """A transaction begins; what follows was committed at this moment."""

    committed_at: datetime
    xid: int


class Commit(msgspec.Struct, frozen=True):
    """A transaction ends, at this place in the log."""

    end_lsn: int


class Change(msgspec.Struct, frozen=True):
    """A row came (`I`), changed (`U`) or went (`D`); of one that went only the key is known."""

    kind: str
    table: str
    row: Row


Message = Begin | Commit | Change


class _Relation(msgspec.Struct, frozen=True):
    table: str
    columns: list[str]


class Decoder:
    """Decodes the messages of one session of decoding, in order."""

    def __init__(self) -> None:
        self._relations: dict[int, _Relation] = {}

    def decode(self, data: bytes) -> Iterator[Message]:
        """Yield what a message tells; those that tell nothing about rows yield nothing."""
        reader = _Reader(data)
        match reader.letter():
            case "B":
                reader.number("Q")
                yield Begin(EPOCH + timedelta(microseconds=reader.number("q")), reader.number("I"))
            case "C":
                reader.number("B")
                reader.number("Q")
                yield Commit(reader.number("Q"))
            case "R":
                identity = reader.number("I")
                reader.text()
                table = reader.text()
                reader.letter()
                columns = [_column(reader) for _ in range(reader.number("H"))]
                self._relations[identity] = _Relation(table, columns)
            case "I":
                relation = self._relations[reader.number("I")]
                reader.letter()
                yield Change("I", relation.table, _row(reader, relation))
            case "U":
                relation = self._relations[reader.number("I")]
                if reader.letter() != "N":
                    # The old key comes first where the update changed it.
                    _row(reader, relation)
                    reader.letter()
                yield Change("U", relation.table, _row(reader, relation))
            case "D":
                relation = self._relations[reader.number("I")]
                reader.letter()
                yield Change("D", relation.table, _row(reader, relation))


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def letter(self) -> str:
        return chr(self.number("B"))

    def number(self, kind: str) -> int:
        [value] = struct.unpack_from(f">{kind}", self._data, self._at)
        self._at += struct.calcsize(kind)
        return int(value)

    def text(self) -> str:
        end = self._data.index(b"\0", self._at)
        text = self._data[self._at : end].decode()
        self._at = end + 1
        return text

    def value(self) -> str:
        length = self.number("I")
        self._at += length
        return self._data[self._at - length : self._at].decode()


def _column(reader: _Reader) -> str:
    reader.number("B")
    name = reader.text()
    reader.number("I")
    reader.number("i")
    return name


def _row(reader: _Reader, relation: _Relation) -> Row:
    row: Row = {}
    for column in relation.columns[: reader.number("H")]:
        match reader.letter():
            case "n":
                row[column] = None
            case "u":
                row[column] = UNCHANGED
            case _:
                row[column] = reader.value()
    return row
