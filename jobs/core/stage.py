"""A deployed stage as the command line sees it, and the names of the SSM parameters that describe it.

CloudFormation generates the physical names. `infra` writes them below `/trainyard/<stage>/…`, and `jobs.runs.batch`
reads them; both use the parameter names of this file.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

from jobs.core.errors import ConfigurationError, UsageError, did_you_mean
from jobs.core.instance_types import InstanceType, instance_type
from jobs.core.queues import owner_of_queue, team_queue_name

DEFAULT_STAGE = "dev"

DEFAULT_TEAM = "research"
"""Team of a spec that does not set one."""

DATA_BUCKET = "bucket/data"
RUN_BUCKET = "bucket/run"
LOG_GROUP = "log-group"
INSTANCE_TYPES = "instance-type"
"""Types of the accelerator pool, separated by spaces."""
RESERVED_INSTANCE_TYPE = "reserved-instance-type"
"""The only one of these types that On-Demand jobs may have. Exists only if the pool has reserved capacity."""
CPU_INSTANCE_TYPE = "cpu-instance-type"
IMAGES = "images"
"""Names of the images that new jobs run in, separated by spaces."""
IMAGE_TAG = "image-tag"
"""Exists only if the settings fix the image tag of the job definitions, independent of later pushes."""
IMAGE_BUILD_PROJECT = "image-build/project"
"""CodeBuild project that builds the stage's images."""
SHARED_DATA_MOUNT = "shared-data-mount"
"""Path in containers where `shared/` of the data bucket is mounted as a file system, if the stage has one."""

FALLBACK_STAGE = "fallback-stage"
"""The stage to which jobs move for lack of Spot capacity: its name, its region, and the seconds that jobs wait before.
Only present if the settings name one."""

SHARED_PREFIX = "shared"
"""Folder of the data bucket that all teams can read; each team's own folder has the team's name."""

TEAM_PATTERN = r"[a-z0-9][a-z0-9-]{0,30}"


def share_identifier(team: str) -> str:
    """Return the team's name for Batch's fair share: without hyphens, because Batch allows only letters and digits."""
    return team.replace("-", "")


def parameter_path(stage: str) -> str:
    """Return the path of all parameters of a stage."""
    return f"/trainyard/{stage}/"


def queue_parameter(queue: str, *, team: str | None = None, retiring: str | None = None) -> str:
    """Return the name of the parameter with a queue's ARN.

    `team` is the queue's owner, or None if teams share it. `retiring` is the id of a former pool, whose queue of that
    name exists next to the current one.
    """
    name = f"{queue}/{retiring}" if retiring else queue
    return f"team-queue/{team}/{name}" if team else f"queue/{name}"


def job_definition_parameter(team: str, kind: str, *, several_nodes: bool = False) -> str:
    return f"job-definition{'-multinode' if several_nodes else ''}/{team}/{kind}"


def job_image_parameter(kind: str) -> str:
    """Return the name of the parameter with the image URI in a kind's deployed job definitions."""
    return f"job-image/{kind}"


def image_repository_parameter(image: str) -> str:
    """Return the name of the parameter with the repository of an image of `jobs.core.images`."""
    return f"image-repository/{image}"


NOT_BUILT_TAG = "not-built-yet"
"""Placeholder tag in an image's parameter until the first push."""


def release_parameter(root: str) -> str:
    """Return the name of the parameter with the software release of new jobs whose image has this root image."""
    return f"release/{root}"


def image_parameter(image: str, release: str) -> str:
    """Return the name of the parameter with the URI of an image, as last pushed for a release.

    The URI is `<repository>@sha256:…`. A deployment creates the parameter with `NOT_BUILT_TAG` and reads it for the job
    definitions; a push updates it.
    """
    return f"image/{image}/{release}"


def huggingface_secret_parameter(team: str) -> str:
    """Return the name of the parameter with the ARN of the secret for the team's Hugging Face token."""
    return f"huggingface-secret/{team}"


def variables_secret_parameter(team: str) -> str:
    """Return the name of the parameter with the ARN of the secret for the team's variables."""
    return f"variables-secret/{team}"


def variable_names_parameter(team: str) -> str:
    """Return the name of the parameter with the names of the team's secret variables, separated by spaces."""
    return f"secret-variables/{team}"


