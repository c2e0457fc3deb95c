from typing import Any

import pytest
from pydantic import ValidationError

from jobs.core.artifact import ArtifactFile, Manifest, fingerprint, location_in_team_of
from jobs.core.locations import S3Location

OF_CORPUS = fingerprint("corpus", version=1, options={"a": 1, "b": "x"}, inputs={"data": {"etag": "1"}})


def test_fingerprint_depends_on_values_not_on_their_order() -> None:
    same: dict[str, Any] = {
        "kind": "corpus",
        "version": 1,
        "options": {"b": "x", "a": 1},
        "inputs": {"data": {"etag": "1"}},
    }
    assert fingerprint(**same) == OF_CORPUS
    for name, value in {"kind": "tokenizer", "version": 2, "options": {"a": "1", "b": "x"}, "inputs": {}}.items():
        assert fingerprint(**{**same, name: value}) != OF_CORPUS
    with pytest.raises(ValueError, match="Out of range float"):
        fingerprint(**{**same, "options": {"share": float("nan")}})


def test_artifact_is_stored_next_to_its_teams_runs() -> None:
    location = location_in_team_of(S3Location("runs", "research/a-20260102-030405-0a1b/"), "corpus", OF_CORPUS)
    assert str(location) == f"s3://runs/research/artifacts/corpus-{OF_CORPUS[:16]}/"
    with pytest.raises(ValueError, match="is not the location of a run"):
        location_in_team_of(S3Location("runs", "research/"), "corpus", OF_CORPUS)


def test_manifest_rejects_files_outside_its_folder() -> None:
    file = ArtifactFile(bytes=1, sha256="0" * 64)
    with pytest.raises(ValidationError, match="is not a file below the artifact's folder"):
        Manifest(
            kind="corpus",
            version=1,
            fingerprint=OF_CORPUS,
            options={},
            inputs={},
            provenance={},
            files={"../../etc/passwd": file},
        )
