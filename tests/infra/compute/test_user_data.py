"""The boot scripts of instances: their format for Batch, and real runs with stand-ins for the commands."""

import base64
import email
import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from infra.storage.stack import CONTAINER_PATH
from jobs.core.instance_types import STOP_TIMEOUT_SECONDS
from jobs.spec.launcher_options import BAD_NODE_FILE
from tests.support.infra.instances import CPU, CUDA, GAUDI, boot_parts, launch_data, script_with, user_data
from tests.support.infra.machine import Machine, Result, shellcheck
from tests.support.infra.synthesis import Templates, flatten, resources

Launched = dict[str, dict[str, Any]]

MAX_USER_DATA_BYTES = 16_384
"""EC2's limit before base64. Ours must meet it after base64, because Batch adds its own part."""
CONTROL = "opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl"


def test_user_data_is_mime_multipart_and_passes_shellcheck(launched: Launched) -> None:
    # Batch refuses a bare script, and skips a part whose boundary is followed by a blank line.
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


def test_each_instance_type_runs_its_scripts(launched: Launched) -> None:
    for name, data in launched.items():
        scripts = [script for _, script in boot_parts(data)]
        # A job fills an accelerated instance, so shutting the instance down ends no other job.
        assert any("bad-node" in script for script in scripts) is not name.startswith("cpu-")
        assert any("hugepages" in script for script in scripts) is name.startswith("dl1-")
        # Boot logs are sent before any script that may shut down the instance.
        (logs,) = (index for index, script in enumerate(scripts) if "fetch-config" in script)
        assert all(index > logs for index, script in enumerate(scripts) if "this instance accepts no jobs" in script)


@pytest.mark.parametrize(("name", "team"), [(GAUDI, None), ("cpu-m6i-4xlarge-of-product-spot", "product")])
def test_the_ecs_agent_gives_jobs_the_time_of_a_spot_notice(
    launched: Launched, machine: Machine, name: str, team: str | None
) -> None:
    assert machine.run(script_with(launched[name], "ecs.config")).code == 0
    values = dict(line.split("=", 1) for line in machine.text("etc/ecs/ecs.config").splitlines())
    # The agent's defaults are 30 s between SIGTERM and SIGKILL, and no draining at a Spot notice.
    assert 30 < int(values["ECS_CONTAINER_STOP_TIMEOUT"].removesuffix("s")) < 120
    assert "awslogs" in values["ECS_AVAILABLE_LOGGING_DRIVERS"]
    # Defaults of Amazon Linux that Ubuntu lacks, and a setting that hides the instance's role from containers.
    switches = ("TASK_IAM_ROLE", "TASK_IAM_ROLE_NETWORK_HOST", "TASK_ENI", "AWSLOGS_EXECUTIONROLE_OVERRIDE")
    for switch in (*(f"ENABLE_{name}" for name in (*switches, "SPOT_INSTANCE_DRAINING")), "AWSVPC_BLOCK_IMDS"):
        assert values[f"ECS_{switch}"] == "true", switch
    # The tag limits an instance's role to the instances of its team.
    tags = json.dumps({"trainyard:team": team}, separators=(",", ":")) if team else None
    assert values.get("ECS_CONTAINER_INSTANCE_TAGS") == tags


