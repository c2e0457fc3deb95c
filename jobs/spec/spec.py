"""JobSpec: the short file a researcher writes, validated before anything is spent.

    name: finetune-reviews            # what the run is called; its id adds the time
    job: finetune-classification      # a kind of jobs/spec/catalog.py
    team: research
    resources:
      nproc_per_node: 8               # ranks, one a card; default: all the cards of the stage's instance type
      capacity: spot                  # or on-demand: dearer, and not interrupted; default: spot for one node
    arguments:                        # of that kind; unknown ones are refused
      model: data://shared/models/minilm
      train_data: data://shared/reviews/train.jsonl

`trainyard schema` prints the JSON Schema of this file for editors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from jobs.core.errors import UsageError, did_you_mean
from jobs.core.locations import S3Location
from jobs.core.queues import Capacity
from jobs.core.run import LATEST
from jobs.core.stage import DEFAULT_TEAM, TEAM_PATTERN
from jobs.core.words import shortened
from jobs.spec.arguments import Arguments, JobKind, Strict, error_in_words
from jobs.spec.catalog import CATALOG, job_kind
from jobs.spec.launcher_options import Limits
from jobs.spec.sweep import PointRecord, Sweep, check_name, point_name, points, values_text, with_values

MAX_ATTEMPTS = 10
"""AWS Batch's own limit."""


MIN_TIMEOUT_HOURS = 1 / 60
"""AWS Batch's own limit: it takes no timeout under 60 seconds."""


MAX_TIMEOUT_HOURS = 14 * 24
"""A run that takes longer is to be resumed."""


MAX_GANG_NODES = 10_000
"""AWS Batch's own limit: children of an array job."""


MAX_TOLD_MISTAKES = 20
"""Where one spec has more mistakes, the first are told, and the others counted."""


class Resources(Strict):
    """The resources that a job asks for; it names no queue, the plan picks that."""

    nnodes: int = Field(default=1, ge=1)
    """Instances. On-Demand, more than one needs a stage that offers them."""
    min_nnodes: int | None = Field(default=None, ge=1)
    """Fewest of several Spot nodes to train on if EC2 has no more after 15 minutes. Default: all of them."""
    nproc_per_node: int | None = Field(default=None, ge=1)
    """Ranks on each instance, one a card. Default: as many as the instance has cards."""
    capacity: Capacity | None = None
    """spot is cheaper, and resumed after a reclaim; on-demand is not interrupted. Default: spot for one node, on-demand
    for several."""

    @property
    def is_gang(self) -> bool:
        """Return whether it is several nodes on Spot: Batch starts each for itself, and they find each other."""
        return self.nnodes > 1 and self.capacity == "spot"

    @property
    def fewest_nnodes(self) -> int:
        """Return the fewest nodes that it may come to train on."""
        return self.min_nnodes or self.nnodes

    @model_validator(mode="after")
    def _gangs_have_limits(self) -> Self:
        if self.is_gang and self.nnodes > MAX_GANG_NODES:
            raise ValueError(f"nnodes: on Spot a job has at most {MAX_GANG_NODES} nodes")
        if self.min_nnodes is None:
            return self
        if not self.is_gang:
            raise ValueError("min_nnodes: it is for several nodes on Spot: capacity: spot, and nnodes more than 1")
        if self.min_nnodes > self.nnodes:
            raise ValueError(f"min_nnodes: {self.min_nnodes} are more than the {self.nnodes} of nnodes")
        return self


class _Submission(Strict):
    """What is to run, for whom, and on what."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Lower-case letters, digits and hyphens, at most 63; the run id starts with it."""
    job: str
    """A job kind of the catalog."""
    team: str = Field(default=DEFAULT_TEAM, pattern=f"^{TEAM_PATTERN}$")
    """Lower-case letters, digits and hyphens, at most 31; the team that pays, of infra/settings.py."""
    resources: Resources = Resources()
    """Instances and ranks."""
    attempts: int = Field(default=3, ge=1, le=MAX_ATTEMPTS)
    """Maximum attempts: reclaims and interruptions are retried, the job's own errors are not."""
    timeout_hours: float | None = Field(default=None, ge=MIN_TIMEOUT_HOURS, le=MAX_TIMEOUT_HOURS)
    """Wall-clock limit of one attempt. Default: the kind's."""


