"""What a row of infra/settings.py may say. Checked before synthesis, so that a slip fails here and not at AWS."""

import re
from collections.abc import Iterator

from infra.network_plan import has_interface_endpoints, uses_default_security_group
from infra.settings import STAGES, Alerts, GitHub, Pool, Stage
from infra.settings_types import type_mistakes
from jobs.contract.errors import ConfigurationError, UsageError, did_you_mean
from jobs.contract.stage import SHARED_PREFIX, TEAM_PATTERN, share_identifier

LOG_RETENTION_DAYS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3653)
"""What CloudWatch Logs accepts (API reference of PutRetentionPolicy)."""

_RANGES = {
    "root_volume_gib": (100, 16_384),  # the Gaudi image takes tens of GiB; gp3 ends at 16 TiB
    "cpu_root_volume_gib": (30, 16_384),  # 30 GiB: the ECS-optimised AMI's own
    "max_nodes": (1, 1_000),
    "max_cpu_nodes": (1, 1_000),
    "max_on_demand_nodes": (0, 1_000),
    "max_multinode_nodes": (0, 1_000),
    "reclaims_before_on_demand": (1, 10),  # Batch starts a job ten times at most
    "share_decay_hours": (1, 168),  # Batch ends at 604,800 s
    "checkpoint_retention_days": (1, 3_650),
    "noncurrent_retention_days": (1, 3_650),
}

