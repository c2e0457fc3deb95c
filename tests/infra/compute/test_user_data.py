"""The scripts that instances run when they boot: as Batch wants them, and run for real on stand-ins of the commands."""

import base64
import email
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.storage.shared_file_system import CONTAINER_PATH
from jobs.contract.health import BAD_NODE_FILE
from jobs.contract.instance_types import STOP_TIMEOUT_SECONDS
from tests.support.infra.instances import CPU, GAUDI, boot_parts, environments, launch_data, user_data
from tests.support.infra.synthesis import Templates

Synthesised = Callable[..., Templates]
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
MAX_USER_DATA_BYTES = 16_384
"""EC2's limit before base64. Ours keeps to it after: Batch adds a part of its own."""

DISKS = "/dev/disk/by-id"
COMMANDS = (
    *("udevadm", "mdadm", "mkfs.xfs", "mount", "mountpoint", "blkid", "dnf", "sysctl", "sleep"),
    *("curl", "docker", "systemctl"),
)
"""What the scripts run and must not do to this machine."""


@pytest.fixture(scope="module")
def launch_templates(templates: Templates) -> dict[str, dict[str, Any]]:
    compute = templates["prod/compute"]
    return {name: launch_data(compute, name) for name in environments(compute)}


@pytest.fixture
def everything(synthesised: Synthesised) -> dict[str, Any]:
    """Launch template data of an instance on which every script runs."""
    compute = synthesised(instance_type="p4d.24xlarge", machine_image=None, fsx_gib=1_200)["compute"]
    return launch_data(compute, "p4d-24xlarge-1-21-0-spot")


@dataclass
class Machine:
    """A folder in place of an instance's root, and commands that note how they were called."""

    root: Path
    answers: dict[str, str]
    """Command to what it does besides, in bash."""

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script of user data, with the folder in place of the root."""
        for path in ("/dev/", "/scratch", "/var/lib/", "/etc/", "/fsx", "/usr/local/", "/opt/"):
            script = script.replace(path, f"{self.root}{path}")
        return self.bash(script)

    def bash(self, script: str) -> subprocess.CompletedProcess[str]:
        commands = self.root / "commands"
        commands.mkdir(exist_ok=True)
        for name in COMMANDS:
            command = commands / name
            command.write_text(
                f'#!/bin/bash\necho "{name} $*" >>"{self.root}/calls"\n{self.answers.get(name, "exit 0")}\n'
            )
            command.chmod(0o755)
        for folder in (
            *("dev/disk/by-id", "etc/ecs", "etc/sysctl.d", "etc/systemd/system", "usr/local/sbin"),
            *("var/lib/docker", "var/lib/containerd"),
        ):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        environment: Mapping[str, str] = {"PATH": f"{commands}:{os.environ['PATH']}"}
        return subprocess.run(["/bin/bash", "-c", script], env=environment, capture_output=True, text=True, check=False)

    def add_disks(self, number: int) -> None:
        by_id = self.root / "dev" / "disk" / "by-id"
        by_id.mkdir(parents=True)
        for index in range(1, number + 1):
            device = self.root / "dev" / f"nvme{index}n1"
            device.touch()
            # As on EC2: two links to each disk, and the root volume's beside them.
            (by_id / f"nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{index}").symlink_to(device)
            (by_id / f"nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{index}_1").symlink_to(device)
        (by_id / "nvme-Amazon_Elastic_Block_Store_vol0").touch()

    @property
    def calls(self) -> list[str]:
        path = self.root / "calls"
        return [line.replace(str(self.root), "") for line in path.read_text().splitlines()] if path.exists() else []

    def called(self, beginning: str) -> list[str]:
        return [call for call in self.calls if call.startswith(beginning)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine on which nothing is mounted and no file system labelled."""
    return Machine(tmp_path, {"mountpoint": "exit 1", "blkid": "exit 2"})


def script_with(data: dict[str, Any], text: str) -> str:
    (script,) = (script for _, script in boot_parts(data) if text in script)
    return script


