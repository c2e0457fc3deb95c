"""The scripts that instances run when they boot: as Batch wants them, and run for real on stand-ins of the commands."""

import base64
import email
import json
import subprocess
from typing import Any

import pytest

from infra.storage.shared_file_system import CONTAINER_PATH
from jobs.contract.health import BAD_NODE_FILE
from tests.support.infra.boot_machine import Machine, script_with
from tests.support.infra.instances import CPU, GAUDI, boot_parts, user_data
from tests.support.infra.shellcheck import shellcheck

MAX_USER_DATA_BYTES = 16_384
"""EC2's limit before base64. Ours keeps to it after: Batch adds a part of its own."""


def test_user_data_is_mime_multipart(launch_templates: dict[str, dict[str, Any]], everything: dict[str, Any]) -> None:
    # Trap: Batch refuses a bare script, and skips a part whose boundary is followed by a blank line.
    for data in (*launch_templates.values(), everything):
        text = user_data(data)
        message = email.message_from_string(text)
        assert message.get_content_type() == "multipart/mixed"
        boundary = f"--{message.get_boundary()}\n"
        assert boundary in text
        assert boundary + "\n" not in text
        assert len(base64.b64encode(text.encode())) < MAX_USER_DATA_BYTES


def test_shellcheck_finds_nothing(launch_templates: dict[str, dict[str, Any]], everything: dict[str, Any]) -> None:
    scripts = {script for data in (*launch_templates.values(), everything) for _, script in boot_parts(data)}
    for script in scripts:
        assert script.startswith("#!/bin/bash\n")
        assert shellcheck(script) == (0, "")


def test_the_ecs_agent_gives_jobs_the_notices_time_to_stop(
    launch_templates: dict[str, dict[str, Any]], machine: Machine
) -> None:
    # Traps: 30 s between SIGTERM and SIGKILL, and no draining at a Spot notice, are the agent's defaults.
    for data in launch_templates.values():
        configuration = machine.root / "etc" / "ecs" / "ecs.config"
        configuration.unlink(missing_ok=True)
        assert machine.run(script_with(data, "ecs.config")).returncode == 0
        values = dict(line.split("=", 1) for line in configuration.read_text().splitlines())
        assert 30 < int(values["ECS_CONTAINER_STOP_TIMEOUT"].removesuffix("s")) < 120
        assert values["ECS_ENABLE_SPOT_INSTANCE_DRAINING"] == "true"
        # What Amazon Linux sets by itself and Ubuntu does not; without them a job has no role, no log, or no network.
        assert values["ECS_ENABLE_TASK_IAM_ROLE"] == "true"
        assert values["ECS_ENABLE_TASK_IAM_ROLE_NETWORK_HOST"] == "true"
        assert values["ECS_ENABLE_TASK_ENI"] == "true"
        assert values["ECS_ENABLE_AWSLOGS_EXECUTIONROLE_OVERRIDE"] == "true"
        assert "awslogs" in values["ECS_AVAILABLE_LOGGING_DRIVERS"]
        # Containers with an interface of their own do not get the instance's role.
        assert values["ECS_AWSVPC_BLOCK_IMDS"] == "true"


CONTROL = "opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl"


