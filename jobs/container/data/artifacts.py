"""Make and read artifacts: files that are made once, by the first run that needs them.

    builder = Builder(s3, rank.run, kind="corpus", version=1, options={…}, inputs={"data": identity_of(…)})
    if builder.existing():
        return
    done = builder.done_shards()
    for name in shards:
        if name not in done:
            builder.put_file(make(name), name, counts={"documents": 10})
    builder.finish({"documents": …})

A file's content must depend only on the options and inputs, never on the time, the host or thread order. Two runs that
make the same artifact at once then write identical files, so neither harms the other.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from jobs.aws import s3 as object_store
from jobs.aws.s3 import sha256
from jobs.container.data.sources import hub_folder, is_on_hub
from jobs.core.artifact import (
    DONE,
    POINTER,
    ArtifactFile,
    Manifest,
    Pointer,
    content_fingerprint,
    fingerprint,
    location_in_team_of,
)
from jobs.core.errors import NotFoundError, UsageError
from jobs.core.locations import S3, S3Location, refuse_unresolved, stays_below
from jobs.core.records import Inputs
from jobs.core.run import INPUTS, MANIFEST
from jobs.core.words import counted

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

TOKENIZER_KIND = "tokenizer"
"""The only kind of artifact that is a model on the hub. All others are data sets."""

RecordT = TypeVar("RecordT", Manifest, ArtifactFile, Pointer)


class Builder:
    """Creates one artifact in this run's team."""

    def __init__(
        self,
        s3: "S3Client",
        run: S3Location,
        *,
        kind: str,
        version: int,
        options: Mapping[str, Any],
        inputs: Mapping[str, Any],
    ) -> None:
        """`options`: everything that decides the files' content. `inputs`: the identity of each input."""
        self._s3 = s3
        self._run = run
        self._kind = kind
        self._version = version
        self._options = dict(options)
        self._inputs = dict(inputs)
        self.fingerprint = fingerprint(kind, version=version, options=options, inputs=inputs)
        self.location = location_in_team_of(run, kind, self.fingerprint)

    def existing(self) -> Manifest | None:
        """Return the manifest and point the run to the artifact if it is complete. Otherwise return None.

        Raises UsageError if another artifact is at its location.
        """
        content = object_store.read(self._s3, self.location / MANIFEST)
        manifest = _parsed(Manifest, content) if content is not None else None
        if manifest is None:
            return None
        if (manifest.kind, manifest.fingerprint) != (self._kind, self.fingerprint):
            raise UsageError(
                f"{self.location} contains another artifact: '{manifest.kind}' {manifest.fingerprint}, not "
                f"'{self._kind}' {self.fingerprint}",
                next_step="move that folder away",
            )
        wrong = _wrong_files(manifest, object_store.sizes(self._s3, self.location))
        if wrong:
            log.warning("%s is damaged (%s); recreating the missing files", self.location, wrong[0])
            return None
        self._point()
        log.info("%s exists: %s", self._kind, self.location)
        return manifest

    def done_shards(self) -> dict[str, ArtifactFile]:
        """Return the finished files of an interrupted attempt, or of another run that makes the same artifact."""
        sizes = object_store.sizes(self._s3, self.location)
        names = [
            name.removeprefix(DONE).removesuffix(".json")
            for name in sizes
            if name.startswith(DONE) and name.endswith(".json")
        ]

        def record(name: str) -> tuple[str, ArtifactFile | None]:
            content = object_store.read(self._s3, self.location / f"{DONE}{name}.json")
            return name, _parsed(ArtifactFile, content) if content is not None else None

        records = object_store.in_threads(record, names)
        return {name: file for name, file in sorted(records) if file is not None and sizes.get(name) == file.bytes}

    def put_file(self, path: Path, name: str | None = None, *, counts: Mapping[str, int] | None = None) -> ArtifactFile:
        """Upload a local file as `name` (default: its file name), and record it as finished.

        Raises UsageError if `name` is reserved for the artifact's records.
        """
        name = name or path.name
        if name == MANIFEST or name.startswith(DONE) or not stays_below(name):
            raise UsageError(f"'{name}' cannot be the name of an artifact's file")
        file = ArtifactFile(bytes=path.stat().st_size, sha256=sha256(path), counts=dict(counts or {}))
        object_store.upload(self._s3, path, self.location / name)
        object_store.write(self._s3, self.location / f"{DONE}{name}.json", file.model_dump_json().encode())
        return file

    def finish(self, provenance: Mapping[str, Any]) -> Manifest:
        """Write the manifest of all finished files, and point the run to the artifact.

        Raises UsageError if there are none.
        """
        files = self.done_shards()
        if not files:
            raise UsageError(f"'{self._kind}' has no files: its inputs were empty")
        manifest = Manifest(
            kind=self._kind,
            version=self._version,
            fingerprint=self.fingerprint,
            options=self._options,
            inputs=self._inputs,
            provenance={"run": str(self._run), **provenance},
            files=files,
        )
        object_store.write(self._s3, self.location / MANIFEST, _readable(manifest.model_dump(mode="json")))
        self._point()
        log.info("%s: %s, %s bytes at %s", self._kind, counted(len(files), "file"), manifest.total_bytes, self.location)
        return manifest

    def _point(self) -> None:
        pointer = Pointer(kind=self._kind, fingerprint=self.fingerprint, location=str(self.location))
        object_store.write(self._s3, self._run / POINTER, _readable(pointer.model_dump()))


