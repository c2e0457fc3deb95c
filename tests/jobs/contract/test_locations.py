import re

import pytest

from jobs.contract.errors import UsageError
from jobs.contract.locations import (
    S3Location,
    artifact_location,
    folder_location,
    hub_parts,
    model_location,
    run_parts,
    stays_below,
    table_location,
)


@pytest.mark.parametrize(
    "location",
    [
        "hf://bert-base-uncased",
        "hf://org/name.v2?revision=main",
        "s3://bucket/key",
        "s3://bucket/folder/",
        "s3://Old_Bucket.of-2012/key",
        "data://shared/m",
        "/a/folder",
        "run://pretrain-bert/model",
        "run://pretrain-bert-20260102-030405-0a1b/model/",
        "folder",
        "a:b/folder",
    ],
)
def test_where_a_model_may_lie(location: str) -> None:
    assert model_location(location) == location


@pytest.mark.parametrize(
    "location",
    [
        "hf://imdb",
        "hf://nyu-mll/glue?config=sst2&split=train&revision=main",
        "s3://bucket/a.jsonl",
        "data://shared/a.ndjson",
        "run://clean/train.jsonl",
        "a.csv",
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
        ("S3://bucket/m", "only hf://, s3://, data://, run:// and local paths can be read"),
        ("data://", "names the whole data bucket"),
        ("data:///", "names the whole data bucket"),
        ("s3://bucket", "names a whole bucket; it should look like s3://bucket/key"),
        ("s3://bucket//", "names a whole bucket"),
        ("s3://", "'' cannot be the name of a bucket"),
        ("s3://BAD BUCKET/x", "'BAD BUCKET' cannot be the name of a bucket"),
        ("s3://ab/x", "'ab' cannot be the name of a bucket"),
        ("run://", "'' is no run's name; it should look like run://name/path"),
        ("run://Bert/model", "'Bert' is no run's name"),
        ("run://bert/../model", "'../model' is no path below a run's folder"),
        ("run://bert", "names a whole run; did you mean run://bert/model?"),
        ("hf://", "names nothing on the hub"),
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
        ("hf://x?splt=a", "unknown option 'splt'; did you mean 'split'?"),
        ("gs://bucket/a.csv", "only hf://, s3://, data://, run:// and local paths can be read"),
    ],
)
def test_where_no_table_can_lie(location: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        table_location(location)


def test_only_what_could_be_a_name_of_the_hub_is_suggested_as_one() -> None:
    for location in ("train.txt", "/data/reviews", "../reviews", "data://shared/reviews"):
        with pytest.raises(ValueError, match="is no table") as error:
            table_location(location)
        assert "did you mean" not in str(error.value)


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


@pytest.mark.parametrize("location", ["run://corpus", "run://corpus/", "s3://bucket/a", "data://shared/a", "a/folder"])
def test_where_an_artifact_may_lie(location: str) -> None:
    assert artifact_location(location) == location


def test_a_folder_is_not_a_whole_run_and_an_artifact_of_the_hub_has_no_split() -> None:
    with pytest.raises(ValueError, match="unknown option 'split'"):
        artifact_location("hf://org/corpus?split=train")
    with pytest.raises(ValueError, match="did you mean run://notes/notebook"):
        folder_location("run://notes")


def test_a_run_is_named_with_or_without_a_path() -> None:
    assert run_parts("run://corpus") == ("corpus", "")
    assert run_parts("run://bert/model/") == ("bert", "model")


@pytest.mark.parametrize(
    ("uri", "bucket", "key"),
    [
        ("s3://bucket/a/b.txt", "bucket", "a/b.txt"),
        ("s3://bucket/a/", "bucket", "a/"),
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/a#b", "bucket", "a#b"),
        ("s3://bucket/what?.csv", "bucket", "what?.csv"),
        ("s3://bucket/a?b#c;d%20e&f=g+h", "bucket", "a?b#c;d%20e&f=g+h"),
        ("s3://bucket/a\tb\nc", "bucket", "a\tb\nc"),
    ],
)
def test_s3_locations_are_read(uri: str, bucket: str, key: str) -> None:
    assert S3Location.parse(uri) == S3Location(bucket, key)


@pytest.mark.parametrize("uri", ["", "bucket/key", "s3:/bucket/key", "s3:///key", "https://bucket/key", "data://key"])
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


@pytest.mark.parametrize("name", ["a", "a/b.txt", "..a/b..", "a/...", "a b"])
def test_a_relative_name_stays_below_its_folder(name: str) -> None:
    assert stays_below(name)


@pytest.mark.parametrize("name", ["", "..", "../a", "a/../../b", "/a", "a//b", "./a", "a/"])
def test_a_name_that_leads_elsewhere_does_not(name: str) -> None:
    assert not stays_below(name)