def test_instances_and_jobs_use_the_proxy(variants: Templates, machine: Machine) -> None:
    name = "dl1-24xlarge-1-21-0-of-research-spot"
    data = launch_data(variants["closed/compute"], name)
    # GIVEN the first script, which runs at every boot before Docker starts
    kind, script = boot_parts(data)[0]
    assert (kind, shellcheck(script)) == ("text/cloud-boothook", (0, ""))
    (machine.root / "etc/dnf").mkdir()
    (machine.root / "etc/dnf/dnf.conf").write_text("[main]\n")
    # WHEN the instance boots twice
    for _ in range(2):
        done = machine.run(script)
    assert machine.run(script_with(data, "ECS_ENABLE_TASK_ENI")).code == 0
    # THEN services, the ECS agent and dnf use the proxy, except for addresses inside the VPC
    url, direct = "http://proxy.example.com:3128", "localhost,127.0.0.1,169.254.169.254,169.254.170.2,172.20.0.0/16"
    [call] = done.called("systemctl")
    variables = dict(item.split("=", 1) for item in call.removeprefix("systemctl set-environment ").split())
    direct = f"{direct},.<AWS::Region>.<AWS::URLSuffix>,.example.com"
    expected = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "NO_PROXY": direct}
    assert variables == {**expected, **{name.lower(): value for name, value in expected.items()}}
    assert machine.text("etc/dnf/dnf.conf") == f"[main]\nproxy={url}\n"
    lines = machine.text("etc/ecs/ecs.config").splitlines()
    agent = dict(line.split("=", 1) for line in lines)
    assert {name: agent[name] for name in expected} == {**expected, "NO_PROXY": f"{direct},/var/run/docker.sock"}
    assert len(lines) == len(agent)
    # AND so do containers
    for definition in resources(variants["closed/jobs"], "AWS::Batch::JobDefinition").values():
        (container,) = definition["EcsProperties"]["TaskProperties"][0]["Containers"]
        found = {item["Name"]: flatten(item["Value"]) for item in container["Environment"]}
        assert found == variables


def test_boot_logs_are_sent_to_cloudwatch(launched: Launched, machine: Machine) -> None:
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


def test_a_bad_node_shuts_down_after_the_job_is_reported(machine: Machine, launched: Launched) -> None:
    # GIVEN an instance without a bad-node file at the first check
    machine.run(script_with(launched[GAUDI], "bad-node"))
    program = machine.text("usr/local/sbin/trainyard-bad-node")
    assert shellcheck(program) == (0, "")
    volume = machine.root / "var/lib/docker/volumes/0a1b/_data"
    machine.answers("sleep", f"mkdir -p {volume}; echo 'node 1 (i-0abc): GPU 3' >{volume}/{BAD_NODE_FILE}")
    # WHEN a job writes it
    done = machine.bash(program)
    # THEN the agent has time to report the job to Batch, and accepts no other job
    assert done.code == 0
    assert "a job found this node bad: node 1 (i-0abc): GPU 3" in done.output
    assert done.calls == [
        *("sleep 5", "sleep 10"),
        *("systemctl mask --now --no-block ecs.service", "systemctl poweroff --no-block"),
    ]


def test_gaudi_instances_reserve_huge_pages(launched: Launched, machine: Machine) -> None:
    machine.answers("sysctl", "[[ $1 != --values ]] || echo 15000")
    done = machine.run(script_with(launched[GAUDI], "hugepages"))
    assert done.code == 0
    assert machine.text("etc/sysctl.d/60-hugepages.conf") == "vm.nr_hugepages=15000\n"
    assert done.calls[0] == "sysctl --quiet --load=/etc/sysctl.d/60-hugepages.conf"
    assert not done.called("systemctl")


def test_the_shared_file_system_is_mounted_read_only(launched: Launched, machine: Machine) -> None:
    # The second attempt succeeds, as if the file servers' host name did not resolve at first.
    machine.answers("mount", f"[[ -e {machine.root}/tried ]] || {{ touch {machine.root}/tried; exit 32; }}")
    machine.answers("mountpoint", f"[[ $(grep -c ^mount\\  {machine.root}/calls) -ge 2 ]]")
    done = machine.run(script_with(launched[CUDA], "lustre"))
    assert (done.code, done.errors) == (0, "")
    first, _ = done.called("mount ")
    kind, _, options, source, mount_point = first.removeprefix("mount -t ").split(" ")
    assert (kind, mount_point, "ro" in options.split(",")) == ("lustre", CONTAINER_PATH, True)
    # The deployment reads both names from the storage stack's SSM parameters.
    dns_name, mount_name = source.split("@tcp:/")
    assert ("fsxdnsname" in dns_name, "fsxmountname" in mount_name) == (True, True)