_PATTERNS = {
    # CloudFormation cuts `trainyard-<stage>-` to 24 characters where it makes a name of it, by which the permissions
    # boundary knows what is the stage's.
    "name": (r"[a-z][a-z0-9-]{0,12}", "1 to 13 lower-case letters, digits and hyphens"),
    "machine_image": (r"ami-[0-9a-f]{8,17}|ssm:/[A-Za-z0-9._/-]+", "'ami-…' or 'ssm:/…'"),
    "root_device_name": (r"/dev/\w+", "a device such as '/dev/sda1'"),
    # ECR's own rule for a tag.
    "image_tag": (r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", "at most 128 letters, digits, '_', '.' and '-'"),
    "permissions_boundary": (r"[\w+=,.@-]{1,128}", "a managed policy's name, without its ARN"),
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
    """Raises ConfigurationError with every mistake on a line of its own.

    Where a value is not of its field's type, only such mistakes are told: the other checks rely on the types.
    """
    mistakes = list(type_mistakes(stage)) or list(_mistakes(stage))
    if mistakes:
        raise ConfigurationError(
            "\n".join(f"infra/settings.py: stage '{stage.name}': {mistake}" for mistake in mistakes)
        )


def _mistakes(stage: Stage) -> Iterator[str]:
    for field, (pattern, wanted) in _PATTERNS.items():
        value = getattr(stage, field)
        if value is not None and not re.fullmatch(pattern, value):
            yield f"{field}: must be {wanted}, not '{value}'"
    for field, (low, high) in _RANGES.items():
        value = getattr(stage, field)
        if not low <= value <= high:
            yield f"{field}: must be from {low} to {high}, not {value}"
    for other in STAGES:
        if stage.name.startswith(f"{other}-"):
            yield (
                f"name: names of stage '{other}' begin like this one's, so in one account its roles would reach what "
                "is this one's; choose another beginning"
            )
    if stage.log_retention_days not in LOG_RETENTION_DAYS:
        yield f"log_retention_days: must be one of {', '.join(map(str, LOG_RETENTION_DAYS))}"
    zones = len(stage.availability_zone_ids) or 2
    if not 0 <= stage.nat_gateways <= zones:
        yield f"nat_gateways: must be from 0 to {zones}, one a zone, not {stage.nat_gateways}"
    for zone in stage.availability_zone_ids:
        # Addresses are set aside for eight of a region's zones (infra/constructs/zone.py); no region has more than six.
        if not re.fullmatch(r"[a-z]+\d-az[1-8]", zone):
            yield f"availability_zone_ids: must be ids such as 'use1-az2', not '{zone}'"
    if len(set(stage.availability_zone_ids)) < len(stage.availability_zone_ids):
        yield "availability_zone_ids: names a zone twice"
    yield from _capacity_mistakes(stage)
    yield from _vpc_mistakes(stage)
    yield from _team_mistakes(stage)
    yield from _budget_mistakes(stage)
    yield from _alert_mistakes(stage.alerts)
    yield from _deploy_mistakes(stage.deploy_from)
    yield from _accelerator_mistakes(stage)


def _capacity_mistakes(stage: Stage) -> Iterator[str]:
    hours = stage.spot_wait_hours
    # What jobStateTimeLimitActions takes: 600 to 86,400 seconds.
    if hours is not None and not 1 / 6 <= hours <= 24:
        yield f"spot_wait_hours: must be from 10 minutes (0.17) to 24, not {hours:g}"
    # PERSISTENT_2 file systems start at 1,200 GiB and grow by 2,400.
    if stage.fsx_gib not in (0, 1_200) and (stage.fsx_gib < 0 or stage.fsx_gib % 2_400):
        yield f"fsx_gib: must be 0, 1200 or a multiple of 2400, not {stage.fsx_gib}"


def _vpc_mistakes(stage: Stage) -> Iterator[str]:
    vpc = stage.vpc
    if vpc is None:
        return
    if stage.availability_zone_ids:
        yield "availability_zone_ids: they are those of the subnets in 'vpc'; leave them out"
    if not vpc.private_subnet_ids:
        yield "vpc: private_subnet_ids: at least one is needed"
    for field, ids, pattern in (
        ("vpc_id", (vpc.vpc_id,), r"vpc-[0-9a-f]{8,17}"),
        ("private_subnet_ids", vpc.private_subnet_ids, r"subnet-[0-9a-f]{8,17}"),
        ("private_route_table_ids", vpc.private_route_table_ids, r"rtb-[0-9a-f]{8,17}"),
        ("default_security_group_id", tuple(filter(None, [vpc.default_security_group_id])), r"sg-[0-9a-f]{8,17}"),
    ):
        for id_ in ids:
            if not re.fullmatch(pattern, id_):
                yield f"vpc: {field}: must be like '{pattern.split('-')[0]}-0123456789abcdef0', not '{id_}'"
        if len(set(ids)) < len(ids):
            yield f"vpc: {field}: names one twice"


def _budget_mistakes(stage: Stage) -> Iterator[str]:
    for name, budget in (
        ("", stage.monthly_budget_usd),
        *((f"team '{t.name}': ", t.monthly_budget_usd) for t in stage.teams),
    ):
        if budget is not None and not budget > 0:
            yield f"{name}monthly_budget_usd: must be above 0, not {budget:g}"


def _alert_mistakes(alerts: Alerts) -> Iterator[str]:
    for address in alerts.emails:
        if not re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", address):
            yield f"alerts: emails: '{address}' is no e-mail address"
    if len(set(alerts.emails)) < len(alerts.emails):
        yield "alerts: emails: names an address twice"
    # The characters that Secrets Manager allows in a name.
    if alerts.webhook_secret is not None and not re.fullmatch(r"[\w/+=.@-]{1,512}", alerts.webhook_secret):
        yield (
            f"alerts: webhook_secret: must be the name of a secret, not '{alerts.webhook_secret}'"
            if "://" not in alerts.webhook_secret
            else "alerts: webhook_secret: must be the name of the secret that holds the URL, not the URL"
        )
    if not 10 <= alerts.blocked_queue_minutes <= 1_440:
        yield f"alerts: blocked_queue_minutes: must be from 10 to 1440, not {alerts.blocked_queue_minutes}"
    if alerts.failed_jobs_an_hour < 1:
        yield f"alerts: failed_jobs_an_hour: must be at least 1, not {alerts.failed_jobs_an_hour}"


def _deploy_mistakes(source: GitHub | None) -> Iterator[str]:
    if source is None:
        return
    # A wildcard here would let other repositories in.
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source.repository):
        yield f"deploy_from: repository: must be 'owner/name', not '{source.repository}'"
    if source.environment is not None and not re.fullmatch(r"[\w .-]{1,255}", source.environment):
        yield f"deploy_from: environment: must be a name, not '{source.environment}'"
    if not re.fullmatch(r"[\w./-]{1,255}", source.branch):
        yield f"deploy_from: branch: must be a branch's name, not '{source.branch}'"
    if source.oidc_provider_arn is not None and not re.fullmatch(
        r"arn:aws[\w-]*:iam::\d{12}:oidc-provider/token\.actions\.githubusercontent\.com", source.oidc_provider_arn
    ):
        yield (
            "deploy_from: oidc_provider_arn: must be that of token.actions.githubusercontent.com, not "
            f"'{source.oidc_provider_arn}'"
        )


def _team_mistakes(stage: Stage) -> Iterator[str]:
    if not stage.teams:
        yield "teams: at least one is needed"
    taken: dict[str, str] = {}
    for team in stage.teams:
        if not re.fullmatch(TEAM_PATTERN, team.name):
            yield f"team '{team.name}': must be at most 31 lower-case letters, digits and hyphens"
        if team.name == SHARED_PREFIX:
            yield f"team '{team.name}': what lies under '{SHARED_PREFIX}/' is for all teams; choose another name"
        for principal in team.member_principals:
            if not re.fullmatch(r"arn:aws[\w-]*:iam::\d{12}:(role|user)/[\w+=,.@/-]+", principal):
                yield f"team '{team.name}': member_principals: must be ARNs of IAM users or roles, not '{principal}'"
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
        return
    yield from _machine_image_mistakes(stage, stage.pool, "machine_image")
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
    if every_row_is_there and stage.vpc is not None and stage.vpc.default_security_group_id is None:
        yield from _default_group_mistakes(stage)


def _default_group_mistakes(stage: Stage) -> Iterator[str]:
    if has_interface_endpoints(stage) and uses_default_security_group(stage):
        yield (
            "vpc: default_security_group_id: is needed with max_multinode_nodes and interface_endpoints: containers of "
            "such jobs are in the VPC's default group, and the endpoints have to admit it"
        )


def _machine_image_mistakes(stage: Stage, pool: Pool, field: str) -> Iterator[str]:
    pattern, wanted = _PATTERNS["machine_image"]
    if pool.builds_machine_image and stage.vpc is None and stage.nat_gateways == 0:
        yield (
            f"{field}: the AMI of '{pool.id}' is built from vault.habana.ai, which nat_gateways=0 leaves no way to; "
            "allow 1, or name an AMI that another stage or account has built"
        )
    # That of the stage itself has been looked at with the other fields.
    if field != "machine_image" and pool.machine_image and not re.fullmatch(pattern, pool.machine_image):
        yield f"{field}: must be {wanted}, not '{pool.machine_image}'"
    pattern, wanted = _PATTERNS["root_device_name"]
    if pool.root_device_name is not None and not re.fullmatch(pattern, pool.root_device_name):
        yield f"retiring: root_device_name: must be {wanted}, not '{pool.root_device_name}'"
