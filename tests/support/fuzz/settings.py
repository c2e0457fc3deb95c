"""Pass valid and invalid rows of settings through the checks, and through a synthesis if they pass."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from infra.stages import Alerts, CapacityReservation, GitHub, Proxy, Stage, Team
from infra.stages.checks import check
from jobs.core.errors import ConfigurationError
from jobs.core.images import releases
from jobs.core.instance_types import INSTANCE_TYPES
from tests.support.fuzz import hostile
from tests.support.fuzz.findings import Nonsense, Round, collected, draw_each
from tests.support.infra.synthesis import synthesise
from tests.support.infra.variants import ALL, EXISTING_VPC, NO_NAT

_AT_ONCE = 8
"""Rows per synthesis. Together they take little more than half of the time of separate syntheses."""
_MOST_TURNS = 20

_ROWS = (ALL, EXISTING_VPC, NO_NAT, Stage(name="dev", teams=(Team(name="research"), Team(name="product"))))

_PLAUSIBLE: dict[str, Sequence[Any]] = {
    "name": ("a", "dev-2", "abcdefghijklm", "prod"),
    "account": ("000000000000", "123456789012", "123", "*", "\u0661\u0662\u0663456789012"),
    "region": ("us-west-2", "eu-central-1", "cn-north-1", "us-gov-west-1", "us-east-1 ", "US-EAST-1", "nowhere-1"),
    "instance_types": (*((name,) for name in INSTANCE_TYPES), ("dl1",), ("p4d.24xlarge ",), (), tuple(INSTANCE_TYPES)),
    "cpu_instance_type": (*INSTANCE_TYPES, "m6i"),
    "release": (*releases(), "1.5.0", "latest"),
    "image_tag": ("1.21.0-0123456789ab", "latest", "a b", ":", "a" * 129),
    "machine_image": ("ami-0123456789abcdef0", "ssm:/a/b", "ssm:", "ami-"),
    "cpu_machine_image": (None, "ami-0123456789abcdef0", "ssm:/a/b", "ami-x"),
    "cpu_root_device_name": ("/dev/xvda", "/dev/sda1", "xvda"),
    "root_device_name": ("/dev/xvda", "/dev/", "/dev/../x", "sda"),
    "availability_zone_ids": (("use1-az2",), ("use1-az1", "use1-az2"), ("use1-az2", "usw2-az1"), ("us-east-1a",)),
    "nat_gateways": (0, 1, 3, -1),
    "interface_endpoints": (True, False, None),
    "egress_ports": ((443,), (443, 8443), (80,), (443, 0)),
    "egress_udp_ports": ((), (53,), (65_536,)),
    "proxy": (None, *(Proxy(url=u) for u in ("http://proxy:3128", "https://10.0.0.1:8080", "proxy", "http://a@b:1"))),
    "ebs_key_arn": (None, "arn:aws:kms:us-east-1:123456789012:key/0ea3fef3-80a7-4778-9d8c-1c0c60000000", "alias/x"),
    "capacity_reservation": (None, *(CapacityReservation(target=t) for t in ("cr-0123456789abcdef0", "cr-", "cr-x\n"))),
    "max_nodes": (1, 2, 1000, 1001, 0),
    "max_on_demand_nodes": (0, 1, 1000),
    "max_multinode_nodes": (0, 1, 2),
    "spot_wait_hours": (None, 1 / 6, 24, 24.01, 0.16),
    "fsx_gib": (0, 1200, 2400, 1, 3600),
    "root_volume_gib": (99, 100, 16_384, 16_385),
    "log_retention_days": (1, 2, 90, 3653),
    "monthly_budget_usd": (None, 1e-9, 5e-324, 1, 1e9, 1e9 + 1, float("nan"), float("inf"), -1.0),
    "max_usd_per_hour": (None, 3.0, 3.93, 1e9, 1e9 + 1, float("nan")),
    "permissions_boundary": ("organisation-boundary", "arn:aws:iam::aws:policy/x", "a b", ""),
    "vpc": (None, EXISTING_VPC.vpc),
    "deploy_from": (
        None,
        *(GitHub(repository=name) for name in ("a/b", "a/b/c", "*/b", "../b", "a/b\n", "ä/b")),
        *(GitHub(repository="a/b", branch=name) for name in ("x/y", "refs/heads/x", "*", "a..b", "a.lock", "ä", "")),
        *(GitHub(repository="a/b", environment=name) for name in ("prod", " a", "*", "a:b", "")),
    ),
    "alerts": tuple(
        Alerts(emails=emails) for emails in ((), ("a@b.c",), ("a@b",), ("a@b.c",) * 2, ("a b@c.d",), ("\u202ea@b.c",))
    ),
    "teams": (
        (),
        *((Team(name=name),) for name in ("a", "shared", "A", "a-b", "-a", "a" * 31, "a" * 32, "a\n", "*", "../a")),
        (Team(name="a-b"), Team(name="ab")),
        (Team(name="a"), Team(name="b", shares_instances=True)),
        *(tuple(Team(name=f"{number:02}".ljust(31, "a")) for number in range(count)) for count in (7, 26)),
        *((Team(name="a", share=share, shares_instances=True),) for share in (0.01, 1000.1, 0.0, float("nan"))),
        *((Team(name="a", monthly_budget_usd=usd),) for usd in (0.001, float("inf"), 0.0)),
        *((Team(name="a", member_principals=(f"arn:aws:iam::123456789012:{who}",)),) for who in ("root", "role/*")),
    ),
}
"""Values of the right type, inside and outside the allowed ranges."""


def fuzz(round_: Round, *, count: int, number: int) -> None:
    """Check at least `count` rows, continue until `count` have passed, and synthesise those."""
    accepted: list[Stage] = []

    def look_at(row: Stage) -> None:
        before = round_.accepted
        round_.look(row, lambda: _check(row))
        if round_.accepted > before and len(accepted) < count:
            accepted.append(replace(row, name=f"s{len(accepted)}"))

    for turn in range(_MOST_TURNS):
        if len(accepted) < count:
            draw_each(rows(round_.canary), look_at, count=count, number=number + turn)
    for start in range(0, len(accepted), _AT_ONCE):
        batch = accepted[start : start + _AT_ONCE]
        together = Round("together", round_.canary)
        with collected(together, batch):
            _synthesise(batch)
        for row in batch if together.findings else ():  # each separately, to find the row that fails
            with collected(round_, row):
                _synthesise([row])


@st.composite
def rows(draw: DrawFn, canary: Path) -> Stage:
    """Draw a valid row with up to three fields changed."""
    row = draw(st.sampled_from(_ROWS))
    names = draw(st.lists(st.sampled_from([field.name for field in fields(Stage)]), max_size=3, unique=True))
    changes = {}
    for name in names:
        same_type = {bool: st.booleans(), int: st.integers(0, 400)}.get(type(getattr(row, name)), st.none())
        right_type = st.sampled_from(_PLAUSIBLE[name]) if name in _PLAUSIBLE else same_type
        changes[name] = draw(st.one_of(*[right_type] * 5, hostile.values(canary)))
    return replace(row, **changes)


def _check(row: Stage) -> bool:
    try:
        check(row)
    except ConfigurationError as error:
        if not str(error).strip():
            raise Nonsense("refused without a message") from None
        return False
    return True


def _synthesise(batch: Sequence[Stage]) -> None:
    with TemporaryDirectory() as folder:
        for path, template in synthesise(batch, Path(folder)).items():
            text = json.dumps(template, allow_nan=False)
            if len(text) > 1_000_000:
                raise Nonsense(f"{path}: the template has {len(text)} characters; CloudFormation allows 1,000,000")
