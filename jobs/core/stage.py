"""A deployed stage as a submitter sees it, and the names of the SSM parameters that carry it.

CloudFormation generates the physical names; `infra` writes them under `/trainyard/<stage>/…` and `jobs.runs.batch`
reads them back, both through this one file.
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
"""The team of a spec that names none."""

DATA_BUCKET = "bucket/data"
RUN_BUCKET = "bucket/run"
LOG_GROUP = "log-group"
INSTANCE_TYPE = "instance-type"
CPU_INSTANCE_TYPE = "cpu-instance-type"
RELEASE = "release"
"""The Gaudi software release that new jobs run on."""
IMAGES = "images"
"""Names of the images that new jobs run in, with a blank between them."""
IMAGE_TAG = "image-tag"
"""There only where the settings name the tag that job definitions run, whatever was pushed."""
IMAGE_BUILD_PROJECT = "image-build/project"
"""The CodeBuild project that builds the stage's images."""
SHARED_DATA_MOUNT = "shared-data-mount"
"""Path at which containers see `shared/` of the data bucket as a file system, where the stage has one."""

SHARED_PREFIX = "shared"
"""Folder of the data bucket that all teams read; a team's own files lie under the team's name."""

TEAM_PATTERN = r"[a-z0-9][a-z0-9-]{0,30}"


def share_identifier(team: str) -> str:
    """Return the team's name in Batch's fair share: without hyphens, since Batch takes letters and digits only."""
    return team.replace("-", "")


def parameter_path(stage: str) -> str:
    """The path under which all of a stage's parameters lie."""
    return f"/trainyard/{stage}/"


def queue_parameter(queue: str, *, team: str | None = None, retiring: str | None = None) -> str:
    """Return the name of the parameter that holds a queue's ARN.

    `team`: whose own it is; None: teams share it. `retiring`: id of a pool that the stage used before, whose queue of
    that name stays beside the current one.
    """
    name = f"{queue}/{retiring}" if retiring else queue
    return f"team-queue/{team}/{name}" if team else f"queue/{name}"


def job_definition_parameter(team: str, kind: str, *, several_nodes: bool = False) -> str:
    return f"job-definition{'-multinode' if several_nodes else ''}/{team}/{kind}"


def job_image_parameter(kind: str) -> str:
    """Return the name of the parameter that holds the URI of the image of a kind's job definitions, as deployed."""
    return f"job-image/{kind}"


def image_repository_parameter(image: str) -> str:
    """Return the name of the parameter that holds an image's repository.

    `image` is a name of `jobs.core.images`.
    """
    return f"image-repository/{image}"


NOT_BUILT_TAG = "not-built-yet"
"""Tag of no image: what an image's parameter names until the first push."""


def image_parameter(image: str, release: str) -> str:
    """Return the name of the parameter that holds an image's URI, as pushed last for a release.

    It is `<repository>@sha256:…`. A push writes it; a deployment makes it, with `NOT_BUILT_TAG`, and reads it for the
    job definitions.
    """
    return f"image/{image}/{release}"


def huggingface_secret_parameter(team: str) -> str:
    """Return the name of the parameter that holds the ARN of the secret with the team's Hugging Face token."""
    return f"huggingface-secret/{team}"


def variables_secret_parameter(team: str) -> str:
    """Return the name of the parameter that holds the ARN of the secret with the values of the team's variables."""
    return f"variables-secret/{team}"


def variable_names_parameter(team: str) -> str:
    """Return the name of the parameter that names those variables, with a blank between them."""
    return f"secret-variables/{team}"


def member_role_parameter(team: str) -> str:
    """Return the name of the parameter that holds the ARN of the role that the team's people assume.

    It is there only where the settings name them.
    """
    return f"member-role/{team}"


def budget_stop_parameter(team: str) -> str:
    """Return the name of the parameter that is there while the team has used up its budget.

    It holds what `BudgetStop` has, as JSON.
    """
    return f"budget-stop/{team}"


STAGE_BUDGET_STOP = "stage-budget-stop"
"""The same of the whole stage's budget."""


NEVER_JOINED = "never-joined"
"""Below this name lies a parameter for each compute environment whose instances booted and never joined their cluster.

It holds `since` and `reason`, as JSON; infra/observability/functions/watch_instances.py writes it.
"""


