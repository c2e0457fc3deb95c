"""Threads that watch, upload and record beside a training: none of them dies of an error that nobody foresaw."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.contract.locations import S3Location
from jobs.kinds.script import Script
from jobs.train.channel import RequestFiles
from jobs.train.launcher import accounting, recipe_cache
from jobs.train.launcher.accounting import AttemptRecord
from jobs.train.launcher.recipe_cache import RecipeCache
from jobs.train.launcher.request import Node
from jobs.train.launcher.shutdown import Shutdown
from jobs.train.launcher.watchdog import Watchdog
from jobs.train.script import job
from jobs.train.script.job import ScriptJob
from jobs.train.trainer import metrics
from jobs.train.trainer.metrics import MetricsFiles
from tests.jobs.train.launcher.test_accounting import recorded
from tests.jobs.train.trainer.test_metrics import rank_of
from tests.support.train.launching import PATIENCE_SECONDS, environment_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

RUN = S3Location("runs", "research/threads-0a1b/")


@contextmanager
def the_record(s3: "S3Client", scratch: Path) -> Iterator[None]:
    record = recorded(RUN, scratch)
    record._thread.start()
    yield
    record._finished.set()


def the_recipes(s3: "S3Client", scratch: Path) -> AbstractContextManager[object]:
    return RecipeCache(s3, RUN / "recipes", scratch / "recipes")


@contextmanager
def the_metrics(s3: "S3Client", scratch: Path) -> Iterator[None]:
    files = MetricsFiles(rank_of(0, scratch, RUN), s3, 0)
    for step in (1, 2):
        files.write(step, {"loss": 1.0})
        time.sleep(0.2)
    yield
    files.close()


def the_watchdog(s3: "S3Client", scratch: Path) -> AbstractContextManager[object]:
    return Watchdog(
        scratch,
        node=Node(index=0, nnodes=1, main_address="127.0.0.1", port=1),
        nodes=None,
        nproc_per_node=1,
        hang_timeout_seconds=0,
        last_lines=lambda _: (),
        end_ranks=lambda: None,
    )


def the_script(s3: "S3Client", scratch: Path) -> ScriptJob:
    script = ScriptJob(
        Script.model_validate({"code": "s3://runs/code.tar.gz", "command": "train.py"}),
        RUN,
        scratch,
        node=0,
        nnodes=1,
        nproc_per_node=1,
        main_address="",
        cards=0,
        allow_changes=False,
    )
    script._output_is_due.set()
    return script


@pytest.mark.parametrize(
    ("begin", "owner", "work"),
    [
        (the_record, AttemptRecord, "_write"),
        (the_recipes, RecipeCache, "save"),
        (the_metrics, MetricsFiles, "upload"),
        (the_watchdog, Watchdog, "_judge"),
        (the_script, ScriptJob, "_look"),
    ],
)
def test_it_goes_on_after_an_error_that_nobody_foresaw(
    *,
    begin: Any,
    owner: type,
    work: str,
    s3: "S3Client",
    s3_endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment_of(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    for module, seconds in (
        (accounting, "HEARTBEAT_SECONDS"),
        (recipe_cache, "SAVE_SECONDS"),
        (metrics, "UPLOAD_EVERY_SECONDS"),
        (job, "LOOK_SECONDS"),
    ):
        monkeypatch.setattr(module, seconds, 0.05)
    calls = []
    does = getattr(owner, work)

    def fails_once(*arguments: Any, **options: Any) -> Any:
        calls.append(work)
        if len(calls) == 1:
            raise ArithmeticError
        return does(*arguments, **options)

    monkeypatch.setattr(owner, work, fails_once)
    with begin(s3, tmp_path):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(calls) < 2:
            assert time.monotonic() < deadline, "its thread has ended"
            time.sleep(0.01)


def test_a_full_disk_does_not_keep_ranks_alive_beyond_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RequestFiles, "ask", full)
    given_up: list[int] = []
    stopping = Shutdown(tmp_path, metadata=None, stop_timeout_seconds=0, give_up=given_up.append)
    monkeypatch.setattr(os, "kill", lambda _, number: given_up.append(number))
    RequestFiles(tmp_path).listen(0)
    with stopping:
        stopping.on_signal(15)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not given_up:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert "warning: the ranks could not be asked to stop: [Errno 28] No space left on device" in caplog.messages
