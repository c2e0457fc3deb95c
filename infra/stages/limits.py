"""The types of single values in a stage's row, with their limits, which pydantic applies."""

import re
from collections.abc import Callable
from ipaddress import IPv4Network
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from jobs.core.stage import TEAM_PATTERN
from jobs.core.words import printable

_PRIVATE = (IPv4Network("10.0.0.0/8"), IPv4Network("172.16.0.0/12"), IPv4Network("192.168.0.0/16"))
"""Addresses that no public network has (RFC 1918)."""

_OF_DOCKER = IPv4Network("172.17.0.0/16")
"""The addresses of the bridge that Docker makes on every instance."""

MOST_QUEUES = 50
"""Job queues that Batch takes in one region of an account, and compute environments too. Neither quota can be raised
(Batch's user guide, "AWS Batch service quotas")."""

OUT_OF_LIMITS = "out_of_limits"
"""Type of the errors that these limits raise. All other errors of pydantic's tell of a value of the wrong type."""


def accepted(test: Callable[[Any], bool], otherwise: str) -> AfterValidator:
    """Refuse a value for which `test` is false, with the message `otherwise`, in which {} stands for the value."""

    def validate(value: Any) -> Any:
        if not test(value):
            said = otherwise.format(f"{value:g}" if isinstance(value, float) else value)
            raise _out_of_limits(said)
        return value

    return AfterValidator(validate)


def between(low: float, high: float) -> AfterValidator:
    """Refuse a number that is not from `low` to `high`, both included."""
    return accepted(lambda value: low <= value <= high, f"must be from {low} to {high}, not {{}}")


def like(pattern: str, wanted: str) -> AfterValidator:
    """Refuse a string that `pattern` does not match as a whole; `wanted` says in words what it has to be."""
    return accepted(lambda value: bool(re.fullmatch(pattern, value, re.ASCII)), f"must be {wanted}, not '{{}}'")


def distinct(otherwise: str) -> AfterValidator:
    """Refuse a tuple in which a value stands twice."""
    return accepted(lambda values: len(set(values)) == len(values), otherwise)


def _out_of_limits(said: str) -> PydanticCustomError:
    """Return the error that says so; pydantic can say no half of a surrogate pair, and a terminal would obey others."""
    return PydanticCustomError(OUT_OF_LIMITS, "{said}", {"said": printable(said)})


def _is_private_sixteen(value: str) -> bool:
    try:
        network = IPv4Network(value)
    except ValueError:
        return False
    return network.prefixlen == 16 and network != _OF_DOCKER and any(network.subnet_of(block) for block in _PRIVATE)


def _ec2_id(kind: str) -> AfterValidator:
    return like(rf"{kind}-[0-9a-f]{{8,17}}", f"like '{kind}-0123456789abcdef0'")


_LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_EMAIL = re.compile(rf"(?=.{{3,254}}$)[\w.!#$%&'*+/=?^`{{|}}~-]{{1,64}}@{_LABEL}(\.{_LABEL})+", re.ASCII)
"""An address as people have it: no quotes or comments, and its domain has a dot."""

# Where it is deployed
Account = Annotated[str, like(r"[0-9]{12}", "the 12 digits of an account's id")]
Region = Annotated[str, like(r"[a-z]{2,}(-[a-z]+)+-[1-9][0-9]?", "a region's name, such as 'us-east-1'")]

# The CDK's own rule for it (`cdk bootstrap --qualifier`); it is part of roles' and buckets' names.
Qualifier = Annotated[str, like(r"[a-z0-9]{1,10}", "1 to 10 lower-case letters and digits")]

