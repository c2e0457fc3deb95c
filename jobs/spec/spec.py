"""JobSpec: the short YAML file that a researcher writes, validated before any money is spent.

    name: finetune-reviews            # the name of the run; its id appends the time
    job: finetune-classification      # a kind of jobs/spec/catalog.py
    team: research
    resources:
      nproc_per_node: 8               # ranks, one per card; default: all cards of the stage's instance type
      capacity: spot                  # or on-demand: more expensive, never interrupted; default: spot for one node
    arguments:                        # the kind's arguments; unknown ones are rejected
      model: data://shared/models/minilm
      train_data: data://shared/reviews/train.jsonl

`trainyard schema` prints the JSON Schema of this file for editors.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from jobs.core.errors import UsageError
from jobs.core.instance_types import InstanceType
from jobs.core.locations import S3Location
from jobs.core.queues import Capacity
from jobs.core.run import LATEST
from jobs.core.stage import DEFAULT_TEAM, TEAM_PATTERN
from jobs.core.words import shortened
from jobs.spec.arguments import Arguments, JobKind, Strict, error_in_words
from jobs.spec.catalog import CATALOG, job_kind
from jobs.spec.launcher_options import Limits, reserved_variable
from jobs.spec.other_names import unknown_key
from jobs.spec.sweep import PointRecord, Sweep, check_name, point_name, points, values_text, with_values

MAX_ATTEMPTS = 10
"""Limit of AWS Batch."""

MIN_TIMEOUT_HOURS = 1 / 60
"""Limit of AWS Batch: it rejects timeouts under 60 seconds."""

MAX_TIMEOUT_HOURS = 14 * 24
"""Longer runs must be resumed."""

MAX_SPOT_NODES = 10_000
"""Limit of AWS Batch: children of an array job."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

MAX_REPORTED_ERRORS = 20
"""Only the first errors of a spec are reported; the others are counted."""


class Resources(Strict):
    """The resources that a job needs; the plan chooses a queue for them."""

    nnodes: int = Field(default=1, ge=1)
    """Number of instances. More than one On-Demand instance needs a stage that offers them."""
    min_nnodes: int | None = Field(default=None, ge=1)
    """Minimum number of Spot nodes to train on if EC2 has no more after 15 minutes. Default: nnodes."""
    nproc_per_node: int | None = Field(default=None, ge=1)
    """Ranks on each instance, one per card. Default: the number of cards of the instance."""
    capacity: Capacity | None = None
    """spot is cheaper and is resumed after a reclaim; on-demand is not interrupted. Default: spot for one node,
    on-demand for several."""
    instance_types: list[str] | None = Field(default=None, min_length=1)
    """Start on these instance types only. Default: all of the stage."""
    gpu: str | None = None
    """Start on this card only, by EC2's name: L40S. Default: any card of the stage."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Start on cards with at least this memory only, as EC2 reports it. Default: no minimum."""

    def misfit(self, row: InstanceType) -> str | None:
        """Return why a job with these resources must not start on an instance type, or None if it may."""
        if self.instance_types is not None and row.name not in self.instance_types:
            return "not in instance_types"
        if self.gpu is not None and self.gpu.lower() != (row.card_model or "").lower():
            return f"has no {self.gpu}"
        if self.gpu_memory_gib is not None and row.card_memory_mib < 1024 * self.gpu_memory_gib:
            return f"card has {row.card_memory_mib / 1024:.3g} GiB"
        return None

    @property
    def is_node_group(self) -> bool:
        """Return whether the job has several nodes on Spot: Batch starts each separately, and they find each other."""
        return self.nnodes > 1 and self.capacity == "spot"

    @property
    def fewest_nnodes(self) -> int:
        """Return the smallest number of nodes that the job may train on."""
        return self.min_nnodes or self.nnodes

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.is_node_group and self.nnodes > MAX_SPOT_NODES:
            raise ValueError(f"nnodes: a job on Spot can have at most {MAX_SPOT_NODES} nodes")
        if self.min_nnodes is None:
            return self
        if not self.is_node_group:
            raise ValueError("min_nnodes needs several nodes on Spot: set capacity: spot and nnodes to more than 1")
        if self.min_nnodes > self.nnodes:
            raise ValueError(f"min_nnodes ({self.min_nnodes}) is more than nnodes ({self.nnodes})")
        return self


class _Submission(Strict):
    """The job to run, its team, and its resources."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Lower-case letters, digits and hyphens, at most 63 characters; the run id starts with this name."""
    job: str
    """The kind of job."""
    team: str = Field(default=DEFAULT_TEAM, pattern=f"^{TEAM_PATTERN}$")
    """Lower-case letters, digits and hyphens, at most 31 characters; the team of infra/settings.py that pays."""
    resources: Resources = Resources()
    """Instances and ranks."""
    priority: int = Field(default=0, ge=-10, le=10)
    """Order among the team's waiting runs: a higher priority starts first. Other teams' turns and running jobs stay."""
    attempts: int = Field(default=3, ge=1, le=MAX_ATTEMPTS)
    """Maximum attempts; reclaims and interruptions are retried, the job's own errors are not."""
    timeout_hours: float | None = Field(default=None, ge=MIN_TIMEOUT_HOURS, le=MAX_TIMEOUT_HOURS)
    """Wall-clock limit of one attempt, in hours. Default: depends on the kind, 1 to 24."""


class JobSpec(Limits, _Submission):  # the fields of the last base come first
    """One validated submission."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the job: TOKENIZERS_PARALLELISM: "true". The whole team can read them; secrets belong
    into the team's secret_variables. Default: none."""
    sweep: Sweep | None = None
    """Many runs that differ in some arguments, submitted together with one budget. Default: a single run."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the kind. In a sweep, swept arguments have the first point's values."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == LATEST:
            raise ValueError(f"'{LATEST}' stands for the newest run; choose another name")
        return name

    @field_validator("env", mode="before")
    @classmethod
    def _check_env(cls, env: object) -> object:
        """Return the variables with numbers as text. Raises ValueError for names that a job cannot set."""
        if not isinstance(env, Mapping):
            return env
        texts = {}
        for name, value in env.items():
            if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
                raise ValueError(f"'{name}' is not the name of a variable: use letters, digits and '_', no digit first")
            if reason := reserved_variable(name):
                raise ValueError(f"{name}: {reason}")
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError(f'{name}: must be text; put the value in quotes: {name}: "1"')  # noqa: TRY004 - pydantic
            texts[name] = str(value)
        return texts

    @model_validator(mode="after")
    def _check_sweep(self) -> Self:
        if self.sweep is not None:
            check_name(self.name)
            if self.resources.nnodes > 1:
                raise ValueError("sweep: each point runs on one node; remove resources.nnodes")
        return self

    @property
    def kind(self) -> JobKind:
        return job_kind(self.job)

    def entrypoint_arguments(self) -> Arguments:
        """Return `arguments` as the kind's model; `parse_spec` has already validated them."""
        return self.kind.arguments.model_validate(self.arguments)

    def point_specs(self) -> list["JobSpec"]:
        """Return the spec of each point of a sweep, without a budget, which belongs to the sweep as a whole."""
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
    """A point of a sweep, ready to run."""

    record: PointRecord
    location: S3Location
    spec: JobSpec


def parse_spec(data: object, *, origin: str) -> JobSpec:
    """Validate `data`, the YAML document of the file `origin`, and return the spec.

    Raises UsageError with one line per error: file, path in the file, what is wrong, and the closest match for an
    unknown key.
    """
    if not isinstance(data, Mapping):
        raise UsageError(
            f"{origin}: a spec must be a mapping of keys to values, not {_yaml_type(data)}",
            next_step="start from one of the specs in jobs/specs/",
        )
    spec, errors = None, []
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        errors = _error_lines(error, origin, (), JobSpec, job=data.get("job"))
    name, arguments = data.get("job"), data.get("arguments", {})
    if spec is not None and spec.sweep is not None:
        spec = _with_first_point(spec, origin)
        errors += _errors_of_points(spec, origin)
        arguments = None  # already checked with each point's values
    if isinstance(name, str):
        try:
            kind = job_kind(name)
            if isinstance(arguments, Mapping):
                kind.arguments.model_validate(arguments)
        except UsageError as error:
            errors.append(f"{origin}: job: {error}")
        except ValidationError as error:
            errors += _error_lines(error, origin, ("arguments",), kind.arguments, job=name)
    if errors or spec is None:
        raise UsageError("\n".join(errors))
    return spec


def placeable_part(data: object) -> JobSpec | None:
    """Return a spec with only the valid kind, team and resources of an invalid one; None if it has no valid kind."""
    if not isinstance(data, Mapping) or not isinstance(data.get("job"), str) or data["job"] not in CATALOG:
        return None
    kept: dict[str, Any] = {"name": "invalid", "job": data["job"]}
    for key in ("team", "resources"):
        try:
            JobSpec.model_validate({**kept, key: data.get(key, JobSpec.model_fields[key].default)})
        except ValidationError:
            continue
        kept |= {key: data[key]} if key in data else {}
    return JobSpec.model_validate(kept)


def _with_first_point(spec: JobSpec, origin: str) -> JobSpec:
    """Return the spec of a sweep with the first point's arguments, so that they and their inputs can be checked."""
    assert spec.sweep is not None  # noqa: S101 - the caller has checked
    try:
        return spec.model_copy(update={"arguments": with_values(spec.arguments, points(spec.sweep)[0])})
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from None


def _errors_of_points(spec: JobSpec, origin: str) -> list[str]:
    """Return the errors of the first point that has any; other points often have the same."""
    if spec.sweep is None or spec.job not in CATALOG:
        return []
    values = points(spec.sweep)
    for number, (point, point_spec) in enumerate(zip(values, spec.point_specs(), strict=True), start=1):
        place = f"{origin}: point {number} of {len(values)} ({shortened(values_text(point))})"
        try:
            spec.sweep.comparison(point_spec.entrypoint_arguments())
        except ValidationError as error:
            return _error_lines(error, place, ("arguments",), spec.kind.arguments, job=spec.job)
        except UsageError as error:
            return [f"{place}: {error}"]
    return []


def spec_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a spec, including the arguments of each kind."""
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


def _error_lines(
    error: ValidationError, origin: str, prefix: tuple[str, ...], model: type[BaseModel], *, job: object
) -> list[str]:
    lines = []
    items = error.errors(include_url=False)
    for item in items[:MAX_REPORTED_ERRORS]:
        parts = (*prefix, *(str(part) for part in item["loc"]))
        path = ".".join(parts) or "the spec"
        if item["type"] == "extra_forbidden":
            message = unknown_key(parts, spec_keys(job), siblings=_keys_at(model, item["loc"][:-1]))
        elif item["type"] == "missing":
            message = "is required"
        else:
            message = error_in_words(item, model)
        lines.append(f"{origin}: {shortened(path)}: {shortened(message)}")
    if len(items) > MAX_REPORTED_ERRORS:
        lines.append(f"{origin}: {len(items) - MAX_REPORTED_ERRORS} more errors")
    return lines


def spec_keys(job: object) -> list[str]:
    """Return the dotted paths of all keys of a spec whose kind of job is `job`, without those of a sweep."""
    found = [path for path in _paths(JobSpec) if not path.startswith("sweep.")]
    kind = CATALOG.get(job) if isinstance(job, str) else None
    return found + [f"arguments.{path}" for path in (_paths(kind.arguments) if kind else ())]


def _paths(model: type[BaseModel]) -> Iterator[str]:
    for name in model.model_fields:
        yield name
        yield from (f"{name}.{key}" for key in _keys_at(model, (name,)))


def _keys_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        models = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
        inner = next((each for each in models if issubclass(each, BaseModel)), None)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _yaml_type(data: object) -> str:
    names = {
        type(None): "an empty document",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(data), f"of type {type(data).__name__}")
