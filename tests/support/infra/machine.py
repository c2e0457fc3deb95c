"""A stand-in machine for shell scripts: a root folder, and commands that record their calls."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_COMMANDS = (
    *("apt-cache", "apt-get", "apt-mark", "blkid", "cloud-init", "curl", "dnf", "docker", "dpkg", "dpkg-query"),
    *("findmnt", "gpg", "hl-smi", "lsblk", "mdadm", "mkfs.xfs", "modinfo", "mount", "mount.lustre", "mountpoint"),
    *("sleep", "snap", "sysctl", "systemctl", "udevadm", "uname", "update-grub"),
)
"""Commands that must not run for real. Without a prepared answer, each does nothing and succeeds."""

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

    def called(self, *prefixes: str) -> list[str]:
        return [call for call in self.calls if call.startswith(prefixes)]


@dataclass(frozen=True)
class Machine:
    """A root folder, and a folder with the commands on its path."""

    root: Path
    programs: Path

    @classmethod
    def create(cls, folder: Path) -> "Machine":
        machine = cls(folder / "root", folder / "programs")
        for path in (*(machine.root / name for name in _FOLDERS), machine.programs):
            path.mkdir(parents=True)
        for command in _COMMANDS:
            machine.answers(command, "exit 0")
        return machine

    def answers(self, command: str, script: str) -> None:
        """Make `command` record its call and run `script`."""
        program = self.programs / command
        program.write_text(f'#!/bin/bash\nprintf \'%s\\n\' "{command} $*" >>"{self.root}/calls"\n{script}\n')
        program.chmod(0o755)

    def run(self, script: str) -> Result:
        """Run a script with its absolute paths moved below the root folder."""
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
        recorded = calls.read_text().replace(str(self.root), "").splitlines() if calls.exists() else []
        return Result(done.returncode, done.stdout, done.stderr, recorded)

    def text(self, path: str) -> str:
        return (self.root / path).read_text()


def shellcheck(script: str, *options: str) -> tuple[int, str]:
    """Return shellcheck's exit code and findings for a script."""
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([program, *options, "-"], input=script, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout
