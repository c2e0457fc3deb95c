"""Plan: JobSpec + stage -> the SubmitJob request, the queue and why, and the price. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from jobs.contract.arguments import Arguments
from jobs.contract.budget import LEAST_SECONDS, NOTHING_SPENT, Spent, usd_per_hour
from jobs.contract.dependencies import Awaited
from jobs.contract.errors import INTERRUPTED_EXIT_CODE, ConfigurationError, UsageError
from jobs.contract.image_hierarchy import child_name
from jobs.contract.instance_types import InstanceType
from jobs.contract.job_kind import JobKind
from jobs.contract.launcher_options import (
    ACCELERATOR_VARIABLE,
    ALLOW_CHANGES_FLAG,
    GANG_ATTEMPTS_FLAG,
    GANG_FLAG,
    GANG_WAIT_SECONDS,
    HANG_TIMEOUT_SECONDS,
    RUN_URI_VARIABLE,
    START_TIMEOUT_SECONDS,
)
from jobs.contract.locations import DATA, S3Location
from jobs.contract.moves import RESUMED_TAG
from jobs.contract.queue_choice import choose_queue
from jobs.contract.queues import MARKET, Capacity
from jobs.contract.run import run_prefix, submitted_at
from jobs.contract.spec import JobSpec
from jobs.contract.stage import NOT_BUILT_TAG, SHARED_PREFIX, DeployedStage, share_identifier

CONTAINER_NAME = "main"
"""The one container of every job definition; an override names it."""

NODE_RANGE = "0:"
"""The one node range of every multi-node job definition: all of them, however many a submission asks for."""

RETRY_RULES: tuple[Mapping[str, str], ...] = (
    # Batch reads them in order and, unlike what one would expect, starts again what no rule matches.
    {"onStatusReason": "Host EC2*", "action": "RETRY"},  # the Spot reclaim, in Batch's own words
    {"onExitCode": str(INTERRUPTED_EXIT_CODE), "action": "RETRY"},
    {"onReason": "*", "action": "EXIT"},
    {"onExitCode": "*", "action": "EXIT"},
)
"""evaluateOnExit of every job: only a reclaim and the reserved code start it again, the job's own fault never does."""


@dataclass(frozen=True, kw_only=True)
class Continued:
    """What a plan goes on with: a run whose jobs have ended."""

    job_ids: tuple[str, ...]
    """Of the jobs that it went through, the newest last; at least that one."""
    at: datetime
    """When it is resumed."""
    spent: Spent = NOTHING_SPENT
    """What its attempts have taken so far."""
    allow_changes: bool = False
    """Whether a checkpoint that was made with other arguments is resumed all the same."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would be submitted, and its price."""

    run_id: str
    run_location: S3Location
    spec: JobSpec
    request: dict[str, Any]
    """SubmitJob's arguments, exactly as they will be sent."""
    queue: str
    queue_reason: str
    capacity: Capacity
    """What the queue's instances are priced at; a Spot queue may go on to On-Demand ones where Spot has none."""
    instance_type: InstanceType
    accelerator: str
    accelerator_reason: str
    nnodes: int
    nproc_per_node: int
    notes: tuple[str, ...]
    """What the submitter should know before paying."""
    awaited: tuple[Awaited, ...] = ()
    """The runs that have to end before this one starts."""
    continued: Continued | None = None
    """The run that this one goes on with; None: it is a new one."""

    @property
    def on_demand_usd_per_hour(self) -> float:
        return self.instance_type.on_demand_usd_per_hour * self.nnodes

    @property
    def spot_usd_per_hour(self) -> float:
        return self.instance_type.spot_usd_per_hour * self.nnodes

    @property
    def usd_per_hour(self) -> float:
        """What it is expected to cost."""
        return self.spot_usd_per_hour if self.capacity == "spot" else self.on_demand_usd_per_hour

    @property
    def inputs(self) -> tuple[tuple[str, str, str], ...]:
        """`(argument, resolved location, what it should be)` of everything the job will read."""
        return tuple(self.spec.entrypoint_arguments().sources())

    def with_job_ids(self, job_ids: Mapping[str, str]) -> "Plan":
        """The same, once the runs that are submitted together with it have ids in Batch: run id to job id."""
        depends_on = [run.depends_on(job_ids.get(run.run_id)) for run in self.awaited]
        return replace(self, request={**self.request, "dependsOn": depends_on}) if depends_on else self


def plan(
    spec: JobSpec,
    stage: DeployedStage,
    *,
    run_id: str,
    awaited: tuple[Awaited, ...] = (),
    continued: Continued | None = None,
) -> Plan:
    """What would be submitted. References to runs are resolved before (jobs.client.references), to the runs in
    `awaited` too.

    Raises UsageError where the spec asks for what the stage cannot give or the team's budget is used up,
    ConfigurationError where the stage lacks what the kind needs.
    """
    kind = spec.kind
    row = stage.instance_type if kind.accelerated else stage.cpu_instance_type
    nnodes = spec.resources.nnodes
    queue, queue_reason = choose_queue(spec, stage, row)
    definition = stage.job_definition(spec.team, spec.job, several_nodes=queue.several_nodes)
    now = continued.at if continued else submitted_at(run_id)
    _check_budget(spec.team, stage, at=now)
    _check_run_budget(spec, row, queue.capacity, continued)
    nproc_per_node = _ranks(spec, row)
    counts = sorted({nnodes, spec.resources.least_nnodes})
    world_sizes = [count * nproc_per_node for count in counts]
    notes = _image_notes(kind, row, stage)
    stop = stage.stage_budget_stop
    if stop is not None and not stop.is_over(now):
        notes.append(
            f"stage '{stage.name}' has used up its monthly budget of {stop.budget_usd:g} USD: the job waits until "
            f"{stop.until[:10]}, or until the budget is raised"
        )
    if nproc_per_node < row.processes and row.accelerators and not kind.one_process:
        notes.append(
            f"uses {nproc_per_node} of the {row.accelerators} {row.card}s of a {row.name}; the whole instance is paid "
            "for"
        )
    if spec.resources.is_gang:
        notes.append(_gang_note(spec))
    notes += [note for run in awaited if (note := run.note(stage))]
    accelerator: str = row.accelerator
    accelerator_reason = f"{row.name} of stage '{stage.name}'"
    if stage.embedded_processes is not None:
        accelerator = "auto"
        accelerator_reason = f"the embedded AWS runs jobs on this machine; on AWS: {row.accelerator} of {row.name}"
        if nproc_per_node > stage.embedded_processes:
            notes.append(
                f"runs {stage.embedded_processes} ranks on this machine instead of {nproc_per_node}; "
                "the global batch size stays"
            )
            nproc_per_node = stage.embedded_processes
            world_sizes += [count * nproc_per_node for count in counts]

    arguments = spec.entrypoint_arguments()
    _check_push(arguments, spec.team, stage)
    # What runs here should run on AWS too, so it is held to the ranks that it would have there.
    arguments.check(*world_sizes)
    if len(counts) > 1 and not arguments.resumes_on_other_ranks:
        raise UsageError(
            f"resources.min_nnodes: a '{spec.job}' with these arguments cannot go on with fewer than {nnodes} nodes: "
            "its checkpoints are of one number of ranks",
            next_step="leave resources.min_nnodes out, or set deepspeed_zero_stage to 0",
        )
    in_s3 = _with_locations(arguments, {DATA: f"s3://{stage.data_bucket}/"})
    in_container = _with_locations(in_s3, _mounts(spec, stage))
    run_location = S3Location(stage.run_bucket, run_prefix(spec.team, run_id))
    overrides = {
        "taskProperties": [
            {
                "containers": [
                    {
                        "name": CONTAINER_NAME,
                        "command": [
                            "python",
                            "-m",
                            "jobs.train.launch",
                            f"--instance-type={row.name}",
                            f"--nproc-per-node={nproc_per_node}",
                            f"--capacity={queue.capacity}",
                            *([f"--max-usd={spec.max_usd}"] if spec.max_usd is not None else []),
                            *([f"--max-hours={spec.max_hours}"] if spec.max_hours is not None else []),
                            *_watch_flags(spec),
                            *(_gang_flags(spec) if spec.resources.is_gang else []),
                            *([ALLOW_CHANGES_FLAG] if continued and continued.allow_changes else []),
                            spec.job,
                            *in_container.to_flags(),
                        ],
                        "environment": [
                            {"name": RUN_URI_VARIABLE, "value": str(run_location)},
                            {"name": ACCELERATOR_VARIABLE, "value": accelerator},
                        ],
                    }
                ]
            }
        ]
    }
    timeout_hours = spec.timeout_hours or kind.timeout_hours
    request: dict[str, Any] = {
        "jobName": run_id,
        "jobQueue": stage.queue(queue.name),
        "jobDefinition": definition,
        # A queue with fair share refuses a job that names no share.
        "shareIdentifier": share_identifier(spec.team),
        **(_node_overrides(nnodes, overrides) if queue.several_nodes else {"ecsPropertiesOverride": overrides}),
        **({"arrayProperties": {"size": nnodes}} if spec.resources.is_gang else {}),
        # Given here the strategy replaces the definition's whole, so the rules go along with the number.
        "retryStrategy": {"attempts": spec.attempts, "evaluateOnExit": [dict(rule) for rule in RETRY_RULES]},
        "timeout": {"attemptDurationSeconds": round(timeout_hours * 3600)},
        "tags": {
            "trainyard:stage": stage.name,
            "trainyard:run": run_id,
            "trainyard:team": spec.team,
            "trainyard:job": spec.job,
            **({RESUMED_TAG: continued.job_ids[-1]} if continued else {}),
        },
        "propagateTags": True,
        **({"dependsOn": [run.depends_on() for run in awaited]} if awaited else {}),
    }
    return Plan(
        run_id=run_id,
        run_location=run_location,
        spec=spec.model_copy(update={"arguments": in_s3.model_dump(mode="json", exclude_none=True)}),
        request=request,
        queue=queue.name,
        queue_reason=queue_reason,
        capacity=queue.capacity,
        instance_type=row,
        accelerator=accelerator,
        accelerator_reason=accelerator_reason,
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        notes=tuple(notes),
        awaited=awaited,
        continued=continued,
    )