def sending(machine: Machine, data: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Install the service that sends logs, and run its program; `dnf` brings the CloudWatch agent."""
    control = machine.root / CONTROL
    machine.answers["dnf"] = (
        f"mkdir -p {control.parent}; printf '#!/bin/bash\\necho \"ctl $*\" >>{machine.root}/calls\\n' >{control}; "
        f"chmod 755 {control}"
    )
    installed = machine.run(script_with(data, "fetch-config"))
    assert (installed.returncode, installed.stderr) == (0, "")
    return machine.bash((machine.root / "usr/local/sbin/trainyard-instance-logs").read_text())


def test_logs_of_the_boot_go_where_they_outlive_the_instance(
    launch_templates: dict[str, dict[str, Any]], machine: Machine
) -> None:
    for data in launch_templates.values():
        parts = [text for _, text in boot_parts(data)]
        (logs,) = (index for index, text in enumerate(parts) if "fetch-config" in text)
        # Before all that may fail and end the boot, and waited for by none of it.
        assert all(index > logs for index, text in enumerate(parts) if "this instance takes no jobs" in text)
        assert "systemctl start --no-block trainyard-instance-logs.service" in parts[logs]
    done = sending(machine, launch_templates[f"{CPU}-spot"])
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.called("dnf") == ["dnf install --assumeyes --quiet amazon-cloudwatch-agent"]
    assert machine.called("ctl") == ["ctl -a fetch-config -m ec2 -s -c file:/etc/trainyard-logs.json"]
    configuration = json.loads((machine.root / "etc/trainyard-logs.json").read_text())
    files = configuration["logs"]["logs_collected"]["files"]["collect_list"]
    assert {item["file_path"]: item["log_stream_name"] for item in files} == {
        "/var/log/cloud-init-output.log": "{instance_id}/cloud-init-output",
        "/var/log/ecs/ecs-init.log": "{instance_id}/ecs-init",
        "/var/log/ecs/ecs-agent.log": "{instance_id}/ecs-agent",
    }
    assert {item["log_group_name"] for item in files} == {"<InstanceLogsAB47D8DA>"}


def test_a_node_that_a_job_found_bad_tells_how_the_job_ended_and_goes(
    machine: Machine, launch_templates: dict[str, dict[str, Any]]
) -> None:
    # GIVEN an instance on which no job has said so when it is looked for first
    installed = machine.run(script_with(launch_templates[f"{GAUDI}-spot"], "bad-node"))
    assert (installed.returncode, installed.stderr) == (0, "")
    program = (machine.root / "usr/local/sbin/trainyard-bad-node").read_text()
    assert shellcheck(program) == (0, "")
    volume = machine.root / "var/lib/docker/volumes/0a1b/_data"
    machine.answers["sleep"] = f"mkdir -p {volume}; echo 'node 1 (i-0abc): GPU 3' >{volume}/{BAD_NODE_FILE}"
    (machine.root / "calls").unlink()
    # WHEN one does
    done = machine.bash(program)
    # THEN the agent has time to tell Batch, and takes no other job
    assert done.returncode == 0
    assert "a job found this node bad: node 1 (i-0abc): GPU 3" in done.stdout
    assert machine.calls == [
        *("sleep 5", "sleep 10"),
        *("systemctl mask --now --no-block ecs.service", "systemctl poweroff --no-block"),
    ]


def test_only_instances_that_one_job_fills_go_at_its_word(launch_templates: dict[str, dict[str, Any]]) -> None:
    watching = {name for name, data in launch_templates.items() if any("bad-node" in s for _, s in boot_parts(data))}
    assert watching
    assert watching == {name for name in launch_templates if not name.startswith("cpu-")}


def test_gaudi_instances_set_huge_pages_aside_and_others_do_not(
    launch_templates: dict[str, dict[str, Any]], machine: Machine
) -> None:
    machine.answers["sysctl"] = "[[ $1 != --values ]] || echo 15000"
    assert machine.run(script_with(launch_templates[f"{GAUDI}-multinode"], "hugepages")).returncode == 0
    assert (machine.root / "etc/sysctl.d/60-hugepages.conf").read_text() == "vm.nr_hugepages=15000\n"
    assert machine.calls[0] == "sysctl --quiet --load=/etc/sysctl.d/60-hugepages.conf"
    assert not machine.called("systemctl")
    assert not any("hugepages" in script for _, script in boot_parts(launch_templates[f"{CPU}-spot"]))


def test_the_shared_file_system_is_mounted_for_reading_where_containers_look(
    everything: dict[str, Any], machine: Machine
) -> None:
    # Mounted on the second try, as when the file servers' name is not known yet.
    machine.answers["mount"] = f"[[ -e {machine.root}/tried ]] || {{ touch {machine.root}/tried; exit 32; }}"
    machine.answers["mountpoint"] = f"[[ $(grep -c ^mount\\  {machine.root}/calls) -ge 2 ]]"
    done = machine.run(script_with(everything, "lustre"))
    assert (done.returncode, done.stderr) == (0, "")
    mounts = [call for call in machine.calls if call.startswith("mount ")]
    assert len(mounts) == 2
    kind, _, options, source, place = mounts[0].removeprefix("mount -t ").split(" ")
    assert (kind, place) == ("lustre", CONTAINER_PATH)
    assert "ro" in options.split(",")
    # Both names are read from the storage stack's parameters when the stack is deployed.
    dns_name, mount_name = source.split("@tcp:/")
    assert "fsxdnsname" in dns_name
    assert "fsxmountname" in mount_name
    assert "dnf install --assumeyes --quiet lustre-client" in machine.calls


def test_an_instance_without_the_shared_file_system_takes_no_jobs(everything: dict[str, Any], machine: Machine) -> None:
    # Trap: the agent starts however user data ends, and Docker makes an empty folder of a volume's path that is not
    # there: each job on that instance would fail, by its own fault as Batch sees it.
    machine.answers["mount"] = "exit 32"
    done = machine.run(script_with(everything, "lustre"))
    assert done.returncode == 1
    assert "could not be mounted" in done.stderr
    assert len(machine.called("mount ")) == 5
    assert_it_shuts_down(done, machine, "lustre")


@pytest.mark.parametrize(
    "answer", ["[[ $1 != --values ]] || echo 9000", "exit 1"], ids=["memory for fewer", "the kernel refuses"]
)
def test_an_instance_without_the_drivers_huge_pages_takes_no_jobs(
    launch_templates: dict[str, dict[str, Any]], machine: Machine, answer: str
) -> None:
    machine.answers["sysctl"] = answer
    done = machine.run(script_with(launch_templates[f"{GAUDI}-spot"], "hugepages"))
    assert_it_shuts_down(done, machine, "huge_pages")


def test_an_instance_whose_agent_cannot_be_configured_takes_no_jobs(
    launch_templates: dict[str, dict[str, Any]], machine: Machine
) -> None:
    (machine.root / "etc/ecs/ecs.config").mkdir(parents=True)
    assert_it_shuts_down(machine.run(script_with(launch_templates[f"{CPU}-spot"], "ecs.config")), machine, "ecs.config")


def test_a_boot_that_fails_waits_for_its_log_a_minute_and_no_longer(
    launch_templates: dict[str, dict[str, Any]], machine: Machine
) -> None:
    (machine.root / "etc/ecs/ecs.config").mkdir(parents=True)
    machine.answers["systemctl"] = "[[ $1 != is-active ]] || echo activating"
    assert machine.run(script_with(launch_templates[f"{CPU}-spot"], "ecs.config")).returncode != 0
    assert machine.called("sleep") == ["sleep 2"] * 30 + ["sleep 10"]
    assert machine.called("systemctl")[-1] == "systemctl poweroff --no-block"


def assert_it_shuts_down(done: subprocess.CompletedProcess[str], machine: Machine, part: str) -> None:
    assert done.returncode != 0
    assert f"trainyard: {part} failed with {done.returncode}; this instance takes no jobs" in done.stderr
    # The agent is told first, and neither is waited for: both wait for the end of user data.
    assert machine.called("systemctl") == [
        "systemctl mask --now --no-block ecs.service",
        "systemctl is-active trainyard-instance-logs.service",
        "systemctl poweroff --no-block",
    ]
    # What it said has time to leave.
    assert [call for call in machine.calls if call.startswith(("sleep", "systemctl poweroff"))][-2:] == [
        "sleep 10",
        "systemctl poweroff --no-block",
    ]
