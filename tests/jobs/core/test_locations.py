import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobs.core.errors import UsageError
from jobs.core.locations import (
    S3Location,
    artifact_location,
    documents_location,
    folder_location,
    hub_parts,
    model_location,
    stays_below,
    table_location,
)

WORDS = st.from_regex(r"[a-z0-9][a-z0-9-]{0,19}[a-z0-9]", fullmatch=True)
PATHS = st.lists(st.from_regex(r"[\w.-]*\w", fullmatch=True), min_size=1, max_size=3).map("/".join)
FOLDERS = st.one_of(
    st.builds(
        "s3://{}/{}".format,
        st.just("Old_Bucket.of-2012") | WORDS.filter(lambda word: len(word) > 2 and word[-1] != "-"),
        PATHS,
    ),
    st.builds("data://{}".format, PATHS),
    st.builds("run://{}/{}".format, WORDS | st.just("bert-20260102-030405-0a1b") | st.just("rates@best"), PATHS),
    PATHS,
    PATHS.map("/{}".format),
)


@given(folder=FOLDERS, suffix=st.sampled_from([".jsonl", ".ndjson", ".csv", ".TSV", ".parquet"]))
@example(folder="a:b/folder", suffix=".csv")
def test_valid_locations_are_accepted(folder: str, suffix: str) -> None:
    assert model_location(folder) == folder_location(folder) == artifact_location(folder) == folder
    assert table_location(folder + suffix) == documents_location(folder + suffix) == folder + suffix
    assert documents_location(f"{folder}.txt") == f"{folder}.txt"


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "is empty"),
        ("gs://bucket/m", "use hf://, s3://, data://, run:// or a local path"),
        ("data://", "names the whole data bucket"),
        ("s3://bucket", "names a whole bucket; it should look like s3://bucket/key"),
        ("s3://BAD BUCKET/x", "'BAD BUCKET' is not a valid bucket name"),
        ("run://Bert/model", "'Bert' is not a run name"),
        ("run://bert/../model", "'../model' is not a path below a run's folder"),
        ("run://bert", "names a whole run; did you mean run://bert/model?"),
        ("hf://a/b/c", "is not a name on the hub"),
        ("hf://x?revison=main", "unknown option 'revison'; did you mean 'revision'?"),
        ("hf://x?split=train", "unknown option 'split'"),
        ("hf://x?revision=", "option 'revision' has no value"),
    ],
)
def test_invalid_model_location_is_rejected(location: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        model_location(location)


@pytest.mark.parametrize(
    ("read", "location", "message"),
    [
        (
            table_location,
            "data://a/b",
            "is not a table: its name should end in .jsonl, .ndjson, .json, .csv, .tsv, .parquet",
        ),
        (table_location, "train.txt", "its name should end in .jsonl, .ndjson, .json, .csv, .tsv, .parquet"),
        (table_location, "imdb", ".tsv, .parquet; did you mean hf://imdb?"),
        (table_location, "hf://imdb#test", "is not a name on the hub"),
        (artifact_location, "hf://org/corpus?split=train", "unknown option 'split'"),
        (folder_location, "run://notes", "did you mean run://notes/notebook"),
        (folder_location, "hf://org/name", "a folder is read from s3://"),
    ],
)
def test_invalid_location_of_another_kind_is_rejected(read: Callable[[str], str], location: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(location)


@pytest.mark.parametrize(
    ("location", "name", "options"),
    [
        ("hf://nyu-mll/glue?config=sst2&split=train", "nyu-mll/glue", {"config": "sst2", "split": "train"}),
        ("hf://imdb", "imdb", {}),
        ("hf://imdb?split=train[:10%]+test", "imdb", {"split": "train[:10%]+test"}),
        ("hf://imdb?revision=refs%2Fpr%2F1&split=", "imdb", {"revision": "refs/pr/1", "split": ""}),
    ],
)
def test_hub_location_is_split_into_name_and_options(location: str, name: str, options: dict[str, str]) -> None:
    assert hub_parts(location) == (name, options)
    assert "" in options.values() or table_location(location) == location


@given(bucket=st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True), key=st.text().filter(lambda key: key[:1] != "/"))
@example(bucket="bucket", key="a?b#c;d%20e&f=g+h")
def test_s3_locations_are_parsed_and_joined(bucket: str, key: str) -> None:
    location = S3Location(bucket, key)
    assert S3Location.parse(str(location)) == location
    for folder in (S3Location(bucket, "run/"), S3Location(bucket, "run")):
        assert str(folder / "model/") == f"s3://{bucket}/run/model/"
    assert str(S3Location(bucket, "") / "spec.yaml") == f"s3://{bucket}/spec.yaml"


@pytest.mark.parametrize("uri", ["", "bucket/key", "s3:///key", "https://bucket/key"])
def test_invalid_s3_location_is_rejected(uri: str) -> None:
    with pytest.raises(UsageError, match=r"is not an S3 location; it should look like s3://bucket/key$"):
        S3Location.parse(uri)


@given(parts=st.lists(st.sampled_from(["a", "b.txt", "..a", "a b", "", ".", ".."]), min_size=1))
def test_name_stays_below_its_folder_unless_a_part_leads_out(parts: list[str]) -> None:
    assert stays_below("/".join(parts)) == (not {"", ".", ".."} & set(parts))
