"""What makes an instance's own NVMe disks ready before Docker starts, where the AMI does not."""

from typing import Any

from tests.support.infra.boot_machine import Machine, script_with
from tests.support.infra.instances import boot_parts

DISKS = "/dev/disk/by-id"


def test_disks_are_made_ready_before_docker_starts_by_the_ami_or_here_and_never_by_both(
    launch_templates: dict[str, dict[str, Any]], everything: dict[str, Any]
) -> None:
    # Trap: shell scripts run when Docker has started already, and the agent waits for them; a boothook runs before.
    assert [kind for kind, script in boot_parts(everything) if "/scratch" in script] == ["text/cloud-boothook"]
    for data in launch_templates.values():
        assert not any("/scratch" in script for _, script in boot_parts(data))


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
