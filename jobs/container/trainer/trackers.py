"""Weights & Biases and MLflow: a run's metrics go to the organisation's tracker as well, by callbacks of transformers.

All attempts of a run are one run there. Addresses and keys come with the job's environment, from the team's secret
(`secret_variables` in infra/settings.py); they are in no argument, so in no list of processes, and in no log. A tracker
that fails costs a warning and its curves from then on, never the training; and what it does with Python's and NumPy's
random numbers is undone, so that a training with it computes what one without it does.
"""

import importlib.util
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jobs.container.callback import Callback
from jobs.container.packages import Environment
from jobs.core.locations import S3Location
from jobs.spec.recipe import TRACKER_VARIABLES, Tracker

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")

PACKAGES: Mapping[Tracker, str] = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
"""What is installed on top of the image's packages, where those have no module of the tracker's name."""

RUN_TAG = "trainyard.run"
"""The tag by which a later attempt finds its run in MLflow, which gives ids of its own."""

_MLFLOW = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""A server that does not answer holds cards up: it is left in seconds, where the job's environment says no other."""

_WANDB = {"WANDB_INIT_TIMEOUT": "30", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
"""The same of W&B; and the log stays as the launcher reads it, and goes to nobody else."""


def join_run(run: S3Location, name: Tracker) -> None:
    """Set the variables by which the tracker's library goes on with the run that earlier attempts have begun there.

    Those that the job's environment has stay. Raises what MLflow does where it fails.
    """
    team, _, run_id = run.key.strip("/").rpartition("/")
    if name == "wandb":
        for variable, value in {"PROJECT": team, "RUN_ID": run_id, "NAME": run_id, "RESUME": "allow"}.items():
            os.environ.setdefault(f"WANDB_{variable}", value)
        return
    for variable, value in _MLFLOW.items():
        os.environ.setdefault(variable, value)
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment_name = os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", team)
    experiment = client.get_experiment_by_name(experiment_name)
    place = experiment.experiment_id if experiment else client.create_experiment(experiment_name)
    known = client.search_runs([place], f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
    found = known[0] if known else client.create_run(place, run_name=run_id, tags={RUN_TAG: run_id})
    os.environ["MLFLOW_RUN_ID"] = found.info.run_id


def join_run_of_script(run: S3Location) -> None:
    """Do so for a script that reports by itself, for each tracker whose address or key and package it has."""
    for name, variable in TRACKER_VARIABLES.items():
        if os.environ.get(variable) and importlib.util.find_spec(name):
            try:
                join_run(run, name)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the script
                _warn(name, error)


class Trackers(Callback):
    """Hands what a Trainer says to the callbacks that transformers has for trackers. Only rank 0 has any."""

    def __init__(self, names: Sequence[Tracker], rank: "Rank", s3: "S3Client | None") -> None:
        self._callbacks: dict[Tracker, Any] = {}
        self._said: tuple[Any, ...] | None = None
        if not rank.is_first or s3 is None:
            return
        for name in names:
            with self._guarded(name):
                self._callbacks[name] = _callback(name, rank, s3)

    def on_train_begin(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        self._said = args, state, control
        self._tell("on_train_begin", args, state, control, **said)

    def on_log(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        self._tell("on_log", args, state, control, **said)

    def log(self, values: Mapping[str, Any]) -> None:
        """Report what the Trainer itself does not log: an evaluation, or the result."""
        if self._said is not None:
            numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self._tell("on_log", *self._said, logs=numbers)

    def finish(self) -> None:
        """Have all sent that was reported. The process may end after that, in whatever way."""
        if self._said is not None:
            self._tell("on_train_end", *self._said)
        if "wandb" in self._callbacks:
            with self._guarded("wandb"):
                import wandb

                wandb.finish()
        self._callbacks.clear()

    def _tell(self, event: str, *given: Any, **said: Any) -> None:
        for name, callback in [*self._callbacks.items()]:
            with self._guarded(name):
                getattr(callback, event)(*given, **said)

    @contextmanager
    def _guarded(self, name: Tracker) -> Iterator[None]:
        """Leave the random numbers as they were, and give the tracker up where it fails."""
        import numpy as np

        python, numpy = random.getstate(), np.random.get_state()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the training
            self._callbacks.pop(name, None)
            _warn(name, error)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _callback(name: Tracker, rank: "Rank", s3: "S3Client") -> Any:
    """Return the Trainer's callback for a tracker, whose package is brought where the image lacks it."""
    variable = TRACKER_VARIABLES[name]
    if not os.environ.get(variable):
        raise LookupError(f"there is no {variable} here; put it into the team's secret")
    if importlib.util.find_spec(name) is None:
        folder = rank.scratch / "trackers"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.txt").write_text(f"{PACKAGES[name]}\n")
        packages = Environment(s3, rank.run, folder / name, code=folder, requirements=f"{name}.txt")
        sys.path += packages.make(wheels=None, installs=True)["PYTHONPATH"].split(":")  # the image's own come first
        importlib.invalidate_caches()
    for setting, value in _WANDB.items():
        os.environ.setdefault(setting, value)
    join_run(rank.run, name)
    from transformers.integrations import integration_utils

    make: Mapping[str, Callable[[], Any]] = integration_utils.INTEGRATION_TO_CALLBACK
    callback = make[name]()
    log.info("report to: %s", name)
    return callback


def _warn(name: str, error: Exception) -> None:
    first = str(error).strip().splitlines() or [""]
    log.warning("warning: report_to: %s is left out from here on: %s: %s", name, type(error).__name__, first[0])
