"""Load infra/settings.py and refuse rows that cannot be deployed, before synthesis rather than during deployment."""

import importlib
import importlib.util
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import __file__ as dataclasses_file
from dataclasses import fields
from types import FrameType

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from infra.stages.limits import MAX_QUEUES, OUT_OF_LIMITS
from infra.stages.model import Pool, Stage, Team
from infra.stages.network_plan import (
    DEFAULT_ZONE_COUNT,
    environment_count,
    has_interface_endpoints,
    reserved_subnet_index,
    subnet_names,
    uses_default_security_group,
    zone_ids,
)
from jobs.core.errors import ConfigurationError, UsageError, did_you_mean
from jobs.core.instance_types import InstanceType
from jobs.core.queues import MAX_QUEUE_ENVIRONMENTS
from jobs.core.stage import SHARED_PREFIX, share_identifier
from jobs.core.words import printable

SETTINGS = "infra.settings"
_UNKNOWN_FIELD = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")
_ROW = TypeAdapter(Stage)


def load() -> dict[str, Stage]:
    """Return the stages of infra/settings.py, unchecked.

    Raises ConfigurationError, with the line, if Python cannot read the file or one of its lines fails.
    """
    try:
        stages: dict[str, Stage] = importlib.import_module(SETTINGS).STAGES
    except Exception as error:
        message = _settings_mistake(error)
        if message is None:
            raise
        raise ConfigurationError(f"infra/settings.py: {message}") from None
    return stages


def _settings_mistake(error: Exception) -> str | None:
    """Return the error and its line in infra/settings.py, or None if it arose in other code."""
    spec = importlib.util.find_spec(SETTINGS)
    path = spec and spec.origin
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})" if error.filename == path else None
    # A call of dataclasses.replace() counts as a line of the settings.
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


def selected_stages(only: str | None = None) -> tuple[Stage, ...]:
    """Return all stages of the settings, or the one called `only`, after checking them.

    Raises ConfigurationError if the settings cannot be loaded or have no such stage, or with one line per mistake.
    """
    stages = load()
    if only is not None and only not in stages:
        raise ConfigurationError(
            f"stage '{only}' is not in infra/settings.py{did_you_mean(only, stages)}",
            next_step="name an existing stage, or add a row",
        )
    chosen = tuple(stages.values()) if only is None else (stages[only],)
    for stage in chosen:
        check(stage)
    return chosen


def fallback_of(stage: Stage) -> Stage | None:
    """Return the row of the stage to which jobs move for lack of Spot capacity, or None if there is none."""
    return load()[stage.fallback_stage] if stage.fallback_stage else None


def homes_of(stage: Stage) -> list[Stage]:
    """Return the rows of the stages whose fallback this stage is."""
    return [other for other in load().values() if other.fallback_stage == stage.name]


def check(stage: Stage) -> None:
    """Raise ConfigurationError with one line per mistake of a row.

    If a value has the wrong type, only wrong types are reported, because the other checks rely on the types.
    """
    try:
        _ROW.validate_python(stage)
        errors = []
    except ValidationError as error:
        errors = error.errors()
    mistakes = [_row_mistake(error, stage) for error in errors if error["type"] != OUT_OF_LIMITS]
    mistakes = mistakes or [*(_row_mistake(error, stage) for error in errors), *_conflicts(stage)]
    if mistakes:
        raise ConfigurationError(
            printable("\n".join(f"infra/settings.py: stage '{stage.name}': {mistake}" for mistake in mistakes))
        )


def _row_mistake(error: ErrorDetails, stage: Stage) -> str:
    """Return the field and its mistake. Teams are identified by name, if the name has the right type."""
    message = error["msg"] if error["type"] == OUT_OF_LIMITS else f"{error['msg']}, not {error['input']!r}"
    match error["loc"]:
        case ("teams", int(index), *fields) if isinstance(stage.teams[index], Team):
            place = [f"team '{stage.teams[index].name}'", *(field for field in fields if field != "name")]
        case loc:
            place = list(loc)
    return ": ".join([*(step for step in place if isinstance(step, str)), message])


