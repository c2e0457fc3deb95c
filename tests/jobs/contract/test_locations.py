import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobs.contract.errors import UsageError
from jobs.contract.locations import (
    S3Location,
    artifact_location,
    folder_location,
    hub_parts,
    model_location,
    stays_below,
    table_location,
)


@pytest.mark.parametrize(
    "location",
    [
        "hf://org/name.v2?revision=main",
        "s3://bucket/key",
        "s3://Old_Bucket.of-2012/key",
        "data://shared/m",
        "/a/folder",
        "run://pretrain-bert/model",
        "run://pretrain-bert-20260102-030405-0a1b/model/",
        "a:b/folder",
    ],
)
def test_where_a_model_may_lie(location: str) -> None:
    assert model_location(location) == location


@pytest.mark.parametrize(
    "location",
    [
        "hf://nyu-mll/glue?config=sst2&split=train&revision=main",
        "s3://bucket/a.jsonl",
        "data://shared/a.ndjson",
        "run://clean/train.jsonl",
        "/a/b.TSV",
        "../a.parquet",
    ],
)
def test_where_a_table_may_lie(location: str) -> None:
    assert table_location(location) == location


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "it is empty"),
        ("gs://bucket/m", "only hf://, s3://, data://, run:// and local paths can be read"),
        ("data://", "names the whole data bucket"),
        ("s3://bucket", "names a whole bucket; it should look like s3://bucket/key"),
        ("s3://BAD BUCKET/x", "'BAD BUCKET' cannot be the name of a bucket"),
        ("run://Bert/model", "'Bert' is no run's name"),
        ("run://bert/../model", "'../model' is no path below a run's folder"),
        ("run://bert", "names a whole run; did you mean run://bert/model?"),
        ("hf://a/b/c", "names nothing on the hub"),
        ("hf://x?revison=main", "unknown option 'revison'; did you mean 'revision'?"),
        ("hf://x?split=train", "unknown option 'split'"),
        ("hf://x?revision=", "option 'revision' has no value"),
    ],
)
def test_where_no_model_can_lie(location: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        model_location(location)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("data://shared/reviews", "is no table: its name should end in .jsonl, .ndjson, .csv, .tsv, .parquet"),
        ("train.txt", "its name should end in .jsonl, .ndjson, .csv, .tsv, .parquet"),
        ("imdb", "its name should end in .jsonl, .ndjson, .csv, .tsv, .parquet; did you mean hf://imdb?"),
    ],
)
def test_where_no_table_can_lie(location: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        table_location(location)


def test_a_hub_location_is_read_in_parts() -> None:
    assert hub_parts("hf://nyu-mll/glue?config=sst2&split=train") == (
        "nyu-mll/glue",
        {"config": "sst2", "split": "train"},
    )
    assert hub_parts("hf://imdb") == ("imdb", {})
    assert hub_parts("hf://imdb?split=train[:10%]+test&revision=v1.0+x#2;3") == (
        "imdb",
        {"split": "train[:10%]+test", "revision": "v1.0+x#2;3"},
    )
    assert hub_parts("hf://imdb?revision=refs%2Fpr%2F1&split=") == ("imdb", {"revision": "refs/pr/1", "split": ""})
    with pytest.raises(ValueError, match="names nothing on the hub"):
        table_location("hf://imdb#test")


def test_a_folder_is_not_a_whole_run_and_an_artifact_of_the_hub_has_no_split() -> None:
    with pytest.raises(ValueError, match="unknown option 'split'"):
        artifact_location("hf://org/corpus?split=train")
    with pytest.raises(ValueError, match="did you mean run://notes/notebook"):
        folder_location("run://notes")


@given(bucket=st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True), key=st.text().filter(lambda key: key[:1] != "/"))
@example(bucket="bucket", key="a?b#c;d%20e&f=g+h")
def test_s3_locations_are_read_as_they_are_written(bucket: str, key: str) -> None:
    location = S3Location(bucket, key)
    assert S3Location.parse(str(location)) == location


@pytest.mark.parametrize("uri", ["", "bucket/key", "s3:///key", "https://bucket/key"])
def test_what_is_no_s3_location_is_refused(uri: str) -> None:
    with pytest.raises(UsageError) as caught:
        S3Location.parse(uri)
    assert str(caught.value) == f"'{uri}' is not an S3 location; it should look like s3://bucket/key"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("location", "name", "joined"),
    [
        (S3Location("b", "run/"), "spec.yaml", "s3://b/run/spec.yaml"),
        (S3Location("b", "run"), "spec.yaml", "s3://b/run/spec.yaml"),
        (S3Location("b", ""), "spec.yaml", "s3://b/spec.yaml"),
        (S3Location("b", "run/"), "model/", "s3://b/run/model/"),
    ],
)
def test_s3_locations_are_joined(location: S3Location, name: str, joined: str) -> None:
    assert str(location / name) == joined


@given(parts=st.lists(st.sampled_from(["a", "b.txt", "..a", "a b", "", ".", ".."]), min_size=1))
def test_a_name_stays_below_its_folder_where_no_part_leads_elsewhere(parts: list[str]) -> None:
    assert stays_below("/".join(parts)) == (not {"", ".", ".."} & set(parts))
