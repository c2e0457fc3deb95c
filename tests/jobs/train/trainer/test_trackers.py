"""Trackers beside a run's own metrics: transformers' own callbacks, with packages that note what they are told."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.contract.locations import S3Location
from jobs.train.trainer.trackers import join_run_of_script
from tests.support.train.launching import Run

KEY = "of-weights-and-biases"

WANDB = """
import json, os, random

def _note(**said):
    random.random()  # as a library may that makes up a name
    with open(os.environ["NOTED"], "a") as file:
        file.write(json.dumps(said) + "\\n")

class _Config(dict):
    def update(self, values, allow_val_change=False):
        super().update(values)

class _Run:
    id = os.environ.get("WANDB_RUN_ID")
    summary = {}
    def _label(self, **_):
        pass

run, config = None, _Config()

def init(project=None, **given):
    global run
    run = _Run()
    set_ones = {name: os.environ[name] for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME")}
    _note(init=project, name=given["name"], key=os.environ["WANDB_API_KEY"] != "", **set_ones)

def log(values):
    _note(log=values)

def finish():
    _note(finish=True)

def define_metric(*_, **__):
    pass

def termwarn(*_, **__):
    pass
"""
"""What WandbCallback asks of the package (transformers/integrations/integration_utils.py, 4.51.3), noted in a file."""


def test_attempts_are_one_run_of_a_tracker_and_one_that_fails_ends_nothing(
    run: Run, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    for name, content in {
        "wandb/__init__.py": WANDB,
        "wandb/sdk/lib/config_util.py": "class ConfigError(Exception): ...",
        "mlflow/__init__.py": "raise OSError('the server of MLflow is gone')",
    }.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    noted = tmp_path / "noted.jsonl"
    environment: dict[str, Any] = {
        "PYTHONPATH": str(tmp_path / "packages"),
        "NOTED": str(noted),
        "WANDB_API_KEY": KEY,
        "MLFLOW_TRACKING_URI": "https://user:secret@mlflow.example",
    }
    flags = (*recipe, '--report-to=["wandb", "mlflow"]', "--evaluate-every-steps=epoch")

    first = run.start(*flags, **environment)
    first.wait_for_line("evaluation: step")
    commands = [" ".join(process.cmdline()) for process in (psutil.Process(first.process.pid), *first.ranks())]
    assert first.kill(signal.SIGTERM) == 75, first.output
    second = run.attempt(*flags, attempt=2, **environment)

    said = [json.loads(line) for line in noted.read_text().splitlines()]
    run_id, names = run.receipt().run_id, ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME")
    begun = {
        "init": "research",
        "name": run_id,
        "key": True,
        **dict(zip(names, (run_id, "allow", run_id), strict=True)),
    }
    assert [line for line in said if "init" in line] == [begun, begun]
    assert [list(line) for line in said].count(["finish"]) == 2
    assert said[-1] == {"finish": True}
    logged = [line["log"] for line in said if "log" in line]
    losses = {line["train/global_step"]: line["train/loss"] for line in logged if "train/loss" in line}
    assert losses == {line["step"]: line["loss"] for line in run.metrics() if "loss" in line}
    assert sum("eval/accuracy" in line for line in logged) >= 2
    assert logged[-1]["eval/accuracy"] == run.receipt().result["eval_accuracy"]

    for launched in (first, second):
        failed = "warning: report_to: mlflow is left out from here on: OSError: the server of MLflow is gone\n"
        assert launched.lines.count(failed) == 1, launched.output
        assert not any(secret in launched.output for secret in (KEY, "user:secret"))
    assert not any(KEY in command for command in commands)
    assert KEY not in run.read("receipt.json").decode()


def test_a_script_goes_on_with_the_run_that_earlier_attempts_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, content in {"wandb": "", "mlflow": "raise OSError('gone')"}.items():
        (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"WANDB_API_KEY": KEY, "WANDB_PROJECT": "our-own", "MLFLOW_TRACKING_URI": "https://mlflow.example"}
    monkeypatch.setattr(os, "environ", {**given})
    join_run_of_script(S3Location("runs", "research/probe-20261101-120000-00ab/"))
    assert os.environ.items() >= given.items()
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("probe-20261101-120000-00ab", "allow")
    assert [record.getMessage() for record in caplog.records] == [
        "warning: report_to: mlflow is left out from here on: OSError: gone"
    ]
