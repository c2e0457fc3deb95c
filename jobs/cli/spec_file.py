"""Reads a spec file: YAML in UTF-8, with the line of a mistake, and `--set key=value` on top.

A file may hold several specs, parted by `---`, whose runs are submitted together.
"""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jobs.contract.display import shortened
from jobs.contract.errors import NotFoundError, UsageError, did_you_mean
from jobs.contract.spec import JobSpec, parse_spec

READY_SPECS = Path(__file__).parent.parent / "specs"

_MAX_BYTES = 1_000_000
"""A spec has some hundred bytes; what is larger is something else."""

_MAX_VALUES = 10_000
"""A file has at most so many values, those counted again that an alias repeats."""

_MAX_DEPTH = 100
"""Values lie inside each other at most so deep."""

_MAX_DIGITS = 1000
"""A longer number, in hexadecimal or sexagesimal digits, takes PyYAML minutes, or can't be shown by Python."""

_TOO_DEEP = "its values lie too deep inside each other"

_SHOWN_CHARACTERS = 40
"""An error shows so many characters of a value that cannot be read."""


def read_spec(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The one spec in `path`: as `read_specs`. Raises UsageError where there are several."""
    specs = read_specs(path, overrides)
    if len(specs) > 1:
        raise UsageError(f"{path} holds {len(specs)} specs; one is expected here")
    return specs[0]


def read_specs(path: Path, overrides: Sequence[str] = ()) -> list[JobSpec]:
    """The specs in `path`, validated, in their order; no two have one name.

    Raises NotFoundError where there is no such file, UsageError for everything wrong inside it or in `overrides`.
    """
    try:
        text = _read(path).decode("utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file{_closest(path)}", next_step="trainyard submit SPEC") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; name one of the specs in it{_closest(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(
            f"{path}: line {line}: byte {error.object[error.start]:#04x} is not UTF-8", next_step="save it as UTF-8"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    documents = _parse(text, origin=str(path)) or [_Document(1, None)]
    for override in overrides:
        _override([document.data for document in documents], override)
    specs: dict[str, JobSpec] = {}
    for number, document in enumerate(documents, start=1):
        origin = str(path) if len(documents) == 1 else f"{path}: document {number}, line {document.line}"
        spec = _with_absolute_paths(parse_spec(document.data, origin=origin))
        if spec.name in specs:
            raise UsageError(f"{origin}: name: '{spec.name}' is that of an earlier document too; a name is given once")
        specs[spec.name] = spec
    return list(specs.values())


def _read(path: Path) -> bytes:
    """Return the bytes of a file, of a pipe or of a device. Raises UsageError where there are too many."""
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{path}: it is larger than {_MAX_BYTES // 1_000_000} MB, so it is no spec")
    return content


@dataclass(frozen=True)
class _Document:
    """One part of a file."""

    line: int
    data: Any


def _parse(text: str, *, origin: str) -> list[_Document]:
    loader = None
    documents = []
    try:
        loader = _Loader(text)
        while (node := loader.get_node() if loader.check_node() else None) is not None:
            documents.append(_Document(node.start_mark.line + 1, loader.construct_document(node)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UsageError(f"{origin}: {place}{shortened(str(error.problem or error.context))}") from None
    except yaml.YAMLError as error:
        # A character that YAML forbids; its message carries lines of its own about the reader.
        raise UsageError(f"{origin}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UsageError(f"{origin}: {_TOO_DEEP}") from None
    finally:
        if loader is not None:
            loader.dispose()
    return documents


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice, of which PyYAML would silently keep the last.

    It also says where a value is that looks like a date or a number and is none, and it stops at what is too large:
    a few hundred bytes of aliases can stand for more values than any machine holds.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0
        self._sizes: dict[yaml.Node, int] = {}
        """How many values each finished node holds, itself included."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark, before = event.start_mark, self._values
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if not isinstance(event, yaml.AliasEvent):
            self._values += 1
            self._sizes[node] = self._values - before
        elif node in self._sizes:
            self._values += self._sizes[node]
        else:
            raise yaml.composer.ComposerError(None, None, f"'{event.anchor}' lies inside itself", mark)
        if self._values > _MAX_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {_MAX_VALUES} values", mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            _check_digits(node)
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            # What PyYAML's own constructors raise: of 2020-13-45, of a number of 5,000 digits, of `!!bool maybe`.
            kind = node.tag.rpartition(":")[2]
            text = str(node.value)
            shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"'{shown}' cannot be read as {kind} ({error}); put quotes around what is text",
                node.start_mark,
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key '{key.value}' is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _check_digits(node: yaml.Node) -> None:
    if node.tag.endswith((":int", ":float")) and len(node.value) > _MAX_DIGITS:
        raise ValueError(f"more than {_MAX_DIGITS} digits")


def read_spec_text(text: str, overrides: Sequence[str], *, origin: str) -> tuple[JobSpec, JobSpec]:
    """The one spec in `text`, which lies at `origin`, without `overrides` and with them. Raises UsageError."""
    specs = []
    for replaced in ((), overrides):
        data = [document.data for document in _parse(text, origin=origin)] or [None]
        for override in replaced:
            _override(data, override)
        specs.append(_with_absolute_paths(parse_spec(data[0], origin=origin)))
    return specs[0], specs[1]


def _override(documents: Sequence[Any], override: str) -> None:
    """Replace a value of the document called NAME by `NAME.KEY=VALUE`, one of each document by `KEY=VALUE`."""
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {override}: it should look like --set arguments.epochs=2")
    if keys[0] not in JobSpec.model_fields:
        named = [data for data in documents if isinstance(data, dict) and data.get("name") == keys[0]]
        if len(keys) > 1 and named:
            documents, keys = named, keys[1:]
        elif len(documents) > 1:
            names = [str(data["name"]) for data in documents if isinstance(data, dict) and "name" in data]
            raise UsageError(
                f"--set {override}: '{keys[0]}' is no document of the file{did_you_mean(keys[0], names)}",
                next_step="begin it with the name of a document, or with a key that every document has",
            )
    for data in documents:
        target = data
        for key in keys[:-1]:
            if not isinstance(target, dict):
                break
            target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise UsageError(f"--set {override}: '{path}' leads into a value that holds no keys")
        values = _parse(text, origin=f"--set {path}")
        if len(values) > 1:
            raise UsageError(f"--set {override}: it holds several values")
        target[keys[-1]] = values[0].data if values else None


def _with_absolute_paths(spec: JobSpec) -> JobSpec:
    """Make local inputs absolute: they count from the working directory, and a job does not run there."""
    arguments = spec.entrypoint_arguments()
    absolute = {
        name: os.path.abspath(location)  # noqa: PTH100 - keeps symbolic links, as Path.absolute() keeps ".."
        for name, location, _ in arguments.sources()
        if "://" not in location
    }
    if not absolute:
        return spec
    resolved = arguments.with_sources(**absolute).model_dump(mode="json")
    return spec.model_copy(update={"arguments": {name: resolved[name] for name in spec.arguments}})


def _closest(path: Path) -> str:
    folders = [path if path.is_dir() else path.parent, READY_SPECS]
    known = [
        os.path.relpath(file) for folder in folders if folder.is_dir() for file in sorted(folder.glob("[!.]*.y*ml"))
    ]
    by_stem = {Path(file).stem: file for file in known}
    close = difflib.get_close_matches(path.stem, by_stem, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {by_stem[close[0]]}?"
    return f"; there is {', '.join(dict.fromkeys(known[:8]))}" if known else ""
