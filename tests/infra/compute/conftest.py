"""Launch templates of ALL, and a machine that their scripts run on."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.infra.instances import environments, launch_data
from tests.support.infra.machine import Machine
from tests.support.infra.synthesis import Templates


@pytest.fixture(scope="module")
def launched(reviewed: Templates) -> dict[str, dict[str, Any]]:
    """Launch template data by environment."""
    return {name: launch_data(reviewed["compute"], name) for name in environments(reviewed["compute"])}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine on which nothing is mounted and no file system labelled."""
    made = Machine.made_in(tmp_path)
    made.answers("mountpoint", "exit 1")
    made.answers("blkid", "exit 2")
    return made
