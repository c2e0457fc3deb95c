"""Trackers: all attempts are one run, and a failing tracker never ends a training."""

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.integrations import integration_utils

from jobs.container.trainer.trackers import Trackers, join_run_of_script
from jobs.core.locations import S3Location

KEY = "of-weights-and-biases"
RUN = S3Location("runs", "research/probe-20261101-120000-00ab/")
GIVEN = {"WANDB_API_KEY": KEY, "MLFLOW_TRACKING_URI": "https://user:secret@mlflow.example"}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake W&B that records its end, and a fake MLflow whose server is gone."""
    (tmp_path / "wandb.py").write_text("ended = []\ndef finish(): ended.append(True)\n")
    (tmp_path / "mlflow.py").write_text("raise OSError('gone')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(os, "environ", dict(GIVEN))


class Told:
    """A transformers callback that records its calls and draws random numbers, as a library may."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def __getattr__(self, event: str) -> Any:
        def note(*_: Any, logs: Any = None, **__: Any) -> None:
            random.random()
            np.random.rand()
            if logs == {"eval_loss": 0.0}:
                raise ConnectionError("too late")
            self.told.append((event, logs))

        return note


def random_numbers() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()


def test_trackers_get_all_values_and_a_failing_one_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", lambda: told)
    caplog.set_level("INFO", "trainyard")
    rank: Any = SimpleNamespace(is_first=True, run=RUN, scratch=tmp_path)
    s3: Any = SimpleNamespace()
    states = random_numbers()

    trackers = Trackers(["wandb", "mlflow"], rank, s3)
    trackers.log({"eval_loss": 1.0})  # ignored before the training
    trackers.on_train_begin(None, None, None)
    trackers.on_log(None, None, None, logs={"loss": 0.5})
    trackers.log({"eval_loss": 0.25, "note": "text"})
    trackers.log({"eval_loss": 0.0})
    trackers.log({"eval_loss": 0.125})
    trackers.finish()

    assert told.told == [("on_train_begin", None), ("on_log", {"loss": 0.5}), ("on_log", {"eval_loss": 0.25})]
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()) == states, (
        "the training draws others"
    )
    names = [os.environ[f"WANDB_{name}"] for name in ("PROJECT", "RUN_ID", "NAME", "RESUME")]
    assert names == ["research", "probe-20261101-120000-00ab", "probe-20261101-120000-00ab", "allow"]
    assert caplog.messages == [
        "report to: wandb",
        "warning: report_to: mlflow is disabled from here on: OSError: gone",
        "warning: report_to: wandb is disabled from here on: ConnectionError: too late",
    ]
    others: Any = SimpleNamespace(is_first=False)
    Trackers(["wandb"], others, None).on_train_begin(None, None, None)
    assert len(told.told) == 3, "of all ranks the first reports"


def test_script_continues_the_trackers_run(caplog: pytest.LogCaptureFixture) -> None:
    os.environ["WANDB_PROJECT"] = "our-own"
    join_run_of_script(RUN)
    assert os.environ.items() >= {**GIVEN, "WANDB_PROJECT": "our-own"}.items()
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("probe-20261101-120000-00ab", "allow")
    assert caplog.messages == ["warning: report_to: mlflow is disabled from here on: OSError: gone"]
