"""A shutdown that is announced: the ranks save at once, and the next attempt goes on as if nothing had happened."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from jobs.train.channel import Heartbeat, RequestFiles, read_heartbeats
from jobs.train.launcher.instance import InstanceMetadata, zone
from jobs.train.launcher.shutdown import Shutdown
from tests.support.train.faulty_s3 import FaultyS3
from tests.support.train.launching import PATIENCE_SECONDS, Launched, NewRun, Run
from tests.support.train.metadata_service import LIFE_CYCLE, NOTICE, REBALANCE, ZONE, MetadataService

MODEL = "model/model.safetensors"

HASTY_LAUNCHER = "import sys; from jobs.train import launch; sys.exit(launch.main(stop_timeout_seconds=12))"
"""Where SIGKILL follows so soon, the ranks have two seconds."""


PATIENT_LAUNCHER = "import sys; from jobs.train import launch; sys.exit(launch.main(stop_timeout_seconds=90))"
"""Where SIGKILL follows late, a busy machine has its time."""


@pytest.fixture
def metadata() -> Iterator[MetadataService]:
    with MetadataService() as service:
        yield service


def assert_same(run: Run, whole: Run) -> None:
    assert run.read(MODEL) == whole.read(MODEL)
    assert run.curve() == whole.curve()


def saved_step(launched: Launched, why: str) -> int:
    """From the last line, which says what the attempt's record says too."""
    match = re.fullmatch(rf"interrupted: ({re.escape(why)}; saved step (\d+))\n", launched.lines[-1])
    assert match, launched.output
    assert "Traceback" not in launched.output
    return int(match[2])


def hold(run: Run, doing: str, *, at_least_step: int = 0) -> tuple[psutil.Process, Heartbeat]:
    """The one rank, stopped in the midst of that."""
    deadline = time.monotonic() + PATIENCE_SECONDS

    def sign() -> Heartbeat | None:
        heartbeats = (
            found for scratch in run.scratch.glob("trainyard-*") for found in read_heartbeats(scratch).values()
        )
        return next((found for found in heartbeats if found.doing == doing and found.step >= at_least_step), None)

    while time.monotonic() < deadline:
        if (seen := sign()) is not None:
            rank = psutil.Process(seen.pid)
            rank.suspend()
            time.sleep(0.05)  # a write that was under way
            if (held := sign()) is not None:
                return rank, held
            rank.resume()
        time.sleep(0.001)
    pytest.fail(f"no rank was seen {doing}")


def test_two_ranks_save_the_same_step_at_sigterm_and_at_a_spot_notice(
    new_run: NewRun, long_recipe: tuple[str, ...], metadata: MetadataService
) -> None:
    whole = new_run()
    whole.attempt(*long_recipe, nproc=2)
    run = new_run()

    # WHEN SIGTERM comes where no checkpoint is due
    metadata.news[LIFE_CYCLE] = "on-demand"
    first = run.start(*long_recipe, nproc=2, attempt=1, options=["--capacity=spot"], **metadata.environment)
    first.wait_for_line("[progress] 10/120")
    assert first.kill(signal.SIGTERM) == 75
    # THEN the ranks' own step is saved, and the attempt says so
    step = saved_step(first, "SIGTERM")
    assert 10 <= step < 120
    assert run.complete_checkpoints() == [step]
    record = run.recorded_attempt(1)
    assert (record.exit_code, record.reason, record.last_step) == (75, f"SIGTERM; saved step {step}", step)
    assert run.receipt().state == "interrupted"
    run.wait_until_gone()
    assert not list(run.scratch.iterdir())

    # Spot had no capacity, so the Spot queue had gone on to an On-Demand instance
    assert record.capacity == "on-demand"

    # WHEN EC2 has given notice so long ago that there is time for one save, however fast the steps are
    metadata.news[LIFE_CYCLE] = "spot"
    notice = metadata.give_notice(8)
    second = run.start(*long_recipe, nproc=2, attempt=2, options=["--capacity=spot"], **metadata.environment)
    assert second.wait() == 75
    assert [attempt.capacity for attempt in run.receipt().attempts] == ["on-demand", "spot"]
    # THEN the same happens without a signal
    assert f"start: resumed from checkpoint step-{step}\n" in second.lines
    later = saved_step(second, notice)
    assert step < later < 120
    assert run.complete_checkpoints()[-1] == later
    assert run.recorded_attempt(2).reason == second.lines[-1].removeprefix("interrupted: ").rstrip()

    third = run.attempt(*long_recipe, nproc=2, attempt=3)
    assert f"start: resumed from checkpoint step-{later}\n" in third.lines
    assert_same(run, whole)


