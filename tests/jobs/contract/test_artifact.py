import pytest
from pydantic import ValidationError

from jobs.contract.artifact import ArtifactFile, Manifest, fingerprint, location_in_team_of
from jobs.contract.locations import S3Location

OF_CORPUS = fingerprint("corpus", version=1, options={"a": 1, "b": "x"}, inputs={"data": {"etag": "1"}})


def test_a_fingerprint_is_of_the_values_whatever_their_order() -> None:
    assert fingerprint("corpus", version=1, options={"b": "x", "a": 1}, inputs={"data": {"etag": "1"}}) == OF_CORPUS


@pytest.mark.parametrize(
    ("kind", "version", "options", "inputs"),
    [
        ("tokenizer", 1, {"a": 1, "b": "x"}, {"data": {"etag": "1"}}),
        ("corpus", 2, {"a": 1, "b": "x"}, {"data": {"etag": "1"}}),
        ("corpus", 1, {"a": 2, "b": "x"}, {"data": {"etag": "1"}}),
        ("corpus", 1, {"a": "1", "b": "x"}, {"data": {"etag": "1"}}),
        ("corpus", 1, {"a": 1}, {"b": "x", "data": {"etag": "1"}}),
        ("corpus", 1, {"a": 1, "b": "x"}, {"data": {"etag": "2"}}),
    ],
)
def test_a_fingerprint_tells_each_difference(
    kind: str, version: int, options: dict[str, object], inputs: dict[str, object]
) -> None:
    assert fingerprint(kind, version=version, options=options, inputs=inputs) != OF_CORPUS


def test_a_fingerprint_of_what_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        fingerprint("corpus", version=1, options={"share": float("nan")}, inputs={})


def test_an_artifact_lies_beside_the_runs_of_its_team() -> None:
    location = location_in_team_of(S3Location("runs", "research/a-20260102-030405-0a1b/"), "corpus", OF_CORPUS)
    assert str(location) == f"s3://runs/research/artifacts/corpus-{OF_CORPUS[:16]}/"
    with pytest.raises(ValueError, match="is not where a run lies"):
        location_in_team_of(S3Location("runs", "research/"), "corpus", OF_CORPUS)


def test_a_manifest_names_no_file_outside_its_folder() -> None:
    file = ArtifactFile(bytes=1, sha256="0" * 64)
    with pytest.raises(ValidationError, match="is no file below an artifact's folder"):
        Manifest(
            kind="corpus",
            version=1,
            fingerprint=OF_CORPUS,
            options={},
            inputs={},
            provenance={},
            files={"../../etc/passwd": file},
        )
