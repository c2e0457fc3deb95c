"""Announced shutdowns: the ranks save, and the next attempt continues as if uninterrupted."""

import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jobs.container.channel import Heartbeat, RequestFiles, read_heartbeats
from jobs.container.instance import InstanceMetadata, zone
from jobs.container.saving.interruption import ShutdownWatch
from tests.support.container.launching import PATIENCE_SECONDS, Launched, NewRun, Run
from tests.support.container.metadata_service import LIFE_CYCLE, NOTICE, REBALANCE, ZONE, MetadataService
from tests.support.waiting import wait_until

MODEL = "model/model.safetensors"

HASTY_LAUNCHER = "import sys; from jobs.container import launch; sys.exit(launch.main(stop_timeout_seconds=12))"
"""With SIGKILL this soon after SIGTERM, the ranks have two seconds."""


@pytest.fixture
def metadata() -> Iterator[MetadataService]:
    with MetadataService() as service:
        yield service


def assert_same(run: Run, whole: Run) -> None:
    assert run.read(MODEL) == whole.read(MODEL)
    assert run.curve() == whole.curve()


def saved_step(launched: Launched, why: str) -> int:
    """Return the step in the last line, which repeats the attempt's record."""
    match = re.fullmatch(rf"interrupted: ({re.escape(why)}; saved step (\d+))\n", launched.lines[-1])
    assert match, launched.output
    assert "Traceback" not in launched.output
    return int(match[2])


def hold(run: Run, doing: str) -> tuple[psutil.Process, Heartbeat]:
    """Return the only rank, stopped during the given activity."""
    deadline = time.monotonic() + PATIENCE_SECONDS

    def sign() -> Heartbeat | None:
        heartbeats = (
            found for scratch in run.scratch.glob("trainyard-*") for found in read_heartbeats(scratch).values()
        )
        return next((found for found in heartbeats if found.doing == doing), None)

    while time.monotonic() < deadline:
        if (seen := sign()) is not None:
            rank = psutil.Process(seen.pid)
            rank.suspend()
            time.sleep(0.05)  # for a write in progress
            if (held := sign()) is not None:
                return rank, held
            rank.resume()
        time.sleep(0.001)
    pytest.fail(f"no rank was seen {doing}")


def test_ranks_save_one_step_at_sigterm_notice_or_rebalance(
    new_run: NewRun, long_recipe: tuple[str, ...], metadata: MetadataService
) -> None:
    whole = new_run()
    whole.attempt(*long_recipe, nproc=2)
    run = new_run()

    # WHEN SIGTERM comes at a step without a checkpoint
    metadata.news[LIFE_CYCLE] = "on-demand"
    first = run.start(*long_recipe, nproc=2, attempt=1, options=["--capacity=spot"], **metadata.environment)
    first.wait_for_line("[progress] 10/120")
    assert first.kill(signal.SIGTERM) == 75
    # THEN the ranks' current step is saved and reported
    step = saved_step(first, "SIGTERM")
    assert 10 <= step < 120
    assert run.complete_checkpoints() == [step]
    record = run.recorded_attempt(1)
    assert (record.exit_code, record.reason, record.last_step) == (75, f"SIGTERM; saved step {step}", step)
    assert run.receipt().state == "interrupted"
    run.wait_until_gone()
    assert not list(run.scratch.iterdir())

    # Spot had no capacity, so the Spot queue used an On-Demand instance
    assert record.capacity == "on-demand"

    # WHEN the notice is so old that there is time for only one save, however fast the steps are
    metadata.news[LIFE_CYCLE] = "spot"
    notice = metadata.give_notice(8)
    second = run.start(*long_recipe, nproc=2, attempt=2, options=["--capacity=spot"], **metadata.environment)
    assert second.wait() == 75
    assert [attempt.capacity for attempt in run.receipt().attempts] == ["on-demand", "spot"]
    # THEN the ranks save and stop without a signal
    assert f"start: resumed from checkpoint step-{step}\n" in second.lines
    later = saved_step(second, notice)
    assert step < later < 120
    assert run.complete_checkpoints()[-1] == later
    assert run.recorded_attempt(2).reason == second.lines[-1].removeprefix("interrupted: ").rstrip()

    # WHEN EC2 only recommends a rebalance, THEN they save and continue to the end
    metadata.news = {REBALANCE: {"noticeTime": "2026-01-02T03:04:05Z"}}
    third = run.attempt(*long_recipe, nproc=2, attempt=3, expect=0, **metadata.environment)
    assert f"start: resumed from checkpoint step-{later}\n" in third.lines
    assert "rebalance recommendation: saving step " in third.output
    assert_same(run, whole)


