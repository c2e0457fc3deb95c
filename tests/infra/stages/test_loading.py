"""A slip in infra/settings.py ends in one line that names the line."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.stages import checks as loading
from jobs.core.errors import ConfigurationError
from tests.support.infra.synthesis import ROOT

SETTINGS = (ROOT / "infra" / "settings.py").read_text()
LINE = 1 + SETTINGS[: SETTINGS.index("TEAMS = ")].count("\n")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], object]:
    """Load the settings with `old` replaced by `new`."""

    def run(old: str, new: str) -> object:
        assert SETTINGS.count(old) == 1
        (tmp_path / "edited_settings.py").write_text(SETTINGS.replace(old, new))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "edited_settings", raising=False)
        monkeypatch.setattr(loading, "SETTINGS", "edited_settings")
        return loading.load()

    return run


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("TEAMS = (", "TEAMS = )", "unmatched ')'"),
        ('Team(name="research")', 'Team(names="research")', "Team has no field 'names'; did you mean 'name'?"),
        ('Team(name="research")', "Team()", "TypeError: Team.__init__() missing 1 required"),
        ('Team(name="research")', "Taem()", "NameError: name 'Taem' is not defined"),
        (
            "TEAMS = (",
            'import dataclasses; TEAMS = (dataclasses.replace(Team(name="a"), budget=1),',
            "Team has no field 'budget'",
        ),
    ],
)
def test_slips_are_reported_with_their_line(load: Callable[[str, str], object], old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(old, new)
    assert str(caught.value).startswith(f"infra/settings.py: {said}")
    assert str(caught.value).endswith(f" (line {LINE})")


def test_what_breaks_in_other_code_keeps_its_traceback(load: Callable[[str, str], object]) -> None:
    with pytest.raises(ValueError, match="Expecting property name"):
        load("STAGES = {", 'import json\n\njson.loads("{")\nSTAGES = {')


def test_settings_without_a_mistake_are_loaded(load: Callable[[str, str], dict[str, object]]) -> None:
    assert set(load("max_nodes=16", "max_nodes=17")) == {"dev", "prod"}
