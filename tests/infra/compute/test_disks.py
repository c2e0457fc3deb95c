"""What makes an instance's own NVMe disks ready before Docker starts, if the AMI does not."""

from typing import Any

import pytest

from tests.support.infra.instances import CUDA, GAUDI, boot_parts, script_with
from tests.support.infra.machine import Machine


@pytest.fixture
def script(launched: dict[str, dict[str, Any]]) -> str:
    # Trap: shell scripts run when Docker has started already, and the agent waits for them; a boothook runs before.
    assert [kind for kind, text in boot_parts(launched[CUDA]) if "/scratch" in text] == ["text/cloud-boothook"]
    assert not any("/scratch" in text for _, text in boot_parts(launched[GAUDI])), "its AMI does it"
    return script_with(launched[CUDA], "/scratch")


def add_disks(machine: Machine, number: int) -> None:
    by_id = machine.root / "dev/disk/by-id"
    for index in range(1, number + 1):
        device = machine.root / f"dev/nvme{index}n1"
        device.touch()
        # As on EC2: two links to each disk, and the root volume's beside them.
        for link in ("", "_1"):
            (by_id / f"nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{index}{link}").symlink_to(device)
    (by_id / "nvme-Amazon_Elastic_Block_Store_vol0").touch()


def test_the_disks_become_one_and_docker_moves_there(script: str, machine: Machine) -> None:
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
    # What the AMI brought along goes with it.
    assert machine.text("scratch/docker/agent") == "image"


def test_a_reboot_keeps_what_is_on_the_disks(script: str, machine: Machine) -> None:
    add_disks(machine, 2)
    (machine.root / "scratch/docker").mkdir(parents=True)
    (machine.root / "scratch/docker/layer").write_text("pulled")
    machine.answers("blkid", "echo /dev/md127")
    done = machine.run(script)
    assert done.code == 0
    assert not done.called("mdadm", "mkfs")
    assert "mount -o noatime /dev/md127 /scratch" in done.calls
    assert machine.text("scratch/docker/layer") == "pulled"


def test_without_disks_that_work_the_instance_runs_on_its_root_volume(script: str, machine: Machine) -> None:
    assert machine.run(script).calls == ["udevadm settle"]
    add_disks(machine, 2)
    machine.answers("mkfs.xfs", "exit 5")
    done = machine.run(script)
    assert done.code != 0
    assert "on the instance store, line" in done.errors
    assert not done.called("systemctl", "mount ")