class JobSpec(Limits, _Submission):  # the fields of the last base come first
    """One validated submission."""

    sweep: Sweep | None = None
    """Many runs that differ in some arguments, submitted as one, with one budget."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """The kind's own arguments. Of a sweep those of its first point, where they are swept."""

    @field_validator("name")
    @classmethod
    def _stands_for_no_other_run(cls, name: str) -> str:
        if name == LATEST:
            raise ValueError(f"'{LATEST}' stands for the newest run; choose another name")
        return name

    @model_validator(mode="after")
    def _sweeps_have_limits(self) -> Self:
        if self.sweep is not None:
            check_name(self.name)
            if self.resources.nnodes > 1:
                raise ValueError("sweep: each of its points runs on one node; leave resources.nnodes out")
        return self

    @property
    def kind(self) -> JobKind:
        return job_kind(self.job)

    def entrypoint_arguments(self) -> Arguments:
        """Return `arguments` as the kind's model; `parse_spec` has validated them."""
        return self.kind.arguments.model_validate(self.arguments)

    def point_specs(self) -> list["JobSpec"]:
        """Return the spec of each point of a sweep, a run of its own without a budget: that is the sweep's."""
        found = points(self.sweep) if self.sweep is not None else []
        return [
            self.model_copy(
                update={
                    "name": point_name(self.name, number, count=len(found)),
                    "sweep": None,
                    "max_usd": None,
                    "max_hours": None,
                    "arguments": with_values(self.arguments, point),
                }
            )
            for number, point in enumerate(found, start=1)
        ]


@dataclass(frozen=True, kw_only=True)
class PlannedPoint:
    """A point of a sweep, as it would be run."""

    record: PointRecord
    location: S3Location
    spec: JobSpec


def parse_spec(data: object, *, origin: str) -> JobSpec:
    """The spec in `data`, what a YAML reader returned for the file `origin`.

    Raises UsageError with every mistake on a line of its own: file, path into it, what is wrong, the closest
    right key.
    """
    if not isinstance(data, Mapping):
        raise UsageError(
            f"{origin}: a spec is a mapping of keys to values, this is {_yaml_type(data)}",
            next_step="start from one of jobs/specs/",
        )
    spec, mistakes = None, []
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        mistakes = _mistakes(error, origin, (), JobSpec)
    name, arguments = data.get("job"), data.get("arguments", {})
    if spec is not None and spec.sweep is not None:
        spec = _with_first_point(spec, origin)
        mistakes += _mistakes_of_points(spec, origin)
        arguments = None  # they are looked at with each point's values
    if isinstance(name, str):
        try:
            kind = job_kind(name)
            if isinstance(arguments, Mapping):
                kind.arguments.model_validate(arguments)
        except UsageError as error:
            mistakes.append(f"{origin}: job: {error}")
        except ValidationError as error:
            mistakes += _mistakes(error, origin, ("arguments",), kind.arguments)
    if mistakes or spec is None:
        raise UsageError("\n".join(mistakes))
    return spec


def _with_first_point(spec: JobSpec, origin: str) -> JobSpec:
    """Return the spec of a sweep with arguments that can be checked, and whose inputs can be looked for."""
    assert spec.sweep is not None  # noqa: S101 - whoever calls has looked
    try:
        return spec.model_copy(update={"arguments": with_values(spec.arguments, points(spec.sweep)[0])})
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from None


def _mistakes_of_points(spec: JobSpec, origin: str) -> list[str]:
    """Return the mistakes of the first point that has some; of several alike one is enough."""
    if spec.sweep is None or spec.job not in CATALOG:
        return []
    values = points(spec.sweep)
    for number, (point, point_spec) in enumerate(zip(values, spec.point_specs(), strict=True), start=1):
        of = f"{origin}: point {number} of {len(values)} ({shortened(values_text(point))})"
        try:
            spec.sweep.comparison(point_spec.entrypoint_arguments())
        except ValidationError as error:  # the first one ends it
            return _mistakes(error, of, ("arguments",), spec.kind.arguments)
        except UsageError as error:
            return [f"{of}: {error}"]
    return []


def spec_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a spec, with the arguments of each kind spelled out."""
    schema = JobSpec.model_json_schema()
    schema["title"] = "trainyard job spec"
    schema["properties"]["job"]["enum"] = sorted(CATALOG)
    schema["allOf"] = []
    for name, kind in sorted(CATALOG.items()):
        arguments = kind.arguments.model_json_schema()
        schema.setdefault("$defs", {}).update(arguments.pop("$defs", {}))
        schema["$defs"][name] = arguments
        schema["allOf"].append(
            {
                "if": {"properties": {"job": {"const": name}}},
                "then": {"properties": {"arguments": {"$ref": f"#/$defs/{name}"}}},
            }
        )
    return schema


def _mistakes(error: ValidationError, origin: str, prefix: tuple[str, ...], model: type[BaseModel]) -> list[str]:
    lines = []
    items = error.errors(include_url=False)
    for item in items[:MAX_TOLD_MISTAKES]:
        path = ".".join((*prefix, *(str(part) for part in item["loc"]))) or "the spec"
        if item["type"] == "extra_forbidden":
            known = _keys_at(model, item["loc"][:-1])
            message = f"unknown key{did_you_mean(str(item['loc'][-1]), known)}"
        elif item["type"] == "missing":
            message = "missing; it has no default"
        else:
            message = error_in_words(item, model)
        lines.append(f"{origin}: {shortened(path)}: {shortened(message)}")
    if len(items) > MAX_TOLD_MISTAKES:
        lines.append(f"{origin}: {len(items) - MAX_TOLD_MISTAKES} mistakes more")
    return lines


def _keys_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _yaml_type(data: object) -> str:
    names = {
        type(None): "empty",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(data), f"of type {type(data).__name__}")
