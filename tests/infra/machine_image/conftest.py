"""A machine that the steps of the documents run on."""

from pathlib import Path

import pytest

from tests.support.infra.ami_machine import COMMANDS, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    root, programs = tmp_path / "root", tmp_path / "programs"
    for folder in (
        "etc",
        "etc/apt/apt.conf.d",
        "etc/apt/sources.list.d",
        "etc/systemd/system",
        "usr/share/keyrings",
        "usr/local/sbin",
        "tmp",
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "etc/os-release").write_text('VERSION_ID="22.04"\nVERSION_CODENAME=jammy\n')
    programs.mkdir()
    made = Machine(root, programs)
    for command, script in COMMANDS.items():
        made.answers(command, script)
    return made
