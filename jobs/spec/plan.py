"""Plans a submission: from a JobSpec and a stage to the SubmitJob request, with queue, reasons and price. Pure."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from jobs.core.errors import ConfigurationError, TrainyardError, UsageError, raise_all
from jobs.core.images import child_name
from jobs.core.instance_types import InstanceType
from jobs.core.locations import DATA, S3Location
from jobs.core.queues import CAPACITY_NAMES, Capacity
from jobs.core.run import ARGUMENTS, run_prefix, submitted_at
from jobs.core.stage import NOT_BUILT_TAG, SHARED_PREFIX, DeployedStage, deploy_command
from jobs.core.words import counted
from jobs.money.budget import MIN_SECONDS, NOTHING_SPENT, Spent, usd_per_hour
from jobs.money.prices import Prices, recorded
from jobs.spec.arguments import Arguments, JobKind
from jobs.spec.code import Pack
from jobs.spec.launcher_options import RENDEZVOUS_WAIT_SECONDS, LauncherOptions
from jobs.spec.placement import Placement, place
from jobs.spec.recipe import TRACKER_VARIABLES, Recipe
from jobs.spec.spec import JobSpec, PlannedPoint
from jobs.spec.submit_job import SUBMITTER_TAG, Dependency, excess, submit_job_request
from jobs.spec.sweep import SweepSize, points


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """An ended run that a plan resumes."""

    job_ids: tuple[str, ...]
    """Ids of the run's previous jobs, newest last; at least one."""
    at: datetime
    """Time at which the run is resumed."""
    spent: Spent = NOTHING_SPENT
    """Hours and dollars of the attempts so far."""
    allow_changes: bool = False
    """Whether to resume a checkpoint that was saved with other arguments."""


@dataclass(frozen=True, kw_only=True)
class ArgumentsFile:
    """The arguments of a job as a file of its run, named by a hash so that no other job of the run overwrites it."""

    name: str
    content: bytes

    @classmethod
    def of(cls, arguments: Arguments) -> "ArgumentsFile":
        content = arguments.model_dump_json(exclude_none=True).encode()
        return cls(name=f"{ARGUMENTS}{hashlib.sha256(content).hexdigest()[:16]}.json", content=content)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A submission, ready to send, and its price."""

    run_id: str
    run_location: S3Location
    spec: JobSpec
    request: dict[str, Any]
    """The arguments of SubmitJob, exactly as they will be sent."""
    queue: str
    queue_reason: str
    capacity: Capacity
    """Capacity of the expected price. A Spot queue may fall back to On-Demand instances if Spot has no capacity."""
    instance_types: tuple[InstanceType, ...]
    """Types on which Batch may start the job, in its order."""
    accelerator: str
    accelerator_reason: str
    nnodes: int
    nproc_per_node: int
    prices: Prices
    """Price of one instance of the first type for an hour: AWS's current price, or the recorded price."""
    notes: tuple[str, ...]
    """Sentences to read before submitting."""
    dependencies: tuple[Dependency, ...] = ()
    """Runs that must end before this one starts."""
    resumed: ResumedRun | None = None
    """The run that is resumed; None for a new run."""
    pack: Pack | None = None
    """Code to upload before the job starts. None if the job has no custom code, or it is already on S3."""
    arguments_file: ArgumentsFile | None = None
    """The job's arguments, if they are too long for its command line."""
    container_arguments: Arguments
    """The arguments as passed to the job's container."""
    sweep: SweepSize | None = None
    """Number of points and workers, if the job is a sweep."""
    points: tuple[PlannedPoint, ...] = ()
    """Points of a new sweep, whose specs must be uploaded before it starts."""

    @property
    def instance_type(self) -> InstanceType:
        """Return the first type, whose price is expected."""
        return self.instance_types[0]

    @property
    def instances(self) -> int:
        """Return the maximum number of instances in use at once."""
        return self.nnodes * (self.sweep.workers if self.sweep else 1)

    @property
    def on_demand_usd_per_hour(self) -> float:
        return self.prices.on_demand.usd_per_hour * self.instances

    @property
    def spot_usd_per_hour(self) -> float:
        return self.prices.spot.usd_per_hour * self.instances

    @property
    def usd_per_hour(self) -> float:
        """Return the expected price per hour of all instances, in US dollars."""
        return self.spot_usd_per_hour if self.capacity == "spot" else self.on_demand_usd_per_hour

    @property
    def inputs(self) -> tuple[tuple[str, str, str], ...]:
        """Return `(argument, resolved location, description)` for every input of the job."""
        return tuple(self.spec.entrypoint_arguments().sources())

    def with_job_ids(self, job_ids: Mapping[str, str]) -> "Plan":
        """Return the plan with the Batch job ids of dependencies that were submitted together with it.

        `job_ids` maps run ids to job ids.
        """
        depends_on = [run.depends_on(job_ids.get(run.run_id)) for run in self.dependencies]
        return replace(self, request={**self.request, "dependsOn": depends_on}) if depends_on else self

    def submitted_by(self, identity: str) -> "Plan":
        """Return the plan with a tag that names who submits it, in characters that AWS allows in tags."""
        tags = {**self.request["tags"], SUBMITTER_TAG: re.sub(r"[^\w +=.:/@-]", "_", identity)[:256]}
        return replace(self, request={**self.request, "tags": tags}) if identity else self


