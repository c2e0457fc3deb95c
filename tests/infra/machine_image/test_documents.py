"""The scripts in infra/machine_image/documents/, run with a stand-in root folder and stand-in commands."""

import hashlib
import io
import json
import re
import tarfile
from typing import Any

import pytest
import yaml

from infra.machine_image.build import DOCUMENTS
from tests.infra.machine_image.conftest import STEPS, run, script_of
from tests.support.infra.machine import Machine, Result, shellcheck


def test_shellcheck_finds_nothing() -> None:
    for step in STEPS:
        script = script_of(step)
        assert shellcheck(script, "--shell=bash", "--external-sources") == (0, ""), step
        # A step that continues after a failure would produce an incomplete AMI.
        assert script.startswith("set -euo pipefail\n"), step


def test_documents_declare_their_parameters_and_have_tests() -> None:
    for path in DOCUMENTS.glob("*.yaml"):
        document: dict[str, Any] = yaml.safe_load(path.read_text())
        declared = {name for parameter in document.get("parameters", []) for name in parameter}
        assert set(re.findall(r"\{\{ (\w+) \}\}", path.read_text())) == declared, path.name
        assert document["name"] == path.stem
        assert "test" in [phase["name"] for phase in document["phases"]] or path.stem == "job-image"


LTS_KERNEL = "linux-image-aws-lts-22.04 '  Depends: linux-image-5.15.0-1080-aws' '  Depends: linux-firmware'"


@pytest.mark.parametrize(("lustre", "kernel"), [(False, "5.15.0-1080-aws"), (True, "5.15.0-1079-aws")])
def test_the_newest_kernel_of_the_release_is_installed_and_held(machine: Machine, *, lustre: bool, kernel: str) -> None:
    # With FSx, it is the newest kernel with modules of the Lustre client.
    names = ("aws", "5.15.0-999-aws", "6.8.0-1029-aws", "5.15.0-1079-aws")
    machine.answers(
        "apt-cache",
        f"""case "$*" in
        "depends linux-image-aws-lts-22.04") printf '%s\\n' {LTS_KERNEL} ;;
        depends*) printf '%s\\n' linux-image-aws '  Depends: linux-image-6.8.0-1031-aws' ;;
        *) printf 'lustre-client-modules-%s\\n' {" ".join(names)} ;;
        esac""",
    )
    result = run(machine, "kernel/build/Install", LustreClient=str(lustre).lower())
    assert result.code == 0, result.errors
    packages = f"linux-image-{kernel} linux-headers-{kernel} linux-modules-extra-{kernel}"
    modules = f" lustre-client-modules-{kernel}" if lustre else ""
    assert result.called("apt-get --yes install") == [f"apt-get --yes install {packages}{modules}"]
    assert result.called("apt-mark") == [f"apt-mark hold {packages}"]
    assert f"Ubuntu, with Linux {kernel}'" in machine.text("etc/default/grub.d/90-trainyard-kernel.cfg")
    assert machine.text("etc/trainyard/kernel") == f"{kernel}\n"
    assert (machine.root / "etc/apt/sources.list.d/fsx-lustre.list").exists() is lustre


@pytest.mark.parametrize(
    ("installed", "running", "message"),
    [
        ("5.15.0-1080-aws", "5.15.0-1080-aws", ""),
        ("6.8.0-2-aws", "6.8.0-1-aws", "error: running kernel 6.8.0-1-aws, but 6.8.0-2-aws was installed\n"),
        ("5.4.0-1100-aws", "5.4.0-1100-aws", "error: kernel 5.4.0-1100-aws is older than 5.15\n"),
    ],
)
def test_the_running_kernel_is_checked(machine: Machine, installed: str, running: str, message: str) -> None:
    (machine.root / "etc/trainyard").mkdir()
    (machine.root / "etc/trainyard/kernel").write_text(f"{installed}\n")
    machine.answers("uname", f"echo {running}")
    result = run(machine, "kernel/build/Check")
    assert (result.code, result.errors) == (int(bool(message)), message)


