"""The organisation's own runs as measurements: how fast each trained, and what came before its first step and after."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jobs.aws.connection import Aws
from jobs.core.errors import TrainyardError
from jobs.core.instance_types import INSTANCE_TYPES
from jobs.core.records import Attempt, Receipt
from jobs.core.stage import DeployedStage
from jobs.core.words import counted
from jobs.money.estimate import Measurement, model_name
from jobs.money.phases import ended_at
from jobs.runs.read_records import read_spec
from jobs.runs.storage import StoredRun, read_receipt, stored_runs
from jobs.spec.recipe import hpu_trainer
from jobs.spec.spec import JobSpec

NEWEST_RUNS = 300
"""So many of the newest are looked at."""

_READERS = 16


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run that succeeded, with what it was asked for."""

    run_id: str
    spec: JobSpec
    receipt: Receipt

    @property
    def last(self) -> Attempt:
        return self.receipt.attempts[-1]

    @property
    def place(self) -> str | None:
        """The instance type that it ran on; None: it ran on a machine that stood in for one."""
        row = INSTANCE_TYPES.get(self.last.instance_type)
        return row.name if row is not None and row.accelerator == self.last.accelerator else None


def past_runs(aws: Aws, stage: DeployedStage, *, job: str) -> list[PastRun]:
    """Return the runs of a kind that succeeded, the newest first; what cannot be read is left out."""
    _ = aws.s3  # made before threads share it
    runs = stored_runs(aws, stage)[-NEWEST_RUNS:]
    with ThreadPoolExecutor(_READERS) as threads:
        found = threads.map(lambda run: _past_run(aws, run, job), reversed(runs))
        return [run for run in found if run is not None]


def measured(runs: Sequence[PastRun], spec: JobSpec, place: str | None) -> Iterator[Measurement]:
    """Yield how fast those of the runs were that trained the spec's model there, on as many nodes and as many ranks."""
    arguments = spec.entrypoint_arguments()
    for run in runs:
        theirs, last = run.spec.entrypoint_arguments(), run.last
        speed = run.receipt.result.get("train_samples_per_second")
        if (
            run.place != place
            or not speed
            or last.training_started_at is None
            or last.nnodes != spec.resources.nnodes
            or model_name(theirs) != model_name(arguments)
            or theirs.longest_sequence != arguments.longest_sequence
            or (last.accelerator == "hpu" and hpu_trainer(theirs) != hpu_trainer(arguments))
        ):
            continue
        steps = last.last_step - last.start_step
        trained_seconds = steps * getattr(theirs, "global_batch_size", 1) / speed
        worked_seconds = (ended_at(last) - last.training_started_at).total_seconds()
        yield Measurement(
            name=run.run_id,
            samples_per_second=float(speed),
            start_seconds=(last.training_started_at - last.started_at).total_seconds(),
            rest_seconds=max(0.0, worked_seconds - trained_seconds),
            note=f"{last.nnodes} x {last.instance_type}"
            if place
            else f"{last.accelerator}, {counted(last.world_size, 'rank')}",
        )


def _past_run(aws: Aws, run: StoredRun, job: str) -> PastRun | None:
    try:
        receipt = read_receipt(aws, run.location)
        if receipt is None or receipt.job != job or receipt.state != "succeeded":
            return None
        spec = read_spec(aws, run.location)
    except TrainyardError:  # another release's
        return None
    return PastRun(run_id=run.run_id, spec=spec, receipt=receipt) if spec is not None else None
