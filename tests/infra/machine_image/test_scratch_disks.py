"""The script of the AMI that makes /scratch of an instance's NVMe disks as it boots, run among stand-in commands."""

import pytest

from tests.infra.machine_image.conftest import run
from tests.support.infra.machine import Machine, Result
from tests.support.infra.shellcheck import shellcheck

EBS = "/dev/nvme0n1 Amazon Elastic Block Store"
DISKS = [f"/dev/nvme{number}n1 Amazon EC2 NVMe Instance Storage" for number in (1, 2, 3, 4)]
SCRIPT = "usr/local/sbin/trainyard-scratch"


def boot(machine: Machine, *disks: str, job_image: bool = True, labelled: str = "") -> Result:
    """Install the script and run it as its unit does, on a machine with the given disks."""
    assert run(machine, "scratch/build/Script").code == 0
    machine.answers("lsblk", "".join(f"echo '{line}'\n" for line in disks))
    machine.answers("blkid", f"[ -n '{labelled}' ] && echo '{labelled}'")
    machine.answers("mountpoint", "exit 1")
    machine.answers("mdadm", '[ "$1" != --assemble ]')  # it fails where there is no array yet
    if job_image:
        (machine.root / "etc/trainyard").mkdir()
        (machine.root / "etc/trainyard/job-image").write_text("registry/gaudi:1.21.0\n")
    return machine.bash(machine.text(SCRIPT))


def test_docker_waits_for_the_disks_but_does_not_depend_on_them(machine: Machine) -> None:
    result = run(machine, "scratch/build/Script")
    unit = machine.text("etc/systemd/system/trainyard-scratch.service")
    for line in ("Before=docker.service\n", "WantedBy=docker.service\n", f"ExecStart={machine.root / SCRIPT}\n"):
        assert line in unit
    assert "Require" not in unit
    assert "systemctl enable trainyard-scratch.service" in result.calls
    assert (machine.root / SCRIPT).stat().st_mode & 0o777 == 0o755
    assert shellcheck(machine.text(SCRIPT)) == (0, "")


@pytest.mark.parametrize("job_image", [True, False])
def test_all_nvme_disks_and_no_volume_become_one_array(machine: Machine, *, job_image: bool) -> None:
    result = boot(machine, EBS, *DISKS, job_image=job_image)
    assert result.code == 0, result.errors
    (created,) = result.called("mdadm --create")
    names = " ".join(disk.split()[0] for disk in DISKS)
    assert created.split()[2] == "/dev/md/scratch"
    assert f"--level=0 --raid-devices=4 {names}" in created
    assert result.called("mkfs.xfs") == ["mkfs.xfs -f -L scratch /dev/md/scratch"]
    assert result.called("mount ")[0] == "mount -o noatime /dev/md/scratch /scratch"
    assert (machine.root / "scratch").stat().st_mode & 0o7777 == 0o1777
    # A job image that was pulled in stays visible: only what is written moves.
    moved = [call.rpartition(" ")[2] for call in result.called("mount --bind")]
    assert moved == ([f"/var/lib/docker/{name}" for name in ("volumes", "tmp")] if job_image else ["/var/lib/docker/"])


def test_after_a_reboot_what_is_there_is_mounted_and_not_made_anew(machine: Machine) -> None:
    result = boot(machine, EBS, *DISKS, labelled="/dev/md127")
    assert not result.called("mdadm --create", "mkfs.xfs")
    assert result.called("mount ")[0] == "mount -o noatime /dev/md127 /scratch"


def test_an_instance_without_disks_has_scratch_on_its_root_volume(machine: Machine) -> None:
    result = boot(machine, EBS)
    assert result.code == 0
    assert "this instance has no NVMe disks" in result.output
    assert not result.called("mount ")
    assert (machine.root / "scratch").stat().st_mode & 0o7777 == 0o1777