def test_the_ecs_agent_starts_after_user_data_and_supports_exec(machine: Machine) -> None:
    machine.answers("dpkg-query", "echo 1.98.0-1")
    (machine.root / "var/lib/ecs/data").mkdir(parents=True)
    (machine.root / "etc/ssl/certs").mkdir(parents=True)
    (machine.root / "etc/ssl/certs/ca-certificates.crt").write_text("a certificate")
    archive = machine.programs / "ssm-agent.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("amazon-ssm-agent", "ssm-agent-worker", "ssm-session-worker", "ssm-cli"):
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            packed.addfile(member)
    machine.answers("curl", f'while [ $# -gt 0 ]; do if [ "$1" = --output ]; then cp {archive} "$2"; fi; shift; done')
    result = run(machine, "container-host/build/EcsAgent")
    assert result.code == 0, result.errors
    # If multi-user.target wanted it, it would wait for cloud-final.service, which waits for that target.
    assert result.called("systemctl") == [
        "systemctl disable --now ecs.service",
        "systemctl daemon-reload",
        "systemctl add-wants cloud-init.target ecs.service",
    ]
    assert "After=cloud-final.service\n" in machine.text("etc/systemd/system/ecs.service.d/after-user-data.conf")
    assert not (machine.root / "var/lib/ecs/data").exists()
    # The folder in which the agent looks (agent/app/agent_capability_unix.go of aws/amazon-ecs-agent).
    folder = machine.root / "var/lib/ecs/deps/execute-command"
    [version] = (folder / "bin").iterdir()
    assert {path.name for path in version.iterdir()} == {"amazon-ssm-agent", "ssm-agent-worker", "ssm-session-worker"}
    assert (folder / "certs/tls-ca-bundle.pem").read_text() == "a certificate"
    # AND the test phase checks these files
    machine.answers("systemctl", "echo ecs.service")
    assert run(machine, "container-host/test/Check").code == 0
    (version / "ssm-agent-worker").unlink()
    assert run(machine, "container-host/test/Check").code == 1


def test_habanas_packages_have_one_version_and_are_held(machine: Machine) -> None:
    result = run(machine, "gaudi/build/Driver", PackageVersion="1.20.0-543")
    assert result.code == 0, result.errors
    installed = result.called("apt-get --yes install habanalabs")[0].split()[3:]
    assert {package.split("=")[1] for package in installed} == {"1.20.0-543"}
    names = [package.split("=")[0] for package in installed]
    assert {"habanalabs-dkms", "habanalabs-firmware", "habanalabs-thunk", "habanalabs-container-runtime"} < set(names)
    assert result.called("apt-mark") == [f"apt-mark hold {' '.join(names)}"]
    assert "signed-by=" in machine.text("etc/apt/sources.list.d/habana.list")


