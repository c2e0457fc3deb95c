"""How the container interprets S3's answers to a job's role, which may list only its team's prefix."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest

from jobs.aws import s3 as object_store
from jobs.core.errors import ConfigurationError, NotFoundError
from jobs.core.locations import S3Location
from jobs.core.run import CHECKPOINT_TAG
from tests.support.jobs.proxies import LimitedRole

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

FOLDER = S3Location("runs", "research/limited-role/")


@pytest.fixture
def limited(s3: "S3Client", s3_endpoint: str) -> Iterator["S3Client"]:
    """A client with such a role, for the buckets of `s3`."""
    with LimitedRole(s3_endpoint) as proxy:
        session = boto3.Session("test", "test", region_name="us-east-1")
        client = session.client("s3", endpoint_url=proxy.url)
        yield client
        client.close()


def test_a_missing_object_is_found_missing_despite_a_403(limited: "S3Client", tmp_path: Path) -> None:
    # Another key with the missing one as prefix must not be taken for it.
    object_store.write(limited, FOLDER / "attempts.json.bak", b"{}")
    assert object_store.read(limited, FOLDER / "attempts.json") is None
    with pytest.raises(NotFoundError, match=r"s3://runs/research/limited-role/attempts\.json does not exist"):
        object_store.download(limited, FOLDER / "attempts.json", tmp_path / "x")


def test_another_teams_object_is_forbidden_not_missing(limited: "S3Client", tmp_path: Path) -> None:
    theirs = S3Location("runs", "product/a-run/spec.yaml")
    with pytest.raises(ConfigurationError, match=r"cannot read s3://runs/product/a-run/spec\.yaml: AWS denied"):
        object_store.read(limited, theirs)
    with pytest.raises(ConfigurationError, match=r"cannot read s3://runs/product/a-run/spec\.yaml: AWS denied"):
        object_store.download(limited, theirs, tmp_path / "x")


def test_an_object_written_with_a_tag_has_it(s3: "S3Client", tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"0")
    object_store.upload_all(s3, tmp_path, ["weights.bin"], FOLDER, tag=CHECKPOINT_TAG)
    object_store.write(s3, FOLDER / "manifest.json", b"{}", tag=CHECKPOINT_TAG)
    object_store.write(s3, FOLDER / "metrics.jsonl", b"{}")
    key, value = CHECKPOINT_TAG
    tags = {
        name: s3.get_object_tagging(Bucket=FOLDER.bucket, Key=(FOLDER / name).key)["TagSet"]
        for name in ("weights.bin", "manifest.json", "metrics.jsonl")
    }
    assert tags == {
        "weights.bin": [{"Key": key, "Value": value}],
        "manifest.json": [{"Key": key, "Value": value}],
        "metrics.jsonl": [],
    }
