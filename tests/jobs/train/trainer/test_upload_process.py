"""A large checkpoint is uploaded by a process of its own, in all that a user notices as by the rank's thread."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.aws import s3 as object_store
from jobs.aws.hashing import sha256
from jobs.contract.errors import TrainyardError
from jobs.contract.run import CHECKPOINT_TAG, MANIFEST
from jobs.train.rank import Rank
from jobs.train.stored_checkpoints import SupersededError, listing
from jobs.train.trainer import upload_process
from tests.jobs.train.trainer.test_checkpoints import save
from tests.support.train.faulty_s3 import FaultyS3

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_SAVES = """
import sys
from pathlib import Path
from jobs.contract.locations import S3Location
from jobs.train.trainer import upload_process
upload_process.LEAST_BYTES = 0
run = S3Location("runs", sys.argv[2])
upload_process.upload(None, Path(sys.argv[1]), run / "step-1", run=run, attempt=None, tag=("a", "b"))
"""


@pytest.fixture
def rank(
    first_rank: Callable[[int], Rank], s3: "S3Client", faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rank]:
    """The first attempt of a run, all of whose checkpoints are large."""
    monkeypatch.setattr(upload_process, "LEAST_BYTES", 0)
    rank = replace(first_rank(1), attempt=1)
    rank.scratch.mkdir()
    object_store.write(s3, rank.run / "attempts/1.json", b"{}")
    yield rank
    assert not uploading(os.getpid()), "what has uploaded has ended"


def uploading(parent: int) -> list[int]:
    """Return the processes that upload for another one."""
    pids = [pid for path in Path(f"/proc/{parent}/task").glob("*/children") for pid in path.read_text().split()]
    return [int(pid) for pid in pids if "upload_process" in command(pid)]


def command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has ended meanwhile
        return ""


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_process_leaves_what_the_thread_would_and_its_warnings_are_the_training_s(
    rank: Rank, faulty: FaultyS3, s3: "S3Client", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, content = tmp_path / "checkpoint", bytes(range(256)) * 40_000  # so much is sent in parts
    (folder / "below").mkdir(parents=True)
    (folder / "below/model").write_bytes(content)
    (folder / "empty").write_bytes(b"")
    broken: list[str] = []

    def denies(method: str, path: str) -> bool:
        if method == "PUT" and "empty" in path and not broken:
            broken.append(path)
            return True
        return False

    faulty.denies = denies
    remote = rank.run / "checkpoints/step-8"
    files = upload_process.upload(s3, folder, remote, run=rank.run, attempt=1, tag=CHECKPOINT_TAG)
    assert files == {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in ("below/model", "empty")
    }
    assert object_store.read(s3, remote / "below/model") == content
    tags = s3.get_object_tagging(Bucket=remote.bucket, Key=(remote / "below/model").key)["TagSet"]
    assert [(tag["Key"], tag["Value"]) for tag in tags] == [CHECKPOINT_TAG]
    assert [line for line in caplog.messages if f"cannot write {remote}/empty: AWS denied" in line]


def test_the_process_asks_for_the_newest_attempt_and_its_errors_are_those_of_the_thread(
    rank: Rank, faulty: FaultyS3, s3: "S3Client", monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.denies = lambda method, path: method == "PUT" and "model.safetensors" in path
    said = []
    for step, least_bytes in ((8, 0), (16, 1 << 30)):
        monkeypatch.setattr(upload_process, "LEAST_BYTES", least_bytes)
        with pytest.raises(TrainyardError) as raised:
            save(rank, step).finish()
        said.append(str(raised.value).replace(f"step-{step}", "step-N"))
    assert said[0] == said[1]
    assert "checkpoint step-N could not be uploaded: cannot write" in said[0]

    # A newer attempt begins while rank 0 asks for the last time before the process does.
    monkeypatch.setattr(upload_process, "LEAST_BYTES", 0)
    faulty.denies = lambda _method, _path: False
    uploaded = upload_process.upload

    def upload(*arguments: Any, **options: Any) -> Any:
        object_store.write(s3, rank.run / "attempts/2.json", b"{}")
        return uploaded(*arguments, **options)

    monkeypatch.setattr(upload_process, "upload", upload)
    with pytest.raises(SupersededError, match="attempt 2 of this run has begun"):
        save(rank, 24).finish()
    assert 24 not in listing(s3, rank.run / "checkpoints")


def test_a_signal_to_all_leaves_the_upload_alone_and_its_loss_is_an_error(
    rank: Rank, faulty: FaultyS3, s3: "S3Client"
) -> None:
    reached: list[str] = []

    def slow(method: str, path: str) -> bool:
        if method == "PUT" and "model.safetensors" in path:
            reached.append(path)
            time.sleep(1)
        return False

    faulty.denies = slow
    uploads = save(rank, 8)
    [process] = until(lambda: uploading(os.getpid()))
    os.kill(process, signal.SIGTERM)
    os.kill(process, signal.SIGINT)
    until(lambda: reached)
    os.kill(process, signal.SIGTERM)
    uploads.finish()
    assert MANIFEST in listing(s3, rank.run / "checkpoints")[8]

    uploads = save(rank, 16)
    [process] = until(lambda: uploading(os.getpid()))
    os.kill(process, signal.SIGKILL)
    with pytest.raises(
        TrainyardError, match="step-16 could not be uploaded: the process that uploads it ended with -9"
    ):
        uploads.finish()
    assert MANIFEST not in listing(s3, rank.run / "checkpoints").get(16, [])


def test_the_upload_ends_with_its_rank_however_that_ends(rank: Rank, faulty: FaultyS3, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    reached: list[str] = []

    def slow(method: str, path: str) -> bool:
        if method == "PUT":
            reached.append(path)
            time.sleep(2)
        return False

    faulty.denies = slow
    with subprocess.Popen(
        [sys.executable, "-c", _SAVES, str(folder), rank.run.key], cwd=Path(__file__).parents[4]
    ) as killed:
        [process] = until(lambda: uploading(killed.pid))
        until(lambda: reached)
        assert os.getpriority(os.PRIO_PROCESS, process) > os.getpriority(os.PRIO_PROCESS, killed.pid)
        killed.kill()
    until(lambda: is_gone(process))