def test_docker_and_the_kernel_are_configured_for_gaudi(machine: Machine) -> None:
    result = run(machine, "gaudi/build/Configuration")
    assert result.code == 0, result.errors
    daemon = json.loads(machine.text("etc/docker/daemon.json"))
    assert daemon["default-runtime"] == "habana"
    assert daemon["runtimes"]["habana"]["path"] == "/usr/bin/habana-container-runtime"
    assert daemon["default-ulimits"]["memlock"] == {"Name": "memlock", "Soft": -1, "Hard": -1}
    assert machine.text("etc/sysctl.d/60-hugepages.conf") == "vm.nr_hugepages=15000\n"
    assert "* soft memlock unlimited\n* hard memlock unlimited\n" in machine.text(
        "etc/security/limits.d/60-memlock.conf"
    )
    assert result.calls[-1] == "systemctl restart docker.service"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, ""),
        ({"dpkg-query": "echo 1.20.0-543"}, "habanalabs-container-runtime is '1.20.0-543', not '1.21.0-555'"),
        ({"modinfo": "echo 1.20.0-0a1b2c"}, "the habanalabs module is '1.20.0-0a1b2c', not '1.21.0-…'"),
        ({"docker": "echo ' Default Runtime: runc'"}, "Docker's default runtime is 'runc', not 'habana'"),
        ({"sysctl": "echo 0"}, "vm.nr_hugepages is '0', not '15000'"),
    ],
)
def test_an_ami_with_the_wrong_driver_or_settings_fails(machine: Machine, wrong: dict[str, str], message: str) -> None:
    right = {
        "dpkg-query": "echo 1.21.0-555",
        "modinfo": "echo 1.21.0-0a1b2c",
        "docker": "printf ' %s\\n' 'Runtimes: habana runc' 'Default Runtime: habana'",
        "sysctl": "echo 15000",
    }
    for command, script in {**right, **wrong}.items():
        machine.answers(command, script)
    result = run(machine, "gaudi/test/Check")
    assert (result.code, result.errors) == ((1, f"error: {message}\n") if message else (0, ""))


@pytest.mark.parametrize("genuine", [True, False])
def test_only_the_pinned_efa_installer_is_run(machine: Machine, *, genuine: bool) -> None:
    archive = machine.root / "served.tar.gz"
    script = f'#!/bin/sh\nprintf "%s\\n" "efa_installer $*" >>{machine.root}/calls\n'.encode()
    with tarfile.open(archive, "w:gz") as files:
        entry = tarfile.TarInfo("aws-efa-installer/efa_installer.sh")
        entry.size, entry.mode = len(script), 0o755
        files.addfile(entry, io.BytesIO(script))
    machine.answers("curl", f"cp {archive} installer.tar.gz")
    pinned = hashlib.sha256(archive.read_bytes() if genuine else b"another").hexdigest()
    result = run(machine, "efa/build/Install", Sha256=pinned)
    assert (result.code == 0) is genuine
    assert result.called("efa_installer") == (["efa_installer -y --minimal"] if genuine else [])
    assert result.called("curl")[0].endswith("/aws-efa-installer-1.42.0.tar.gz")


@pytest.mark.parametrize(
    ("answer", "code", "message", "recorded"),
    [
        ("exit 0", 0, "pulled registry/gaudi:1.21.0", True),
        (
            "echo 'manifest for registry/gaudi:1.21.0 not found: manifest unknown' >&2; exit 1",
            0,
            "registry/gaudi:1.21.0 does not exist yet",
            False,
        ),
        ("echo 'denied: User is not authorized' >&2; exit 1", 1, "error: denied: User is not authorized", False),
    ],
    ids=["exists", "not yet built", "denied"],
)
def test_a_missing_job_image_does_not_fail_the_build(
    machine: Machine, *, answer: str, code: int, message: str, recorded: bool
) -> None:
    machine.answers("docker", f'cat "$DOCKER_CONFIG/config.json" >>{machine.root}/docker-config; {answer}')
    result = run(machine, "job-image/build/Pull")
    assert result.code == code
    assert message in result.output + result.errors
    assert (machine.root / "etc/trainyard/job-image").exists() is recorded
    assert json.loads(machine.text("docker-config")) == {"credsStore": "ecr-login"}
    assert result.called("docker") == ["docker pull --quiet registry/gaudi:1.21.0"]


def test_the_latest_pushed_job_image_is_pulled(machine: Machine) -> None:
    # GIVEN the name of an SSM parameter instead of an image
    digest = f"registry/gaudi@sha256:{'ab' * 32}"
    machine.answers("aws", f"echo {digest}")
    machine.answers("cloud-init", "echo us-west-2")
    result = run(machine, "job-image/build/Pull", Image="ssm:/trainyard/dev/image/gaudi/1.21.0")
    assert result.code == 0, result.errors
    assert machine.text("etc/trainyard/job-image") == f"{digest}\n"
    (call,) = result.called("aws")
    assert call.startswith("aws ssm get-parameter --region us-west-2 --name /trainyard/dev/image/gaudi/1.21.0 ")
    # The AWS CLI is removed again.
    assert [call.split()[2] for call in result.called("apt-get")] == ["install", "purge"]


