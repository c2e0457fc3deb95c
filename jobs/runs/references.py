"""Resolve `run://name/path` references to S3 locations when a spec is submitted.

A name is looked up, in this order, as an earlier document of the same file, a run id, and a spec name, which stands for
the team's newest run of that spec. `name@best` is the best point of the team's newest sweep of that name.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jobs.aws.connection import Aws
from jobs.core.errors import NotFoundError, UsageError, did_you_mean
from jobs.core.locations import RUN, S3Location, run_parts
from jobs.core.run import spec_name
from jobs.core.stage import DeployedStage
from jobs.runs.batch import find_job
from jobs.runs.job import CANCELLED, UNSUCCESSFUL
from jobs.runs.logs import may_have_successor
from jobs.runs.run_records import read_spec
from jobs.runs.storage import StoredRun, readable_receipt, runs_of_team
from jobs.runs.sweeps import best, progress_text, read_sweep, standings
from jobs.spec.arguments import ARTIFACT_FOLDER, TOKENIZER_FOLDER
from jobs.spec.catalog import CATALOG
from jobs.spec.plan import Plan
from jobs.spec.spec import JobSpec
from jobs.spec.submit_job import MAX_DEPENDENCIES, Dependency
from jobs.spec.sweep import BEST


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A run found by its name."""

    run_id: str
    location: S3Location
    job: str | None
    """Kind of the job, or None if Batch and the receipt have lost it."""
    queue: str = ""
    job_id: str | None = None
    ended: bool = False


def resolve(
    aws: Aws, stage: DeployedStage, spec: JobSpec, *, earlier: Sequence[Plan] = (), later: Collection[str] = ()
) -> tuple[JobSpec, tuple[Dependency, ...]]:
    """Replace all references in a spec with S3 locations, and return the runs that must end before the job can start.

    `earlier` are the plans submitted before this spec from the same file; `later` names the specs after it.
    Raises NotFoundError if a run does not exist, UsageError if it has failed or cannot be read.
    """
    arguments = spec.entrypoint_arguments()
    found: dict[str, _Found] = {}
    places: dict[str, str] = {}
    needed: dict[str, list[str]] = {}
    for argument, location, expected in arguments.sources():
        if not location.startswith(RUN):
            continue
        name, path = run_parts(location)
        if name not in found:
            what = f"arguments.{argument}: {location}"
            found[name] = _find(aws, stage, spec.team, name, what=what, earlier=earlier, later=later)
        run = found[name]
        if expected in (ARTIFACT_FOLDER, TOKENIZER_FOLDER) and not path:
            _check_kind(run, f"arguments.{argument}: {location}", arguments.artifact_kind(argument))
        places[argument] = str(run.location / path if path else run.location)
        if not run.ended:
            needed.setdefault(name, []).append(argument)
    if not places:
        return spec, ()
    resolved = arguments.with_sources(**places).model_dump(mode="json", exclude_none=True)
    dependencies: dict[str, Dependency] = {}
    for name, of_run in needed.items():
        run = found[name]
        known = dependencies[run.run_id].arguments if run.run_id in dependencies else ()
        dependencies[run.run_id] = Dependency(
            run_id=run.run_id, job_id=run.job_id, queue=run.queue, arguments=(*known, *of_run)
        )
    if len(dependencies) > MAX_DEPENDENCIES:
        raise UsageError(
            f"{spec.name} waits for {len(dependencies)} runs, but AWS Batch allows at most {MAX_DEPENDENCIES}",
            next_step="wait until some of them have ended",
        )
    return spec.model_copy(update={"arguments": resolved}), tuple(dependencies.values())


def _find(
    aws: Aws,
    stage: DeployedStage,
    team: str,
    name: str,
    *,
    what: str,
    earlier: Sequence[Plan],
    later: Collection[str],
) -> _Found:
    """Find a run by its name. Errors begin with `what`: the argument and its value."""
    if name.endswith(BEST):
        return _best(aws, stage, team, name.removesuffix(BEST), what=what, earlier=earlier)
    for plan in earlier:
        if name in (plan.spec.name, plan.run_id):
            if plan.sweep is not None:
                raise _is_sweep(what, name, "submit the spec that reads it after the sweep has ended")
            if plan.spec.team != team:
                raise UsageError(f"{what} is a run of team '{plan.spec.team}', which team '{team}' cannot read")
            return _Found(run_id=plan.run_id, location=plan.run_location, job=plan.spec.job, queue=plan.queue)
    if name in later:
        raise UsageError(
            f"{what} comes later in the file, and runs are submitted in the file's order",
            next_step=f"move '{name}' before the spec that reads it",
        )
    return _stored(aws, stage, _newest(aws, stage, team, name, what=what, earlier=earlier), what)


