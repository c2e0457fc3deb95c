"""Vega as one script: made beside the command that needs it, and kept."""

from pathlib import Path

import pytest

from jobs.report import vega


def test_vega_is_made_in_a_process_of_its_own_and_kept_for_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    vega.begin()
    assert vega._making, "nothing is kept, and nobody makes it"
    made = vega.script()
    [kept] = tmp_path.glob("trainyard/vega-*.js")
    assert made == kept.read_text()
    assert "vegaEmbed" in made
    assert "</script" not in made
    vega.begin()
    assert not vega._making, "it is kept, and made again"
    # A cache that cannot be written, or that a process which failed left empty, costs the time and nothing else.
    kept.unlink()
    tmp_path.joinpath("trainyard").rmdir()
    tmp_path.joinpath("trainyard").write_text("no folder")
    assert vega.script() == made
