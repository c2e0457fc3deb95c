"""Endings that are announced: the ranks save at once, and the next attempt goes on as if nothing had happened."""

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jobs.train.instance_metadata import InstanceMetadata
from tests.jobs.train.launching import Launched, NewRun, Run
from tests.jobs.train.reviews import reviews, write_jsonl

MODEL = "model/model.safetensors"
NOTICE = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

HASTY_LAUNCHER = "import sys; from jobs.train import launch; sys.exit(launch.main(stop_timeout_seconds=12))"
"""Where SIGKILL follows so soon, the ranks have two seconds."""

MEASURED = ("time", "samples_per_second", "train_samples_per_second", "train_runtime_seconds")
"""What two runs of the same weights do not have in common."""


class MetadataService:
    """Of an instance: IMDSv2 on loopback, with nothing to tell until a test says what."""

    def __init__(self) -> None:
        self.news: dict[str, dict[str, str]] = {}
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                allowed = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
                self._answer(200 if allowed else 400, b"token")

            def do_GET(self) -> None:
                if self.headers.get("X-aws-ec2-metadata-token") != "token":
                    self._answer(401, b"")
                elif self.path in service.news:
                    self._answer(200, json.dumps(service.news[self.path]).encode())
                else:
                    self._answer(404, b"")

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}/"}


@pytest.fixture
def metadata() -> Iterator[MetadataService]:
    service = MetadataService()
    thread = threading.Thread(target=service.server.serve_forever, daemon=True)
    thread.start()
    yield service
    service.server.shutdown()
    service.server.server_close()
    thread.join()


@pytest.fixture
def long_recipe(recipe: tuple[str, ...], put: Callable[[Path, str], str], tmp_path: Path) -> tuple[str, ...]:
    """120 steps of several accumulated batches each, with no checkpoint but those of endings and the last one."""
    held_out = put(write_jsonl(tmp_path / "eval.jsonl", reviews(200, seed=2)), f"{tmp_path.name}/eval.jsonl")
    return (
        *recipe,
        f"--eval-data={held_out}",
        "--epochs=10",
        "--eval-batch-size=2",
        "--max-batch-size-per-rank=4",
        "--checkpoint-every-steps=100000",
        "--evaluate-every-steps=50",
        "--log-every-steps=5",
    )


def assert_same(run: Run, whole: Run) -> None:
    assert run.read(MODEL) == whole.read(MODEL)
    assert lines(run) == lines(whole)


def lines(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in run.metrics()]


def saved_step(launched: Launched, why: str) -> int:
    """From the last line, which says what the attempt's record says too."""
    match = re.fullmatch(rf"interrupted: ({re.escape(why)}; saved step (\d+))\n", launched.lines[-1])
    assert match, launched.output
    assert "Traceback" not in launched.output
    return int(match[2])


def test_two_ranks_save_the_same_step_at_sigterm_and_at_a_spot_notice(
    new_run: NewRun, long_recipe: tuple[str, ...], metadata: MetadataService
) -> None:
    whole = new_run()
    whole.attempt(*long_recipe, nproc=2)
    run = new_run()

    # WHEN SIGTERM comes where no checkpoint is due
    first = run.start(*long_recipe, nproc=2)
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

    # WHEN EC2 gives notice
    ends_at = datetime.now(timezone.utc) + timedelta(seconds=120)
    metadata.news[NOTICE] = {"action": "terminate", "time": f"{ends_at:%Y-%m-%dT%H:%M:%SZ}"}
    second = run.start(*long_recipe, nproc=2, attempt=2, **metadata.environment)
    assert second.wait() == 75
    # THEN the same happens without a signal
    assert f"start: resumed from checkpoint step-{step}\n" in second.lines
    later = saved_step(second, f"Spot notice: terminate at {ends_at:%H:%M:%SZ}")
    assert step < later < 120
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
    first.wait_for_line(f"checkpoint: {saving.split(': saving ')[1].strip()},")
    first.wait_for_line("[progress] 120/120")
    # Held until the launcher has taken the signal, the rank is still at its evaluation then.
    [rank] = first.ranks()
    rank.suspend()
    first.process.send_signal(signal.SIGTERM)
    first.wait_for_line("SIGTERM: the training saves and stops")
    rank.resume()

    assert first.wait() == 75
    assert saved_step(first, "SIGTERM") == 120
    assert "result:" not in first.output
    run.attempt(*long_recipe, attempt=2)
    assert_same(run, whole)


def test_a_rank_that_hangs_does_not_hold_the_launcher_beyond_its_time(run: Run, long_recipe: tuple[str, ...]) -> None:
    launched = run.start(*long_recipe, program=("-c", HASTY_LAUNCHER))
    launched.wait_for_line("[progress] 10/120")
    launched.ranks()[0].suspend()

    assert launched.kill(signal.SIGTERM) == 75

    assert launched.lines[-1] == (
        "interrupted: SIGTERM; not saved within 2 s; a next attempt resumes from the newest checkpoint\n"
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
    # No news, then an answer that is none, then one of another form
    service = found(**metadata.environment)
    assert service is not None
    assert service.spot_notice() is None
    assert not service.rebalance_recommended()
    for answer in ({}, {"action": "terminate"}, {"action": "terminate", "time": "soon"}):
        metadata.news[NOTICE] = answer
        assert service.spot_notice() is None
    metadata.news[NOTICE] = {"action": "stop", "time": "2026-01-02T03:04:05Z"}
    assert str(service.spot_notice()) == "Spot notice: stop at 03:04:05Z"