def member_role_parameter(team: str) -> str:
    """Return the name of the parameter with the ARN of the role that the team's members assume.

    The parameter exists only if the settings name members.
    """
    return f"member-role/{team}"


def budget_stop_parameter(team: str) -> str:
    """Return the name of the parameter that exists while the team's budget is used up: a `BudgetStop` as JSON."""
    return f"budget-stop/{team}"


BUDGETS, STAGE_BUDGET = "budget", "stage-budget"
"""Path of the parameters of teams' monthly budgets, and name of the stage's: JSON with `limit_usd`."""

STAGE_BUDGET_STOP = "stage-budget-stop"
"""Name of the parameter that exists while the budget of the whole stage is used up."""

STAGE_HOURLY_STOP, HOURLY_STOPS = "stage-hourly-stop", "hourly-stop"
"""Name of the parameter that exists while the stage's instances cost more an hour than its limit, and path of those of
teams."""


NEVER_JOINED = "never-joined"
"""Path of one parameter per compute environment whose instances booted but never joined their cluster.

Each contains `since` and `reason` as JSON, written by infra/observability/functions/watch_instances.py.
"""


@dataclass(frozen=True, kw_only=True)
class BudgetStop:
    """A used-up budget: jobs of its team are refused."""

    budget_usd: float
    """Monthly budget."""
    since: str
    """Day on which the budget was found to be used up, in ISO 8601."""
    until: str
    """First day of the next monthly budget, in ISO 8601."""

    def is_over(self, now: datetime) -> bool:
        """Return whether the next month has started, so that the stop no longer applies even if it still exists."""
        until = datetime.fromisoformat(self.until)
        return now >= (until if until.tzinfo else until.replace(tzinfo=timezone.utc))


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """The stage in another region to which jobs move for lack of Spot capacity."""

    stage: str
    region: str
    wait_seconds: int
    """Time without Spot capacity after which a job moves there."""

    def __str__(self) -> str:
        return f"stage {self.stage} ({self.region})"


