"""An artifact: files that one run made once, kept under what they were made from, and read by other runs.

It lies below `s3://<run bucket>/<team>/artifacts/<kind>-<fingerprint>/`:

    <file>                 one shard, or any other file
    done/<file>.json       one `ArtifactFile`, written once that file is there: a restarted job makes the others only
    manifest.json          one `Manifest`, written last: without it the artifact does not exist

The run that made it, or found that it exists, has `artifact.json` in its own folder: one `Pointer`.
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
"""Folder of a team's artifacts, beside its runs; no run's id is that short."""

FINGERPRINT_IN_NAME = 16
"""Digits of the fingerprint in an artifact's folder; the manifest has them all."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ArtifactFile(_Record):
    """One file of an artifact."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    counts: dict[str, int] = Field(default_factory=dict)
    """Numbers of what is in the file: documents, tokens, …"""


class Manifest(_Record):
    """The manifest of an artifact: its kind, what it was made from and by, and its files."""

    kind: str
    version: int
    """Version of the kind's format."""
    fingerprint: str = Field(pattern=r"^[0-9a-f]{64}$")
    options: dict[str, Any]
    """Options that decide what is in the files."""
    inputs: dict[str, Any]
    """Identity of each input: an artifact's fingerprint, a file's bytes and hash, the commit of a hub data set."""
    provenance: dict[str, Any]
    """The run that made it, and the sums over it; other runs that make the same may say something else here."""
    files: dict[str, ArtifactFile]

    @field_validator("files")
    @classmethod
    def _below_its_folder(cls, files: dict[str, ArtifactFile]) -> dict[str, ArtifactFile]:
        for name in files:
            if not stays_below(name):
                raise ValueError(f"'{name}' is no file below an artifact's folder")
        return files

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def count(self, name: str) -> int:
        """Return a count summed over all files."""
        return sum(file.counts.get(name, 0) for file in self.files.values())


class Pointer(_Record):
    """The record by which a run points to the artifact that it made."""

    kind: str
    fingerprint: str
    location: str


def fingerprint(kind: str, *, version: int, options: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    """Return 64 digits that tell one artifact from all others: the same for the same values in any order of keys.

    Raises TypeError for what is no JSON, ValueError for a number that JSON does not have.
    """
    content = {"kind": kind, "version": version, "options": dict(options), "inputs": dict(inputs)}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def content_fingerprint(identity: Mapping[str, Any]) -> str:
    """Return 16 digits that tell the content of a file or a folder from any other, from what identifies its files."""
    return fingerprint("data", version=1, options={}, inputs=identity)[:FINGERPRINT_IN_NAME]


def artifact_prefix(team: str, kind: str, fingerprint: str) -> str:
    """Return the key prefix of an artifact in the run bucket, with its closing slash."""
    return f"{team}/{ARTIFACTS}/{kind}-{fingerprint[:FINGERPRINT_IN_NAME]}/"


def location_in_team_of(run: S3Location, kind: str, fingerprint: str) -> S3Location:
    """Return where an artifact lies that a run makes: beside the runs of its team, in the same bucket."""
    team, _, rest = run.key.partition("/")
    if not rest.strip("/"):
        raise ValueError(f"{run} is not where a run lies: it should look like s3://bucket/team/run/")
    return S3Location(run.bucket, artifact_prefix(team, kind, fingerprint))
