"""A team's files in the data bucket: uploaded, listed with a fingerprint, deleted."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.aws.connection import Aws
from jobs.container.data.artifacts import identity_of
from jobs.core.artifact import content_fingerprint
from jobs.core.errors import NotFoundError, UsageError
from jobs.core.stage import DeployedStage
from jobs.data_checks import team_data
from tests.jobs.conftest import point_at
from tests.support.jobs.planning import STAGE
from tests.support.running_emulator import Emulator

BUCKET = "team-data"


@pytest.fixture(scope="module")
def aws(emulator: Emulator) -> Iterator[Aws]:
    with pytest.MonkeyPatch.context() as patch:
        point_at(patch, emulator.endpoint)
        connected = Aws()
        connected.s3.create_bucket(Bucket=BUCKET)
        yield connected


@pytest.fixture
def stage(aws: Aws) -> Iterator[DeployedStage]:
    yield replace(STAGE, data_bucket=BUCKET)
    for item in aws.s3.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        aws.s3.delete_object(Bucket=BUCKET, Key=item["Key"])


def put(aws: Aws, stage: DeployedStage, source: Path, location: str) -> list[bool]:
    files = team_data.files_of(source, team_data.place_of(stage, location))
    sent: list[int] = []
    found = [team_data.put(aws, path, place, sent=sent.append) for path, place in files.items()]
    assert sum(sent) == sum(path.stat().st_size for path in files)
    return found


def test_folder_is_uploaded_listed_and_deleted(aws: Aws, stage: DeployedStage, tmp_path: Path) -> None:
    source = tmp_path / "model"
    (source / "deep").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "deep" / "a.txt").write_text("abc")
    assert put(aws, stage, source, "data://research/model") == [True, True]
    assert put(aws, stage, source, "data://research/model") == [False, False], "S3 already has it"
    [listed] = team_data.entries(aws, stage, team_data.place_of(stage, "data://research"))
    assert (listed.location, listed.files, listed.size) == ("data://research/model/", 2, 5)
    files = [*team_data.entries(aws, stage, team_data.place_of(stage, "data://research/model"))]
    assert [file.location for file in files] == ["data://research/model/config.json", "data://research/model/deep/"]

    (source / "config.json").write_text("[]")
    assert put(aws, stage, source, "data://research/model") == [True, False], "it has changed"
    changed = team_data.entry(aws, stage, team_data.place_of(stage, "data://research/model"))
    assert changed.fingerprint != listed.fingerprint
    identity = identity_of(f"s3://{BUCKET}/research/model", s3=lambda: aws.s3)
    assert content_fingerprint(identity) == changed.fingerprint, "the fingerprint that a run records"

    (tmp_path / "models.txt").write_bytes(bytes(9 << 20))  # in several parts
    assert put(aws, stage, tmp_path / "models.txt", "data://research/") == [True]
    assert put(aws, stage, tmp_path / "models.txt", "data://research/") == [False]
    team_data.remove(aws, team_data.place_of(stage, "data://research/model"))
    assert [left.location for left in team_data.entries(aws, stage, team_data.place_of(stage, "data://research/"))] == [
        "data://research/models.txt"
    ]
    with pytest.raises(NotFoundError, match=r"data://research/model/ is empty"):
        list(team_data.entries(aws, stage, team_data.place_of(stage, "data://research/model")))


@pytest.mark.parametrize(
    ("location", "error", "message"),
    [
        ("s3://bucket/x", UsageError, "'s3://bucket/x' is not a data location\nNext: use data://TEAM/NAME"),
        ("data://", UsageError, "is not a data location"),
        ("data://research/../product/x", UsageError, "is not a data location"),
        ("data://reserch/x", NotFoundError, "team 'reserch' not found in stage 'dev'; did you mean 'research'?"),
    ],
)
def test_invalid_data_locations_are_refused(location: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        team_data.place_of(STAGE, location)
    assert message in str(caught.value)


def test_missing_files_cannot_be_uploaded(tmp_path: Path) -> None:
    place = team_data.place_of(STAGE, "data://research/x")
    with pytest.raises(NotFoundError, match="does not exist"):
        team_data.files_of(tmp_path / "none", place)
    with pytest.raises(NotFoundError, match="has no files"):
        team_data.files_of(tmp_path, place)
