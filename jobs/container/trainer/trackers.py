"""Report a run's metrics to the organisation's Weights & Biases or MLflow as well, with callbacks of transformers.

All attempts of a run are one run in the tracker. Addresses and keys come from the job's environment, from the team's
secret (`secret_variables` in infra/settings.py). They are never passed as arguments, so they appear in no process list
and no log. If a tracker fails, a warning is logged and its curves end, but the training continues. Python's and NumPy's
random state is restored after each call, so that a tracker does not change the training's results.
"""

import importlib.util
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jobs.container.packages import Environment
from jobs.container.rank import Callback
from jobs.core.locations import S3Location
from jobs.spec.recipe import TRACKER_VARIABLES, Tracker

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")

PACKAGES: Mapping[Tracker, str] = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
"""Package to install if the image lacks the tracker's module."""

RUN_TAG = "trainyard.run"
"""The tag by which a later attempt finds its run in MLflow, which assigns its own ids."""

_MLFLOW = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Give up within seconds if the server does not answer, because cards wait meanwhile. The job's environment can change
these."""

_WANDB = {"WANDB_INIT_TIMEOUT": "30", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
"""The same for W&B, which also prints nothing and leaves the output to the launcher."""


def join_run(run: S3Location, name: Tracker) -> None:
    """Set the variables with which the tracker's library continues the run of earlier attempts.

    Keeps variables that the job's environment sets. Passes on MLflow's errors.
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
    """Call `join_run` for each tracker whose package and address or key exist, for scripts that report themselves."""
    for name, variable in TRACKER_VARIABLES.items():
        if os.environ.get(variable) and importlib.util.find_spec(name):
            try:
                join_run(run, name)
            except Exception as error:  # noqa: BLE001 - no error of a tracker may end the script
                _warn(name, error)


class Trackers(Callback):
    """Passes a Trainer's events to transformers' callbacks for trackers. Only rank 0 has any."""

    def __init__(self, names: Sequence[Tracker], rank: "Rank", s3: "S3Client | None") -> None:
        self._callbacks: dict[Tracker, Any] = {}
        self._latest: tuple[Any, ...] | None = None
        if not rank.is_first or s3 is None:
            return
        for name in names:
            with self._guarded(name):
                self._callbacks[name] = _callback(name, rank, s3)

    def on_train_begin(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        self._latest = args, state, control
        self._call("on_train_begin", args, state, control, **values)

    def on_log(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        self._call("on_log", args, state, control, **values)

    def log(self, values: Mapping[str, Any]) -> None:
        """Report values that the Trainer does not log: an evaluation or the result."""
        if self._latest is not None:
            numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self._call("on_log", *self._latest, logs=numbers)

    def finish(self) -> None:
        """Send all reported values. Afterwards the process may end in any way."""
        if self._latest is not None:
            self._call("on_train_end", *self._latest)
        if "wandb" in self._callbacks:
            with self._guarded("wandb"):
                import wandb

                wandb.finish()
        self._callbacks.clear()

    def _call(self, event: str, *given: Any, **values: Any) -> None:
        for name, callback in [*self._callbacks.items()]:
            with self._guarded(name):
                getattr(callback, event)(*given, **values)

    @contextmanager
    def _guarded(self, name: Tracker) -> Iterator[None]:
        """Preserve the random state, and drop the tracker if it fails."""
        import numpy as np

        python, numpy = random.getstate(), np.random.get_state()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no error of a tracker may end the training
            self._callbacks.pop(name, None)
            _warn(name, error)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _callback(name: Tracker, rank: "Rank", s3: "S3Client") -> Any:
    """Return the Trainer's callback for a tracker. Installs the tracker's package if the image lacks it."""
    variable = TRACKER_VARIABLES[name]
    if not os.environ.get(variable):
        raise LookupError(f"{variable} is not set; add it to the team's secret")
    if importlib.util.find_spec(name) is None:
        folder = rank.scratch / "trackers"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.txt").write_text(f"{PACKAGES[name]}\n")
        packages = Environment(s3, rank.run, folder / name, code=folder, requirements=f"{name}.txt")
        # At the end, so that the image's packages come first.
        sys.path += packages.make(wheels=None, installs=True)["PYTHONPATH"].split(":")
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
    log.warning("warning: report_to: %s is disabled from here on: %s: %s", name, type(error).__name__, first[0])
