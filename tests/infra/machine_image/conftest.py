"""A machine on which the steps of the documents run."""

from pathlib import Path

import pytest
import yaml

from infra.machine_image.build import DOCUMENTS
from tests.support.infra.machine import Machine, Result

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


def script_of(step: str, **parameters: str) -> str:
    script = STEPS[step]
    for name, value in {**PARAMETERS, **parameters}.items():
        script = script.replace("{{ " + name + " }}", value)
    assert "{{" not in script
    return script


def run(machine: Machine, step: str, **parameters: str) -> Result:
    return machine.run(script_of(step, **parameters))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine.create(tmp_path)
    (machine.root / "etc/os-release").write_text('VERSION_ID="22.04"\nVERSION_CODENAME=jammy\n')
    machine.answers("curl", 'while [ $# -gt 0 ]; do if [ "$1" = --output ]; then : >"$2"; fi; shift; done')
    return machine
