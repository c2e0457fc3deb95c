"""An artifact: files that one run produces and other runs read, stored by a fingerprint of their inputs.

Its folder is `s3://<run bucket>/<team>/artifacts/<kind>-<fingerprint>/`:

    <file>                 a shard or another file
    done/<file>.json       one `ArtifactFile`, written when that file is complete: a restarted job skips the file
    manifest.json          one `Manifest`, written last: without it the artifact does not exist

Each run that produced or reused the artifact has a `Pointer` in its folder: `artifact.json`.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from jobs.core.locations import S3Location, stays_below

POINTER = "artifact.json"
DONE = "done/"
ARTIFACTS = "artifacts"
"""Folder of a team's artifacts, next to its runs. Run ids are longer, so the name cannot clash."""

FINGERPRINT_IN_NAME = 16
"""Digits of the fingerprint in the name of an artifact's folder; the manifest has all digits."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ArtifactFile(_Record):
    """One file of an artifact."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    counts: dict[str, int] = Field(default_factory=dict)
    """Number of documents, tokens, … in the file."""


class Manifest(_Record):
    """The manifest of an artifact: kind, inputs, options, origin, and files."""

    kind: str
    version: int
    """Version of the kind's format."""
    fingerprint: str = Field(pattern=r"^[0-9a-f]{64}$")
    options: dict[str, Any]
    """Options that determine the content of the files."""
    inputs: dict[str, Any]
    """Identity of each input: an artifact's fingerprint, a file's size and hash, the commit of a hub data set."""
    provenance: dict[str, Any]
    """The run that produced the artifact, and totals. Not part of the fingerprint, because they differ between runs."""
    files: dict[str, ArtifactFile]

    @field_validator("files")
    @classmethod
    def _check_names(cls, files: dict[str, ArtifactFile]) -> dict[str, ArtifactFile]:
        for name in files:
            if not stays_below(name):
                raise ValueError(f"'{name}' is not a file below the artifact's folder")
        return files

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def count(self, name: str) -> int:
        """Return a count summed over all files."""
        return sum(file.counts.get(name, 0) for file in self.files.values())


class Pointer(_Record):
    """A run's record of the artifact that it produced."""

    kind: str
    fingerprint: str
    location: str


def fingerprint(kind: str, *, version: int, options: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    """Return 64 hex digits that identify an artifact, independent of the order of keys.

    Raises TypeError for values that JSON cannot represent, ValueError for NaN and infinity.
    """
    content = {"kind": kind, "version": version, "options": dict(options), "inputs": dict(inputs)}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def content_fingerprint(identity: Mapping[str, Any]) -> str:
    """Return 16 hex digits that identify the content of a file or folder, given the identities of its files."""
    return fingerprint("data", version=1, options={}, inputs=identity)[:FINGERPRINT_IN_NAME]


def artifact_prefix(team: str, kind: str, fingerprint: str) -> str:
    """Return the key prefix of an artifact in the run bucket, with a trailing slash."""
    return f"{team}/{ARTIFACTS}/{kind}-{fingerprint[:FINGERPRINT_IN_NAME]}/"


def location_in_team_of(run: S3Location, kind: str, fingerprint: str) -> S3Location:
    """Return the location of an artifact that `run` produces: next to its team's runs, in the same bucket."""
    team, _, rest = run.key.partition("/")
    if not rest.strip("/"):
        raise ValueError(f"{run} is not the location of a run; it should look like s3://bucket/team/run/")
    return S3Location(run.bucket, artifact_prefix(team, kind, fingerprint))