def shellcheck(script: str) -> tuple[int, str]:
    """Return shellcheck's exit code and what it found."""
    done = subprocess.run([SHELLCHECK, "-"], input=script, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


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


def test_what_batch_and_the_ami_wrote_for_the_agent_stays(
    launch_templates: dict[str, dict[str, Any]], machine: Machine
) -> None:
    configuration = machine.root / "etc" / "ecs" / "ecs.config"
    configuration.parent.mkdir(parents=True)
    configuration.write_text("ECS_CLUSTER=batch\n")
    machine.run(script_with(launch_templates[f"{CPU}-spot"], "ecs.config"))
    assert configuration.read_text().startswith("ECS_CLUSTER=batch\nECS_")


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


def test_an_ami_that_brings_the_cloudwatch_agent_installs_nothing(
    launch_templates: dict[str, dict[str, Any]], machine: Machine
) -> None:
    sending(machine, launch_templates[f"{GAUDI}-spot"])
    (machine.root / "calls").unlink()
    sending(machine, launch_templates[f"{GAUDI}-spot"])
    assert not machine.called("dnf")
    assert machine.called("ctl")


def test_an_instance_whose_logs_cannot_be_sent_runs_jobs_all_the_same(
    launch_templates: dict[str, dict[str, Any]], machine: Machine
) -> None:
    sending(machine, launch_templates[f"{CPU}-spot"])
    (machine.root / CONTROL).unlink()
    (machine.root / "calls").unlink()
    machine.answers["dnf"] = "exit 1"
    done = machine.bash((machine.root / "usr/local/sbin/trainyard-instance-logs").read_text())
    assert done.returncode == 1, "systemd tries it again"
    assert not machine.called("systemctl")


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


def test_disks_are_made_ready_before_docker_starts_by_the_ami_or_here_and_never_by_both(
    launch_templates: dict[str, dict[str, Any]], everything: dict[str, Any]
) -> None:
    # Trap: shell scripts run when Docker has started already, and the agent waits for them; a boothook runs before.
    assert [kind for kind, script in boot_parts(everything) if "/scratch" in script] == ["text/cloud-boothook"]
    for data in launch_templates.values():
        assert not any("/scratch" in script for _, script in boot_parts(data))


def test_no_script_waits_for_what_waits_for_it(
    launch_templates: dict[str, dict[str, Any]], everything: dict[str, Any]
) -> None:
    # Trap: from user data, starting the agent waits for the end of user data.
    for data in (*launch_templates.values(), everything):
        scripts = "\n".join(script for _, script in boot_parts(data))
        started = re.findall(r"systemctl (?:start|restart|enable --now|reload) .*", scripts)
        services = [line.removeprefix("systemctl start --no-block trainyard-") for line in started]
        assert services[:2] == ["instance-logs.service", "spot-notice.service"]
        assert services[2:] in ([], ["bad-node.service"])


def test_types_without_disks_have_no_script_for_them(launch_templates: dict[str, Any]) -> None:
    of_cpus = [data for name, data in launch_templates.items() if name.startswith("cpu-")]
    assert of_cpus
    assert [script for data in of_cpus for _, script in boot_parts(data) if "/scratch" in script] == []


def test_the_disks_become_one_and_docker_moves_there(everything: dict[str, Any], machine: Machine) -> None:
    machine.add_disks(8)
    (machine.root / "var/lib/docker").mkdir(parents=True)
    (machine.root / "var/lib/docker/agent").write_text("image")
    done = machine.run(script_with(everything, "/scratch"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "/scratch is 8 NVMe disks" in done.stdout
    disks = " ".join(f"/dev/nvme{index}n1" for index in range(1, 9))
    assert f"mdadm --create /dev/md/scratch --run --force --level=0 --raid-devices=8 {disks}" in machine.calls
    assert [call for call in machine.calls if call.startswith(("mkfs", "mount "))] == [
        "mkfs.xfs -f -L scratch /dev/md/scratch",
        "mount -o noatime /dev/md/scratch /scratch",
        "mount --bind /scratch/docker /var/lib/docker",
        "mount --bind /scratch/containerd /var/lib/containerd",
    ]
    # What the AMI brought along goes with it.
    assert (machine.root / "scratch/docker/agent").read_text() == "image"


def test_a_single_disk_needs_no_array(everything: dict[str, Any], machine: Machine) -> None:
    machine.add_disks(1)
    assert machine.run(script_with(everything, "/scratch")).returncode == 0
    assert "mkfs.xfs -f -L scratch /dev/nvme1n1" in machine.calls
    assert not any(call.startswith(("mdadm", "dnf")) for call in machine.calls)


def test_a_reboot_keeps_what_is_on_the_disks(everything: dict[str, Any], machine: Machine) -> None:
    machine.add_disks(2)
    (machine.root / "scratch/docker").mkdir(parents=True)
    (machine.root / "scratch/docker/layer").write_text("pulled")
    machine.answers["blkid"] = "echo /dev/md127"
    assert machine.run(script_with(everything, "/scratch")).returncode == 0
    assert not any(call.startswith(("mdadm", "mkfs")) for call in machine.calls)
    assert "mount -o noatime /dev/md127 /scratch" in machine.calls
    assert (machine.root / "scratch/docker/layer").read_text() == "pulled"


def test_without_disks_the_instance_runs_on_its_root_volume(everything: dict[str, Any], machine: Machine) -> None:
    done = machine.run(script_with(everything, "/scratch"))
    assert done.returncode == 0
    assert machine.calls == ["udevadm settle"]


def test_disks_that_fail_are_told_of_in_the_log(everything: dict[str, Any], machine: Machine) -> None:
    machine.add_disks(2)
    machine.answers["mkfs.xfs"] = "exit 5"
    done = machine.run(script_with(everything, "/scratch"))
    assert done.returncode != 0
    assert "on the instance store, line" in done.stderr
    assert not machine.called("systemctl"), "jobs have the root volume, as on an AMI that the stage builds"
    assert not any(call.startswith("mount ") for call in machine.calls)


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


def test_an_instance_without_a_lustre_client_takes_no_jobs(everything: dict[str, Any], machine: Machine) -> None:
    machine.answers["dnf"] = "exit 1"
    assert_it_shuts_down(machine.run(script_with(everything, "lustre")), machine, "lustre")
    assert not machine.called("mount ")


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


def test_only_accelerated_jobs_see_the_shared_file_system(synthesised: Synthesised) -> None:
    made = synthesised(fsx_gib=1_200, max_on_demand_nodes=1, max_multinode_nodes=2)
    mounting = {
        name
        for name in environments(made["compute"])
        if any("lustre" in script for _, script in boot_parts(launch_data(made["compute"], name)))
    }
    assert mounting == {f"{GAUDI}-spot", f"{GAUDI}-on-demand", f"{GAUDI}-multinode"}
    read = {item["Default"] for item in made["compute"]["Parameters"].values()}
    assert {"/trainyard/test/fsx/dns-name", "/trainyard/test/fsx/mount-name"} <= read
