"""The scripts that instances run when they boot: as Batch wants them, and run for real on stand-ins of the commands."""

import email
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.constructs.shared_file_system import CONTAINER_PATH
from infra.settings import Pool
from tests.infra.instances import CPU, GAUDI, boot_parts, environments, launch_data, user_data
from tests.infra.synthesis import Templates

Synthesised = Callable[..., Templates]
MAX_USER_DATA_BYTES = 16_384
"""EC2's limit, before base64."""

DISKS = "/dev/disk/by-id"
COMMANDS = ("udevadm", "mdadm", "mkfs.xfs", "mount", "mountpoint", "blkid", "dnf", "sysctl", "sleep")
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
        commands = self.root / "commands"
        commands.mkdir(exist_ok=True)
        for name in COMMANDS:
            command = commands / name
            command.write_text(
                f'#!/bin/bash\necho "{name} $*" >>"{self.root}/calls"\n{self.answers.get(name, "exit 0")}\n'
            )
            command.chmod(0o755)
        for folder in ("dev/disk/by-id", "etc/ecs", "etc/sysctl.d", "var/lib/docker", "var/lib/containerd"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        for path in ("/dev/", "/scratch", "/var/lib/", "/etc/", "/fsx"):
            script = script.replace(path, f"{self.root}{path}")
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


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """On which nothing is mounted and no file system labelled."""
    return Machine(tmp_path, {"mountpoint": "exit 1", "blkid": "exit 2"})


def script_with(data: dict[str, Any], text: str) -> str:
    (script,) = (script for _, script in boot_parts(data) if text in script)
    return script


def test_user_data_is_mime_multipart(launch_templates: dict[str, dict[str, Any]], everything: dict[str, Any]) -> None:
    # Trap: Batch refuses a bare script, and skips a part whose boundary is followed by a blank line.
    for data in (*launch_templates.values(), everything):
        text = user_data(data)
        message = email.message_from_string(text)
        assert message.get_content_type() == "multipart/mixed"
        boundary = f"--{message.get_boundary()}\n"
        assert boundary in text
        assert boundary + "\n" not in text
        assert len(text) < MAX_USER_DATA_BYTES


def test_every_script_is_bash_that_parses(
    launch_templates: dict[str, dict[str, Any]], everything: dict[str, Any]
) -> None:
    for data in (*launch_templates.values(), everything):
        for _, script in boot_parts(data):
            assert script.startswith("#!/bin/bash\n")
            checked = subprocess.run(["/bin/bash", "-n"], input=script, capture_output=True, text=True, check=False)
            assert (checked.returncode, checked.stderr) == (0, "")


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


def test_gaudi_instances_set_huge_pages_aside_and_others_do_not(
    launch_templates: dict[str, dict[str, Any]], machine: Machine
) -> None:
    assert machine.run(script_with(launch_templates[f"{GAUDI}-multinode"], "hugepages")).returncode == 0
    assert (machine.root / "etc/sysctl.d/60-hugepages.conf").read_text() == "vm.nr_hugepages=15000\n"
    assert machine.calls == ["sysctl --quiet --load=/etc/sysctl.d/60-hugepages.conf"]
    assert not any("hugepages" in script for _, script in boot_parts(launch_templates[f"{CPU}-spot"]))


def test_disks_are_made_ready_before_docker_starts_by_the_ami_or_here_and_never_by_both(
    launch_templates: dict[str, dict[str, Any]], everything: dict[str, Any]
) -> None:
    # Trap: shell scripts run when Docker has started already, and the agent waits for them; a boothook runs before.
    assert [kind for kind, script in boot_parts(everything) if "/scratch" in script] == ["text/cloud-boothook"]
    for data in launch_templates.values():
        assert not any("/scratch" in script for _, script in boot_parts(data))
    # Trap: from user data, starting the agent waits for the end of user data.
    for data in (*launch_templates.values(), everything):
        assert not any("systemctl" in script for _, script in boot_parts(data))


def test_types_without_disks_have_no_script_for_them(synthesised: Synthesised) -> None:
    compute = synthesised(instance_type="p3.8xlarge", machine_image="ami-0123456789abcdef0")["compute"]
    data = launch_data(compute, f"{Pool(instance_type='p3.8xlarge').id}-spot")
    assert [kind for kind, _ in boot_parts(data)] == ["text/x-shellscript"]


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


def test_a_file_system_that_does_not_answer_is_told_of_in_the_log(everything: dict[str, Any], machine: Machine) -> None:
    machine.answers["mount"] = "exit 32"
    done = machine.run(script_with(everything, "lustre"))
    assert done.returncode == 1
    assert "could not be mounted" in done.stderr
    assert len([call for call in machine.calls if call.startswith("mount ")]) == 5


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
