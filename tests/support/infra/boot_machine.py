"""A machine that boots, for scripts of user data: a folder, and stand-ins of the commands."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.infra.instances import boot_parts

COMMANDS = (
    *("udevadm", "mdadm", "mkfs.xfs", "mount", "mountpoint", "blkid", "dnf", "sysctl", "sleep"),
    *("curl", "docker", "systemctl"),
)
"""What the scripts run and must not do to this machine."""


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


def script_with(data: dict[str, Any], text: str) -> str:
    (script,) = (script for _, script in boot_parts(data) if text in script)
    return script
