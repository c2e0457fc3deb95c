"""The library as a separate distribution: it installs alone, and every call works without the platform."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import tomllib

import trainyard

LIBRARY = Path(trainyard.__file__).parent
ROOT = LIBRARY.parent

SCRIPT = """
import importlib.util, sys
for name in ("jobs", "pydantic", "torch", "transformers"):
    assert importlib.util.find_spec(name) is None, name

import trainyard

assert not trainyard.is_here()
assert trainyard.checkpoint() is None
assert trainyard.output("new/out").is_dir()
assert trainyard.input_path("reviews", default="reviews.csv") == "reviews.csv"
try:
    trainyard.input_path("reviews")
except KeyError as error:
    assert "no input 'reviews'" in str(error)
else:
    raise AssertionError
trainyard.busy(seconds=3600)
trainyard.result(accuracy=0.5, words="any")
with trainyard.Run(total_steps=2, samples_per_step=4, save_every_steps=1, keep=1) as run:
    assert run.state is None and run.restore(model=object()) == run.steps_done == 0
    run.step(1)
    run.log(1, loss=0.5)
    run.busy(seconds=60)
    assert not run.should_save() and not run.should_stop()
    run.save(1, words=["any", "thing"])
run.finish()
try:
    trainyard.Callback
except ModuleNotFoundError as error:
    assert error.name == "transformers"
else:
    raise AssertionError
tested = {"Callback", "Run", "busy", "checkpoint", "input_path", "is_here", "output", "result"}
for name in set(trainyard.__all__) - tested:  # the client: tests/jobs/runs/test_client.py
    try:
        getattr(trainyard, name)
    except ImportError as error:
        assert "pip install" in str(error)
    else:
        raise AssertionError(f"test {name} as well")
assert {name for name in vars(trainyard.Run) if name[0] != "_"} == {
    "busy", "finish", "log", "restore", "save", "should_save", "should_stop", "state", "step", "steps_done"
}
"""


def test_library_installs_alone_and_works_anywhere(tmp_path: Path) -> None:
    source = shutil.copytree(LIBRARY, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", tmp_path, source], check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        [metadata] = [packed.read(name).decode() for name in names if name.endswith("METADATA")]
    assert {"trainyard/__init__.py", "trainyard/py.typed"} <= set(names)
    assert "Requires-Dist" not in metadata

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([*pip, "--python", python, "install", *offline, wheel], check=True)
    subprocess.run([python, "-I", "-c", SCRIPT], cwd=tmp_path, check=True)


def test_library_has_the_version_of_the_platform() -> None:
    own, whole = (tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (LIBRARY, ROOT))
    assert own["name"] != whole["name"], "the distributions have different names"
    assert (own["version"], own["requires-python"]) == (whole["version"], whole["requires-python"])
