"""Convert a table's file to lines of UTF-8: decompress it, decode it, and end its lines with a newline.

Only what the first bytes prove is done unasked: compressed files and byte order marks have unique beginnings. Other
formats are refused.
"""

import codecs
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jobs.core.errors import UsageError

UTF8 = "utf-8"

_BLOCK_BYTES = 1 << 16

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh91AY&SY": "bz2"}
"""First bytes of compressed files, and the names that Arrow gives the compressions."""

_SPREADSHEET_NEXT = "open it in a spreadsheet program and save it as CSV"

_OTHER_FORMATS = {
    b"PK\x03\x04": ("an Excel workbook or a ZIP archive", _SPREADSHEET_NEXT),
    b"\xd0\xcf\x11\xe0": ("an Excel workbook", _SPREADSHEET_NEXT),
    b"PAR1": ("a Parquet file", "name it .parquet"),
    b"version https://git-lfs": ("a pointer of Git LFS", "git lfs pull"),
}
"""First bytes of files that are not text, what such a file is, and the next step."""

_MARKS = {codecs.BOM_UTF8: UTF8, codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def utf8_text(
    stream: io.BufferedIOBase, location: str, encoding: str = UTF8, *, is_head: bool = False, has_key: bool = True
) -> io.BufferedIOBase:
    """Return a file's text as UTF-8. Bytes that are not valid in `encoding` are kept, so that their line can be named.

    `is_head` says that the stream is only the beginning of the file, and may end in the middle of a compressed block,
    `has_key` that a spec can set the encoding.
    Raises UsageError if the file is not text in this encoding.
    """
    head = _head(stream)
    for start, codec in _COMPRESSED.items():
        if head.startswith(start):
            stream = _converted(partial(_decompressed, stream, location, codec, is_head=is_head))
            head = _head(stream)
    for start, (what, next_step) in _OTHER_FORMATS.items():
        if head.startswith(start):
            raise UsageError(f"{location} is {what}", next_step=next_step)
    mark = next((name for start, name in _MARKS.items() if head.startswith(start)), None)
    encoding = mark or encoding
    if encoding == UTF8 and head[:64].count(0) > len(head[:64]) // 4:
        found = "utf-16-be" if head[0] == 0 else "utf-16-le"
        step = f"set encoding: {found}" if has_key else f"convert it to UTF-8: iconv -f {found} -t utf-8 OLD > NEW"
        raise UsageError(f"{location} contains NUL bytes like a file in UTF-16", next_step=step)
    if encoding != UTF8:
        if mark is None and _is_utf8(head):
            raise UsageError(f"{location} is UTF-8, not {encoding}", next_step="remove encoding, or convert the table")
        stream = _converted(partial(_decoded, stream, location, encoding, is_head=is_head))
        head = _head(stream)
    if b"\r" in head and b"\n" not in head:  # "CSV (Macintosh)"
        return _converted(partial(_with_newlines, stream))
    return stream


class _Converted(io.RawIOBase):
    """The converted blocks of another stream. To seek backwards, it starts over."""

    def __init__(self, blocks: Callable[[], Iterator[bytes]]) -> None:
        self._start = blocks
        self._blocks = blocks()
        self._block = b""
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._block:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._block = block
        taken = self._block[: len(target)]
        target[: len(taken)] = taken
        self._block = self._block[len(taken) :]
        self._position += len(taken)
        return len(taken)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        wanted = offset + (self._position if whence == io.SEEK_CUR else 0)
        if wanted < self._position:
            self._blocks, self._block, self._position = self._start(), b"", 0
        while self._position < wanted and self.read(min(_BLOCK_BYTES, wanted - self._position)):
            pass
        return self._position


def _converted(blocks: Callable[[], Iterator[bytes]]) -> io.BufferedReader:
    return io.BufferedReader(_Converted(blocks), buffer_size=_BLOCK_BYTES)


def _head(stream: io.BufferedIOBase) -> bytes:
    stream.seek(0)
    head = stream.read(_BLOCK_BYTES)
    stream.seek(0)
    return head


def _blocks(stream: io.BufferedIOBase) -> Iterator[bytes]:
    stream.seek(0)
    while block := stream.read(_BLOCK_BYTES):
        yield block


def _decompressed(stream: io.BufferedIOBase, location: str, codec: str, *, is_head: bool) -> Iterator[bytes]:
    import pyarrow as pa

    source = _converted(partial(_blocks, stream))  # Arrow closes it
    content = pa.CompressedInputStream(pa.PythonFile(source, mode="r"), codec)
    try:
        while block := content.read(_BLOCK_BYTES):
            yield block
    except OSError as error:
        if not is_head:
            raise UsageError(f"{location} cannot be decompressed: {error}", next_step="copy the file again") from None


def _decoded(stream: io.BufferedIOBase, location: str, encoding: str, *, is_head: bool) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
    try:
        for block in _blocks(stream):
            yield decoder.decode(block).encode(UTF8, "surrogateescape")
        yield decoder.decode(b"", final=not is_head).encode(UTF8, "surrogateescape")
    except UnicodeError as error:
        raise UsageError(f"{location} is not {encoding}: {error}", next_step="correct encoding") from None


def _with_newlines(stream: io.BufferedIOBase) -> Iterator[bytes]:
    return (block.replace(b"\r", b"\n") for block in _blocks(stream))


def _is_utf8(head: bytes) -> bool:
    """Return whether the beginning of a file is valid UTF-8 with other characters than ASCII has."""
    try:
        codecs.getincrementaldecoder(UTF8)().decode(head)
    except UnicodeDecodeError:
        return False
    return not head.isascii()
