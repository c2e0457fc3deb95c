"""Rows of settings, right and wrong, through the checks, and through a synthesis where they pass."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from infra.stages import Alerts, CapacityReservation, ExistingVpc, GitHub, Pool, Stage, Team
from infra.stages.checks import check
from jobs.contract.errors import ConfigurationError
from jobs.contract.instance_types import INSTANCE_TYPES
from jobs.contract.releases import releases
from tests.support.fuzz import hostile
from tests.support.fuzz.findings import Finding, Nonsense, Round, draw_each
from tests.support.infra.synthesis import synthesise
from tests.support.infra.variants import ALL, EXISTING_VPC, NO_WAY_OUT

_STAGES_AT_ONCE = 8
"""So many rows are synthesised at once, which takes little more than half of what each by itself would."""

_MOST_TURNS = 20

_ROWS = (ALL, EXISTING_VPC, NO_WAY_OUT, Stage(name="dev", teams=(Team(name="research"), Team(name="product"))))

_PLAUSIBLE: dict[str, Sequence[Any]] = {
    "name": ("a", "dev-2", "abcdefghijklm", "prod"),
    "account": ("000000000000", "123456789012", "123", "*", "12345678901a", "\u0661\u0662\u0663456789012"),
    "region": (
        "us-east-1",
        "us-west-2",
        "eu-central-1",
        "cn-north-1",
        "us-gov-west-1",
        "us-east-1 ",
        "US-EAST-1",
        "nowhere-1",
    ),
    "instance_type": (*INSTANCE_TYPES, "dl1", "p4d.24xlarge "),
    "cpu_instance_type": (*INSTANCE_TYPES, "m6i"),
    "release": (*releases(), "1.5.0", "1.22.0", "latest"),
    "image_tag": ("1.21.0-0123456789ab", "latest", "a b", ":", "a" * 129),
    "machine_image": ("ami-0123456789abcdef0", "ssm:/a/b", "ssm:", "ami-", "ami-0123456789ABCDEF0"),
    "root_device_name": ("/dev/xvda", "/dev/sda1", "/dev/", "/dev/../x", "sda"),
    "retiring": (
        (Pool(instance_type="dl1.24xlarge", release="1.20.0"),),
        (Pool(instance_type="g5.12xlarge"),),
        (Pool(instance_type="x"),),
    ),
    "availability_zone_ids": (
        ("use1-az2",),
        ("use1-az1", "use1-az2"),
        ("use1-az2", "usw2-az1"),
        ("us-east-1a",),
        ("use1-az9",),
    ),
    "nat_gateways": (0, 1, 2, 3, -1),
    "interface_endpoints": (True, False, None),
    "capacity_reservation": (
        None,
        *(
            CapacityReservation(target=target, is_block=True)
            for target in ("cr-0123456789abcdef0", "cr-", "", "cr-x\n")
        ),
    ),
    "max_nodes": (1, 2, 1000, 1001, 0),
    "max_on_demand_nodes": (0, 1, 1000),
    "max_multinode_nodes": (0, 1, 2),
    "spot_wait_hours": (None, 0.17, 1 / 6, 24, 24.01, 0.16),
    "fsx_gib": (0, 1200, 2400, 4800, 1, 3600),
    "root_volume_gib": (99, 100, 16_384, 16_385),
    "log_retention_days": (1, 2, 90, 3653),
    "monthly_budget_usd": (None, 1e-9, 0.01, 5e-324, 1, 1e9, 1e9 + 1, float("nan"), float("inf"), -1.0),
    "permissions_boundary": ("organisation-boundary", "arn:aws:iam::aws:policy/x", "a b", ""),
    "vpc": (
        None,
        EXISTING_VPC.vpc,
        replace(EXISTING_VPC.vpc or ExistingVpc(vpc_id="", private_subnet_ids=()), private_subnet_ids=()),
    ),
    "deploy_from": (
        None,
        *(GitHub(repository=name) for name in ("a/b", "a/b/c", "*/b", "a/*", "../b", ".../...", "-/-", "a/b\n", "ä/b")),
        *(
            GitHub(repository="a/b", branch=name)
            for name in ("main", "x/y", "refs/heads/x", "*", "a..b", "a.lock", "ä", "", "/")
        ),
        *(GitHub(repository="a/b", environment=name) for name in ("prod", "a b", " a", "*", "a:b", "ä", "", "a\n")),
    ),
    "alerts": tuple(
        Alerts(emails=emails)
        for emails in (
            (),
            ("a@b.c",),
            ("a@b",),
            ("a@b.c", "a@b.c"),
            ("a b@c.d",),
            ("\u202ea@b.c",),
            (f"{'a' * 500}@b.c",),
        )
    ),
    "teams": (
        (),
        (Team(name="a"),),
        *((Team(name=name),) for name in ("shared", "A", "a-b", "-a", "a" * 31, "a" * 32, "a\n", "*", "../a")),
        (Team(name="a-b"), Team(name="ab")),
        (Team(name="a"), Team(name="b", shares_instances=True)),
        *(tuple(Team(name=f"{number:02}".ljust(31, "a")) for number in range(count)) for count in (7, 26)),
        *(
            (Team(name="a", share=share, shares_instances=True),)
            for share in (0.01, 1000.0, 1000.1, 0.0, float("nan"), 1e-9)
        ),
        *((Team(name="a", monthly_budget_usd=usd),) for usd in (0.001, 1e9, float("inf"), 0.0)),
        *(
            (Team(name="a", member_principals=(arn,)),)
            for arn in (
                "*",
                "arn:aws:iam::123456789012:root",
                "arn:aws:iam::123456789012:role/x",
                "arn:aws:iam::123456789012:role/*",
            )
        ),
    ),
}
"""Values of the right type, on both sides of what may be."""


def _numbers_of(row: Stage) -> Iterator[tuple[str, float | None, float]]:
    """Yield each amount of money or share: its name, the value, and what it may be at most."""
    yield "monthly_budget_usd", row.monthly_budget_usd, 1e9
    for team in row.teams:
        yield f"monthly_budget_usd of {team.name!r}", team.monthly_budget_usd, 1e9
        yield f"share of {team.name!r}", team.share, 1000


def _regions_of(zones: Sequence[str]) -> set[str]:
    return {zone.rpartition("-az")[0] for zone in zones}


def nonsense(row: Stage) -> str | None:
    """Return what AWS, GitHub or a mail server would never take in a row that was accepted; None: nothing known.

    It is told apart from the checks: none of their patterns is used here.
    """
    wrong = {
        "account": row.account is not None and not (len(row.account) == 12 and set(row.account) <= set("0123456789")),
        "region": row.region is not None and not re.match(r"[a-z]{2}(-[a-z]+)+-[0-9]\Z", row.region),
        "max_nodes": not 1 <= row.max_nodes <= 1000,
        "nat_gateways": row.nat_gateways < 0,
        "zones of two regions": len(_regions_of(row.availability_zone_ids)) > 1,
        "a zone that is no id": not all("-az" in zone for zone in row.availability_zone_ids),
        "no team": not row.teams,
        "two teams of a name": len({team.name.replace("-", "") for team in row.teams}) < len(row.teams),
        "an image tag": row.image_tag is not None and bool(set(row.image_tag) & set(" :/\n")),
        "a device": not row.root_device_name.startswith("/dev/") or ".." in row.root_device_name,
    }
    for name, value, most in _numbers_of(row):
        wrong[name] = value is not None and not 0 < value <= most
    for team in row.teams:
        wrong[f"team {team.name!r}"] = team.name == "shared" or not re.match(r"[a-z][a-z0-9-]*\Z", team.name)
        for arn in team.member_principals:
            wrong[f"principal {arn!r}"] = "*" in arn or arn.endswith(":root") or arn.count(":") != 5
    if row.deploy_from is not None:
        repository, branch, environment = (
            row.deploy_from.repository,
            row.deploy_from.branch,
            row.deploy_from.environment,
        )
        wrong[f"repository {repository!r}"] = repository.count("/") != 1 or "*" in repository or "/." in repository
        wrong[f"branch {branch!r}"] = branch is not None and (
            not branch
            or branch.startswith(("refs/", "/"))
            or branch.endswith((".lock", "/"))
            or ".." in branch
            or bool(set(branch) & set("*?[~^: \\\n"))
        )
        wrong[f"environment {environment!r}"] = environment is not None and (
            environment.strip() != environment or not environment or bool(set(environment) & set("*?:"))
        )
        wrong["a letter that GitHub does not take"] = not f"{repository}{branch}{environment}".isascii()
    for email in row.alerts.emails:
        wrong[f"address {email!r}"] = (
            email.count("@") != 1 or not email.isprintable() or " " in email or len(email) > 254
        )
    wrong["an address twice"] = len(set(row.alerts.emails)) < len(row.alerts.emails)
    return next((what for what, is_wrong in wrong.items() if is_wrong), None)


def fuzz(round_: Round, *, count: int, number: int, synthesise: int = 0) -> int:
    """Give at least `count` rows to the checks, and the first `synthesise` that pass to a synthesis.

    So many more rows are drawn as it takes until that many have passed. Returns how many were synthesised.
    """
    accepted: dict[str, Stage] = {}

    def look_at(row: Stage) -> None:
        before = round_.accepted
        round_.look(row, lambda: _check(row))
        if round_.accepted > before and len(accepted) < synthesise:
            name = f"s{len(accepted)}"
            accepted[name] = replace(row, name=name)

    turn = 0
    while not turn or (len(accepted) < synthesise and turn < _MOST_TURNS):
        draw_each(rows(round_.canary), look_at, count=count, number=number + turn)
        turn += 1
    left = list(accepted.values())
    while left:
        batch, left = left[:_STAGES_AT_ONCE], left[_STAGES_AT_ONCE:]
        round_.findings.extend(_failing(batch))
    round_.notes.append(f"{len(accepted):,} synthesised")
    return len(accepted)


@st.composite
def rows(draw: DrawFn, canary: Path) -> Stage:
    """Draw a row that is right but for up to three fields."""
    row = draw(st.sampled_from(_ROWS))
    names = draw(st.lists(st.sampled_from([field.name for field in fields(Stage)]), max_size=3, unique=True))
    changes = {}
    for name in names:
        plausible = _PLAUSIBLE.get(name)
        same_type = {bool: st.booleans(), int: st.integers(0, 400)}.get(type(getattr(row, name)), st.none())
        right_type = st.sampled_from(plausible) if plausible else same_type
        changes[name] = draw(st.one_of(*[right_type] * 5, hostile.values(canary)))
    return replace(row, **changes)


def _check(row: Stage) -> bool:
    try:
        check(row)
    except ConfigurationError as error:
        if not str(error).strip():
            raise Nonsense("refused without a word") from None
        return False
    if what := nonsense(row):
        raise Nonsense(f"accepted in spite of {what}")
    return True


def _failing(batch: Sequence[Stage]) -> Iterator[Finding]:
    """Synthesise the rows together; where that fails, each by itself, to tell whose fault it is."""
    try:
        _synthesise(batch)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - each is a fault
        if len(batch) == 1:
            yield Finding("traceback", repr(batch[0]), f"{type(error).__name__}: {str(error)[-1500:]}")
            return
        for row in batch:
            yield from _failing([row])


def _synthesise(batch: Sequence[Stage]) -> None:
    with TemporaryDirectory() as folder:
        for path, template in synthesise(batch, Path(folder)).items():
            text = json.dumps(template, allow_nan=False)
            if len(text) > 1_000_000:
                raise Nonsense(f"{path}: the template has {len(text)} characters; CloudFormation takes 1,000,000")