def test_notice_in_the_first_step_saves_it_and_again_at_the_end(
    run: Run, long_recipe: tuple[str, ...], metadata: MetadataService
) -> None:
    # WHEN a notice comes during a slow first step, such as one that compiles graphs
    launched = run.start(*long_recipe, "--epochs=40", nproc=1, attempt=1, **metadata.environment)
    rank, held = hold(run, "training")
    notice = metadata.give_notice(20)
    launched.wait_for_line(f"{notice}: the training saves, continues, saves again and stops, within ")
    rank.resume()
    # THEN that step is saved, and another step shortly before the end
    launched.wait_for_line(f"{notice}: saving step {held.step + 1}, and training on")
    assert launched.wait() == 75
    later = saved_step(launched, notice)
    assert held.step + 1 < later
    for step in (held.step + 1, later):
        assert f"checkpoint: step {step}, " in launched.output
    assert run.complete_checkpoints()[-1] == later


def test_hanging_rank_does_not_delay_the_launcher(run: Run, long_recipe: tuple[str, ...]) -> None:
    launched = run.start(*long_recipe, program=("-c", HASTY_LAUNCHER))
    launched.wait_for_line("[progress] 10/120")
    launched.ranks()[0].suspend()

    assert launched.kill(signal.SIGTERM) == 75

    assert launched.lines[-1] == (
        "interrupted: SIGTERM; not saved within 2 s; if retried, it starts over: no checkpoint was saved\n"
    )
    run.wait_until_gone()
    assert not list(run.scratch.iterdir())


def test_missing_or_malformed_metadata_is_no_notice(metadata: MetadataService) -> None:
    def found(**environment: str) -> InstanceMetadata | None:
        return InstanceMetadata.of(environment, on_instance=False)

    # On a laptop nothing is queried
    assert found() is None
    assert found(**metadata.environment, AWS_EC2_METADATA_DISABLED="true") is None
    # Nothing listens at the address
    silent = found(AWS_EC2_METADATA_SERVICE_ENDPOINT="http://127.0.0.1:9")
    assert silent is not None
    assert silent.spot_notice() is None
    assert silent.capacity() is None
    # No notice, then an incomplete one, then a malformed time
    service = found(**metadata.environment)
    assert service is not None
    assert service.spot_notice() is None
    assert not service.rebalance_recommended()
    for answer in ({}, {"action": "terminate"}, {"action": "terminate", "time": "soon"}):
        metadata.news[NOTICE] = answer
        assert service.spot_notice() is None
    metadata.news[NOTICE] = {"action": "stop", "time": "2026-01-02T03:04:05Z"}
    for life_cycle in ("capacity-block", ""):
        metadata.news[LIFE_CYCLE] = life_cycle
        assert service.capacity() is None
    assert str(service.spot_notice()) == "Spot notice: stop at 03:04:05Z"

    assert zone(metadata.environment, on_instance=False) is None
    metadata.news[ZONE] = "us-west-2b"
    assert zone(metadata.environment, on_instance=False) == "us-west-2b"
    assert zone({}, on_instance=False) is None


def test_request_to_stop_has_no_deadline(tmp_path: Path) -> None:
    def give_up(number: int) -> None:
        pytest.fail("the ranks were ended")

    shutdown = ShutdownWatch(tmp_path, metadata=None, stop_timeout_seconds=0, give_up=give_up)
    files = RequestFiles(tmp_path)
    files.listen(0)
    with shutdown:
        shutdown.ask_to_stop("node 3 of 4 arrived late")
        asked = wait_until(lambda: files.asked("stop"), bool)
        assert asked is not None
        assert asked.reason == "node 3 of 4 arrived late"
        time.sleep(1)
        assert shutdown.overdue_seconds is None


def test_full_disk_does_not_keep_ranks_past_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RequestFiles, "ask", full)
    given_up: list[int] = []
    stopping = ShutdownWatch(tmp_path, metadata=None, stop_timeout_seconds=0, give_up=given_up.append)
    monkeypatch.setattr(os, "kill", lambda _, number: given_up.append(number))
    RequestFiles(tmp_path).listen(0)
    with stopping:
        stopping.on_signal(15)
        wait_until(lambda: given_up, bool)
    assert "warning: the ranks could not be asked to stop: [Errno 28] No space left on device" in caplog.messages
