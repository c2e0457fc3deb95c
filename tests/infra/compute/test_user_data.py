"""The scripts that instances run when they boot: as Batch wants them, and run for real on stand-ins of the commands."""

import base64
import email
import json
from typing import Any

import pytest

from infra.storage.stack import CONTAINER_PATH
from jobs.spec.launcher_options import BAD_NODE_FILE
from tests.support.infra.instances import CPU, CUDA, GAUDI, boot_parts, script_with, user_data
from tests.support.infra.machine import Machine
from tests.support.infra.shellcheck import shellcheck

Launched = dict[str, dict[str, Any]]

MAX_USER_DATA_BYTES = 16_384
"""EC2's limit before base64. Ours keeps to it after: Batch adds a part of its own."""
CONTROL = "opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl"


def test_user_data_is_mime_multipart_of_scripts_without_a_finding(launched: Launched) -> None:
    # Trap: Batch refuses a bare script, and skips a part whose boundary is followed by a blank line.
    for data in launched.values():
        text = user_data(data)
        message = email.message_from_string(text)
        assert message.get_content_type() == "multipart/mixed"
        boundary = f"--{message.get_boundary()}\n"
        assert boundary in text
        assert boundary + "\n" not in text
        assert len(base64.b64encode(text.encode())) < MAX_USER_DATA_BYTES
    for script in {script for data in launched.values() for _, script in boot_parts(data)}:
        assert script.startswith("#!/bin/bash\n")
        assert shellcheck(script) == (0, "")


def test_each_instance_runs_what_it_is_for(launched: Launched) -> None:
    for name, data in launched.items():
        scripts = [script for _, script in boot_parts(data)]
        # A job fills an accelerated instance, so at its word no other goes.
        assert any("bad-node" in script for script in scripts) is not name.startswith("cpu-")
        assert any("hugepages" in script for script in scripts) is name.startswith("dl1-")
        # The log of the boot is sent before all that may fail and end it.
        (logs,) = (index for index, script in enumerate(scripts) if "fetch-config" in script)
        assert all(index > logs for index, script in enumerate(scripts) if "this instance accepts no jobs" in script)


@pytest.mark.parametrize(("name", "team"), [(GAUDI, None), ("cpu-m6i-4xlarge-of-product-spot", "product")])
def test_the_ecs_agent_gives_jobs_the_notices_time_to_stop(
    launched: Launched, machine: Machine, name: str, team: str | None
) -> None:
    assert machine.run(script_with(launched[name], "ecs.config")).code == 0
    values = dict(line.split("=", 1) for line in machine.text("etc/ecs/ecs.config").splitlines())
    # Traps: 30 s between SIGTERM and SIGKILL, and no draining at a Spot notice, are the agent's defaults.
    assert 30 < int(values["ECS_CONTAINER_STOP_TIMEOUT"].removesuffix("s")) < 120
    assert "awslogs" in values["ECS_AVAILABLE_LOGGING_DRIVERS"]
    # What Amazon Linux sets by itself and Ubuntu does not, and what keeps containers off the instance's role.
    switches = ("TASK_IAM_ROLE", "TASK_IAM_ROLE_NETWORK_HOST", "TASK_ENI", "AWSLOGS_EXECUTIONROLE_OVERRIDE")
    for switch in (*(f"ENABLE_{name}" for name in (*switches, "SPOT_INSTANCE_DRAINING")), "AWSVPC_BLOCK_IMDS"):
        assert values[f"ECS_{switch}"] == "true", switch
    # By its tag the role of an instance is kept to its own team's.
    tags = json.dumps({"trainyard:team": team}, separators=(",", ":")) if team else None
    assert values.get("ECS_CONTAINER_INSTANCE_TAGS") == tags


def test_logs_of_the_boot_go_where_they_outlive_the_instance(launched: Launched, machine: Machine) -> None:
    control = machine.root / CONTROL
    agent = f'#!/bin/bash\\necho "ctl $*" >>{machine.root}/calls\\n'
    machine.answers("dnf", f"mkdir -p {control.parent}; printf '{agent}' >{control}; chmod 755 {control}")
    installed = machine.run(script_with(launched[CPU], "fetch-config"))
    assert installed.called("systemctl start") == ["systemctl start --no-block trainyard-instance-logs.service"]
    done = machine.bash(machine.text("usr/local/sbin/trainyard-instance-logs"))
    assert (done.code, done.errors) == (0, "")
    assert done.calls == [
        "dnf install --assumeyes --quiet amazon-cloudwatch-agent",
        "ctl -a fetch-config -m ec2 -s -c file:/etc/trainyard-logs.json",
    ]
    files = json.loads(machine.text("etc/trainyard-logs.json"))["logs"]["logs_collected"]["files"]["collect_list"]
    assert {item["file_path"]: item["log_stream_name"] for item in files} == {
        "/var/log/cloud-init-output.log": "{instance_id}/cloud-init-output",
        "/var/log/ecs/ecs-init.log": "{instance_id}/ecs-init",
        "/var/log/ecs/ecs-agent.log": "{instance_id}/ecs-agent",
    }
    assert {item["log_group_name"] for item in files} == {"<InstanceLogsAB47D8DA>"}


