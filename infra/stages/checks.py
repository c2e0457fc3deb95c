"""Refuse rows of infra/settings.py that cannot be deployed, before synthesis rather than at AWS."""

import importlib
import importlib.util
import re
import traceback
from collections.abc import Iterator
from dataclasses import __file__ as dataclasses_file
from dataclasses import fields
from types import FrameType

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from infra.stages.limits import MOST_QUEUES, OUT_OF_LIMITS
from infra.stages.model import Pool, Stage, Team
from infra.stages.network_plan import has_interface_endpoints, uses_default_security_group, zone_ids
from jobs.core.errors import ConfigurationError, UsageError, did_you_mean
from jobs.core.stage import SHARED_PREFIX, share_identifier
from jobs.core.words import printable

SETTINGS = "infra.settings"
_UNKNOWN_FIELD = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def load() -> dict[str, Stage]:
    """Return the stages of the settings, unchecked.

    Raises ConfigurationError where Python cannot read the file, or stops at one of its lines.
    """
    try:
        stages: dict[str, Stage] = importlib.import_module(SETTINGS).STAGES
    except Exception as error:
        mistake = _mistake(error)
        if mistake is None:
            raise
        raise ConfigurationError(f"infra/settings.py: {mistake}") from None
    return stages


def _mistake(error: Exception) -> str | None:
    """Say what is wrong with the file; None where the error arose in other code, which its author cannot mend there."""
    spec = importlib.util.find_spec(SETTINGS)
    path = spec and spec.origin
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})" if error.filename == path else None
    # dataclasses.replace() calls a row's class on the file's behalf.
    calls = [call for call in traceback.walk_tb(error.__traceback__) if call[0].f_code.co_filename != dataclasses_file]
    frame, line = calls[-1]
    if frame.f_code.co_filename != path:
        return None
    return f"{_unknown_field(error, frame) or f'{type(error).__name__}: {error}'} (line {line})"


def _unknown_field(error: Exception, frame: FrameType) -> str | None:
    found = _UNKNOWN_FIELD.search(str(error))
    row = frame.f_globals.get(found[1]) if found else None
    if not found or row is None:
        return None
    return f"{found[1]} has no field '{found[2]}'{did_you_mean(found[2], (field.name for field in fields(row)))}"


_ROW = TypeAdapter(Stage)


def selected_stages(only: str | None = None) -> tuple[Stage, ...]:
    """Return all stages of the settings, or the one called `only`, each checked.

    Raises ConfigurationError where the settings cannot be loaded or have no stage of that name, or with every mistake
    of a row on a line of its own.
    """
    stages = load()
    if only is not None and only not in stages:
        raise ConfigurationError(
            f"stage '{only}' is not in infra/settings.py{did_you_mean(only, stages)}",
            next_step="name one that is there, or add a row",
        )
    chosen = tuple(stages.values()) if only is None else (stages[only],)
    for stage in chosen:
        check(stage)
    return chosen


def check(stage: Stage) -> None:
    """Raise ConfigurationError with every mistake of a row on a line of its own.

    If a value has the wrong type, only such mistakes are reported: the other checks rely on the types.
    """
    try:
        _ROW.validate_python(stage)
        errors = []
    except ValidationError as error:
        errors = error.errors()
    mistakes = [_row_mistake(error, stage) for error in errors if error["type"] != OUT_OF_LIMITS]
    mistakes = mistakes or [*(_row_mistake(error, stage) for error in errors), *_what_does_not_fit(stage)]
    if mistakes:
        raise ConfigurationError(
            printable("\n".join(f"infra/settings.py: stage '{stage.name}': {mistake}" for mistake in mistakes))
        )


def _row_mistake(error: ErrorDetails, stage: Stage) -> str:
    """Return the field and what is wrong with it; a team is called by its name, if that has the right type."""
    message = error["msg"] if error["type"] == OUT_OF_LIMITS else f"{error['msg']}, not {error['input']!r}"
    match error["loc"]:
        case ("teams", int(index), *fields) if isinstance(stage.teams[index], Team):
            place = [f"team '{stage.teams[index].name}'", *(field for field in fields if field != "name")]
        case loc:
            place = list(loc)
    return ": ".join([*(step for step in place if isinstance(step, str)), message])


def _what_does_not_fit(stage: Stage) -> Iterator[str]:
    """Yield mistakes that no value has by itself, but beside others."""
    for other in load():
        if stage.name.startswith(f"{other}-"):
            yield (
                f"name: names of stage '{other}' begin like this one's, so in one account its roles would reach what "
                "is this one's; choose another beginning"
            )
    zones = len(stage.availability_zone_ids) or 2
    if not 0 <= stage.nat_gateways <= zones:
        yield f"nat_gateways: must be from 0 to {zones}, one a zone, not {stage.nat_gateways}"
    if stage.vpc and stage.availability_zone_ids:
        yield "availability_zone_ids: they are those of the subnets in 'vpc'; leave them out"
    if stage.vpc and stage.vpc_cidr != Stage.vpc_cidr:
        yield "vpc_cidr: it is that of 'vpc', which is there already; leave it out"
    yield from _team_mistakes(stage)
    yield from _accelerator_mistakes(stage)


