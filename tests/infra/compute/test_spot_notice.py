"""What waits for the Spot notice of an instance: stops jobs and nothing else, once and in time."""

import subprocess
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from jobs.contract.instance_types import STOP_TIMEOUT_SECONDS
from tests.support.infra.boot_machine import Machine, script_with
from tests.support.infra.instances import GAUDI
from tests.support.infra.shellcheck import shellcheck

NOTICE = '{"action": "terminate", "time": "2026-11-21T08:22:00Z"}'

RUNNING = ("e1 ~internal~ecs~pause", "c1 main", "c2 main")
"""Containers of tasks, as Docker lists them in the format that it is asked for."""


@dataclass
class SpotInstance:
    """An instance whose Spot notice comes at the third question, and on which two jobs run beside the ECS agent."""

    machine: Machine
    program: Path

    @classmethod
    def booted(cls, machine: Machine, data: dict[str, Any]) -> "SpotInstance":
        installed = machine.run(script_with(data, "spot-notice"))
        assert (installed.returncode, installed.stderr) == (0, "")
        root = machine.root
        machine.answers["curl"] = f"""case "$*" in
          *--request\\ PUT*/latest/api/token) echo "token-$(grep -c api/token "{root}/calls")" ;;
          *) cat >>"{root}/headers"
            (($(grep -c spot/instance-action "{root}/calls") > 2)) || exit 22  # as for a 404
            echo '{NOTICE}' ;;
        esac"""
        machine.answers["docker"] = f"""[[ $1 == ps ]] || exit 0
        [[ $* == *"--filter label=com.amazonaws.ecs.task-arn"* ]] || echo "a1"  # the agent has no such label
        printf '%s\\n' {" ".join(f"'{line}'" for line in RUNNING)}"""
        return cls(machine, root / "usr/local/sbin/trainyard-spot-notice")

    def wait_for_the_notice(self) -> subprocess.CompletedProcess[str]:
        (self.machine.root / "calls").unlink(missing_ok=True)
        return self.machine.bash(self.program.read_text())


@pytest.fixture
def spot(machine: Machine, launch_templates: dict[str, dict[str, Any]]) -> SpotInstance:
    return SpotInstance.booted(machine, launch_templates[f"{GAUDI}-spot"])


def test_every_instance_waits_for_its_spot_notice_from_the_first_boot_on(
    launch_templates: dict[str, dict[str, Any]], everything: dict[str, Any], machine: Machine
) -> None:
    for data in (*launch_templates.values(), everything):
        # Installed twice, as when an image is made of an instance, it is the same.
        for _ in range(2):
            SpotInstance.booted(machine, data)
        calls = [call for call in machine.calls if call.startswith("systemctl")]
        assert calls[-3:] == [
            "systemctl daemon-reload",
            "systemctl enable trainyard-spot-notice.service",
            "systemctl start --no-block trainyard-spot-notice.service",
        ]
        unit = (machine.root / "etc/systemd/system/trainyard-spot-notice.service").read_text()
        program = machine.root / "usr/local/sbin/trainyard-spot-notice"
        assert f"ExecStart={program}\n" in unit
        assert "WantedBy=multi-user.target\n" in unit
        assert "Restart=on-failure\n" in unit
        assert program.stat().st_mode & 0o777 == 0o755
        assert program.read_text().startswith("#!/bin/bash\n")
        assert shellcheck(program.read_text()) == (0, "")


def test_a_spot_notice_stops_jobs_and_nothing_else_once_and_in_time(spot: SpotInstance) -> None:
    # Trap: the agent's draining stops the tasks of services only; nobody would tell a job of Batch.
    done = spot.wait_for_the_notice()
    assert (done.returncode, done.stderr) == (0, "")
    assert NOTICE in done.stdout
    asked = [call for call in spot.machine.calls if "spot/instance-action" in call]
    assert len(asked) == 3
    assert spot.machine.called("sleep") == ["sleep 5"] * 2
    # The agent and what holds a task's network stay; what is left of two minutes covers the wait between questions.
    assert spot.machine.called("docker stop") == [f"docker stop -t {STOP_TIMEOUT_SECONDS} c1 c2"]
    assert STOP_TIMEOUT_SECONDS + 5 + 2 * 3 < 120


@pytest.mark.parametrize(("left", "least", "most"), [(117, 107, 115), (600, 118, 118), (60, 100, 100)])
def test_jobs_have_until_shortly_before_the_time_of_the_notice(
    *, left: int, least: int, most: int, spot: SpotInstance
) -> None:
    time = f"{datetime.now(timezone.utc) + timedelta(seconds=left):%Y-%m-%dT%H:%M:%SZ}"
    spot.machine.answers["curl"] = spot.machine.answers["curl"].replace("2026-11-21T08:22:00Z", time)
    assert spot.wait_for_the_notice().returncode == 0
    [stop] = spot.machine.called("docker stop")
    assert least <= int(stop.split()[3]) <= most, stop


def test_the_notice_is_asked_for_with_a_fresh_token_that_no_process_list_shows(spot: SpotInstance) -> None:
    spot.wait_for_the_notice()
    headers = (spot.machine.root / "headers").read_text().splitlines()
    assert headers == [f"X-aws-ec2-metadata-token: token-{number}" for number in (1, 2, 3)]
    assert not any("token-1" in call for call in spot.machine.calls)
    assert all("http://169.254.169.254/latest/" in call for call in spot.machine.called("curl"))


def test_a_metadata_service_that_does_not_answer_is_asked_again(spot: SpotInstance) -> None:
    answer = spot.machine.answers["curl"]
    spot.machine.answers["curl"] = f'(($(wc -l <"{spot.machine.root}/calls") > 4)) || exit 28\n{answer}'
    assert spot.wait_for_the_notice().returncode == 0
    assert len(spot.machine.called("docker stop")) == 1


def test_an_idle_instance_has_nothing_to_stop(spot: SpotInstance) -> None:
    spot.machine.answers["docker"] = "exit 0"
    done = spot.wait_for_the_notice()
    assert (done.returncode, done.stderr) == (0, "")
    assert not spot.machine.called("docker stop")


def test_a_docker_that_does_not_answer_is_asked_again_by_systemd_but_no_job_is_stopped_twice(
    spot: SpotInstance,
) -> None:
    answer = spot.machine.answers["docker"]
    spot.machine.answers["docker"] = "exit 1"
    # systemd starts a service that fails once more, and one that succeeds never.
    assert spot.wait_for_the_notice().returncode != 0
    assert not spot.machine.called("docker stop")
    # One of the jobs may end by itself just now; a second SIGTERM would disturb the end of the other.
    spot.machine.answers["docker"] = f"[[ $1 != stop ]] || exit 1\n{answer}"
    done = spot.wait_for_the_notice()
    assert done.returncode == 0
    assert "not all could be stopped" in done.stdout
