import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.infra.synthesis import ROOT

Program = Callable[..., subprocess.CompletedProcess[str]]

SETTINGS = (ROOT / "infra" / "settings.py").read_text()
LOAD = [
    "-c",
    """
import sys
from infra.stages.loading import ConfigurationError, load
try:
    load()
except ConfigurationError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
""",
]
TYPO = ("max_nodes=16", "max_node=16")


@pytest.fixture
def with_settings(tmp_path: Path) -> Program:
    """Run Python with the project's own code around an infra/settings.py in which `old` is replaced by `new`."""

    def run(arguments: list[str], old: str, new: str) -> subprocess.CompletedProcess[str]:
        assert SETTINGS.count(old) == 1
        infra = tmp_path / "infra"
        infra.mkdir()
        for source in (ROOT / "infra").iterdir():
            if source.name not in ("settings.py", "__pycache__"):
                (infra / source.name).symlink_to(source)
        (infra / "settings.py").write_text(SETTINGS.replace(old, new))
        for source in (ROOT / "jobs", ROOT / "images", ROOT / "cdk.json"):
            (tmp_path / source.name).symlink_to(source)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run


@pytest.mark.parametrize(
    "program",
    [
        ["infra.app"],
        ["infra.preflight"],
        ["infra.idle_costs"],
        ["infra.emulator", "deploy", "--endpoint", "http://localhost:9"],
    ],
    ids=lambda program: program[0],
)
def test_a_field_that_does_not_exist_is_told_without_a_traceback(program: list[str], with_settings: Program) -> None:
    done = with_settings(["-m", *program], *TYPO)
    (said,) = [line for line in done.stderr.splitlines() if line and "!!" not in line]
    line = 1 + SETTINGS[: SETTINGS.index("        Stage(\n")].count("\n")
    assert said.removeprefix("error: ") == (
        f"infra/settings.py: Stage has no field 'max_node'; did you mean 'max_nodes'? (line {line})"
    )
    assert (done.stdout, done.returncode) == ("", 3)


@pytest.mark.parametrize(
    "program",
    [
        ["infra.app"],
        ["infra.preflight", "--stage", "prod"],
        ["infra.idle_costs"],
        ["infra.emulator", "deploy", "--endpoint", "http://localhost:9", "--stage", "prod"],
    ],
    ids=lambda program: program[0],
)
def test_a_value_of_another_type_is_told_without_a_traceback(program: list[str], with_settings: Program) -> None:
    done = with_settings(["-m", *program], "max_nodes=16", "max_nodes='three'")
    (said,) = [line for line in done.stderr.splitlines() if line and "!!" not in line]
    assert said.removeprefix("error: ") == (
        "infra/settings.py: stage 'prod': max_nodes: must be a whole number, not 'three'"
    )
    assert (done.stdout, done.returncode) == ("", 3)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("max_nodes=16,", "max_nodes=16", "invalid syntax. Perhaps you forgot a comma?"),
        ('Team(name="research")', 'Team(names="research")', "Team has no field 'names'; did you mean 'name'?"),
        (
            'Team(name="research")',
            "Team()",
            "TypeError: Team.__init__() missing 1 required keyword-only argument: 'name'",
        ),
        ('Team(name="research")', "Taem()", "NameError: name 'Taem' is not defined"),
        (
            "STAGES = {",
            'import dataclasses\n\nBIG = dataclasses.replace(Team(name="a"), budget=1)\nSTAGES = {',
            "Team has no field 'budget'",
        ),
    ],
)
def test_other_slips_are_told_with_their_line(old: str, new: str, said: str, with_settings: Program) -> None:
    done = with_settings(LOAD, old, new)
    assert done.stderr.startswith(f"infra/settings.py: {said}")
    (line,) = re.findall(r" \(line (\d+)\)$", done.stderr)
    first = 1 + SETTINGS[: SETTINGS.index(old)].count("\n")
    assert first <= int(line) <= first + new.count("\n") + 1
    assert done.stderr.count("\n") == 1
    assert done.returncode == 3


def test_what_breaks_in_other_code_keeps_its_traceback(with_settings: Program) -> None:
    # Where it came from is all that helps whoever has to mend that code.
    done = with_settings(LOAD, "STAGES = {", 'import json\n\njson.loads("{")\nSTAGES = {')
    assert "Traceback" in done.stderr
    assert "/json/decoder.py" in done.stderr
    assert done.returncode == 1


def test_settings_without_a_mistake_are_loaded(with_settings: Program) -> None:
    done = with_settings(LOAD, "max_nodes=16", "max_nodes=17")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
