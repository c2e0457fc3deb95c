"""Do what skills/trainyard/SKILL.md says, block by block, as an agent would.

`test_documents.py` checks its commands and specs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from jobs.core import errors
from jobs.spec.spec import spec_json_schema

SKILL = Path(__file__).parents[3] / "skills/trainyard/SKILL.md"

STAGE_IS_UP = 'trainyard() { [ "$1" = local ] || command trainyard "$@"; }\n'
"""The test's emulator has the stage already; tests/jobs/cli/test_local.py runs `trainyard local`."""


def test_every_block_of_the_skill_runs(aws_environment: dict[str, str], tmp_path: Path) -> None:
    text = SKILL.read_text()
    for name, content in re.findall(r"^Save this [^\n]*?`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)^```", text, re.M | re.S):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    script = STAGE_IS_UP + "".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path, env={**aws_environment, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [answer] = tmp_path.glob("runs/squares-*/output/answer.json")
    assert abs(json.loads(answer.read_text())[0] - 3) < 0.01
    receipt = done.stdout[done.stdout.rindex("\n{") :]
    assert json.loads(receipt)["run_id"] == answer.parts[-3]


def test_keys_and_exit_codes_of_the_skill_exist() -> None:
    text = SKILL.read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["name"] == SKILL.parent.name
    assert "spec" in head["description"]
    schema = spec_json_schema()
    of_resources = schema["$defs"][schema["properties"]["resources"]["$ref"].rpartition("/")[2]]["properties"]
    known = {*schema["properties"], *(f"resources.{key}" for key in of_resources)}
    keys = re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (`[^|]*`) \|", text, re.M)))
    assert len(keys) > 8
    assert set(keys) <= known
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)}
    kinds = [
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.TrainyardError)
    ]
    assert codes == {0, *(kind.exit_code for kind in kinds)}