@pytest.mark.parametrize(
    ("name", "part", "command", "answer"),
    [
        # Docker creates an empty folder for a missing volume path, so every job on the instance would fail.
        (CUDA, "lustre", "mount", "exit 32"),
        (GAUDI, "huge_pages", "sysctl", "[[ $1 != --values ]] || echo 9000"),
        (CPU, "ecs.config", "cat", "exit 1"),
    ],
)
def test_an_instance_with_a_failed_required_script_shuts_down(
    launched: Launched, machine: Machine, *, name: str, part: str, command: str, answer: str
) -> None:
    machine.answers(command, answer)
    # It waits for the boot log for at most a minute.
    machine.answers("systemctl", "[[ $1 != is-active ]] || echo activating")
    done = machine.run(script_with(launched[name], f"PART='{part}'"))
    assert done.code != 0
    assert f"trainyard: {part} failed with exit code {done.code}; this instance accepts no jobs" in done.errors
    # The agent is stopped first, without waiting, because both commands complete only after user data.
    assert done.called("systemctl")[0] == "systemctl mask --now --no-block ecs.service"
    assert done.called("sleep", "systemctl poweroff")[-32:] == [
        *["sleep 2"] * 30,
        *("sleep 10", "systemctl poweroff --no-block"),
    ]


@pytest.fixture
def script(launched: dict[str, dict[str, Any]]) -> str:
    # A boothook runs before Docker starts; shell scripts run later, before the agent.
    assert [kind for kind, text in boot_parts(launched[CUDA]) if "/scratch" in text] == ["text/cloud-boothook"]
    assert not any("/scratch" in text for _, text in boot_parts(launched[GAUDI])), "its AMI sets up the disks"
    return script_with(launched[CUDA], "/scratch")


def add_disks(machine: Machine, number: int) -> None:
    by_id = machine.root / "dev/disk/by-id"
    for index in range(1, number + 1):
        device = machine.root / f"dev/nvme{index}n1"
        device.touch()
        # As on EC2: two links per disk, and one of the root volume.
        for link in ("", "_1"):
            (by_id / f"nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{index}{link}").symlink_to(device)
    (by_id / "nvme-Amazon_Elastic_Block_Store_vol0").touch()


def test_the_disks_are_combined_for_dockers_data(script: str, machine: Machine) -> None:
    add_disks(machine, 8)
    (machine.root / "var/lib/docker/agent").write_text("image")
    done = machine.run(script)
    assert (done.code, done.errors) == (0, "")
    disks = " ".join(f"/dev/nvme{index}n1" for index in range(1, 9))
    assert f"mdadm --create /dev/md/scratch --run --force --level=0 --raid-devices=8 {disks}" in done.calls
    assert done.called("mkfs", "mount ") == [
        "mkfs.xfs -f -L scratch /dev/md/scratch",
        "mount -o noatime /dev/md/scratch /scratch",
        "mount --bind /scratch/docker /var/lib/docker",
        "mount --bind /scratch/containerd /var/lib/containerd",
    ]
    # Existing data of the AMI is copied.
    assert machine.text("scratch/docker/agent") == "image"


def test_a_reboot_keeps_the_data_on_the_disks(script: str, machine: Machine) -> None:
    add_disks(machine, 2)
    (machine.root / "scratch/docker").mkdir(parents=True)
    (machine.root / "scratch/docker/layer").write_text("pulled")
    machine.answers("blkid", "echo /dev/md127")
    done = machine.run(script)
    assert done.code == 0
    assert not done.called("mdadm", "mkfs")
    assert "mount -o noatime /dev/md127 /scratch" in done.calls
    assert machine.text("scratch/docker/layer") == "pulled"


