"""A machine that an AMI is built on: a root in a folder, stand-ins of the commands, and the steps of the documents."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from infra.machine_image.build import DOCUMENTS

PARAMETERS = {
    "LustreClient": "false",
    "Release": "1.21.0",
    "PackageVersion": "1.21.0-555",
    "HugePages": "15000",
    "Version": "1.42.0",
    "Sha256": "0" * 64,
    "Image": "registry/gaudi:1.21.0",
}

STEPS = {
    f"{path.stem}/{phase['name']}/{step['name']}": "\n".join(step["inputs"]["commands"])
    for path in sorted(DOCUMENTS.glob("*.yaml"))
    for phase in yaml.safe_load(path.read_text())["phases"]
    for step in phase["steps"]
    if step["action"] == "ExecuteBash"
}

COMMANDS = {
    **dict.fromkeys(("apt-cache", "apt-get", "apt-mark", "cloud-init", "dpkg", "dpkg-query", "snap"), "exit 0"),
    "update-grub": "exit 0",
    **dict.fromkeys(("docker", "gpg", "hl-smi", "modinfo", "sysctl", "systemctl", "uname"), "exit 0"),
    **dict.fromkeys(
        ("blkid", "findmnt", "lsblk", "mdadm", "mkfs.xfs", "mount", "mount.lustre", "mountpoint"), "exit 0"
    ),
    "curl": 'while [ $# -gt 0 ]; do if [ "$1" = --output ]; then : >"$2"; fi; shift; done',
}
"""What the commands of the machine do unless a test says otherwise: nothing, successfully."""


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    errors: str
    calls: list[str]

    def called(self, beginning: str) -> list[str]:
        return [call for call in self.calls if call.startswith(beginning)]


@dataclass(frozen=True)
class Machine:
    """A root folder, and the commands that are found on it."""

    root: Path
    programs: Path

    def answers(self, command: str, script: str) -> None:
        """Let `command` run `script`, besides noting that it was called."""
        program = self.programs / command
        program.write_text(f'#!/bin/bash\nprintf \'%s\\n\' "{command} $*" >>"{self.root}/calls"\n{script}\n')
        program.chmod(0o755)

    def run(self, step: str, **parameters: str) -> Result:
        return self.bash(self.rooted(substituted(STEPS[step], **parameters)))

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

    def rooted(self, script: str) -> str:
        """Return the script with all that it reads and writes below the folder."""
        return re.sub(
            r"(?<![\w/.:-])/(etc|usr/local|usr/share|var/lib|scratch|tmp)(?=[/\s\"';]|$)",
            rf"{self.root}/\1",
            script,
            flags=re.MULTILINE,
        )

    def text(self, path: str) -> str:
        return (self.root / path).read_text()


def substituted(script: str, **parameters: str) -> str:
    for name, value in {**PARAMETERS, **parameters}.items():
        script = script.replace("{{ " + name + " }}", value)
    assert "{{" not in script
    return script
