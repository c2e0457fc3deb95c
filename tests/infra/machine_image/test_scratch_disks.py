"""The script of the AMI that makes /scratch of an instance's NVMe disks as it boots, run among stand-in commands."""

from collections.abc import Callable

import pytest

from tests.support.infra.ami_machine import Machine, Result
from tests.support.infra.shellcheck import shellcheck

EBS = "/dev/nvme0n1 Amazon Elastic Block Store"
DISKS = [f"/dev/nvme{number}n1 Amazon EC2 NVMe Instance Storage" for number in (1, 2, 3, 4)]
NAMES = [disk.split()[0] for disk in DISKS]

Boot = Callable[..., Result]


@pytest.fixture
def boot(machine: Machine) -> Boot:
    """Install the script and run it as its unit does, on a machine with the given disks."""
    installed = machine.run("scratch/build/Script")
    assert installed.code == 0, installed.errors

    def run(*disks: str, job_image: bool, labelled: str = "", mounted: bool = False) -> Result:
        machine.answers("lsblk", "".join(f"echo '{line}'\n" for line in disks))
        machine.answers("blkid", f"[ -n '{labelled}' ] && echo '{labelled}'")
        machine.answers("mountpoint", "exit 0" if mounted else "exit 1")
        machine.answers("mdadm", '[ "$1" != --assemble ]')  # it fails where there is no array yet
        if job_image:
            (machine.root / "etc/trainyard").mkdir()
            (machine.root / "etc/trainyard/job-image").write_text("registry/gaudi:1.21.0\n")
        return machine.bash(machine.text("usr/local/sbin/trainyard-scratch"))

    return run


def test_docker_waits_for_the_disks_but_does_not_depend_on_them(machine: Machine) -> None:
    result = machine.run("scratch/build/Script")
    unit = machine.text("etc/systemd/system/trainyard-scratch.service")
    assert "Before=docker.service\n" in unit
    assert "WantedBy=docker.service\n" in unit
    assert "Require" not in unit
    assert "systemctl enable trainyard-scratch.service" in result.calls
    script = machine.root / "usr/local/sbin/trainyard-scratch"
    assert f"ExecStart={script}\n" in unit
    assert script.stat().st_mode & 0o777 == 0o755
    assert shellcheck(script.read_text()) == (0, "")


def test_all_nvme_disks_and_no_volume_become_one_array(boot: Boot, machine: Machine) -> None:
    result = boot(EBS, *DISKS, job_image=False)
    assert result.code == 0, result.errors
    (created,) = result.called("mdadm --create")
    assert created.split()[2] == "/dev/md/scratch"
    assert "--level=0 --raid-devices=4 " + " ".join(NAMES) in created
    assert result.called("mkfs.xfs") == ["mkfs.xfs -f -L scratch /dev/md/scratch"]
    assert result.called("mount ")[0] == "mount -o noatime /dev/md/scratch /scratch"
    assert not [call for call in result.calls if "/dev/nvme0n1" in call]
    assert (machine.root / "scratch").stat().st_mode & 0o7777 == 0o1777


def test_a_job_image_that_was_pulled_in_stays_visible(boot: Boot) -> None:
    result = boot(EBS, *DISKS, job_image=True)
    assert result.code == 0, result.errors
    assert result.called("mount --bind") == [
        "mount --bind /scratch/docker/volumes /var/lib/docker/volumes",
        "mount --bind /scratch/docker/tmp /var/lib/docker/tmp",
    ]


def test_after_a_reboot_what_is_there_is_mounted_and_not_made_anew(boot: Boot) -> None:
    result = boot(EBS, *DISKS, job_image=True, labelled="/dev/md127")
    assert result.code == 0, result.errors
    assert not result.called("mdadm --create")
    assert not result.called("mkfs.xfs")
    assert result.called("mount ")[0] == "mount -o noatime /dev/md127 /scratch"


def test_an_instance_without_disks_has_scratch_on_its_root_volume(boot: Boot, machine: Machine) -> None:
    result = boot(EBS, job_image=True)
    assert result.code == 0
    assert "has no NVMe disks of its own" in result.output
    assert not result.called("mount ")
    assert (machine.root / "scratch").stat().st_mode & 0o7777 == 0o1777
