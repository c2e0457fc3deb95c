"""A run on an S3 that fails, is slow, drops connections, or denies what it allowed before."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.aws import s3 as object_store
from jobs.core.errors import TrainyardError
from jobs.core.locations import S3Location
from tests.jobs.container.trainer.test_resuming import MODEL
from tests.support.container.faulty_s3 import Fault, FaultyS3, try_again_at_once
from tests.support.container.launching import Run, environment_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.fixture
def faulty(s3: "S3Client", s3_endpoint: str) -> Iterator[FaultyS3]:
    with FaultyS3(s3_endpoint, fraction=0.1) as proxy:
        yield proxy


@pytest.fixture
def connected(faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> "S3Client":
    """A client as in jobs, through the proxy, but without botocore's retries."""
    for name, value in environment_of(faulty.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(object_store, "RETRIES", 1)
    try_again_at_once(monkeypatch)
    return object_store.connect()


def test_a_denied_upload_interrupts_a_run_that_later_resumes(
    run: Run, uninterrupted: Callable[[int], Run], recipe: tuple[str, ...], faulty: FaultyS3
) -> None:
    whole = uninterrupted(1)
    run = replace(run, environment={**run.environment, "AWS_ENDPOINT_URL": faulty.url})

    faulty.denies = lambda method, path: method == "PUT" and "/checkpoints/step-24/" in path
    first = run.attempt(*recipe, expect=1)
    assert first.lines[-1].startswith(
        f"error: checkpoint step-24 could not be uploaded: cannot write {run.location}checkpoints/step-24/"
    )
    assert first.lines[-1].endswith(
        f": AWS denied PutObject: injected; the last complete one in {run.location}checkpoints/ is untouched. "
        "Next: fix that, then trainyard resume RUN\n"
    )
    assert "Traceback" not in first.output
    assert run.complete_checkpoints() == [8, 16]

    faulty.denies = lambda _method, _path: False
    second = run.attempt(*recipe, attempt=2)
    assert "start: resumed from checkpoint step-16\n" in second.lines
    assert run.read(MODEL) == whole.read(MODEL)
    assert run.curve() == whole.curve()
    assert sum(faulty.counts.values()) - faulty.counts["none"] > 5, faulty.counts


def test_a_download_that_failed_all_retries_is_restarted(
    connected: "S3Client", faulty: FaultyS3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = S3Location("runs", f"research/{tmp_path.name}")
    large, small = bytes(range(256)) * 80_000, b"small"  # the large one is a multipart upload
    (tmp_path / "large").write_bytes(large)
    broken: set[str] = set()

    def breaks(method: str, path: str) -> Fault | None:
        """Each once: the end of a multipart upload, a part, an upload, a listing, each kind of error, a denial."""
        for part, wanted, fault in (
            ("uploadId=", "POST", "cut before the answer"),
            ("partNumber=2", "PUT", "cut on the way"),
            ("/small", "PUT", "SlowDown"),
            ("list-type", "GET", "InternalError"),
            ("/small", "GET", "cut in the answer"),
            ("/large", "GET", "cut in the answer"),
            ("/small", "DELETE", "cut before the answer"),
            ("/large", "HEAD", "AccessDenied"),
            ("uploads", "POST", "AccessDenied"),
        ):
            if method == wanted and part in path and f"{method} {part}" not in broken:
                broken.add(f"{method} {part}")
                return fault  # type: ignore[return-value]
        return None

    faulty.breaks = breaks
    object_store.upload(connected, tmp_path / "large", folder / "large")
    object_store.write(connected, folder / "small", small)
    assert object_store.sizes(connected, folder) == {"large": len(large), "small": len(small)}
    assert object_store.read(connected, folder / "small") == small
    object_store.download(connected, folder / "large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == large
    object_store.delete_all(connected, folder, ["small"])
    assert object_store.read(connected, folder / "small") is None
    assert len(broken) == 9
    assert any(f"cannot write {folder}/small: PutObject kept failing with SlowDown" in line for line in caplog.messages)


def test_retries_end_and_permanent_errors_are_not_retried(
    connected: "S3Client", faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = S3Location("runs", "research/nothing")
    faulty.denies = lambda _method, _path: True
    with pytest.raises(TrainyardError, match="cannot write s3://runs/research/nothing: AWS denied PutObject"):
        object_store.write(connected, place, b"")
    tries = "warning: cannot write s3://runs/research/nothing: AWS denied PutObject: injected; trying once more"
    assert [line for line in caplog.messages if "denied" in line] == [tries, tries]
    faulty.denies = lambda _method, _path: False
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.5)
    faulty.breaks = lambda _method, _path: "InternalError"
    with pytest.raises(TrainyardError, match="kept failing with InternalError"):
        object_store.write(connected, place, b"")