def test_without_working_disks_the_root_volume_is_used(script: str, machine: Machine) -> None:
    assert machine.run(script).calls == ["udevadm settle"]
    add_disks(machine, 2)
    machine.answers("mkfs.xfs", "exit 5")
    done = machine.run(script)
    assert done.code != 0
    assert "scratch is not on the NVMe disks" in done.errors
    assert not done.called("systemctl", "mount ")


TIME = "2026-11-21T08:22:00Z"
RUNNING = ("e1 ~internal~ecs~pause", "c1 main", "c2 main")
"""Task containers, as Docker lists them in the requested format."""
DOCKER = f"""[[ $1 == ps ]] || exit 0
[[ $* == *"--filter label=com.amazonaws.ecs.task-arn"* ]] || echo "a1"  # the agent has no such label
printf '%s\\n' {" ".join(f"'{line}'" for line in RUNNING)}"""

PROGRAM = "usr/local/sbin/trainyard-spot-notice"


@pytest.fixture
def spot(machine: Machine, launched: dict[str, dict[str, Any]]) -> Machine:
    """An instance that runs two jobs and the ECS agent, and gets its Spot notice at the third request."""
    for _ in range(2):  # Installing twice, as on an instance from an image of an instance, makes no difference.
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


def run_until_notice(machine: Machine) -> Result:
    return machine.bash(machine.text(PROGRAM))


def test_systemd_runs_the_spot_notice_script_at_every_boot(spot: Machine) -> None:
    unit = spot.text("etc/systemd/system/trainyard-spot-notice.service")
    for line in (f"ExecStart={spot.root / PROGRAM}\n", "WantedBy=multi-user.target\n", "Restart=on-failure\n"):
        assert line in unit
    assert (spot.root / PROGRAM).stat().st_mode & 0o777 == 0o755
    assert shellcheck(spot.text(PROGRAM)) == (0, "")


def test_a_spot_notice_stops_only_jobs_once_and_in_time(spot: Machine) -> None:
    # The agent's draining only stops tasks of services, not Batch jobs.
    done = run_until_notice(spot)
    assert (done.code, done.errors) == (0, "")
    assert len([call for call in done.calls if "spot/instance-action" in call]) == 3
    assert done.called("sleep") == ["sleep 5"] * 2
    # The agent and pause containers keep running, and the stop ends within two minutes even after a late poll.
    assert done.called("docker stop") == [f"docker stop -t {STOP_TIMEOUT_SECONDS} c1 c2"]
    assert STOP_TIMEOUT_SECONDS + 5 + 2 * 3 < 120
    # Each request has a new token, which does not appear in the process list.
    assert spot.text("headers").splitlines() == [f"X-aws-ec2-metadata-token: token-{number}" for number in (1, 2, 3)]
    assert not any("token-1" in call for call in done.calls)
    # An idle instance has nothing to stop.
    spot.answers("docker", "exit 0")
    assert not run_until_notice(spot).called("docker stop")


@pytest.mark.parametrize(("left", "least", "most"), [(117, 107, 115), (600, 118, 118), (60, 100, 100)])
def test_jobs_have_until_shortly_before_the_time_in_the_notice(
    spot: Machine, *, left: int, least: int, most: int
) -> None:
    notice_at(spot, f"{datetime.now(timezone.utc) + timedelta(seconds=left):%Y-%m-%dT%H:%M:%SZ}")
    [stop] = run_until_notice(spot).called("docker stop")
    assert least <= int(stop.split()[3]) <= most, stop


def test_a_failed_docker_call_is_retried_but_jobs_stop_only_once(spot: Machine) -> None:
    spot.answers("docker", "exit 1")
    # systemd restarts a failed service, but not one that succeeded.
    assert run_until_notice(spot).code != 0
    # If one of the jobs just ended by itself, a second SIGTERM would disturb the other's shutdown.
    spot.answers("docker", f"[[ $1 != stop ]] || exit 1\n{DOCKER}")
    done = run_until_notice(spot)
    assert done.code == 0
    assert "could not stop all jobs" in done.output
