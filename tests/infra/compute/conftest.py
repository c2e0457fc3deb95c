"""Launch templates of ALL, and a machine on which their scripts run."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.infra.instances import environments, launch_data
from tests.support.infra.machine import Machine
from tests.support.infra.synthesis import Templates


@pytest.fixture(scope="module")
def launched(reviewed: Templates) -> dict[str, dict[str, Any]]:
    """Launch template data by compute environment."""
    return {name: launch_data(reviewed["compute"], name) for name in environments(reviewed["compute"])}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without mounts and without labelled file systems."""
    machine = Machine.create(tmp_path)
    machine.answers("mountpoint", "exit 1")
    machine.answers("blkid", "exit 2")
    return machine
