"""The examples in jobs/docs/scripts.md: the scripts run on any machine, and the specs are valid."""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from jobs.spec.spec import parse_spec
from tests.support.container.scripts import PACKAGES, REPOSITORY

PAGE = (Path(__file__).parents[4] / "jobs/docs/scripts.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_specs_of_the_page_are_valid() -> None:
    for text in blocks("yaml"):
        assert parse_spec(yaml.safe_load(text), origin="jobs/docs/scripts.md").job == "script"


def test_the_scripts_of_the_page_run_without_the_platform(tmp_path: Path) -> None:
    scripts = blocks("python")
    for number, text in enumerate(scripts):
        (tmp_path / f"{number}.py").write_text(text)
    # In one process, because most of the time is imports. The script that needs torchrun's variables runs last.
    (of_ranks,) = (number for number, text in enumerate(scripts) if "init_process_group" in text)
    names = [f"{number}.py" for number in range(len(scripts)) if number != of_ranks]
    runs = f"""
import os, runpy, sys
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
runpy.run_path("{of_ranks}.py", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", runs, *names],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{PACKAGES['PYTHONPATH']}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 100: loss " in done.stdout
    assert (tmp_path / "output/model/config.json").is_file()
    assert (tmp_path / "checkpoints/last.ckpt").is_file()