def _conflicts(stage: Stage) -> Iterator[str]:
    """Yield conflicts between values that are each valid alone."""
    for other in load():
        if stage.name.startswith(f"{other}-"):
            yield (
                f"name: starts with the name of stage '{other}', so in one account the roles of '{other}' would reach "
                "this stage's resources; choose a name that starts differently"
            )
    source = stage.deploy_from
    if source is not None and (source.owner_id is None) != (source.repository_id is None):
        yield "deploy_from: set both owner_id and repository_id, or neither: GitHub's tokens contain both or none"
    if stage.vpc and stage.availability_zone_ids:
        yield "availability_zone_ids: follow from the subnets in 'vpc'; leave them out"
    if stage.vpc and stage.vpc_cidr != Stage.vpc_cidr:
        yield "vpc_cidr: follows from the existing 'vpc'; leave it out"
    if stage.dedicated_account:
        others = [
            other.name for other in load().values() if other.account == stage.account and other.name != stage.name
        ]
        if stage.account is None:
            yield "dedicated_account: also set 'account'"
        elif others:
            yield f"dedicated_account: stage '{others[0]}' has the same account; remove it, or move one of the stages"
    yield from (f"fallback_stage: {mistake}" for mistake in _fallback_mistakes(stage))
    yield from _team_mistakes(stage)
    yield from _accelerator_mistakes(stage)


def _fallback_mistakes(stage: Stage) -> Iterator[str]:
    """Yield why jobs could not move to the fallback stage, or could not run there."""
    name, stages = stage.fallback_stage, load()
    if name is None:
        return
    if stage.spot_wait_hours is None:
        yield "also set spot_wait_hours: a job moves after this wait"
    if stage.fsx_gib:
        yield f"jobs find shared data under a path of the file system, which '{name}' does not have; set fsx_gib=0"
    if name not in stages:
        yield f"'{name}' is not in infra/settings.py{did_you_mean(name, stages)}"
        return
    other = stages[name]
    try:
        _ROW.validate_python(other)
    except ValidationError:
        yield f"'{name}' also has mistakes; to list them: cdk synth -c stage={name}"
        return
    if None in (stage.region, other.region) or stage.region == other.region:
        yield f"set 'region' of both '{stage.name}' and '{name}', to different regions"
    if stage.account != other.account:
        yield f"'{name}' must have the same account"
    if other.vpc is None and other.nat_gateways == 0 and other.proxy is None:
        # Amazon VPC user guide, "Gateway endpoints for Amazon S3", "Considerations"
        yield (
            f"jobs of '{name}' could not reach the buckets here, because an S3 gateway endpoint serves only its own "
            f"region; set nat_gateways of '{name}' to 1"
        )
    teams = {team.name: team for team in other.teams}
    for team in stage.teams:
        there = teams.get(team.name)
        if there is None:
            yield f"'{name}' needs team '{team.name}'"
        elif (team.huggingface_token, set(team.secret_variables)) != (
            there.huggingface_token,
            set(there.secret_variables),
        ):
            yield f"team '{team.name}' needs the same huggingface_token and secret_variables in '{name}'"
    if others := [each for each in other.instance_types if each not in stage.instance_types]:
        yield f"'{name}' has {', '.join(others)}, which this stage does not; its types must all be types of this stage"
        return
    with suppress(ConfigurationError, UsageError):  # of these rows' own types or releases, which is reported as such
        if stage.pool.software != other.pool.software:
            yield f"'{name}' must have the same release, not {other.pool.software.name}"


