"""Reads a script's requirements file like uv and pip do, with all files that it includes.

Format: https://pip.pypa.io/en/stable/reference/requirements-file-format/, without options for building a package.
"""

import argparse
import codecs
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from jobs.core.errors import UsageError
from jobs.core.locations import stays_below

_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")

_NAMED = re.compile(r"[A-Za-z0-9][\w.-]*\s*(\[[^\]]*\])?\s*([<>=!~;(].*|@\s*(?!file:)\S+:.*)?", re.ASCII)
"""A requirement that names a package (PEP 508). Everything else is a URL or a path."""

_ADDRESS = re.compile(r"(?:(?:git|hg|svn|bzr)\+)?(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)

_EDITABLE = re.compile(r"^(?:-e|--editable)(?:\s*=\s*|\s*)")


@dataclass(frozen=True)
class Line:
    """One requirement, with the file and the line number where it starts."""

    file: str
    number: int
    text: str
    """The requirement without comments and without `-e`: a job installs packages normally, not in editable mode."""
    requirement: str = ""
    """The named package with versions and marker. Empty if the line has only options, a URL or a path."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}"


@dataclass(frozen=True)
class Requirements:
    """The lines of a requirements file and of the files that it includes, and the local paths that they name."""

    lines: tuple[Line, ...]
    constraints: tuple[Line, ...]
    """Lines of constraints files (`-c`)."""
    files: tuple[str, ...]
    """The files that were read, relative to the code's folder."""
    paths: tuple[tuple[Line, str], ...]
    """Local archives and folders that lines install or search, relative to the code's folder."""


def read_requirements(folder: Path, name: str) -> Requirements:
    """Read a requirements file in a folder of code, and the files that it includes.

    Raises UsageError for a file that is missing, includes itself, or names a path outside the folder.
    """
    return _Reader(folder, name).read()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _Reader:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._lines: dict[bool, list[Line]] = {False: [], True: []}
        self._files: list[str] = []
        self._paths: list[tuple[Line, str]] = []

    def read(self) -> Requirements:
        self._include(self._name, below=(), constrains=False)
        return Requirements(
            lines=tuple(self._lines[False]),
            constraints=tuple(self._lines[True]),
            files=tuple(dict.fromkeys(self._files)),
            paths=tuple(self._paths),
        )

    def _include(self, name: str, *, below: tuple[str, ...], constrains: bool) -> None:
        path = self._folder / name
        if name in below:
            raise UsageError(f"arguments.requirements: circular include: {' -> '.join((*below, name))}")
        if not path.is_file():
            named_by = f", which {below[-1]} includes" if below else ""
            raise UsageError(f"arguments.requirements: the code has no file '{name}'{named_by}")
        self._files.append(name)
        for number, text in _logical_lines(_text(path)):
            line = Line(name, number, text)
            try:
                self._take(line, (*below, name), constrains=constrains)
            except ValueError as error:
                raise UsageError(
                    f"arguments.requirements: {line}: {error}",
                    next_step="see pip.pypa.io/en/stable/reference/requirements-file-format",
                ) from None

    def _take(self, line: Line, below: tuple[str, ...], *, constrains: bool) -> None:
        text, options = _split(line.text)
        if included := [*options.requirement, *options.constraint]:
            if text or len(shlex.split(line.text)) > 2:
                raise ValueError("-r or -c must be on a separate line")
            # pip resolves included files relative to the including file, but packages relative to the working
            # directory.
            name = self._below(line, Path(line.file).parent, included[0])
            self._include(name, below=below, constrains=constrains or bool(options.constraint))
            return
        if options.editable:
            [text] = options.editable
        path = _path(text)
        requirement = "" if path or _ADDRESS.match(text) else text
        line = replace(line, text=_EDITABLE.sub("", line.text), requirement=requirement)
        for found in ([path] if path else []) + [source for source in options.find_links if not _ADDRESS.match(source)]:
            # The working directory is the folder of the requirements file that the spec names.
            name = self._below(line, Path(self._name).parent, found)
            if not (self._folder / name).exists():
                raise UsageError(f"arguments.requirements: {line}: the code has no '{name}'")
            self._paths.append((line, name))
        self._lines[constrains].append(line)

    def _below(self, line: Line, start: Path, path: str) -> str:
        name = os.path.normpath(start / path)
        if "://" in path or path.startswith("file:") or name.startswith("/") or not (name == "." or stays_below(name)):
            raise UsageError(
                f"arguments.requirements: {line}: '{path}' is outside the code's folder",
                next_step="copy it into that folder and use a relative path",
            )
        return name


def _path(text: str) -> str | None:
    """Return the local path to install from, without extras and marker; None for a package or a URL."""
    path = re.sub(r"\[[^\]]*\]$", "", re.sub(r"\s*;.*$", "", text)).strip()
    is_archive = path.lower().endswith(_ARCHIVES)
    if _ADDRESS.match(text) or (_NAMED.fullmatch(text) and ("@" in text or not is_archive)):
        return None
    return path if is_archive or "/" in path or path.startswith(".") else None


def _split(text: str) -> tuple[str, argparse.Namespace]:
    """Split a line into requirement and options. Raises ValueError for an option that uv does not allow there."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for names in (
        *(("-r", "--requirement"), ("-c", "--constraint"), ("-e", "--editable"), ("-f", "--find-links")),
        *(("-i", "--index-url", "--pypi-url"), ("--extra-index-url",), ("--trusted-host",), ("--use-feature",)),
        *(("--no-binary",), ("--only-binary",), ("--hash",)),
    ):
        parser.add_argument(*names, action="append", default=[])
    for name in ("--no-index", "--pre", "--prefer-binary", "--require-hashes"):
        parser.add_argument(name, action="store_true")
    words = re.split(r"\s(?=-)|^(?=-)", text, maxsplit=1)
    options = parser.parse_args(shlex.split(words[1]) if len(words) > 1 else [])
    return words[0].strip(), options


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        # Windows shells write UTF-16.
        return content.decode(
            "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
        )
    except UnicodeDecodeError as error:
        raise UsageError(f"arguments.requirements: {path.name} is not UTF-8: {error.reason}") from None


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each non-empty line, without comments; a backslash continues a line."""
    parts: list[str] = []
    begin = 0
    physical: Sequence[str] = text.splitlines()
    for number, line in enumerate(physical, start=1):
        begin = begin if parts else number
        is_comment = line.lstrip().startswith("#")
        parts.append(line.removesuffix("\\"))
        if line.endswith("\\") and not is_comment and number < len(physical):
            continue
        joined = re.sub(r"(?:^|\s)#.*$", "", "".join(parts)).strip()
        parts = []
        if joined:
            yield begin, joined