def plan(
    spec: JobSpec,
    stage: DeployedStage,
    *,
    run_id: str,
    dependencies: tuple[Dependency, ...] = (),
    resumed: ResumedRun | None = None,
    prices_of: Callable[[InstanceType], Prices] = recorded,
    room_of: Callable[[Placement], int] | None = None,
    points_left: int | None = None,
) -> Plan:
    """Return the plan of a submission: place the job, check budgets and arguments, resolve inputs, build the request.

    `prices_of` returns the prices of an instance type. A Spot price other than the recorded one is passed to the job,
    whose budget and receipt use it.

    `room_of` returns how many instances a job's queue can hold, which limits the workers of a sweep. It is called only
    for sweeps; None means unknown.

    `points_left` is the number of remaining points of a resumed sweep; None means all.
    References to runs, including those in `dependencies`, must already be resolved (jobs.runs.references).
    Raises UsageError if the stage cannot run the spec or a budget is used up, ConfigurationError if the stage lacks
    something that the kind needs.
    """
    now = resumed.at if resumed else submitted_at(run_id)
    arguments = spec.entrypoint_arguments()
    in_s3 = with_s3_locations(spec, stage)
    container_arguments = _with_locations(in_s3, _mounts(spec, stage))
    row = stage.row_of(accelerated=spec.kind.accelerated)
    errors = [*_errors_of(lambda: _check_compiling(arguments, row))]
    if spec.team in stage.teams:
        errors += [
            *_errors_of(lambda: _check_team_budget(spec.team, stage, at=now)),
            *_errors_of(lambda: _check_push(arguments, spec.team, stage)),
            *_errors_of(lambda: _check_trackers(arguments, spec, stage)),
            *_errors_of(lambda: _check_env(spec, stage)),
            *_errors_of(lambda: _check_team_reads(in_s3, spec.team, stage)),
        ]
    try:
        placement = place(spec, stage)
    except UsageError as error:
        raise_all([error, *errors])
        raise
    prices = {each: prices_of(each) for each in placement.instance_types}
    raise_all(
        [
            *errors,
            *_errors_of(lambda: _check_run_budget(spec, placement, resumed, prices)),
            *_errors_of(lambda: _check_ranks(spec, arguments, placement)),
        ]
    )
    notes = _notes(spec, stage, placement, dependencies, at=now)
    run_location = S3Location(stage.run_bucket, run_prefix(spec.team, run_id))
    sweep = None
    if spec.sweep is not None:
        room = room_of(placement) if room_of else None
        sweep = SweepSize.of(spec.sweep, points_left or len(points(spec.sweep)), room=room)
    options = _launcher_options(spec, placement, prices, allow_changes=resumed is not None and resumed.allow_changes)
    request_with = functools.partial(
        submit_job_request,
        spec,
        stage,
        placement,
        run_id=run_id,
        run_location=run_location,
        dependencies=dependencies,
        resumed_job_id=resumed.job_ids[-1] if resumed else None,
        sweep=sweep,
    )
    # A sweep's workers read the arguments of their points from S3.
    job_flags = [] if sweep else container_arguments.to_flags()
    request = request_with(flags=[*options.to_flags(), spec.job, *job_flags])
    arguments_file = None
    if excess(request) > 0:
        arguments_file = ArgumentsFile.of(container_arguments)
        options = options.model_copy(update={"arguments_file": arguments_file.name})
        request = request_with(flags=[*options.to_flags(), spec.job])
        if (more := excess(request)) > 0:
            raise UsageError(
                f'env: the variables have {more:,} more characters than a job has room for, counting {{"name": …}} '
                "around each, and escapes",
                next_step="put long values into a file of the code, or into a script's parameters",
            )
    return Plan(
        run_id=run_id,
        run_location=run_location,
        spec=spec.model_copy(update={"arguments": in_s3.model_dump(mode="json", exclude_none=True)}),
        request=request,
        queue=placement.queue_name,
        queue_reason=placement.queue_reason,
        capacity=placement.queue.capacity,
        instance_types=placement.instance_types,
        accelerator=placement.accelerator,
        accelerator_reason=placement.accelerator_reason,
        nnodes=placement.nnodes,
        nproc_per_node=placement.nproc_per_node,
        prices=prices[placement.instance_type],
        notes=tuple(notes),
        dependencies=dependencies,
        resumed=resumed,
        arguments_file=arguments_file,
        container_arguments=container_arguments,
        sweep=sweep,
    )