def _team_mistakes(stage: Stage) -> Iterator[str]:
    if not stage.teams:
        yield "teams: at least one is needed"
    taken: dict[str, str] = {}
    for team in stage.teams:
        if team.name == SHARED_PREFIX:
            yield f"team '{team.name}': the prefix '{SHARED_PREFIX}/' belongs to all teams; choose another name"
        other = taken.get(share_identifier(team.name))
        if other == team.name:
            yield f"team '{team.name}': two teams have this name"
        elif other is not None:
            yield (
                f"team '{team.name}': Batch's fair share drops hyphens, so it cannot distinguish this team from "
                f"'{other}'; rename one of them"
            )
        taken[share_identifier(team.name)] = team.name
        if team.max_usd_per_hour is not None and team.shares_instances:
            yield (
                f"team '{team.name}': max_usd_per_hour: its instances also run other teams' jobs; set the stage's "
                "max_usd_per_hour instead"
            )
        if team.share != Team.share and not team.shares_instances:
            yield f"team '{team.name}': share: only affects teams that share instances; also set shares_instances=True"
    owners = len(stage.instance_owners)
    try:
        most = max(stage.queue_count, environment_count(stage))
    except UsageError:  # an unknown instance type, which is reported as such
        return
    if most > MAX_QUEUES:
        yield (
            f"teams: Batch allows {MAX_QUEUES} queues and as many compute environments per account and region; this "
            f"stage has {owners} x {most // owners}: one set per team with its own instances, and one for "
            f"all teams that share{', with one per zone for multi-node jobs' if stage.max_multinode_nodes else ''}. "
            "Set shares_instances=True for more teams, or move some to another account or region"
        )


def _accelerator_mistakes(stage: Stage) -> Iterator[str]:
    try:
        if stage.cpu_row.accelerator != "cpu":
            yield f"cpu_instance_type: must be a type without an accelerator, not '{stage.cpu_instance_type}'"
    except UsageError as error:
        yield f"cpu_instance_type: {error}"
    if not all(pool.instance_types for pool in stage.pools):
        return  # the limits of single values report it
    try:
        mixed = list(_pool_mistakes(stage, stage.pool))
    except UsageError as error:
        mixed = [str(error)]
    if mixed:
        yield from (f"instance_types: {mistake}" for mistake in mixed)
        return
    try:
        _ = stage.pool.software
    except (ConfigurationError, UsageError) as error:
        yield f"release: {error}"
        return
    yield from _machine_image_mistakes(stage, stage.pool, "machine_image")
    for team, limit in stage.hourly_limits.items():
        dearest = max(stage.pool.rows, key=lambda row: row.spot_usd_per_hour)
        if limit < dearest.spot_usd_per_hour:
            owner = f"team '{team}': " if team else ""
            yield (
                f"{owner}max_usd_per_hour: must be at least {dearest.spot_usd_per_hour:g}, the price of one "
                f"{dearest.name} on Spot, not {limit:g}"
            )
    if stage.capacity_reservation is not None and not stage.max_on_demand_nodes + stage.max_multinode_nodes:
        yield "capacity_reservation: only On-Demand instances use it; set max_on_demand_nodes or max_multinode_nodes"
    ids = [stage.pool.id]
    for pool in stage.retiring:
        try:
            yield from (f"retiring: instance_types: {mistake}" for mistake in _pool_mistakes(stage, pool))
            ids.append(pool.id)
        except (ConfigurationError, UsageError) as error:
            yield f"retiring: {error}"
            continue
        yield from _machine_image_mistakes(stage, pool, "retiring: machine_image")
    if ids[0] in ids[1:]:
        yield f"retiring: '{ids[0]}' is the pool of new jobs; it cannot retire at the same time"
    if len(set(ids[1:])) < len(ids[1:]):
        yield "retiring: lists a pool twice"
    if len(ids) == 1 + len(stage.retiring):  # all pools have a row and a release
        yield from _default_group_mistakes(stage)
        yield from _zone_mistakes(stage)
        yield from _reservation_mistakes(stage, stage.pool, "capacity_reservation")
        for pool in stage.retiring:
            yield from _reservation_mistakes(stage, pool, "retiring: capacity_reservation")


_SHARED: dict[str, Callable[[InstanceType], object]] = {
    "image": lambda row: row.image,
    "AMI family": lambda row: row.image_type,
    "number of cards": lambda row: row.accelerators,
    # Batch counts GPUs. Jobs on other instances fill them by vCPUs.
    "number of vCPUs": lambda row: None if row.gpus else row.vcpus,
    "local disks": lambda row: "some" if row.nvme_disks else "none",
    "huge pages": lambda row: row.huge_pages,
}
"""What all types of a pool must have in common: its jobs have one definition, its instances one AMI and user data."""


