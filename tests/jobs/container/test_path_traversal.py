"""A user who can write keys to a bucket must not be able to write files of users who download them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.container.data.artifacts import open_artifact
from jobs.container.data.sources import copy_folder
from jobs.container.saving.saved_folder import SavedFolder
from jobs.core.artifact import fingerprint
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.runs import storage

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

CONTENT = b"a,b\n1,2\n"
NAMES = ("nb/../../x.csv", "/x.csv")

Download = Callable[["S3Client", S3Location, str, Path], object]


def all_of_a_folder(s3: "S3Client", folder: S3Location, name: str, target: Path) -> object:
    object_store.download_all(s3, folder, ["harmless", name], target)
    return None


def an_input_folder(s3: "S3Client", folder: S3Location, name: str, target: Path) -> object:
    copy_folder(str(folder), target, s3=lambda: s3)
    return None


def a_notebooks_folder(s3: "S3Client", folder: S3Location, name: str, target: Path) -> object:
    return SavedFolder(s3, target, folder).restore()


def an_artifact(s3: "S3Client", folder: S3Location, name: str, target: Path) -> object:
    manifest = {
        "kind": "corpus",
        "version": 1,
        "fingerprint": fingerprint("corpus", version=1, options={}, inputs={}),
        "options": {},
        "inputs": {},
        "provenance": {},
        "files": {name: {"bytes": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}},
    }
    object_store.write(s3, folder / "manifest.json", json.dumps(manifest).encode())
    return open_artifact(str(folder), kind="corpus", s3=lambda: s3, scratch=target).download()


def a_run(s3: "S3Client", folder: S3Location, name: str, target: Path) -> object:
    return list(storage.fetch(Aws(), S3Location(folder.bucket, f"{folder.key}/"), target))


@pytest.fixture
def connection(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """The command line's connection, to the same S3."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return Aws()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "download",
    [all_of_a_folder, an_input_folder, a_notebooks_folder, an_artifact, a_run],
)
def test_a_key_outside_the_folder_is_refused(
    download: Download, name: str, s3: "S3Client", connection: Aws, tmp_path: Path
) -> None:
    folder = S3Location("runs", f"{tmp_path.name}/folder")
    object_store.write(s3, folder / "harmless", CONTENT)
    object_store.write(s3, folder / name, CONTENT)
    target = tmp_path / "deep" / "inside" / "target"
    with pytest.raises(UsageError, match=r"would be written outside|its manifest\.json cannot be read"):
        download(s3, folder, name, target)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if target not in path.parents] == []