def with_s3_locations(spec: JobSpec, stage: DeployedStage) -> Arguments:
    """Return a spec's arguments with `data://` locations replaced by locations in the stage's data bucket."""
    return _with_locations(spec.entrypoint_arguments(), {DATA: f"s3://{stage.data_bucket}/"})


def _errors_of(check: Callable[[], None]) -> Iterator[TrainyardError]:
    try:
        check()
    except UsageError as error:
        yield error


def _launcher_options(
    spec: JobSpec, placement: Placement, prices: Mapping[InstanceType, Prices], *, allow_changes: bool
) -> LauncherOptions:
    spot_usd_per_hour, *others = (
        None if found.spot == recorded(row).spot else found.spot.usd_per_hour for row, found in prices.items()
    )
    names = (row.name for row in placement.instance_types[1:])
    is_node_group = spec.resources.is_node_group
    return LauncherOptions(
        instance_type=placement.instance_type.name,
        nproc_per_node=placement.nproc_per_node,
        capacity=placement.queue.capacity,
        spot_usd_per_hour=spot_usd_per_hour,
        other_instance_types=dict(zip(names, others, strict=True)) or None,
        **spec.limits(),
        rendezvous_min_nnodes=spec.resources.fewest_nnodes if is_node_group else None,
        rendezvous_attempts=spec.attempts if is_node_group else None,
        sweep_attempts=spec.attempts if spec.sweep else None,
        sweep_timeout_seconds=3600 * (spec.timeout_hours or spec.kind.timeout_hours) if spec.sweep else None,
        halving=spec.sweep.comparison(spec.entrypoint_arguments()) if spec.sweep else None,
        allow_changes=allow_changes,
    )


def _notes(
    spec: JobSpec, stage: DeployedStage, placement: Placement, dependencies: Sequence[Dependency], *, at: datetime
) -> list[str]:
    """Return notes to read before submitting."""
    row = placement.instance_type
    wanted, local = placement.nproc_per_node_on_aws, placement.nproc_per_node
    notes = _image_notes(spec.kind, row, stage)
    stop = stage.stage_budget_stop
    if stop is not None and not stop.is_over(at):
        notes.append(
            f"stage '{stage.name}' has used up its monthly budget of {stop.budget_usd:g} USD: the job waits until "
            f"{stop.until[:10]} or until the budget is raised"
        )
    if limited := stage.hourly_stop(spec.team):
        notes.append(f"{limited}: the job waits until running jobs end, or until the limit is raised")
    if wanted < row.processes and row.accelerators and not spec.kind.one_process:
        notes.append(
            f"uses {wanted} of the {row.accelerators} {row.card}s of a {row.name}; you pay for the whole instance"
        )
    if spec.resources.is_node_group:
        notes.append(_node_group_note(spec))
    notes += [note for run in dependencies if (note := run.note(stage))]
    if local < wanted:
        notes.append(
            f"runs {counted(local, 'rank')} on this machine instead of {wanted}, with the same global batch size"
        )
    return notes