def _gang_note(spec: JobSpec) -> str:
    """What nodes that Batch starts one by one cost more than those that it starts together."""
    least = spec.resources.least_nnodes
    some = f"; after {GANG_WAIT_SECONDS / 60:g} minutes {least} begin" if least < spec.resources.nnodes else ""
    return (
        f"the {spec.resources.nnodes} nodes start as they come, and are paid for while they wait for each other{some}; "
        f"when one is taken away all save and start again, which is one of their {spec.attempts} attempts"
    )


def _gang_flags(spec: JobSpec) -> list[str]:
    return [f"{GANG_FLAG}={spec.resources.least_nnodes}", f"{GANG_ATTEMPTS_FLAG}={spec.attempts}"]


def _watch_flags(spec: JobSpec) -> list[str]:
    """How long the launcher waits for ranks and nodes, where that is not what it would do anyway."""
    limits = (
        ("--hang-timeout-seconds", spec.hang_timeout_seconds, HANG_TIMEOUT_SECONDS),
        ("--start-timeout-seconds", spec.start_timeout_seconds, START_TIMEOUT_SECONDS),
    )
    return [f"{flag}={seconds:g}" for flag, seconds, default in limits if seconds != default]


def _node_overrides(nnodes: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The same command on all nodes.

    Their number can be overridden since the definition's one range is open; the range named here must be that one.
    """
    nodes = {"targetNodes": NODE_RANGE, "ecsPropertiesOverride": overrides}
    return {"nodeOverrides": {"numNodes": nnodes, "nodePropertyOverrides": [nodes]}}


def _with_locations(arguments: Arguments, places: Mapping[str, str]) -> Arguments:
    """`arguments` whose sources begin with what `places` has in place of their beginning."""
    return arguments.with_sources(
        **{
            name: place + location.removeprefix(beginning)
            for name, location, _ in arguments.sources()
            for beginning, place in places.items()
            if location.startswith(beginning)
        }
    )


def _mounts(spec: JobSpec, stage: DeployedStage) -> dict[str, str]:
    """What the job finds as files: the shared data, on the accelerator instances of a stage that mounts it there."""
    if stage.shared_data_mount is None or stage.embedded or not spec.kind.accelerated:
        return {}
    return {f"s3://{stage.data_bucket}/{SHARED_PREFIX}/": f"{stage.shared_data_mount.rstrip('/')}/"}


def _image_notes(kind: JobKind, row: InstanceType, stage: DeployedStage) -> list[str]:
    """What to know of the image that the job will run in. Raises ConfigurationError where there is none yet."""
    deployed = stage.job_images.get(kind.name)
    if deployed is None:
        return []
    name = child_name(row.image, kind.image)
    pushed = stage.images.get((name, stage.release or ""), deployed)
    deploy = f"cdk deploy '{stage.name}/jobs' -c stage={stage.name}"
    if stage.embedded:
        name, deploy = child_name("cpu", kind.image), f"trainyard --stage {stage.name} local up"
    if deployed.endswith(f":{NOT_BUILT_TAG}"):
        push = f"trainyard --stage {stage.name} images push {name}, then " if pushed == deployed else ""
        raise ConfigurationError(
            f"the image of '{kind.name}' jobs had not been pushed when stage '{stage.name}' was deployed: its job "
            f"definitions name {deployed}",
            next_step=push + deploy,
        )
    if pushed.endswith(f":{NOT_BUILT_TAG}"):
        return [f"runs in {deployed}, which the stage no longer records: 'trainyard images push' before it is deployed"]
    if pushed != deployed and stage.image_tag is None:
        return [f"runs in {deployed}; a newer image was pushed, which '{deploy}' rolls out"]
    return []


def _check_budget(team: str, stage: DeployedStage, *, at: datetime) -> None:
    stop = stage.budget_stop(team)
    if stop is not None and not stop.is_over(at):
        raise UsageError(
            f"team '{team}' has used up its monthly budget of {stop.budget_usd:g} USD in stage '{stage.name}': no job "
            f"of it is taken from {stop.since} until {stop.until}",
            next_step="wait until then, or ask who runs the stage to raise the team's monthly_budget_usd in "
            "infra/settings.py and deploy",
        )


def _check_run_budget(spec: JobSpec, row: InstanceType, capacity: Capacity, continued: Continued | None) -> None:
    so_far = continued.spent if continued else NOTHING_SPENT
    nnodes = spec.resources.nnodes
    left = spec.budget.left(so_far, row=row, capacity=capacity, nnodes=nnodes)
    if left is None or left.seconds >= LEAST_SECONDS:
        return
    needed = usd_per_hour(row, capacity) * nnodes * LEAST_SECONDS / 3600
    least = (
        f"{needed + so_far.usd:.2f}"
        if left.key == "max_usd"
        else f"{nnodes * LEAST_SECONDS / 3600 + so_far.instance_hours:.2f}"
    )
    used = f"; {spec.budget.text(so_far)} are used up" if continued else ""
    raise UsageError(
        f"{left.key}: {left.limit:g} leaves {max(0.0, left.seconds) / 60:.1f} minutes of {nnodes} x {row.name} "
        f"({MARKET[capacity]}){used}; a run needs at least {LEAST_SECONDS / 60:g} to start, train and save",
        next_step=f"set {left.key} to more than {least}",
    )


def _check_push(arguments: Arguments, team: str, stage: DeployedStage) -> None:
    """On the embedded AWS a job has the HF_TOKEN that it was started with, if any: the job itself says so."""
    repository = arguments.hub_repository
    if repository is not None and not stage.embedded and team not in stage.huggingface_teams:
        raise UsageError(
            f"arguments.push_to_hub: team '{team}' has no secret for a Hugging Face token in stage '{stage.name}', so "
            f"nothing can be pushed to {repository}",
            next_step="set the team's huggingface_token in infra/settings.py, deploy, and put a token into the secret; "
            "or leave push_to_hub out",
        )


def _ranks(spec: JobSpec, row: InstanceType) -> int:
    asked = spec.resources.nproc_per_node
    if spec.kind.one_process:
        if asked not in (None, 1):
            raise UsageError(
                f"resources.nproc_per_node: a '{spec.job}' is one process, to which all {row.card}s of the node belong",
                next_step="leave resources.nproc_per_node out",
            )
        return 1
    if asked is None:
        return row.processes
    if asked > row.processes:
        raise UsageError(
            f"resources.nproc_per_node: {asked} ranks do not fit a {row.name}, which has "
            f"{row.accelerators or row.vcpus} {row.card}s",
            next_step=f"ask for at most {row.processes}, or for more nodes",
        )
    return asked
