"""Submit specs and follow runs from Python, with the checks, runs and errors of the command `trainyard`.

    run = trainyard.submit("my-spec.yaml", changes={"arguments.epochs": 3, "max_usd": 20})
    receipt = run.wait(on_line=print)          # raises trainyard.JobFailedError if the job fails
    print(receipt.result, run.metrics()[-1])
    run.fetch("runs")

    for run in trainyard.runs(since=timedelta(days=2)):
        print(run.id, run.status().state)

For laptops and notebooks; training scripts do not need it. In an environment other than the repository's, `pip install
--editable 'REPOSITORY[client]'` installs it. Like the AWS CLI, it uses boto3's settings: a profile, or the variables
that `trainyard local env` prints.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import ParamSpec

from jobs.aws.connection import Aws
from jobs.aws.errors import explain
from jobs.core.errors import JobFailedError, TimedOutError, TrainyardError, UsageError
from jobs.core.locations import S3Location
from jobs.core.records import Receipt
from jobs.core.run import run_prefix
from jobs.core.stage import DEFAULT_STAGE, DeployedStage
from jobs.runs import batch, storage
from jobs.runs.cancel import cancel_job
from jobs.runs.failure import raise_failure
from jobs.runs.job import Job
from jobs.runs.logs import LogLine, LogReader, follow
from jobs.runs.planning import plan_run
from jobs.runs.spec_file import read_spec, read_spec_text
from jobs.runs.submit import send
from jobs.spec.plan import Plan

__all__ = [
    "JobFailedError",
    "RunHandle",
    "TimedOutError",
    "TrainyardError",
    "UsageError",
    "find_run",
    "plan",
    "runs",
    "submit",
]

P = ParamSpec("P")
T = TypeVar("T")


def _explained(function: Callable[P, T]) -> Callable[P, T]:
    """Raise TrainyardError in place of boto3's errors."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except TrainyardError:
            raise
        except Exception as error:
            if explained := explain(error):
                raise explained from error
            raise

    return call


@dataclass(frozen=True)
class RunHandle:
    """A run: all attempts of one submission, and its files."""

    id: str
    team: str
    location: str
    """The folder of its files, as `s3://bucket/team/id/`."""
    _aws: Aws = field(repr=False, compare=False)
    _stage: DeployedStage = field(repr=False, compare=False)

    @_explained
    def status(self) -> Job:
        """Return its newest Batch job: `state`, `reason`, `attempts`, `queue` and times.

        Raises NotFoundError once Batch has forgotten it, a week after its end; `receipt` works longer.
        """
        return batch.job_of(self._aws, self._stage, self.id)

    @_explained
    def wait(
        self, *, timeout_seconds: float | None = None, on_line: Callable[[str], object] = lambda _: None
    ) -> Receipt | None:
        """Wait for its end and return its receipt, or None for a job without one. Ctrl-C stops only the waiting.

        Calls `on_line` with each line of its log. Raises JobFailedError if it failed or was cancelled, and
        TimedOutError if it exceeded its own time limit, or did not end within `timeout_seconds`.
        """
        reader = LogReader(self._aws, self._stage.log_group)

        def show(what: Job | LogLine | Receipt) -> None:
            if isinstance(what, LogLine):
                on_line(what.text)

        first = batch.job_of(self._aws, self._stage, self.id)
        job = follow(self._aws, self._stage, first.id, reader=reader, show=show, timeout_seconds=timeout_seconds)
        receipt = self.receipt()
        raise_failure(job, cause=batch.cause_of_failure(self._aws, self._stage, job), receipt=receipt)
        return receipt

    @_explained
    def logs(self, *, tail: int | None = None) -> list[str]:
        """Return the lines of its log, of all attempts and nodes; with `tail`, only the last ones."""
        reader = LogReader(self._aws, self._stage.log_group)
        jobs = batch.jobs_of(self._aws, self._stage, self.id)
        if tail is None:
            return [line.text for job in jobs for line in reader.read(job.log_streams)]
        lines = [line.text for job in jobs for line in reader.read_last(job.log_streams, tail)]
        return lines[max(0, len(lines) - tail) :]

    @_explained
    def metrics(self) -> list[dict[str, Any]]:
        """Return its metrics so far, one dictionary per logged step: `step`, `time`, and values such as `loss`."""
        return storage.read_metrics(self._aws, self._place)

    @_explained
    def receipt(self) -> Receipt | None:
        """Return its receipt (`result`, attempts with time and cost), or None if it has not written one."""
        return storage.readable_receipt(self._aws, self._place)

    @_explained
    def fetch(self, folder: str | Path = "runs", *, checkpoints: bool = False) -> Path:
        """Download its files into `folder`/`id`, and return that path. With `checkpoints`, also its checkpoints."""
        target = Path(folder) / self.id
        for _ in storage.fetch(self._aws, self._place, target, checkpoints=checkpoints):
            pass
        return target

    @_explained
    def cancel(self, reason: str = "") -> bool:
        """Stop it; its newest complete checkpoint is kept. Return False if it had already ended."""
        job = batch.job_of(self._aws, self._stage, self.id)
        return cancel_job(self._aws, self._stage, job, reason=reason)

    @property
    def _place(self) -> S3Location:
        return S3Location.parse(self.location)


