"""Check that each benchmark imports and prints its help."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if not path.stem.startswith("test_"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_prints_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"tests.benchmarks.{name}").main()
    assert ended.value.code in (0, None)
    assert f"usage: python -m tests.benchmarks.{name}" in capsys.readouterr().out