def _team_mistakes(stage: Stage) -> Iterator[str]:
    if not stage.teams:
        yield "teams: at least one is needed"
    taken: dict[str, str] = {}
    for team in stage.teams:
        if team.name == SHARED_PREFIX:
            yield f"team '{team.name}': what lies under '{SHARED_PREFIX}/' is for all teams; choose another name"
        other = taken.get(share_identifier(team.name))
        if other == team.name:
            yield f"team '{team.name}': there are two of that name"
        elif other is not None:
            yield f"team '{team.name}': Batch's fair share drops hyphens and cannot tell it from team '{other}'"
        taken[share_identifier(team.name)] = team.name
        if team.share != Team.share and not team.shares_instances:
            yield f"team '{team.name}': share: counts among teams that share instances; set shares_instances=True too"
    yield from _too_many_queues(stage)


def _too_many_queues(stage: Stage) -> Iterator[str]:
    owners = len(stage.instance_owners)
    if stage.queue_count > MOST_QUEUES:
        yield (
            f"teams: Batch takes {MOST_QUEUES} queues, and as many compute environments, in a region of an account; "
            f"these have {owners} x {stage.queue_count // owners}, a set for each team and one for all that share. Set "
            "shares_instances=True for more of them, or give some a stage elsewhere"
        )


def _accelerator_mistakes(stage: Stage) -> Iterator[str]:
    try:
        if stage.cpu_row.accelerator != "cpu":
            yield f"cpu_instance_type: must be a row without an accelerator, not '{stage.cpu_instance_type}'"
    except UsageError as error:
        yield f"cpu_instance_type: {error}"
    try:
        _ = stage.row
    except UsageError as error:
        yield f"instance_type: {error}"
        return
    try:
        _ = stage.pool.software
    except (ConfigurationError, UsageError) as error:
        yield f"release: {error}"
        return
    yield from _machine_image_mistakes(stage, stage.pool, "machine_image")
    if stage.capacity_reservation is not None and not stage.max_on_demand_nodes + stage.max_multinode_nodes:
        yield "capacity_reservation: On-Demand instances draw on it; set max_on_demand_nodes or max_multinode_nodes"
    ids = [stage.pool.id]
    for pool in stage.retiring:
        try:
            ids.append(pool.id)
        except (ConfigurationError, UsageError) as error:
            yield f"retiring: {error}"
            continue
        yield from _machine_image_mistakes(stage, pool, "retiring: machine_image")
    if ids[0] in ids[1:]:
        yield f"retiring: '{ids[0]}' is what new jobs run on; it cannot retire as well"
    if len(set(ids[1:])) < len(ids[1:]):
        yield "retiring: names a pool twice"
    every_row_is_there = len(ids) == 1 + len(stage.retiring)
    if every_row_is_there:
        yield from _default_group_mistakes(stage)
        yield from _unknown_zone_mistakes(stage)


def _default_group_mistakes(stage: Stage) -> Iterator[str]:
    if stage.vpc is None or stage.vpc.default_security_group_id is not None:
        return
    if has_interface_endpoints(stage) and uses_default_security_group(stage):
        yield (
            "vpc: default_security_group_id: is needed with max_multinode_nodes and interface_endpoints: containers of "
            "such jobs are in the VPC's default group, and the endpoints have to admit it"
        )


def _unknown_zone_mistakes(stage: Stage) -> Iterator[str]:
    """Yield that what lives in one zone would get the region's first by letter, which need not offer the instances."""
    limits = {"max_multinode_nodes": stage.max_multinode_nodes, "fsx_gib": stage.fsx_gib}
    wanted = [name for name, limit in limits.items() if limit]
    if not wanted or stage.vpc is not None or zone_ids(stage):
        return
    name = stage.instance_type
    regions = [] if stage.region else [f"'{region}'" for region in stage.row.zone_ids]
    choices = [f"region={' or '.join(regions)}"] if regions else []
    choices.append(
        f"availability_zone_ids, first a zone that offers it (aws ec2 describe-instance-type-offerings "
        f"--location-type availability-zone-id --filters Name=instance-type,Values={name})"
    )
    yield f"{wanted[0]}: lives in one zone, and no zone is known to offer {name} here; set {', or '.join(choices)}"


def _machine_image_mistakes(stage: Stage, pool: Pool, field: str) -> Iterator[str]:
    if pool.builds_machine_image and stage.vpc is None and stage.nat_gateways == 0:
        yield (
            f"{field}: the AMI of '{pool.id}' is built from vault.habana.ai, which nat_gateways=0 leaves no way to; "
            "allow 1, or name an AMI that another stage or account has built"
        )