# Names
StageName = Annotated[
    str,
    # CloudFormation cuts `trainyard-<stage>-` to 24 characters where it makes a name of it, by which the permissions
    # boundary knows what is the stage's.
    like(r"[a-z][a-z0-9-]{0,12}", "1 to 13 lower-case letters, digits and hyphens"),
]
TeamName = Annotated[
    str,
    accepted(
        lambda value: bool(re.fullmatch(TEAM_PATTERN, value)),
        "must be at most 31 lower-case letters, digits and hyphens",
    ),
]
# ECR's own rule for a tag.
ImageTag = Annotated[str, like(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", "at most 128 letters, digits, '_', '.' and '-'")]
MachineImage = Annotated[str, like(r"ami-[0-9a-f]{8,17}|ssm:/[A-Za-z0-9._/-]+", "'ami-…' or 'ssm:/…'")]
DeviceName = Annotated[str, like(r"/dev/\w+", "a device such as '/dev/sda1'")]
PolicyName = Annotated[str, like(r"[\w+=,.@-]{1,128}", "a managed policy's name, without its ARN")]
MemberPrincipal = Annotated[
    str, like(r"arn:aws[\w-]*:iam::\d{12}:(role|user)/[\w+=,.@/-]+", "ARNs of IAM users or roles")
]
SecretVariables = Annotated[
    tuple[
        Annotated[
            str,
            accepted(
                # Those decide where a job runs and as whom, or have a secret of their own.
                lambda value: not re.match(r"AWS_|TRAINYARD_|LD_|PYTHON|HF_TOKEN$|PATH$", value),
                "'{}' is none that a secret may hold",
            ),
            like(r"[A-Z][A-Z0-9_]{0,63}", "the name of a variable, such as 'WANDB_API_KEY'"),
        ],
        ...,
    ],
    distinct("names a variable twice"),
]
Emails = Annotated[
    tuple[
        Annotated[
            str,
            accepted(lambda value: bool(_EMAIL.fullmatch(value)), "'{}' is no e-mail address"),
        ],
        ...,
    ],
    distinct("names an address twice"),
]

# GitHub. A wildcard in one of these would let other repositories in.
Repository = Annotated[str, like(r"(?!-)[\w-]{1,39}/(?!\.\.?$)[\w.-]{1,100}", "'owner/name'")]
GitHubEnvironment = Annotated[str, like(r"(?! )[\w .-]{1,255}(?<! )", "a name")]
Branch = Annotated[
    str,
    # A role that trusts refs/heads/refs/heads/main can be assumed by nobody.
    accepted(
        lambda value: not value.startswith("refs/"),
        "must be a branch's name without 'refs/heads/' before it, not '{}'",
    ),
    # What git-check-ref-format(1) refuses is left out: no branch has such a name.
    like(r"(?![-/.])(?!.*(?:\.\.|//|/\.|\.lock(?:/|$)))[\w./-]{1,255}(?<![/.])", "a branch's name"),
]
OidcProvider = Annotated[
    str,
    like(
        r"arn:aws[\w-]*:iam::\d{12}:oidc-provider/token\.actions\.githubusercontent\.com",
        "that of token.actions.githubusercontent.com",
    ),
]

# The network
VpcId = Annotated[str, _ec2_id("vpc")]
SecurityGroupId = Annotated[str, _ec2_id("sg")]
SubnetIds = Annotated[
    tuple[Annotated[str, _ec2_id("subnet")], ...],
    distinct("names one twice"),
    accepted(bool, "at least one is needed"),
]
RouteTableIds = Annotated[tuple[Annotated[str, _ec2_id("rtb")], ...], distinct("names one twice")]
VpcCidr = Annotated[
    str,
    accepted(_is_private_sixteen, "must be a private /16 that is not Docker's own, such as '10.1.0.0/16', not '{}'"),
]
ZoneIds = Annotated[
    tuple[
        # Addresses are set aside for eight of a region's zones (infra/network/stack.py); no region has more than six.
        Annotated[str, like(r"[a-z]+\d-az[1-8]", "ids such as 'use1-az2'")],
        ...,
    ],
    distinct("names a zone twice"),
]

# Numbers
Nodes = Annotated[int, between(0, 1_000)]
NodesAtLeastOne = Annotated[int, between(1, 1_000)]
Share = Annotated[float, between(0.01, 1_000)]  # Batch's weight factor, its inverse, goes from 0.0001 to 999.9999
UsdAMonth = Annotated[
    float,
    accepted(lambda value: value >= 0.01, "must be at least 0.01, not {}"),
    # JSON, and so a template, has no infinity.
    accepted(lambda value: value <= 1e9, "must be at most 1000000000 (None: no budget), not {}"),
]
Reclaims = Annotated[int, between(1, 10)]  # Batch starts a job ten times at most
FailedJobs = Annotated[int, accepted(lambda value: value >= 1, "must be at least 1, not {}")]
VolumeGib = Annotated[int, between(100, 16_384)]  # the Gaudi image takes tens of GiB; gp3 ends at 16 TiB
CpuVolumeGib = Annotated[int, between(30, 16_384)]  # 30 GiB: the ECS-optimised AMI's own
FsxGib = Annotated[
    int,
    # PERSISTENT_2 file systems start at 1,200 GiB and grow by 2,400.
    accepted(
        lambda value: value == 1_200 or (value >= 0 and value % 2_400 == 0),
        "must be 0, 1200 or a multiple of 2400, not {}",
    ),
]

# Capacity
ReservationTarget = Annotated[
    str,
    like(
        r"cr-[0-9a-f]{8,17}|arn:aws[a-z-]*:resource-groups:[a-z0-9-]+:\d{12}:group/[\w.-]+",
        "the id of a capacity reservation, 'cr-0123456789abcdef0', or the ARN of a resource group of some",
    ),
]

# Times
SpotWaitHours = Annotated[
    float,
    # What jobStateTimeLimitActions takes: 600 to 86,400 seconds.
    accepted(lambda value: 1 / 6 <= value <= 24, "must be from 10 minutes (0.17) to 24, not {}"),
]
RetentionDays = Annotated[int, between(1, 3_650)]
LOG_RETENTION_DAYS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3653)
"""What CloudWatch Logs accepts (API reference of PutRetentionPolicy)."""
LogRetentionDays = Annotated[
    int,
    accepted(lambda value: value in LOG_RETENTION_DAYS, f"must be one of {', '.join(map(str, LOG_RETENTION_DAYS))}"),
]