def _node_group_note(spec: JobSpec) -> str:
    """Return a note on the extra costs of nodes that start one by one instead of together."""
    nnodes, fewest = spec.resources.nnodes, spec.resources.fewest_nnodes
    start = f"; after {RENDEZVOUS_WAIT_SECONDS / 60:g} minutes, {fewest} are enough to start" if fewest < nnodes else ""
    return (
        f"the {nnodes} nodes start one by one, and cost money while they wait for each other{start}; if one is "
        f"reclaimed, all save and restart, which counts as one of {counted(spec.attempts, 'attempt')}"
    )


def _with_locations(arguments: Arguments, places: Mapping[str, str]) -> Arguments:
    """Return `arguments` with each prefix in `places` replaced in the locations of inputs."""
    return arguments.with_sources(
        **{
            name: place + location.removeprefix(prefix)
            for name, location, _ in arguments.sources()
            for prefix, place in places.items()
            if location.startswith(prefix)
        }
    )


def _mounts(spec: JobSpec, stage: DeployedStage) -> dict[str, str]:
    """Return S3 prefixes that the job sees as files, with their mount paths.

    Accelerator instances have the shared data mounted, if the stage has a file system for it.
    """
    if stage.shared_data_mount is None or stage.emulated or not spec.kind.accelerated:
        return {}
    return {f"s3://{stage.data_bucket}/{SHARED_PREFIX}/": f"{stage.shared_data_mount.rstrip('/')}/"}


def _image_notes(kind: JobKind, row: InstanceType, stage: DeployedStage) -> list[str]:
    """Return notes on the image that the job will run in. Raises ConfigurationError if it does not exist yet."""
    deployed = stage.job_images.get(kind.name)
    if deployed is None:
        return []
    name = child_name(row.image, kind.image)
    pushed = stage.images.get((name, stage.releases.get(row.image, "")), deployed)
    deploy = deploy_command(stage.name, "jobs", emulated=stage.emulated)
    if stage.emulated:
        name = child_name("cpu", kind.image)
    if deployed.endswith(f":{NOT_BUILT_TAG}"):
        push = f"trainyard --stage {stage.name} images push {name}, then " if pushed == deployed else ""
        raise ConfigurationError(
            f"the image of '{kind.name}' jobs had not been pushed when stage '{stage.name}' was deployed: its job "
            f"definitions contain {deployed}",
            next_step=push + deploy,
        )
    if pushed.endswith(f":{NOT_BUILT_TAG}"):
        return [f"runs in {deployed}, which the stage no longer records: push an image before you deploy again"]
    if pushed != deployed and stage.image_tag is None:
        return [f"runs in {deployed}; a newer image was pushed: '{deploy}' rolls it out"]
    return []


def _check_push(arguments: Arguments, team: str, stage: DeployedStage) -> None:
    """Raise UsageError if the arguments push to the Hugging Face Hub but the team has no secret for a token.

    This applies on the emulator too, which passes none of its environment's keys to jobs.
    """
    repository = arguments.hub_repository
    if repository is not None and team not in stage.huggingface_teams:
        raise UsageError(
            f"arguments.push_to_hub: team '{team}' has no secret for a Hugging Face token in stage '{stage.name}', so "
            f"the job cannot push to {repository}",
            next_step="set the team's huggingface_token in infra/settings.py, deploy, and store a token in the secret; "
            "or remove push_to_hub",
        )


def _check_env(spec: JobSpec, stage: DeployedStage) -> None:
    """Raise UsageError if the spec sets a variable that comes from the team's secret: ECS refuses both at once."""
    secret = [
        *stage.secret_variables.get(spec.team, ()),
        *(["HF_TOKEN"] if spec.team in stage.huggingface_teams else []),
    ]
    if both := [name for name in spec.env if name in secret]:
        raise UsageError(
            f"env: {', '.join(both)} already comes from the secret of team '{spec.team}'",
            next_step="remove it from env",
        )


