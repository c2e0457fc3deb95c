"""Vega as one script, built once and cached."""

from pathlib import Path

import pytest

from jobs.report.rendering import vega_script


def test_vega_is_cached_if_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = vega_script()
    assert "vegaEmbed" in made
    assert "</script" not in made
    [kept] = tmp_path.glob("cache/trainyard/vega-*.js")
    kept.write_text("kept")
    assert vega_script() == "kept"
    tmp_path.joinpath("file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert vega_script() == made