EBS = "/dev/nvme0n1 Amazon Elastic Block Store"
DISKS = [f"/dev/nvme{number}n1 Amazon EC2 NVMe Instance Storage" for number in (1, 2, 3, 4)]
SCRIPT = "usr/local/sbin/trainyard-scratch"


def boot(machine: Machine, *disks: str, job_image: bool = True, labelled: str = "") -> Result:
    """Install the script, and run it like its systemd unit, on a machine with the given disks."""
    assert run(machine, "scratch/build/Script").code == 0
    machine.answers("lsblk", "".join(f"echo '{line}'\n" for line in disks))
    machine.answers("blkid", f"[ -n '{labelled}' ] && echo '{labelled}'")
    machine.answers("mountpoint", "exit 1")
    machine.answers("mdadm", '[ "$1" != --assemble ]')  # fails if there is no array yet
    if job_image:
        (machine.root / "etc/trainyard").mkdir()
        (machine.root / "etc/trainyard/job-image").write_text("registry/gaudi:1.21.0\n")
    return machine.bash(machine.text(SCRIPT))


def test_docker_starts_after_the_disks_even_if_they_fail(machine: Machine) -> None:
    result = run(machine, "scratch/build/Script")
    unit = machine.text("etc/systemd/system/trainyard-scratch.service")
    for line in ("Before=docker.service\n", "WantedBy=docker.service\n", f"ExecStart={machine.root / SCRIPT}\n"):
        assert line in unit
    assert "Require" not in unit
    assert "systemctl enable trainyard-scratch.service" in result.calls
    assert (machine.root / SCRIPT).stat().st_mode & 0o777 == 0o755
    assert shellcheck(machine.text(SCRIPT)) == (0, "")


@pytest.mark.parametrize("job_image", [True, False])
def test_nvme_disks_but_not_ebs_volumes_form_one_array(machine: Machine, *, job_image: bool) -> None:
    result = boot(machine, EBS, *DISKS, job_image=job_image)
    assert result.code == 0, result.errors
    (created,) = result.called("mdadm --create")
    names = " ".join(disk.split()[0] for disk in DISKS)
    assert created.split()[2] == "/dev/md/scratch"
    assert f"--level=0 --raid-devices=4 {names}" in created
    assert result.called("mkfs.xfs") == ["mkfs.xfs -f -L scratch /dev/md/scratch"]
    assert result.called("mount ")[0] == "mount -o noatime /dev/md/scratch /scratch"
    assert (machine.root / "scratch").stat().st_mode & 0o7777 == 0o1777
    # A job image in the AMI stays visible: only folders with new data move.
    moved = [call.rpartition(" ")[2] for call in result.called("mount --bind")]
    assert moved == ([f"/var/lib/docker/{name}" for name in ("volumes", "tmp")] if job_image else ["/var/lib/docker/"])


def test_a_reboot_mounts_the_existing_array(machine: Machine) -> None:
    result = boot(machine, EBS, *DISKS, labelled="/dev/md127")
    assert not result.called("mdadm --create", "mkfs.xfs")
    assert result.called("mount ")[0] == "mount -o noatime /dev/md127 /scratch"


def test_without_nvme_disks_scratch_is_on_the_root_volume(machine: Machine) -> None:
    result = boot(machine, EBS)
    assert result.code == 0
    assert "this instance has no NVMe disks" in result.output
    assert not result.called("mount ")
    assert (machine.root / "scratch").stat().st_mode & 0o7777 == 0o1777