@dataclass(frozen=True, kw_only=True)
class BudgetStop:
    """The stop of a budget that is used up: jobs of its team are refused."""

    budget_usd: float
    """A month's."""
    since: str
    """The day on which the budget was found used up, in ISO 8601."""
    until: str
    """The day on which the next month's budget begins, in ISO 8601."""

    def is_over(self, now: datetime) -> bool:
        """Return whether the next month has begun: the stop counts no more, though nobody has taken it back yet."""
        until = datetime.fromisoformat(self.until)
        return now >= (until if until.tzinfo else until.replace(tzinfo=timezone.utc))


@dataclass(frozen=True, kw_only=True)
class DeployedStage:
    """A stage as it is deployed: everything that it offers, by its physical names."""

    name: str
    data_bucket: str
    run_bucket: str
    log_group: str
    instance_type: InstanceType
    cpu_instance_type: InstanceType
    queues: Mapping[str, str]
    """Queue name (of a team `spot@<team>`, …; of teams that share `spot`; of a retiring pool with `/<pool id>`) to
    ARN."""
    job_definitions: Mapping[tuple[str, str], str]
    """(team, job kind) to ARN with revision."""
    multinode_job_definitions: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """The same for jobs of several nodes; empty where the stage offers none."""
    shared_data_mount: str | None = None
    """Path at which containers on accelerator instances see `shared/` of the data bucket; None: they do not."""
    budget_stops: Mapping[str, str] = field(default_factory=dict)
    """Teams that have used up their budgets, with what their parameters hold."""
    never_joined: Mapping[str, str] = field(default_factory=dict)
    """Compute environments that were disabled since their instances never joined, with what their parameters hold."""
    stage_stop: str | None = None
    """The stop of the whole stage's budget, once that is used up."""
    release: str | None = None
    """The Gaudi software release that new jobs run on; None: deployed before it was published."""
    image_tag: str | None = None
    """The tag that all jobs' images have, where the settings name one."""
    images: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(image, release) to the URI that was pushed last."""
    job_images: Mapping[str, str] = field(default_factory=dict)
    """Job kind to the URI that its job definitions name; empty where images do not matter, since jobs are processes."""
    huggingface_teams: frozenset[str] = frozenset()
    """Teams that have a secret for their Hugging Face token."""
    secret_variables: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Team to the variables that its jobs have from its secret."""
    emulated_processes: int | None = None
    """Ranks that this machine should run on the emulator where a job asks for more. None on AWS."""
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
        """Read a stage from the parameters below `parameter_path(name)`, keyed by the rest of their names.

        `runs_containers`: False on an emulator whose jobs are processes, so that images do not matter.
        Raises ConfigurationError where one is missing: the stage is not deployed, or by another release.
        """
        missing = [
            key for key in (DATA_BUCKET, RUN_BUCKET, LOG_GROUP, INSTANCE_TYPE, CPU_INSTANCE_TYPE) if key not in values
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
            instance_type=instance_type(values[INSTANCE_TYPE]),
            cpu_instance_type=instance_type(values[CPU_INSTANCE_TYPE]),
            queues={"/".join(rest): value for rest, value in _below("queue", values)}
            | {team_queue_name("/".join(rest), team): value for (team, *rest), value in _below("team-queue", values)},
            job_definitions={(team, kind): value for (team, kind), value in _below("job-definition", values)},
            multinode_job_definitions={
                (team, kind): value for (team, kind), value in _below("job-definition-multinode", values)
            },
            shared_data_mount=values.get(SHARED_DATA_MOUNT),
            budget_stops={team: value for (team,), value in _below("budget-stop", values)},
            never_joined={name: value for (name,), value in _below(NEVER_JOINED, values)},
            stage_stop=values.get(STAGE_BUDGET_STOP),
            release=values.get(RELEASE),
            image_tag=values.get(IMAGE_TAG),
            images={(image, release): value for (image, release), value in _below("image", values)},
            job_images=({kind: value for (kind,), value in _below("job-image", values)} if runs_containers else {}),
            huggingface_teams=frozenset(team for (team,), _ in _below("huggingface-secret", values)),
            secret_variables={team: frozenset(value.split()) for (team,), value in _below("secret-variables", values)},
            emulated_processes=emulated_processes,
        )

    def row_of(self, *, accelerated: bool) -> InstanceType:
        """Return the instance type of accelerated jobs, or that of jobs on CPUs."""
        return self.instance_type if accelerated else self.cpu_instance_type

    def queue(self, name: str) -> str:
        """Return the ARN of a queue, by its name. Raises UsageError where the stage has none of that name."""
        try:
            return self.queues[name]
        except KeyError:
            raise UsageError(f"stage '{self.name}' has no queue '{name}'{did_you_mean(name, self.queues)}") from None

    @property
    def teams_with_queues(self) -> frozenset[str]:
        """Return the teams that have queues, and so instances, of their own; the others share."""
        return frozenset(team for name in self.queues if (team := owner_of_queue(name)))

    def queue_of(self, team: str, name: str) -> str:
        """Return what the queue called `name` in `QUEUES` is called for the team's jobs: its own, unless it shares.

        It need not be there: a team with queues of its own never falls back to one that others share.
        """
        return team_queue_name(name, team) if team in self.teams_with_queues else name

    def budget_stop(self, team: str) -> BudgetStop | None:
        """Return why the team's jobs are refused; None where they are not.

        Raises ConfigurationError where nobody can tell.
        """
        value = self.budget_stops.get(team)
        return None if value is None else self._stop(value, budget_stop_parameter(team))

    @property
    def stage_budget_stop(self) -> BudgetStop | None:
        """Return why no instance starts; None where some may. Raises ConfigurationError where nobody can tell."""
        return None if self.stage_stop is None else self._stop(self.stage_stop, STAGE_BUDGET_STOP)

    def _stop(self, value: str, name: str) -> BudgetStop:
        try:
            fields = json.loads(value)
            stop = BudgetStop(budget_usd=float(fields["budget_usd"]), since=fields["since"], until=fields["until"])
            datetime.fromisoformat(stop.until)
        except (ValueError, KeyError, TypeError):
            parameter = parameter_path(self.name) + name
            raise ConfigurationError(
                f"{parameter} stops jobs, and should say budget_usd, since and until in JSON, not {value!r}",
                next_step=f"aws ssm delete-parameter --name {parameter}, if the budget is not used up",
            ) from None
        return stop

    @property
    def default_team(self) -> str:
        """Return the team of a spec that names none; where the stage lacks it, its only one."""
        if DEFAULT_TEAM in self.teams or len(self.teams) != 1:
            return DEFAULT_TEAM
        return self.teams[0]

    def check_team(self, team: str) -> None:
        """Raise UsageError where the stage has no such team."""
        if team not in self.teams:
            raise UsageError(
                f"team '{team}' not found in stage '{self.name}'{did_you_mean(team, self.teams)}",
                next_step="correct 'team' in the spec, or add the team to infra/settings.py and deploy",
            )

    def job_definition(self, team: str, kind: str, *, several_nodes: bool = False) -> str:
        """Return the ARN of the definition of a kind for a team.

        Raises UsageError where the stage has no such team, ConfigurationError where it lacks the kind.
        """
        definitions = self.multinode_job_definitions if several_nodes else self.job_definitions
        self.check_team(team)
        try:
            return definitions[team, kind]
        except KeyError:
            nodes = " on several nodes" if several_nodes else ""
            raise ConfigurationError(
                f"stage '{self.name}' has no job definition of '{kind}'{nodes} for team '{team}': it was deployed "
                "before that kind existed",
                next_step=deploy_command(self.name, emulated=self.emulated),
            ) from None


def deploy_command(stage: str, stacks: str = "*", *, emulated: bool) -> str:
    """Return the command that deploys a stage's stacks: the CDK, or what deploys all of them to the emulator."""
    return f"trainyard --stage {stage} local up" if emulated else f"cdk deploy '{stage}/{stacks}' -c stage={stage}"


def _below(kind: str, values: Mapping[str, str]) -> Iterator[tuple[list[str], str]]:
    """The parameters called `<kind>/…`, by the parts of the rest of their names."""
    for key, value in values.items():
        first, *rest = key.split("/")
        if first == kind:
            yield rest, value