def _pool_mistakes(stage: Stage, pool: Pool) -> Iterator[str]:
    """Yield why a pool's types cannot share it. Raises UsageError for an unknown type."""
    first, *others = pool.rows
    for row in others:
        for name, value in _SHARED.items():
            if value(row) != value(first):
                yield (
                    f"{first.name} and {row.name} cannot share a pool, whose types need the same {name}, not "
                    f"{value(first)} and {value(row)}"
                )
                break
    falls_back = bool(stage.max_on_demand_nodes) and stage.spot_wait_hours is None
    if (count := len(pool.environments) + falls_back) > MAX_QUEUE_ENVIRONMENTS:
        yield (
            f"a queue tries at most {MAX_QUEUE_ENVIRONMENTS} compute environments, not {count}: one per card"
            f"{' and one of On-Demand instances, which spot_wait_hours would leave out' if falls_back else ''}; "
            "list types of the same card one after the other, or fewer cards"
        )


def _default_group_mistakes(stage: Stage) -> Iterator[str]:
    if stage.vpc is None or stage.vpc.default_security_group_id is not None:
        return
    if has_interface_endpoints(stage) and uses_default_security_group(stage):
        yield (
            "vpc: default_security_group_id: is required with max_multinode_nodes and interface_endpoints: containers "
            "of multi-node jobs are in the VPC's default group, and the endpoints have to admit it"
        )


def _reservation_mistakes(stage: Stage, pool: Pool, field: str) -> Iterator[str]:
    """Yield a zone or subnet that the stage does not have, or the field that is missing although it has several."""
    reservation, own = pool.capacity_reservation, stage.vpc is None
    if reservation is None:
        return
    places = (reservation.zone_id, reservation.subnet_id)
    place, misplaced = places if own else reversed(places)
    if misplaced is not None:
        yield f"{field}: " + (
            "subnet_id is for an existing `vpc`; set zone_id instead"
            if own
            else "zone_id is for a VPC that the stage creates; set subnet_id instead"
        )
    elif place is not None:
        if reserved_subnet_index(stage, pool) is None:
            yield f"{field}: add {place} to {'availability_zone_ids' if own else 'private_subnet_ids of `vpc`'}"
    # A group may have reservations in several zones.
    elif len(subnet_names(stage)) != 1 and not reservation.target.startswith("arn:"):
        yield (
            f"{field}: set {'zone_id to' if own else 'subnet_id to a subnet in'} the zone of the capacity: aws ec2 "
            f"describe-capacity-reservations --capacity-reservation-ids {reservation.target} --query "
            "'CapacityReservations[].AvailabilityZoneId'"
        )


def _zone_mistakes(stage: Stage) -> Iterator[str]:
    """Yield too many NAT gateways, and settings for one zone if the region's first may not offer the instances."""
    zones = len(zone_ids(stage)) or DEFAULT_ZONE_COUNT
    if stage.vpc is None and not 0 <= stage.nat_gateways <= zones:
        yield f"nat_gateways: must be from 0 to {zones}, at most one per zone, not {stage.nat_gateways}"
    limits = {"max_multinode_nodes": stage.max_multinode_nodes, "fsx_gib": stage.fsx_gib}
    enabled = [name for name, limit in limits.items() if limit]
    if not enabled or stage.vpc is not None or zone_ids(stage):
        return
    name = stage.instance_types[0]
    regions = [] if stage.region else [f"'{region}'" for region in stage.row.zone_ids]
    choices = [f"region={' or '.join(regions)}"] if regions else []
    choices.append(
        f"availability_zone_ids, starting with a zone that offers it (aws ec2 describe-instance-type-offerings "
        f"--location-type availability-zone-id --filters Name=instance-type,Values={name})"
    )
    yield f"{enabled[0]}: needs one zone, and no zone here is known to offer {name}; set {', or '.join(choices)}"


def _machine_image_mistakes(stage: Stage, pool: Pool, field: str) -> Iterator[str]:
    if pool.builds_machine_image and stage.proxy is not None:
        yield f"{field}: building the AMI of '{pool.id}' would not use the proxy; name an AMI of another stage"
    if pool.builds_machine_image and stage.vpc is None and stage.nat_gateways == 0:
        yield (
            f"{field}: building the AMI of '{pool.id}' needs access to vault.habana.ai, which nat_gateways=0 prevents; "
            "set nat_gateways=1, or name an AMI that another stage or account has built"
        )