@_explained
def plan(
    spec: Mapping[str, Any] | str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    stage: str | None = None,
    profile: str | None = None,
    region: str | None = None,
) -> Plan:
    """Check a spec and its inputs, and return what `submit` would submit: queue, instances, prices and notes.

    The options are those of `submit`. Raises UsageError with everything that is wrong.
    """
    _, _, planned = _planned(spec, changes, stage, profile, region)
    return planned


@_explained
def submit(
    spec: Mapping[str, Any] | str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    stage: str | None = None,
    profile: str | None = None,
    region: str | None = None,
) -> RunHandle:
    """Check a spec, submit it as a job, and return its run. On AWS this costs money: `plan` has the price, and the
    spec's `max_usd` limits it.

    `spec` is a dictionary, or the path of a file with one spec. `changes` replaces keys, as in
    `{"arguments.epochs": 3}`. `stage` is TRAINYARD_STAGE by default, else `dev`. Raises UsageError with everything
    that is wrong, before anything is submitted.
    """
    aws, deployed, planned = _planned(spec, changes, stage, profile, region)
    send(aws, planned)
    return RunHandle(planned.run_id, planned.spec.team, str(planned.run_location), aws, deployed)


@_explained
def find_run(
    name: str, *, stage: str | None = None, profile: str | None = None, region: str | None = None
) -> RunHandle:
    """Return a run by its id, the beginning of one, or its spec's name (its newest run). Raises NotFoundError."""
    aws, deployed = _connect(stage, profile, region)
    found = storage.find_run(aws, deployed, name)
    return RunHandle(found.run_id, found.team, str(found.location), aws, deployed)


@_explained
def runs(
    *,
    since: timedelta | datetime = timedelta(days=7),
    team: str | None = None,
    stage: str | None = None,
    profile: str | None = None,
    region: str | None = None,
) -> list[RunHandle]:
    """Return the runs that Batch remembers, the newest first: unfinished ones, and ended ones for at least a week.

    `since` is the time that has passed since their submission, or a time with a zone. `team` selects one team's runs;
    by default, all teams'.
    """
    aws, deployed = _connect(stage, profile, region)
    moment = datetime.now(timezone.utc) - since if isinstance(since, timedelta) else since
    jobs = batch.list_jobs(aws, deployed, since=moment, team=team)
    folders = [S3Location(deployed.run_bucket, run_prefix(job.team, job.run_id)) for job in jobs]
    return [RunHandle(job.run_id, job.team, str(at), aws, deployed) for job, at in zip(jobs, folders, strict=True)]


def _connect(stage: str | None, profile: str | None, region: str | None) -> tuple[Aws, DeployedStage]:
    aws = Aws(profile, region)
    return aws, batch.read_stage(aws, stage or os.environ.get("TRAINYARD_STAGE") or DEFAULT_STAGE)


def _planned(
    spec: Mapping[str, Any] | str | Path,
    changes: Mapping[str, Any] | None,
    stage: str | None,
    profile: str | None,
    region: str | None,
) -> tuple[Aws, DeployedStage, Plan]:
    overrides = [f"{key}={_yaml(value, what=key)}" for key, value in (changes or {}).items()]
    if isinstance(spec, Mapping):
        _, changed = read_spec_text(_yaml(dict(spec), what="the spec"), overrides, origin="the spec")
    else:
        changed = read_spec(Path(spec), overrides)
    if changed.sweep is not None:
        raise UsageError("the spec is a sweep", next_step="trainyard submit SPEC, or submit its points in a loop")
    aws, deployed = _connect(stage, profile, region)
    return aws, deployed, plan_run(aws, deployed, changed)


def _yaml(value: object, *, what: str) -> str:
    """Return a value as JSON, which is YAML too. Paths become text."""

    def text(part: object) -> str:
        if isinstance(part, Path):
            return str(part)
        raise TypeError(f"a {type(part).__name__} cannot stand in a spec")

    try:
        return json.dumps(value, default=text, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: {error}", next_step="use text, numbers, booleans, lists and dictionaries") from None
