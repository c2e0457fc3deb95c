"""What waits for the Spot notice of an instance: stops jobs and nothing else, once and in time."""

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from jobs.core.instance_types import STOP_TIMEOUT_SECONDS
from tests.support.infra.instances import GAUDI, script_with
from tests.support.infra.machine import Machine, Result
from tests.support.infra.shellcheck import shellcheck

TIME = "2026-11-21T08:22:00Z"
RUNNING = ("e1 ~internal~ecs~pause", "c1 main", "c2 main")
"""Containers of tasks, as Docker lists them in the format that it is asked for."""
DOCKER = f"""[[ $1 == ps ]] || exit 0
[[ $* == *"--filter label=com.amazonaws.ecs.task-arn"* ]] || echo "a1"  # the agent has no such label
printf '%s\\n' {" ".join(f"'{line}'" for line in RUNNING)}"""

PROGRAM = "usr/local/sbin/trainyard-spot-notice"


@pytest.fixture
def spot(machine: Machine, launched: dict[str, dict[str, Any]]) -> Machine:
    """An instance whose Spot notice comes at the third question, and on which two jobs run beside the ECS agent."""
    for _ in range(2):  # Installed twice, as when an image is made of an instance, it is the same.
        installed = machine.run(script_with(launched[GAUDI], "spot-notice"))
        assert (installed.code, installed.errors) == (0, "")
    assert installed.called("systemctl") == [
        "systemctl daemon-reload",
        "systemctl enable trainyard-spot-notice.service",
        "systemctl start --no-block trainyard-spot-notice.service",
    ]
    machine.answers("docker", DOCKER)
    notice_at(machine, TIME)
    return machine


def notice_at(machine: Machine, time: str) -> None:
    root = machine.root
    machine.answers(
        "curl",
        f"""case "$*" in
          *--request\\ PUT*/latest/api/token) echo "token-$(grep -c api/token "{root}/calls")" ;;
          *) cat >>"{root}/headers"
            (($(grep -c spot/instance-action "{root}/calls") > 2)) || exit 22  # as for a 404
            echo '{{"action": "terminate", "time": "{time}"}}' ;;
        esac""",
    )


def wait_for_the_notice(machine: Machine) -> Result:
    return machine.bash(machine.text(PROGRAM))


def test_systemd_runs_it_from_every_boot_on(spot: Machine) -> None:
    unit = spot.text("etc/systemd/system/trainyard-spot-notice.service")
    for line in (f"ExecStart={spot.root / PROGRAM}\n", "WantedBy=multi-user.target\n", "Restart=on-failure\n"):
        assert line in unit
    assert (spot.root / PROGRAM).stat().st_mode & 0o777 == 0o755
    assert shellcheck(spot.text(PROGRAM)) == (0, "")


def test_a_spot_notice_stops_jobs_and_nothing_else_once_and_in_time(spot: Machine) -> None:
    # Trap: the agent's draining stops the tasks of services only; nobody would tell a job of Batch.
    done = wait_for_the_notice(spot)
    assert (done.code, done.errors) == (0, "")
    assert len([call for call in done.calls if "spot/instance-action" in call]) == 3
    assert done.called("sleep") == ["sleep 5"] * 2
    # The agent and what holds a task's network stay; what is left of two minutes covers the wait between questions.
    assert done.called("docker stop") == [f"docker stop -t {STOP_TIMEOUT_SECONDS} c1 c2"]
    assert STOP_TIMEOUT_SECONDS + 5 + 2 * 3 < 120
    # Each question has a fresh token, which no list of processes shows.
    assert spot.text("headers").splitlines() == [f"X-aws-ec2-metadata-token: token-{number}" for number in (1, 2, 3)]
    assert not any("token-1" in call for call in done.calls)
    # An idle instance has nothing to stop.
    spot.answers("docker", "exit 0")
    assert not wait_for_the_notice(spot).called("docker stop")


@pytest.mark.parametrize(("left", "least", "most"), [(117, 107, 115), (600, 118, 118), (60, 100, 100)])
def test_jobs_have_until_shortly_before_the_time_of_the_notice(
    spot: Machine, *, left: int, least: int, most: int
) -> None:
    notice_at(spot, f"{datetime.now(timezone.utc) + timedelta(seconds=left):%Y-%m-%dT%H:%M:%SZ}")
    [stop] = wait_for_the_notice(spot).called("docker stop")
    assert least <= int(stop.split()[3]) <= most, stop


def test_a_docker_that_does_not_answer_is_asked_again_by_systemd_but_no_job_is_stopped_twice(spot: Machine) -> None:
    spot.answers("docker", "exit 1")
    # systemd starts a service that fails once more, and one that succeeds never.
    assert wait_for_the_notice(spot).code != 0
    # One of the jobs may end by itself just now; a second SIGTERM would disturb the end of the other.
    spot.answers("docker", f"[[ $1 != stop ]] || exit 1\n{DOCKER}")
    done = wait_for_the_notice(spot)
    assert done.code == 0
    assert "could not stop all jobs" in done.output
