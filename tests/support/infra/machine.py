"""A machine for shell scripts: a folder in place of its root, and stand-ins of its commands, which note their calls."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_COMMANDS = (
    *("apt-cache", "apt-get", "apt-mark", "blkid", "cloud-init", "curl", "dnf", "docker", "dpkg", "dpkg-query"),
    *("findmnt", "gpg", "hl-smi", "lsblk", "mdadm", "mkfs.xfs", "modinfo", "mount", "mount.lustre", "mountpoint"),
    *("sleep", "snap", "sysctl", "systemctl", "udevadm", "uname", "update-grub"),
)
"""What scripts run and must not do to this machine: without an answer each does nothing, successfully."""

_FOLDERS = (
    *("dev/disk/by-id", "etc/apt/apt.conf.d", "etc/apt/sources.list.d", "etc/ecs", "etc/sysctl.d"),
    *("etc/systemd/system", "tmp", "usr/local/sbin", "usr/share/keyrings", "var/lib/containerd", "var/lib/docker"),
)


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    errors: str
    calls: list[str]

    def called(self, *beginnings: str) -> list[str]:
        return [call for call in self.calls if call.startswith(beginnings)]


@dataclass(frozen=True)
class Machine:
    """A root folder, and the commands that are found on it."""

    root: Path
    programs: Path

    @classmethod
    def made_in(cls, folder: Path) -> "Machine":
        made = cls(folder / "root", folder / "programs")
        for path in (*(made.root / name for name in _FOLDERS), made.programs):
            path.mkdir(parents=True)
        for command in _COMMANDS:
            made.answers(command, "exit 0")
        return made

    def answers(self, command: str, script: str) -> None:
        """Let `command` run `script`, besides noting that it was called."""
        program = self.programs / command
        program.write_text(f'#!/bin/bash\nprintf \'%s\\n\' "{command} $*" >>"{self.root}/calls"\n{script}\n')
        program.chmod(0o755)

    def run(self, script: str) -> Result:
        """Run a script with all that it reads and writes below the folder."""
        return self.bash(
            re.sub(
                r"(?<![\w/.:-])/(dev|etc|fsx|opt|usr/local|usr/share|var/lib|scratch|tmp)(?=[/\s\"';]|$)",
                rf"{self.root}/\1",
                script,
                flags=re.MULTILINE,
            )
        )

    def bash(self, script: str) -> Result:
        calls = self.root / "calls"
        calls.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.root,
            env={"PATH": f"{self.programs}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        noted = calls.read_text().replace(str(self.root), "").splitlines() if calls.exists() else []
        return Result(done.returncode, done.stdout, done.stderr, noted)

    def text(self, path: str) -> str:
        return (self.root / path).read_text()
