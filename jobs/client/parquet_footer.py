"""The columns and the number of rows of a Parquet file, from its last bytes: what can be told without a library.

A file ends with its FileMetaData in Thrift's compact protocol, the length of that in four bytes, and `PAR1`
(https://parquet.apache.org/docs/file-format/; parquet.thrift; Thrift's thrift-compact-protocol.md).
"""

from collections.abc import Callable
from typing import Any

MAGIC = b"PAR1"

FOOTER_BYTES = 64 << 10
"""Holds the metadata of most files; those with more are asked for a second time."""

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_SCHEMA, _ROWS = 2, 3
"""Fields of FileMetaData."""
_NAME, _CHILDREN = 4, 5
"""Fields of SchemaElement."""


def columns_and_rows(tail: Callable[[int], bytes], at_once: int) -> tuple[list[str], int]:
    """Return the names of the top columns, and how many rows there are. `tail(n)` returns the last n bytes.

    Raises ValueError where these are no end of a Parquet file.
    """
    end = tail(at_once)
    if end[-4:] != MAGIC:
        raise ValueError("no Parquet")
    length = int.from_bytes(end[-8:-4], "little")
    if length + 8 > len(end):
        end = tail(length + 8)
    try:
        metadata = _Compact(end[-8 - length : -8]).struct()
        root, *elements = metadata[_SCHEMA]
        names = []
        for _ in range(root.get(_CHILDREN, 0)):
            names.append(elements[0][_NAME].decode())
            elements = elements[_size(elements) :]
        return names, int(metadata[_ROWS])
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        # Fields are missing, or of another type than Parquet's.
        raise ValueError(f"no metadata of Parquet: {error!r}") from None


def _size(elements: list[dict[int, Any]]) -> int:
    """Return how many elements the first one takes with all that lies inside it: they are listed depth first."""
    size = 1
    for _ in range(elements[0].get(_CHILDREN, 0)):
        size += _size(elements[size:])
    return size


class _Compact:
    """Reads values in Thrift's compact protocol; the fields of a struct are by their numbers."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            fields[number] = self._value(head & 15)
        return fields

    def _value(self, kind: int, *, in_list: bool = False) -> Any:
        if kind in (_TRUE, _FALSE):
            return (self._byte() if in_list else kind) == _TRUE
        if kind == _BYTE:
            return self._byte()
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in (_LIST, _SET):
            head = self._byte()
            size = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, in_list=True) for _ in range(size)]
        if kind == _STRUCT:
            return self.struct()
        if kind == _MAP:
            raise ValueError("Parquet's metadata has no maps")
        return self._integer()

    def _integer(self) -> int:
        """Read a zigzag integer."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _byte(self) -> int:
        self._at += 1
        return self._content[self._at - 1]

    def _bytes(self, length: int) -> bytes:
        self._at += length
        if self._at > len(self._content):
            raise IndexError(self._at)
        return self._content[self._at - length : self._at]
