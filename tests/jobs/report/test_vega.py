"""Vega as one script: made once, and kept."""

from pathlib import Path

import pytest

from jobs.report import vega


def test_vega_is_kept_if_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = vega.script()
    assert "vegaEmbed" in made
    assert "</script" not in made
    [kept] = tmp_path.glob("cache/trainyard/vega-*.js")
    kept.write_text("kept")
    assert vega.script() == "kept"
    tmp_path.joinpath("file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert vega.script() == made