def test_a_node_that_a_job_found_bad_tells_how_the_job_ended_and_goes(machine: Machine, launched: Launched) -> None:
    # GIVEN an instance on which no job has said so when it is looked for first
    machine.run(script_with(launched[GAUDI], "bad-node"))
    program = machine.text("usr/local/sbin/trainyard-bad-node")
    assert shellcheck(program) == (0, "")
    volume = machine.root / "var/lib/docker/volumes/0a1b/_data"
    machine.answers("sleep", f"mkdir -p {volume}; echo 'node 1 (i-0abc): GPU 3' >{volume}/{BAD_NODE_FILE}")
    # WHEN one does
    done = machine.bash(program)
    # THEN the agent has time to tell Batch, and takes no other job
    assert done.code == 0
    assert "a job found this node bad: node 1 (i-0abc): GPU 3" in done.output
    assert done.calls == [
        *("sleep 5", "sleep 10"),
        *("systemctl mask --now --no-block ecs.service", "systemctl poweroff --no-block"),
    ]


def test_gaudi_instances_set_huge_pages_aside(launched: Launched, machine: Machine) -> None:
    machine.answers("sysctl", "[[ $1 != --values ]] || echo 15000")
    done = machine.run(script_with(launched[GAUDI], "hugepages"))
    assert done.code == 0
    assert machine.text("etc/sysctl.d/60-hugepages.conf") == "vm.nr_hugepages=15000\n"
    assert done.calls[0] == "sysctl --quiet --load=/etc/sysctl.d/60-hugepages.conf"
    assert not done.called("systemctl")


def test_the_shared_file_system_is_mounted_for_reading_where_containers_look(
    launched: Launched, machine: Machine
) -> None:
    # Mounted on the second try, as when the file servers' name is not known yet.
    machine.answers("mount", f"[[ -e {machine.root}/tried ]] || {{ touch {machine.root}/tried; exit 32; }}")
    machine.answers("mountpoint", f"[[ $(grep -c ^mount\\  {machine.root}/calls) -ge 2 ]]")
    done = machine.run(script_with(launched[CUDA], "lustre"))
    assert (done.code, done.errors) == (0, "")
    first, _ = done.called("mount ")
    kind, _, options, source, place = first.removeprefix("mount -t ").split(" ")
    assert (kind, place, "ro" in options.split(",")) == ("lustre", CONTAINER_PATH, True)
    # Both names are read from the storage stack's parameters when the stack is deployed.
    dns_name, mount_name = source.split("@tcp:/")
    assert ("fsxdnsname" in dns_name, "fsxmountname" in mount_name) == (True, True)


@pytest.mark.parametrize(
    ("name", "part", "command", "answer"),
    [
        # Trap: Docker makes an empty folder of a volume's path that is not there: each job there would fail.
        (CUDA, "lustre", "mount", "exit 32"),
        (GAUDI, "huge_pages", "sysctl", "[[ $1 != --values ]] || echo 9000"),
        (CPU, "ecs.config", "cat", "exit 1"),
    ],
)
def test_an_instance_that_lacks_what_jobs_need_shuts_down(
    launched: Launched, machine: Machine, *, name: str, part: str, command: str, answer: str
) -> None:
    machine.answers(command, answer)
    # The log of the boot is waited for a minute, and no longer.
    machine.answers("systemctl", "[[ $1 != is-active ]] || echo activating")
    done = machine.run(script_with(launched[name], f"PART='{part}'"))
    assert done.code != 0
    assert f"trainyard: {part} failed with exit code {done.code}; this instance accepts no jobs" in done.errors
    # The agent is told first, and neither is waited for: both wait for the end of user data.
    assert done.called("systemctl")[0] == "systemctl mask --now --no-block ecs.service"
    assert done.called("sleep", "systemctl poweroff")[-32:] == [
        *["sleep 2"] * 30,
        *("sleep 10", "systemctl poweroff --no-block"),
    ]