def _check_trackers(arguments: Arguments, spec: JobSpec, stage: DeployedStage) -> None:
    """Raise UsageError if a tracker's key or address is neither in the team's secret nor in the spec's variables."""
    team = spec.team
    missing = [
        f"{tracker} ({TRACKER_VARIABLES[tracker]})"
        for tracker in ((isinstance(arguments, Recipe) and arguments.report_to) or ())
        if TRACKER_VARIABLES[tracker] not in (*stage.secret_variables.get(team, ()), *spec.env)
    ]
    if missing:
        raise UsageError(
            f"arguments.report_to: the secret of team '{team}' in stage '{stage.name}' has no variable for "
            f"{' and '.join(missing)}",
            next_step="add it to the team's secret_variables in infra/settings.py, deploy, and store its value in the "
            "secret; or remove report_to",
        )


def _check_ranks(spec: JobSpec, arguments: Arguments, placement: Placement) -> None:
    arguments.check(*placement.world_sizes)
    if placement.fewest_nnodes < placement.nnodes and not arguments.resumes_on_other_ranks:
        raise UsageError(
            f"resources.min_nnodes: '{spec.job}' with these arguments cannot continue with fewer than "
            f"{placement.nnodes} nodes, because its checkpoints need the same number of ranks",
            next_step="remove resources.min_nnodes",
        )


def _check_compiling(arguments: Arguments, row: InstanceType) -> None:
    if getattr(arguments, "torch_compile", False) and row.accelerator != "cuda":
        why = (
            "on HPUs it would need Habana's backend, which is untested"
            if row.accelerator == "hpu"
            else f"the image {row.image} has no compiler"
        )
        raise UsageError(
            f"arguments.torch_compile: works on GPUs only, but the job runs on {row.name}; {why}", next_step="remove it"
        )


def _check_team_budget(team: str, stage: DeployedStage, *, at: datetime) -> None:
    stop = stage.budget_stop(team)
    if stop is not None and not stop.is_over(at):
        raise UsageError(
            f"team '{team}' has used up its monthly budget of {stop.budget_usd:g} USD in stage '{stage.name}': its "
            f"jobs are refused from {stop.since} until {stop.until}",
            next_step="wait until then, or ask the stage's operators to raise the team's monthly_budget_usd in "
            "infra/settings.py and deploy",
        )


def _check_run_budget(
    spec: JobSpec, placement: Placement, resumed: ResumedRun | None, prices: Mapping[InstanceType, Prices]
) -> None:
    capacity, nnodes = placement.queue.capacity, placement.nnodes
    so_far = resumed.spent if resumed else NOTHING_SPENT
    price, row = max(
        (
            (usd_per_hour(row, capacity, spot_usd_per_hour=found.spot.usd_per_hour), row)
            for row, found in prices.items()
        ),
        key=lambda each: each[0],
    )
    left = spec.budget.left(so_far, usd_per_hour=price, nnodes=nnodes)
    if left is None or left.seconds >= MIN_SECONDS:
        return
    needed = price * nnodes * MIN_SECONDS / 3600
    minimum = (
        f"{needed + so_far.usd:.2f}"
        if left.key == "max_usd"
        else f"{nnodes * MIN_SECONDS / 3600 + so_far.instance_hours:.2f}"
    )
    used = f"; {spec.budget.text(so_far)} are used up" if resumed else ""
    raise UsageError(
        f"{left.key}: {left.limit:g} pays for {max(0.0, left.seconds) / 60:.1f} more minutes of {nnodes} x {row.name} "
        f"({CAPACITY_NAMES[capacity]}){used}; a run needs at least {MIN_SECONDS / 60:g} to start, train and save",
        next_step=f"set {left.key} to more than {minimum}",
    )


def _check_team_reads(arguments: Arguments, team: str, stage: DeployedStage) -> None:
    """Raise UsageError if an input is in the folder of another team, which this team's jobs cannot read."""
    for argument, location, _ in arguments.sources():
        for bucket in (stage.data_bucket, stage.run_bucket):
            owner = location.removeprefix(f"s3://{bucket}/").partition("/")[0]
            if location.startswith(f"s3://{bucket}/") and owner != team and owner in stage.teams:
                raise UsageError(
                    f"arguments.{argument}: {location} belongs to team '{owner}'; team '{team}' cannot read it",
                    next_step=f"have it copied to {DATA}{SHARED_PREFIX}/, which all teams read, or to {DATA}{team}/",
                )
