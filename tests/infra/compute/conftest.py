"""Launch templates, and a machine that their scripts run on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.infra.boot_machine import Machine
from tests.support.infra.instances import environments, launch_data
from tests.support.infra.synthesis import Templates

Synthesised = Callable[..., Templates]


@pytest.fixture(scope="module")
def launch_templates(templates: Templates) -> dict[str, dict[str, Any]]:
    compute = templates["prod/compute"]
    return {name: launch_data(compute, name) for name in environments(compute)}


@pytest.fixture
def everything(synthesised: Synthesised) -> dict[str, Any]:
    """Launch template data of an instance on which every script runs."""
    compute = synthesised(instance_type="p4d.24xlarge", machine_image=None, fsx_gib=1_200)["compute"]
    return launch_data(compute, "p4d-24xlarge-1-21-0-spot")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine on which nothing is mounted and no file system labelled."""
    return Machine(tmp_path, {"mountpoint": "exit 1", "blkid": "exit 2"})
