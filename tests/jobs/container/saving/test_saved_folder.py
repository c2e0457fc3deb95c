"""A folder kept on S3: saved as it changes, and restored on another machine."""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.aws import s3 as object_store
from jobs.container.saving.manifest import SupersededError, check_newest
from jobs.container.saving.saved_folder import SavedFolder
from jobs.core.locations import S3Location

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture
def place(tmp_path: Path) -> S3Location:
    return S3Location("runs", f"research/{tmp_path.name}/notebook")


@pytest.fixture
def saved(s3: "S3Client", folder: Path, place: S3Location) -> SavedFolder:
    return SavedFolder(s3, folder, place)


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def stored(s3: "S3Client", place: S3Location) -> dict[str, str]:
    found = s3.list_objects_v2(Bucket=place.bucket, Prefix=f"{place.key}/").get("Contents", [])
    return {
        item["Key"].removeprefix(f"{place.key}/"): s3.get_object(Bucket=place.bucket, Key=item["Key"])["Body"]
        .read()
        .decode()
        for item in found
    }


def test_save_follows_writes_changes_moves_and_deletions(
    s3: "S3Client", folder: Path, place: S3Location, saved: SavedFolder
) -> None:
    assert not saved.save()
    write(folder, a="1", deep__b="2", deep__er__c="3")
    assert saved.save()
    assert stored(s3, place) == {"a": "1", "deep/b": "2", "deep/er/c": "3"}
    write(folder, a="changed")
    (folder / "deep/b").rename(folder / "b")
    (folder / "deep/er/c").unlink()
    assert saved.save()
    assert stored(s3, place) == {"a": "changed", "b": "2"}


def test_links_and_times_are_restored_and_skips_named_once(
    s3: "S3Client", folder: Path, place: S3Location, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = SavedFolder(s3, folder, place)
    write(folder, hub__blobs__123="weights", old="1", new="2")
    (folder / "hub/snapshots").mkdir()
    (folder / "hub/snapshots/model").symlink_to("../blobs/123")
    (folder / "latest").symlink_to(folder / "hub")
    (folder / "outside").symlink_to("/etc/hostname")
    os.mkfifo(folder / "pipe")
    for name, time in (("old", 2), ("new", 1), ("hub/blobs", 3)):
        os.utime(folder / name, (time, time))
    assert saved.save()
    assert not saved.save()
    message = "warning: not saved from here: outside (a link to /etc/hostname), pipe (neither a file nor a folder)"
    assert caplog.messages == [message]

    other = tmp_path / "there"
    other.mkdir()
    restored = SavedFolder(s3, other, place)
    assert restored.restore() == 3
    restored.restore_links()
    assert (other / "latest").readlink() == Path("hub")
    assert (other / "latest/snapshots/model").read_text() == "weights"
    assert [(other / name).stat().st_mtime for name in ("old", "new", "hub/blobs")] == [2, 1, 3]
    assert not restored.save()
    (other / "latest").unlink()
    assert restored.save(), "a deleted link is a change"
    # Listings written by others create no link that leads out of the folder
    listing = S3Location(place.bucket, f"{place.key}-listing.json")
    for content in (b'{"links": {"a": "../../secret", "../b": "old"}}', b"{", b'{"times": {"old": 1e300}}'):
        object_store.write(s3, listing, content)
        again = SavedFolder(s3, tmp_path / "again", place)
        again.restore()
        again.restore_links()
        assert not [path for path in tmp_path.rglob("*") if path.name in ("a", "b")]


def test_names_refused_by_s3_do_not_block_other_files(
    s3: "S3Client", folder: Path, place: S3Location, saved: SavedFolder, caplog: pytest.LogCaptureFixture
) -> None:
    deep = "/".join(["x" * 250] * 5)
    write(folder, a="1", z="2")
    for name in (os.fsdecode(b"caf\xe9.txt"), "line\nfeed", deep):
        write(folder, **{name: "odd"})
    (folder / os.fsdecode(b"odd-\xff")).symlink_to("a")
    assert saved.save()
    assert not saved.save()
    assert stored(s3, place) == {"a": "1", "z": "2"}
    [message] = caplog.messages
    assert r"caf\xe9.txt (its name is not UTF-8), line\nfeed (its name contains a line break), xxx" in message
    assert "more than 1024)" in message
    saved.restore()


def test_unreadable_file_does_not_block_other_files(
    s3: "S3Client", folder: Path, place: S3Location, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = SavedFolder(s3, folder, place)
    upload = object_store.upload

    def of_a_bad_disk(s3: "S3Client", source: Path, location: S3Location) -> object:
        if source.name == "bad":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return upload(s3, source, location)

    monkeypatch.setattr(object_store, "upload", of_a_bad_disk)
    write(folder, a="1", bad="2", z="3")
    saved.save()
    assert stored(s3, place) == {"a": "1", "z": "3"}
    assert caplog.messages == ["warning: not saved from here: bad (Input/output error)"]
    monkeypatch.setattr(object_store, "upload", upload)
    saved.save()
    assert stored(s3, place) == {"a": "1", "bad": "2", "z": "3"}


def test_nothing_is_written_after_a_newer_attempt_has_begun(s3: "S3Client", folder: Path, place: S3Location) -> None:
    run = S3Location(place.bucket, place.key.removesuffix("notebook"))
    saved = SavedFolder(s3, folder, place, check_may_write=lambda: check_newest(s3, run, 1))
    write(folder, mine="1", gone="1")
    assert saved.save()
    s3.put_object(Bucket=run.bucket, Key=f"{run.key}attempts/2.json", Body=b"{}")
    assert not saved.save()
    write(folder, mine="2")
    (folder / "gone").unlink()
    with pytest.raises(SupersededError, match="attempt 2 of this run has begun, so attempt 1 stops"):
        saved.save()
    assert stored(s3, place) == {"mine": "1", "gone": "1"}