def _newest(aws: Aws, stage: DeployedStage, team: str, name: str, *, what: str, earlier: Sequence[Plan]) -> StoredRun:
    """Return the team's newest run of a name or an id. Raises NotFoundError with the closest name if there is none."""
    matching = [
        run for run in runs_of_team(aws, stage, team, prefix=name) if name in (run.run_id, spec_name(run.run_id))
    ]
    if matching:
        return matching[-1]
    known = {word for run in runs_of_team(aws, stage, team) for word in (run.run_id, spec_name(run.run_id))}
    known |= {plan.spec.name for plan in earlier}
    raise NotFoundError(
        f"{what}: team '{team}' has no run of that name or id{did_you_mean(name, known)}",
        next_step=f"trainyard list --team {team}, or submit '{name}' first",
    )


def _best(aws: Aws, stage: DeployedStage, team: str, name: str, *, what: str, earlier: Sequence[Plan]) -> _Found:
    """Find the best point of the newest sweep of a name. Raises UsageError if the sweep is running or has none."""
    if any(name in (plan.spec.name, plan.run_id) for plan in earlier):
        raise UsageError(
            f"{what}: the best point is known only after the sweep has ended",
            next_step="submit the spec that reads it separately, after that",
        )
    run = _newest(aws, stage, team, name, what=what, earlier=())
    record, spec = read_sweep(aws, run.location), read_spec(aws, run.location)
    if record is None or spec is None or spec.sweep is None:
        raise UsageError(f"{what} is {run.run_id}, which is not a sweep", next_step=f"remove {BEST}")
    job = find_job(aws, stage, run.run_id)
    found = standings(aws, run.location, record, job)
    if job is not None and not job.ended:
        raise UsageError(
            f"{what} is {run.run_id}, which is still running: {progress_text(found)}",
            next_step=f"trainyard sweep {run.run_id}; submit again when it has ended, or name a point by its run id",
        )
    first = best(found, spec.sweep)
    if first is None:
        metric = f"'{spec.sweep.metric}'" if spec.sweep.metric else "a metric to rank by"
        raise UsageError(
            f"{what} is {run.run_id}, but none of its points has succeeded with {metric}: {progress_text(found)}",
            next_step=f"trainyard sweep {run.run_id}, then trainyard resume {run.run_id}",
        )
    return _Found(run_id=first.point.run_id, location=first.location, job=spec.job, ended=True)


def _is_sweep(what: str, name: str, next_step: str) -> UsageError:
    return UsageError(
        f"{what} is a sweep, whose points are separate runs; run://{name}{BEST}/… is the best of them",
        next_step=next_step,
    )


def _stored(aws: Aws, stage: DeployedStage, run: StoredRun, what: str) -> _Found:
    """Find the state of a run that was submitted earlier. Raises UsageError if it will produce nothing more."""
    job = find_job(aws, stage, run.run_id)
    if job is None:
        # Batch has forgotten the job. The run's files are checked later, like any other input.
        receipt = readable_receipt(aws, run.location)
        if receipt is not None and receipt.state == "failed":
            raise _failed(run, what, "has failed")
        return _Found(
            run_id=run.run_id, location=run.location, job=receipt.job if receipt is not None else None, ended=True
        )
    if may_have_successor(stage, job):
        raise UsageError(
            f"{what} is {run.run_id}, which has no job now: its Spot job ended, and it may continue elsewhere",
            next_step="submit again in a minute",
        )
    if job.home and not job.ended:  # Batch does not know jobs of other regions
        raise UsageError(
            f"{what} is {run.run_id}, which moved to stage {job.stage} ({job.region}): a run cannot wait for it there",
            next_step=f"submit again when it has ended: trainyard status {run.run_id}",
        )
    if job.points:
        raise _is_sweep(what, spec_name(run.run_id), f"trainyard sweep {run.run_id}")
    if job.state in UNSUCCESSFUL:
        raise _failed(run, what, "was cancelled" if job.state == CANCELLED else "has failed")
    return _Found(
        run_id=run.run_id,
        location=run.location,
        job=job.kind,
        queue=job.queue,
        job_id=job.id,
        ended=job.state == "SUCCEEDED",
    )


def _check_kind(run: _Found, what: str, wanted: str | None) -> None:
    """Raise UsageError if the run makes no artifact, or another kind than `wanted`."""
    kind = CATALOG.get(run.job or "")
    if kind is None:
        return
    if kind.makes is None:
        raise UsageError(f"{what} is a '{kind.name}', which makes no artifact", next_step=_makers_of(wanted))
    if wanted not in (None, kind.makes):
        raise UsageError(f"{what} makes a '{kind.makes}', not a '{wanted}'", next_step=_makers_of(wanted))


def _makers_of(wanted: str | None) -> str | None:
    makers = [kind.name for kind in CATALOG.values() if kind.makes is not None and wanted in (None, kind.makes)]
    return f"name a run of {' or '.join(makers)}" if makers else None


def _failed(run: StoredRun, what: str, how: str) -> UsageError:
    return UsageError(
        f"{what} is {run.run_id}, which {how}",
        next_step=f"trainyard logs {run.run_id}, then submit it again; or name another run by its id",
    )
