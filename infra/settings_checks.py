"""What a row of infra/settings.py may say. Checked before synthesis, so that a slip fails here and not at AWS."""

import re
from collections.abc import Iterator

from infra.settings import STAGES, Stage
from jobs.errors import ConfigurationError, UsageError, did_you_mean
from jobs.stage import SHARED_PREFIX, TEAM_PATTERN, share_identifier

LOG_RETENTION_DAYS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3653)
"""What CloudWatch Logs accepts (API reference of PutRetentionPolicy)."""

_RANGES = {
    "root_volume_gib": (100, 16_384),  # the Gaudi image takes tens of GiB; gp3 ends at 16 TiB
    "cpu_root_volume_gib": (30, 16_384),  # 30 GiB: the ECS-optimised AMI's own
    "max_nodes": (1, 1_000),
    "max_cpu_nodes": (1, 1_000),
    "share_decay_hours": (1, 168),  # Batch ends at 604,800 s
    "checkpoint_retention_days": (1, 3_650),
    "noncurrent_retention_days": (1, 3_650),
}

_PATTERNS = {
    "name": (r"[a-z][a-z0-9-]{0,15}", "1 to 16 lower-case letters, digits and hyphens"),
    "machine_image": (r"ami-[0-9a-f]{8,17}|ssm:/[A-Za-z0-9._/-]+", "'ami-…' or 'ssm:/…'"),
    "root_device_name": (r"/dev/\w+", "a device such as '/dev/sda1'"),
    # ECR's own rule for a tag.
    "image_tag": (r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", "at most 128 letters, digits, '_', '.' and '-'"),
}


def selected_stages(only: str | None = None) -> tuple[Stage, ...]:
    """All stages of the settings, or the one called `only`, each checked.

    Raises ConfigurationError where there is none of that name, or with every mistake of a row on a line of its own.
    """
    if only is not None and only not in STAGES:
        raise ConfigurationError(
            f"stage '{only}' is not in infra/settings.py{did_you_mean(only, STAGES)}",
            next_step="name one that is there, or add a row",
        )
    chosen = tuple(STAGES.values()) if only is None else (STAGES[only],)
    for stage in chosen:
        check(stage)
    return chosen


def check(stage: Stage) -> None:
    """Raises ConfigurationError with every mistake on a line of its own."""
    mistakes = [f"infra/settings.py: stage '{stage.name}': {mistake}" for mistake in _mistakes(stage)]
    if mistakes:
        raise ConfigurationError("\n".join(mistakes))


def _mistakes(stage: Stage) -> Iterator[str]:
    for field, (pattern, wanted) in _PATTERNS.items():
        value = getattr(stage, field)
        if value is not None and not re.fullmatch(pattern, value):
            yield f"{field}: must be {wanted}, not '{value}'"
    for field, (low, high) in _RANGES.items():
        value = getattr(stage, field)
        if not low <= value <= high:
            yield f"{field}: must be from {low} to {high}, not {value}"
    if stage.log_retention_days not in LOG_RETENTION_DAYS:
        yield f"log_retention_days: must be one of {', '.join(map(str, LOG_RETENTION_DAYS))}"
    zones = len(stage.availability_zone_ids) or 2
    if not 0 <= stage.nat_gateways <= zones:
        yield f"nat_gateways: must be from 0 to {zones}, one a zone, not {stage.nat_gateways}"
    for zone in stage.availability_zone_ids:
        if not re.fullmatch(r"[a-z]+\d-az\d+", zone):
            yield f"availability_zone_ids: must be ids such as 'use1-az2', not '{zone}'"
    if len(set(stage.availability_zone_ids)) < len(stage.availability_zone_ids):
        yield "availability_zone_ids: names a zone twice"
    yield from _team_mistakes(stage)
    yield from _accelerator_mistakes(stage)


def _team_mistakes(stage: Stage) -> Iterator[str]:
    if not stage.teams:
        yield "teams: at least one is needed"
    taken: dict[str, str] = {}
    for team in stage.teams:
        if not re.fullmatch(TEAM_PATTERN, team.name):
            yield f"team '{team.name}': must be at most 31 lower-case letters, digits and hyphens"
        if team.name == SHARED_PREFIX:
            yield f"team '{team.name}': what lies under '{SHARED_PREFIX}/' is for all teams; choose another name"
        # Batch's weight factor, its inverse, goes from 0.0001 to 999.9999.
        if not 0.01 <= team.share <= 1_000:
            yield f"team '{team.name}': share: must be from 0.01 to 1000, not {team.share:g}"
        other = taken.get(share_identifier(team.name))
        if other == team.name:
            yield f"team '{team.name}': there are two of that name"
        elif other is not None:
            yield f"team '{team.name}': Batch's fair share drops hyphens and cannot tell it from team '{other}'"
        taken[share_identifier(team.name)] = team.name


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
        _ = stage.gaudi_release
    except (ConfigurationError, UsageError) as error:
        yield f"release: {error}"
