"""Reads specs from a file or standard input, reports errors with their lines, and applies `--set KEY=VALUE`.

A file may hold several specs, separated by `---`, whose runs are submitted together.
"""

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from jobs.core.errors import NotFoundError, TrainyardError, UsageError, did_you_mean
from jobs.spec.spec import JobSpec, parse_spec, placeable_part, spec_keys
from jobs.spec.spec_yaml import MAX_SPEC_BYTES, Document, parse_documents
from jobs.spec.sweep import set_path

READY_SPECS = Path(__file__).parent.parent / "specs"

_MAX_NAMED = 3
"""At most this many specs are suggested."""

STANDARD_INPUT = Path("-")
"""Stands for standard input, like in most programs."""


def read_spec(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read the only spec in `path`, like `read_specs`. Raises UsageError if there are several."""
    specs = read_specs(path, overrides)
    if len(specs) > 1:
        raise UsageError(f"{path} has {len(specs)} specs; only one is allowed here")
    return specs[0]


def read_specs(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    also: Callable[[JobSpec], Iterable[TrainyardError]] = lambda _: (),
) -> list[JobSpec]:
    """Read and validate the specs in `path`, in order. Their names are unique.

    Raises NotFoundError if the file does not exist, UsageError with all errors of the file and of `overrides`, and with
    what `also` returns for the valid kind, team and resources of an invalid spec.
    """
    name = "standard input" if path == STANDARD_INPUT else str(path)
    try:
        text = _read(path).decode("utf-8")
    except FileNotFoundError:
        ready = f"ready-made specs are in {os.path.relpath(READY_SPECS)}/"
        raise NotFoundError(f"{path}: no such file{_closest(path)}", next_step=ready) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, not a spec{_closest(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(
            f"{name}: line {line}: byte {error.object[error.start]:#04x} is not UTF-8", next_step="save it as UTF-8"
        ) from None
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}") from None
    documents = parse_documents(text, origin=name) or [Document(1, None)]
    _override_all([document.data for document in documents], overrides)
    specs: dict[str, JobSpec] = {}
    errors: list[str] = []
    for number, document in enumerate(documents, start=1):
        origin = name if len(documents) == 1 else f"{name}: document {number}, line {document.line}"
        try:
            spec = with_absolute_paths(parse_spec(document.data, origin=origin))
        except UsageError as error:
            part = placeable_part(document.data)
            others = [*also(part)] if part is not None else []
            if len(documents) == 1 and not others:
                raise
            lines = chain.from_iterable(str(other).replace("\nNext: ", "; next: ").splitlines() for other in others)
            errors += [error.args[0], *(f"{origin}: {line}" for line in lines)]
            continue
        if spec.name in specs:
            errors.append(f"{origin}: name: an earlier document has the name '{spec.name}' too; names must be unique")
        specs[spec.name] = spec
    if errors:
        raise UsageError("\n".join(errors))
    return list(specs.values())


def _read(path: Path) -> bytes:
    """Return the content of a file, a pipe, a device or standard input. Raises UsageError if it is too large."""
    if path == STANDARD_INPUT:
        content = sys.stdin.buffer.read(MAX_SPEC_BYTES + 1)
    else:
        with path.open("rb") as file:
            content = file.read(MAX_SPEC_BYTES + 1)
    if len(content) > MAX_SPEC_BYTES:
        raise UsageError(f"{path}: it is larger than {MAX_SPEC_BYTES // 1_000_000} MB, so it is not a spec")
    return content


def read_spec_text(text: str, overrides: Sequence[str], *, origin: str) -> tuple[JobSpec, JobSpec]:
    """Return the only spec in `text`, without and with `overrides`. Errors name `origin`. Raises UsageError."""
    specs = []
    for replaced in ((), overrides):
        data = [document.data for document in parse_documents(text, origin=origin)] or [None]
        _override_all(data, replaced)
        specs.append(with_absolute_paths(parse_spec(data[0], origin=origin)))
    return specs[0], specs[1]


def _override_all(documents: Sequence[Any], overrides: Sequence[str]) -> None:
    """Apply all overrides. Raises UsageError for one without effect, because a sweep varies its argument."""
    for override, places in [(override, [*_override(documents, override)]) for override in overrides]:
        for data, place in places:
            if (swept := _swept(data, place)) is not None:
                raise UsageError(
                    f"--set {override}: it would have no effect, because the sweep varies arguments.{swept}",
                    next_step=f"--set 'sweep.arguments.{swept}=[VALUE, …]', or remove the argument from the sweep",
                )


def _swept(data: Any, place: Sequence[str]) -> str | None:
    """Return the argument of a document's sweep whose values replace that at `place`; None if there is none."""
    sweep = data.get("sweep") if isinstance(data, dict) else None
    if not isinstance(sweep, dict) or place[0] != "arguments":
        return None
    named = sweep.get("arguments")
    names = [*sweep, *(f"arguments.{name}" for name in (named if isinstance(named, dict) else ()))]
    path = ".".join(place)
    found = (name for name in names if str(name).startswith("arguments.") and f"{path}.".startswith(f"{name}."))
    return next((name.removeprefix("arguments.") for name in found), None)


def _override(documents: Sequence[Any], override: str) -> Iterator[tuple[Any, list[str]]]:
    """Apply `KEY=VALUE` to all documents that have this key, or `NAME.KEY=VALUE` to the document NAME.

    KEY may be the end of a key's path: `epochs` stands for `arguments.epochs`. Yields each document and the path of its
    key.
    """
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {override}: expected KEY=VALUE, e.g. --set arguments.epochs=2")
    found: dict[int, str] = {}
    if keys[0] not in JobSpec.model_fields:
        named = [data for data in documents if isinstance(data, dict) and data.get("name") == keys[0]]
        if len(keys) > 1 and named:
            documents, keys = named, keys[1:]
        found = {number: whole for number, data in enumerate(documents) if (whole := _whole_path(data, keys, override))}
        if len(documents) > 1 and not named and not found:
            names = [str(data["name"]) for data in documents if isinstance(data, dict) and "name" in data]
            raise UsageError(
                f"--set {override}: the file has no document '{keys[0]}'{did_you_mean(keys[0], names)}",
                next_step="begin with the name of a document, or with a key that all documents have",
            )
    for number, data in enumerate(documents):
        if found and number not in found:
            continue
        values = parse_documents(text, origin=f"--set {path}")
        if len(values) > 1:
            raise UsageError(f"--set {override}: expected one value, got {len(values)}")
        place = found[number].split(".") if found else keys
        if place[:2] == ["sweep", "arguments"] and len(place) > 2:  # one key with dots, before which others yield
            place = ["sweep", ".".join(place[1:])]
        set_path(data, place, values[0].data if values else None, what=f"--set {override}: '{path}'")
        yield data, place


def _whole_path(data: Any, keys: Sequence[str], override: str) -> str | None:
    """Return the path of the only key of a document's spec that ends with `keys`; None if there is none.

    Raises UsageError if there are several.
    """
    if not isinstance(data, dict):
        return None
    known = dict.fromkeys([*spec_keys(data.get("job")), *_given_paths(data)])
    end = ".".join(keys)
    meant = [end] if end in known else [path for path in known if path.endswith(f".{end}")]
    if not meant and len(keys) > 1 and (first := _whole_path(data, keys[:1], override)):
        return ".".join((first, *keys[1:]))  # a new key of parameters or inputs
    if len(meant) > 1:
        raise UsageError(
            f"--set {override}: '{end}' could be {' or '.join(meant)}", next_step=f"--set {meant[0]}=VALUE, for example"
        )
    return meant[0] if meant else None


def _given_paths(data: dict[Any, Any]) -> Iterator[str]:
    """Yield the path of each key in a document, such as those of a script's parameters; without those of a sweep."""
    for name, value in data.items():
        yield str(name)
        if isinstance(value, dict) and name != "sweep":
            yield from (f"{name}.{path}" for path in _given_paths(value))


def with_absolute_paths(spec: JobSpec) -> JobSpec:
    """Make local inputs absolute, relative to the working directory, because jobs run elsewhere. Expands `~`."""
    arguments = spec.entrypoint_arguments()
    absolute = {
        name: os.path.abspath(os.path.expanduser(location))  # noqa: PTH100, PTH111 - keeps symbolic links, as Path.absolute() keeps ".."
        for name, location, _ in arguments.sources()
        if "://" not in location
    }
    if not absolute:
        return spec
    resolved = arguments.with_sources(**absolute).model_dump(mode="json")
    return spec.model_copy(update={"arguments": {name: resolved[name] for name in spec.arguments}})


def _closest(path: Path) -> str:
    """Return a suggestion from the specs in the same folder; empty if it has none."""
    folder = path if path.is_dir() else path.parent
    known = [os.path.relpath(file) for file in sorted(folder.glob("[!.]*.y*ml"))] if folder.is_dir() else []
    by_stem = {Path(file).stem: file for file in known}
    close = difflib.get_close_matches(path.stem, by_stem, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {by_stem[close[0]]}?"
    more = f" and {len(known) - _MAX_NAMED} more" if len(known) > _MAX_NAMED else ""
    return f"; the folder has {', '.join(known[:_MAX_NAMED])}{more}" if known else ""