@dataclass(frozen=True, kw_only=True)
class OpenArtifact:
    """A complete artifact, ready to be read."""

    location: str
    """The artifact's folder, on S3 or local."""
    manifest: Manifest
    _s3: Callable[[], "S3Client"]
    _folder: Path
    """The local folder of its files."""

    def path(self, name: str) -> Path:
        """Download and verify one file, and return its path. Raises UsageError if it differs from the manifest."""
        self.download([name])
        return self._folder / name

    def download(self, names: Iterable[str] | None = None) -> Path:
        """Download the named files (default: all), verify their sizes and hashes, and return their folder.

        Raises UsageError if a file differs from the manifest, and NotFoundError if it is missing.
        """
        chosen = list(self.manifest.files if names is None else names)
        for name in chosen:
            if name not in self.manifest.files:
                raise UsageError(f"{self.location} has no file '{name}' in its manifest")
        object_store.in_threads(self._fetch, chosen)
        return self._folder

    def each_file(self, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
        """Yield each name with its verified local file, and download the next file meanwhile.

        A downloaded file is deleted when the caller requests the next one. Raises what `download` raises.
        """
        waiting = list(names)
        with ThreadPoolExecutor(1, thread_name_prefix="fetch") as pool:
            pending = [pool.submit(self.path, name) for name in waiting[:1]]
            for number, name in enumerate(waiting):
                path = pending.pop().result()
                pending += [pool.submit(self.path, following) for following in waiting[number + 1 : number + 2]]
                try:
                    yield name, path
                finally:
                    if self.location.startswith(S3):
                        path.unlink(missing_ok=True)

    def _fetch(self, name: str) -> None:
        target = self._folder / name
        if self.location.startswith(S3):
            object_store.download_below(self._s3(), S3Location.parse(self.location), name, self._folder)
        expected = self.manifest.files[name]
        found = target.stat().st_size
        if found != expected.bytes:
            raise _damaged(self.location, f"{name} has {found} bytes instead of {expected.bytes}")
        if sha256(target) != expected.sha256:
            raise _damaged(self.location, f"the sha256 of {name} differs from its manifest")


def open_artifact(location: str, *, kind: str, s3: Callable[[], "S3Client"], scratch: Path) -> OpenArtifact:
    """Open the artifact at `location`: its folder on S3, on the hub or local, or a run's folder that points to it.

    `s3` returns the client. Files are downloaded below `scratch`. Raises NotFoundError if there is no artifact, and
    UsageError if it is of another kind or damaged.
    """
    if is_on_hub(location):
        folder = str(hub_folder(location, "model" if kind == TOKENIZER_KIND else "dataset"))
        text = _read(folder, MANIFEST, s3)
        if text is None:
            raise NotFoundError(
                f"{location} is not a '{kind}': it has no {MANIFEST}",
                next_step="name a repository that a run has pushed to the hub",
            )
        return _opened(folder, text, kind=kind, s3=s3, scratch=scratch)
    for _ in range(2):  # a run's folder, then the artifact's folder
        refuse_unresolved(location)
        text = _read(location, MANIFEST, s3)
        if text is not None:
            return _opened(location, text, kind=kind, s3=s3, scratch=scratch)
        text = _read(location, POINTER, s3)
        if text is None:
            break
        pointer = _parsed(Pointer, text)
        if pointer is None:
            raise _damaged(location, f"its {POINTER} cannot be read")
        _check_kind(location, pointer.kind, kind)
        location = pointer.location
    raise NotFoundError(
        f"{location} is not a '{kind}': it has neither {MANIFEST} nor {POINTER}",
        next_step="wait until the run that makes it has finished, or correct the location",
    )


def identity_of(location: str, *, s3: Callable[[], "S3Client"]) -> dict[str, Any]:
    """Return a value that identifies the content of a file or folder, for the `inputs` of a `Builder`.

    Objects on S3 are identified by ETag and size, without reading them, and local files by hash. Raises NotFoundError
    if `location` does not exist.
    """
    refuse_unresolved(location)
    if location.startswith(S3):
        return object_store.identity(s3(), S3Location.parse(location))
    path = Path(location)
    if path.is_file():
        return {"bytes": path.stat().st_size, "sha256": sha256(path)}
    names = object_store.files_below(path) if path.is_dir() else []
    if not names:
        raise NotFoundError(f"{location} does not exist, or is empty", next_step="check the path")
    return {name: identity_of(str(path / name), s3=s3) for name in names}


def record_inputs(run: S3Location, locations: Iterable[str], *, s3: "S3Client") -> None:
    """Record the fingerprints of a run's inputs. Inputs from the hub are identified by their revisions instead.

    Raises NotFoundError if an input does not exist.
    """
    found = {
        location: content_fingerprint(identity_of(location, s3=lambda: s3))
        for location in dict.fromkeys(locations)
        if not is_on_hub(location)
    }
    for location, digits in found.items():
        log.info("read: %s (fingerprint %s)", location, digits)
    if found:
        object_store.write(s3, run / INPUTS, Inputs(fingerprints=found).model_dump_json(indent=2).encode() + b"\n")


def _opened(location: str, text: bytes, *, kind: str, s3: Callable[[], "S3Client"], scratch: Path) -> OpenArtifact:
    manifest = _parsed(Manifest, text)
    if manifest is None:
        raise _damaged(location, f"its {MANIFEST} cannot be read")
    _check_kind(location, manifest.kind, kind)
    made_of = fingerprint(manifest.kind, version=manifest.version, options=manifest.options, inputs=manifest.inputs)
    if made_of != manifest.fingerprint:
        raise _damaged(location, "its fingerprint does not match its options and inputs")
    if location.startswith(S3):
        sizes = object_store.sizes(s3(), S3Location.parse(location))
        folder = scratch / "artifacts" / f"{manifest.kind}-{manifest.fingerprint}"
    else:
        folder = Path(location)
        sizes = {name: (folder / name).stat().st_size for name in object_store.files_below(folder)}
    wrong = _wrong_files(manifest, sizes)
    if wrong:
        raise _damaged(location, wrong[0])
    return OpenArtifact(location=location, manifest=manifest, _s3=s3, _folder=folder)


def _wrong_files(manifest: Manifest, sizes: Mapping[str, int]) -> list[str]:
    """List the files whose sizes differ from the manifest."""
    return [
        f"{name} has {sizes[name]} bytes instead of {file.bytes}" if name in sizes else f"{name} is missing"
        for name, file in manifest.files.items()
        if sizes.get(name) != file.bytes
    ]


def _check_kind(location: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise UsageError(f"{location} is a '{found}', not a '{wanted}'", next_step="name the run that makes one")


def _damaged(location: str, what: str) -> UsageError:
    return UsageError(
        f"{location} is damaged: {what}", next_step="have that folder deleted, then rerun the job that made it"
    )


def _read(location: str, name: str, s3: Callable[[], "S3Client"]) -> bytes | None:
    if location.startswith(S3):
        return object_store.read(s3(), S3Location.parse(location) / name)
    path = Path(location) / name
    return path.read_bytes() if path.is_file() else None


def _parsed(model: type[RecordT], content: bytes) -> RecordT | None:
    """Return the record, or None if the content is not one."""
    try:
        return model.model_validate_json(content)
    except ValidationError:
        return None


def _readable(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n"