@dataclass(frozen=True, kw_only=True)
class DeployedStage:
    """Everything that a deployed stage offers, with physical names."""

    name: str
    data_bucket: str
    run_bucket: str
    log_group: str
    instance_types: tuple[InstanceType, ...]
    """Types of the accelerator pool, in the order in which Batch tries them."""
    reserved_instance_type: InstanceType | None = None
    """The only one of them that On-Demand jobs may have, or None for all."""
    cpu_instance_type: InstanceType
    queues: Mapping[str, str]
    """ARN by queue name: `spot` for a shared queue, `spot@<team>` for a team's. A retiring pool's queue ends with
    `/<pool id>`."""
    job_definitions: Mapping[tuple[str, str], str]
    """ARN with revision, by team and job kind."""
    multinode_job_definitions: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """The same for multi-node jobs; empty if the stage does not offer them."""
    shared_data_mount: str | None = None
    """Mount path of the data bucket's `shared/` in containers on accelerator instances. None if it is not mounted."""
    budgets: Mapping[str, str] = field(default_factory=dict)
    """Values of the parameters of monthly budgets, by team; empty text for the stage."""
    budget_stops: Mapping[str, str] = field(default_factory=dict)
    """Teams with a used-up budget, with the values of their parameters."""
    never_joined: Mapping[str, str] = field(default_factory=dict)
    """Compute environments disabled because their instances never joined, with the values of their parameters."""
    hourly_stops: frozenset[str] = frozenset()
    """Teams whose instances cost more an hour than their limit; empty text for the stage. Nothing of theirs starts."""
    stage_stop: str | None = None
    """Value of the parameter for the stage's used-up budget. None while the budget lasts."""
    releases: Mapping[str, str] = field(default_factory=dict)
    """Software release of new jobs, by root image."""
    image_tag: str | None = None
    """Image tag of all jobs, if the settings fix one."""
    images: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """URI that was pushed last, by image and release."""
    job_images: Mapping[str, str] = field(default_factory=dict)
    """Image URI in the job definitions, by job kind. Empty if jobs are local processes, which need no image."""
    huggingface_teams: frozenset[str] = frozenset()
    """Teams that have a secret for their Hugging Face token."""
    secret_variables: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Variables that jobs get from their team's secret, by team."""
    emulated_processes: int | None = None
    """Maximum ranks that the emulator runs on this machine if a job asks for more. None on AWS."""
    fallback: Fallback | None = None
    """Where jobs move for lack of Spot capacity; None if they stay."""
    teams: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "teams", tuple(sorted({team for team, _ in self.job_definitions})))

    @property
    def emulated(self) -> bool:
        return self.emulated_processes is not None

    @classmethod
    def from_parameters(
        cls,
        name: str,
        values: Mapping[str, str],
        *,
        emulated_processes: int | None = None,
        runs_containers: bool = True,
    ) -> "DeployedStage":
        """Build a stage from the parameters below `parameter_path(name)`, keyed by the rest of their names.

        `runs_containers` is False on an emulator whose jobs are processes, which need no image. Raises
        ConfigurationError if a parameter is missing: the stage is not deployed, or another version deployed it.
        """
        missing = [
            key for key in (DATA_BUCKET, RUN_BUCKET, LOG_GROUP, INSTANCE_TYPES, CPU_INSTANCE_TYPE) if key not in values
        ]
        if missing:
            emulated = emulated_processes is not None
            instead = "" if emulated else f" (or, without an account: {deploy_command(name, emulated=True)})"
            raise ConfigurationError(
                f"stage '{name}' is not deployed here: SSM has no {parameter_path(name)}{missing[0]}",
                next_step=deploy_command(name, emulated=emulated) + instead,
            )
        return cls(
            name=name,
            data_bucket=values[DATA_BUCKET],
            run_bucket=values[RUN_BUCKET],
            log_group=values[LOG_GROUP],
            instance_types=tuple(map(instance_type, values[INSTANCE_TYPES].split())),
            reserved_instance_type=(
                instance_type(values[RESERVED_INSTANCE_TYPE]) if RESERVED_INSTANCE_TYPE in values else None
            ),
            cpu_instance_type=instance_type(values[CPU_INSTANCE_TYPE]),
            queues={"/".join(rest): value for rest, value in _below("queue", values)}
            | {team_queue_name("/".join(rest), team): value for (team, *rest), value in _below("team-queue", values)},
            job_definitions={(team, kind): value for (team, kind), value in _below("job-definition", values)},
            multinode_job_definitions={
                (team, kind): value for (team, kind), value in _below("job-definition-multinode", values)
            },
            shared_data_mount=values.get(SHARED_DATA_MOUNT),
            budgets={
                **({"": values[STAGE_BUDGET]} if STAGE_BUDGET in values else {}),
                **{team: value for (team,), value in _below(BUDGETS, values)},
            },
            budget_stops={team: value for (team,), value in _below("budget-stop", values)},
            never_joined={name: value for (name,), value in _below(NEVER_JOINED, values)},
            stage_stop=values.get(STAGE_BUDGET_STOP),
            hourly_stops=frozenset(
                [*(team for (team,), _ in _below(HOURLY_STOPS, values)), *[""] * (STAGE_HOURLY_STOP in values)]
            ),
            releases={root: value for (root,), value in _below("release", values)},
            image_tag=values.get(IMAGE_TAG),
            images={(image, release): value for (image, release), value in _below("image", values)},
            job_images=({kind: value for (kind,), value in _below("job-image", values)} if runs_containers else {}),
            huggingface_teams=frozenset(team for (team,), _ in _below("huggingface-secret", values)),
            secret_variables={team: frozenset(value.split()) for (team,), value in _below("secret-variables", values)},
            emulated_processes=emulated_processes,
            fallback=_fallback(values.get(FALLBACK_STAGE, "").split()),
        )

    @property
    def instance_type(self) -> InstanceType:
        """Return the first type of the accelerator pool, for what all its types have in common."""
        return self.instance_types[0]

    def row_of(self, *, accelerated: bool) -> InstanceType:
        """Return the first instance type of accelerated jobs, or the one of jobs on CPUs."""
        return self.instance_type if accelerated else self.cpu_instance_type

    def queue(self, name: str) -> str:
        """Return the ARN of a queue. Raises UsageError if the stage has no queue of that name."""
        try:
            return self.queues[name]
        except KeyError:
            raise UsageError(f"stage '{self.name}' has no queue '{name}'{did_you_mean(name, self.queues)}") from None

    @property
    def teams_with_queues(self) -> frozenset[str]:
        """Return the teams with their own queues and instances; other teams share."""
        return frozenset(team for name in self.queues if (team := owner_of_queue(name)))

    def queue_of(self, team: str, name: str) -> str:
        """Return the name of the team's queue for `name` of `QUEUES`: the team's own queue, or the shared one.

        The queue may not exist: a team with its own queues never falls back to a shared one.
        """
        return team_queue_name(name, team) if team in self.teams_with_queues else name

    def budget_usd(self, team: str) -> float | None:
        """Return the monthly budget of a team, or of the stage for empty text. None if there is none."""
        try:
            return float(json.loads(self.budgets[team])["limit_usd"])
        except (ValueError, KeyError, TypeError):
            return None

    def budget_stop(self, team: str) -> BudgetStop | None:
        """Return the used-up budget that blocks the team's jobs, or None.

        Raises ConfigurationError if its parameter is not valid.
        """
        value = self.budget_stops.get(team)
        return None if value is None else self._stop(value, budget_stop_parameter(team))

    @property
    def stage_budget_stop(self) -> BudgetStop | None:
        """Return the used-up budget that blocks new instances, or None. Raises ConfigurationError if it is invalid."""
        return None if self.stage_stop is None else self._stop(self.stage_stop, STAGE_BUDGET_STOP)

    def hourly_stop(self, team: str) -> str | None:
        """Return which hourly limit keeps the team's instances from starting, as a sentence, or None."""
        for owner, name in (("", f"stage '{self.name}'"), (team, f"team '{team}'")):
            if owner in self.hourly_stops:
                return f"the instances of {name} cost more than its max_usd_per_hour"
        return None

    def _stop(self, value: str, name: str) -> BudgetStop:
        try:
            fields = json.loads(value)
            stop = BudgetStop(budget_usd=float(fields["budget_usd"]), since=fields["since"], until=fields["until"])
            datetime.fromisoformat(stop.until)
        except (ValueError, KeyError, TypeError):
            parameter = parameter_path(self.name) + name
            raise ConfigurationError(
                f"{parameter}, which stops jobs, should be JSON with budget_usd, since and until, not {value!r}",
                next_step=f"if the budget is not used up, aws ssm delete-parameter --name {parameter}",
            ) from None
        return stop

    @property
    def default_team(self) -> str:
        """Return the team of a spec that sets none: DEFAULT_TEAM, or the stage's only team if it has another name."""
        if DEFAULT_TEAM in self.teams or len(self.teams) != 1:
            return DEFAULT_TEAM
        return self.teams[0]

    def check_team(self, team: str) -> None:
        """Raise UsageError if the stage has no such team."""
        if team not in self.teams:
            raise UsageError(
                f"team '{team}' not found in stage '{self.name}'{did_you_mean(team, self.teams)}",
                next_step="correct 'team' in the spec, or add the team to infra/settings.py and deploy",
            )

    def job_definition(self, team: str, kind: str, *, several_nodes: bool = False) -> str:
        """Return the ARN of a team's job definition for a kind.

        Raises UsageError if the stage has no such team, ConfigurationError if it lacks the kind.
        """
        definitions = self.multinode_job_definitions if several_nodes else self.job_definitions
        self.check_team(team)
        try:
            return definitions[team, kind]
        except KeyError:
            nodes = " on several nodes" if several_nodes else ""
            raise ConfigurationError(
                f"stage '{self.name}' has no job definition of '{kind}'{nodes} for team '{team}': it was deployed "
                "before this kind existed",
                next_step=deploy_command(self.name, emulated=self.emulated),
            ) from None


def _fallback(words: list[str]) -> Fallback | None:
    return Fallback(stage=words[0], region=words[1], wait_seconds=int(words[2])) if words else None


def deploy_command(stage: str, stacks: str = "*", *, emulated: bool) -> str:
    """Return the command that deploys a stage's stacks: `cdk deploy`, or `trainyard local up` on the emulator."""
    return f"trainyard --stage {stage} local up" if emulated else f"cdk deploy '{stage}/{stacks}' -c stage={stage}"


def _below(kind: str, values: Mapping[str, str]) -> Iterator[tuple[list[str], str]]:
    """Yield the parameters called `<kind>/…`: the remaining parts of the name, and the value."""
    for key, value in values.items():
        first, *rest = key.split("/")
        if first == kind:
            yield rest, value