def test_a_rebalance_recommendation_saves_and_goes_on_and_the_final_evaluation_is_left_at_sigterm(
    new_run: NewRun, long_recipe: tuple[str, ...], metadata: MetadataService
) -> None:
    whole = new_run()
    whole.attempt(*long_recipe)
    run = new_run()
    metadata.news[REBALANCE] = {"noticeTime": "2026-01-02T03:04:05Z"}

    first = run.start(*long_recipe, nproc=1, attempt=1, **metadata.environment)
    saving = first.wait_for_line("rebalance recommendation: saving step ")
    first.wait_for_line(f"checkpoint: {saving.split(': saving ')[1].split(',')[0]},")
    # Held until the launcher has taken the signal, the rank is still at its evaluation then.
    rank, _ = hold(run, "evaluating", at_least_step=120)
    first.process.send_signal(signal.SIGTERM)
    first.wait_for_line("SIGTERM: the training saves and stops")
    rank.resume()

    assert first.wait() == 75
    assert saved_step(first, "SIGTERM") == 120
    assert "result:" not in first.output
    run.attempt(*long_recipe, attempt=2)
    assert_same(run, whole)


def test_a_notice_in_the_first_step_and_sigterm_in_an_evaluation_beside_an_upload_save_and_end(
    run: Run, long_recipe: tuple[str, ...], metadata: MetadataService, s3_endpoint: str
) -> None:
    # Several evaluations follow a checkpoint before the next one, which waits for its upload. They have many batches:
    # SIGTERM in the last one is answered a step later.
    often = ("--evaluate-every-steps=2", "--checkpoint-every-steps=12")
    recipe = (*long_recipe, "--epochs=40", "--eval-batch-size=1", *often)

    # WHEN a notice comes while the first step takes long, as one does for which graphs are compiled
    first = run.start(*recipe, nproc=1, attempt=1, **metadata.environment)
    rank, held = hold(run, "training")
    notice = metadata.give_notice(20)
    first.wait_for_line(f"{notice}: the training saves, trains on, saves again and stops, within ")
    rank.resume()
    # THEN that step is saved, and another one shortly before the end
    first.wait_for_line(f"{notice}: saving step {held.step + 1}, and training on")
    assert first.wait() == 75
    later = saved_step(first, notice)
    assert held.step + 1 < later
    for step in (held.step + 1, later):
        assert f"checkpoint: step {step}, " in first.output
    assert run.complete_checkpoints()[-1] == later

    # WHEN SIGTERM comes in an evaluation, and the upload of the checkpoint before it is still under way
    is_under_way, may_end = threading.Event(), threading.Event()

    def wait(method: str, path: str) -> bool:
        if method == "PUT" and "/checkpoints/step-" in path and "model.safetensors" in path:
            is_under_way.set()
            assert may_end.wait(PATIENCE_SECONDS)
        return False

    with FaultyS3(s3_endpoint) as slow:
        slow.denies = wait
        behind = replace(run, environment={**run.environment, "AWS_ENDPOINT_URL": slow.url})
        second = behind.start(*recipe, attempt=2, program=("-c", PATIENT_LAUNCHER))
        assert is_under_way.wait(PATIENCE_SECONDS)
        rank, held = hold(run, "evaluating")
        second.process.send_signal(signal.SIGTERM)
        second.wait_for_line("SIGTERM: the training saves and stops")
        may_end.set()
        rank.resume()
        # THEN the evaluation is left, its step is saved, and both checkpoints are there
        assert second.wait() == 75
    assert saved_step(second, "SIGTERM") == held.step
    assert run.complete_checkpoints()[-2:] == [(held.step - 1) // 12 * 12, held.step]
    assert not any(line["step"] == held.step and "eval_loss" in line for line in run.metrics())


def test_a_rank_that_hangs_does_not_hold_the_launcher_beyond_its_time(run: Run, long_recipe: tuple[str, ...]) -> None:
    launched = run.start(*long_recipe, program=("-c", HASTY_LAUNCHER))
    launched.wait_for_line("[progress] 10/120")
    launched.ranks()[0].suspend()

    assert launched.kill(signal.SIGTERM) == 75

    assert launched.lines[-1] == (
        "interrupted: SIGTERM; not saved within 2 s; "
        "if it is started again, it starts over: it has saved no checkpoint\n"
    )
    run.wait_until_gone()
    assert not list(run.scratch.iterdir())


def test_what_the_metadata_service_does_not_say_is_no_news(metadata: MetadataService) -> None:
    def found(**environment: str) -> InstanceMetadata | None:
        return InstanceMetadata.of(environment, on_instance=False)

    # A laptop asks nobody
    assert found() is None
    assert found(**metadata.environment, AWS_EC2_METADATA_DISABLED="true") is None
    # Nobody listens at the address
    silent = found(AWS_EC2_METADATA_SERVICE_ENDPOINT="http://127.0.0.1:9")
    assert silent is not None
    assert silent.spot_notice() is None
    assert silent.capacity() is None
    # No news, then an answer that is none, then one of another form
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


def test_a_wish_that_the_ranks_stop_has_no_limit(tmp_path: Path) -> None:
    def give_up(number: int) -> None:
        pytest.fail("the ranks were ended")

    shutdown = Shutdown(tmp_path, metadata=None, stop_timeout_seconds=0, give_up=give_up)
    files = RequestFiles(tmp_path)
    files.listen(0)
    with shutdown:
        shutdown.ask_to_stop("node 3 of 4 came late")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (asked := files.asked("stop")) is None or asked.reason != "node 3 of 4 came late":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(2)
        assert shutdown.overdue_seconds is None
