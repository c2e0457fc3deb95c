"""A short slice of the benchmark `fuzz`; a page's requests to the embedded AWS are in tests/infra/emulator."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.stages import Alerts, GitHub, Stage, Team
from jobs.aws.connection import Aws
from jobs.contract.stage import DEFAULT_STAGE
from tests.support.embedded_aws import EmbeddedAws, environment_of
from tests.support.fuzz import commands, inputs, settings, specs, web
from tests.support.fuzz.findings import Nonsense, Round


@pytest.fixture
def round_(tmp_path: Path) -> Iterator[Round]:
    """A round in which the test has to find no fault."""
    round_ = Round("a slice", canary=tmp_path / "canary")
    yield round_
    assert [str(finding) for finding in round_.findings] == []


@pytest.fixture
def aws(deployed_aws: EmbeddedAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Aws:
    for name, value in {**environment_of(deployed_aws.endpoint), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.chdir(tmp_path)
    return Aws()


def test_specs(round_: Round, aws: Aws, tmp_path: Path) -> None:
    specs.put_inputs(aws, DEFAULT_STAGE)
    specs.fuzz(round_, aws, DEFAULT_STAGE, tmp_path, count=60, number=1)
    assert round_.tried >= 60
    assert 2 < round_.accepted < 40


# docker-py leaves the socket open with which it found no engine.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("aws")
def test_commands(round_: Round, tmp_path: Path) -> None:
    commands.fuzz(round_, tmp_path, count=60, number=1, every_as_process=60)
    assert round_.tried >= 40


@pytest.mark.usefixtures("aws")
def test_inputs(round_: Round, tmp_path: Path) -> None:
    inputs.fuzz(round_, Aws(), DEFAULT_STAGE, tmp_path, count=75, number=1)
    assert round_.tried >= 75
    assert 2 < round_.accepted < 30


def test_settings(round_: Round) -> None:
    assert settings.fuzz(round_, count=75, number=1, synthesise=5) == 5
    assert 5 < round_.accepted < 70


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"account": "123"}, "account"),
        ({"region": "us-east-1 "}, "region"),
        ({"availability_zone_ids": ("use1-az2", "usw2-az1")}, "zones of two regions"),
        ({"deploy_from": GitHub(repository="a/b", branch="refs/heads/main")}, "branch 'refs/heads/main'"),
        ({"deploy_from": GitHub(repository="*/b")}, "repository '*/b'"),
        ({"teams": (Team(name="a", share=float("nan")),)}, "share of 'a'"),
        ({"teams": (Team(name="a", member_principals=("*",)),)}, "principal '*'"),
        ({"alerts": Alerts(emails=("a b@c.d",))}, "address 'a b@c.d'"),
        ({"monthly_budget_usd": float("inf")}, "monthly_budget_usd"),
    ],
)
def test_settings_that_nobody_can_deploy_are_known_without_the_checks(wrong: dict[str, Any], what: str) -> None:
    row = Stage(name="dev", teams=(Team(name="research"),))
    assert settings.nonsense(row) is None
    assert settings.nonsense(replace(row, **wrong)) == what


def test_requests(round_: Round, fresh_aws: EmbeddedAws) -> None:
    web.fuzz(round_, fresh_aws, every=15, in_a_browser=False)
    assert round_.tried > 500
    [note] = round_.notes
    assert int(note.split()[0]) > 20


def test_requests_that_are_let_in_are_found(round_: Round, fresh_aws: EmbeddedAws) -> None:
    request = web.Request("GET", "/", "s3")
    with pytest.raises(Nonsense, match="the answer was 200"):
        web.refused(fresh_aws, request, web.headers_of_owner(fresh_aws, request))
    assert not web.refused(fresh_aws, request, {})
    assert round_.findings == []


def test_a_round_finds_faults(tmp_path: Path) -> None:
    round_ = Round("faults", canary=tmp_path / "canary")

    def accept_nonsense() -> bool:
        raise Nonsense("it was accepted")

    def run_a_command() -> bool:
        round_.canary.touch()
        return True

    for attempt in (accept_nonsense, run_a_command, lambda: bool(1 / 0), lambda: True):
        round_.look("input", attempt)
    assert [finding.kind for finding in round_.findings] == ["nonsense", "command", "traceback"]
    assert (round_.tried, round_.accepted) == (4, 2)


def test_what_takes_too_long_is_a_fault_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.fuzz.findings.LIMIT_SECONDS", 0.1)
    round_ = Round("hangs", canary=tmp_path / "canary")
    numbers = iter(range(3))

    def is_slow_once() -> bool:
        return next(numbers) == 1 or _hang()

    round_.look("slow once", is_slow_once)
    assert round_.findings == []
    round_.look("slow", _hang)
    assert [finding.kind for finding in round_.findings] == ["hang"]


def test_waiting_for_what_does_not_come_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.fuzz.findings.WAIT_SECONDS", 0.1)
    round_ = Round("waiting", canary=tmp_path / "canary")
    round_.look("asleep", lambda: threading.Event().wait(60))
    assert [finding.kind for finding in round_.findings] == ["hang"]


def test_processor_time_of_processes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.fuzz.findings.LIMIT_SECONDS", 0.3)
    round_ = Round("processes", canary=tmp_path / "canary")
    for busy in ("import time; time.sleep(0.5)", "import time\nwhile time.process_time() < 0.5: pass"):
        round_.look(busy, lambda busy=busy: bool(subprocess.run([sys.executable, "-ISc", busy], check=True)))  # type: ignore[misc]
    assert [(finding.kind, finding.given) for finding in round_.findings] == [("hang", busy)]


def _hang() -> bool:
    while True:
        pass
