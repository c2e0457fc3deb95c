"""Types of single settings values with their limits, which pydantic enforces."""

import re
from collections.abc import Callable
from ipaddress import IPv4Network
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from jobs.core.stage import TEAM_PATTERN
from jobs.core.words import printable

_PRIVATE = (IPv4Network("10.0.0.0/8"), IPv4Network("172.16.0.0/12"), IPv4Network("192.168.0.0/16"))
"""Private address ranges (RFC 1918)."""

_DOCKER_BRIDGE = IPv4Network("172.17.0.0/16")
"""Address range of Docker's bridge network on every instance."""

MAX_QUEUES = 50
"""Maximum number of job queues, and of compute environments, per account and region. Neither quota can be raised (AWS
Batch user guide, "AWS Batch service quotas")."""

OUT_OF_LIMITS = "out_of_limits"
"""Error type of the limits in this file. All other pydantic errors report a value of the wrong type."""


def require(test: Callable[[Any], bool], message: str) -> AfterValidator:
    """Refuse a value that fails `test`. In `message`, {} stands for the value."""

    def validate(value: Any) -> Any:
        if not test(value):
            text = message.format(f"{value:g}" if isinstance(value, float) else value)
            # Escapes surrogates, on which pydantic fails, and control characters of terminals.
            raise PydanticCustomError(OUT_OF_LIMITS, "{message}", {"message": printable(text)})
        return value

    return AfterValidator(validate)


def between(low: float, high: float) -> AfterValidator:
    """Refuse a number below `low` or above `high`."""
    return require(lambda value: low <= value <= high, f"must be from {low} to {high}, not {{}}")


def matches(pattern: str, description: str) -> AfterValidator:
    """Refuse a string that `pattern` does not fully match; `description` is the expected form."""
    return require(lambda value: bool(re.fullmatch(pattern, value, re.ASCII)), f"must be {description}, not '{{}}'")


def distinct(message: str) -> AfterValidator:
    """Refuse a tuple with duplicates."""
    return require(lambda values: len(set(values)) == len(values), message)


def _is_private_sixteen(value: str) -> bool:
    try:
        network = IPv4Network(value)
    except ValueError:
        return False
    return network.prefixlen == 16 and network != _DOCKER_BRIDGE and any(network.subnet_of(block) for block in _PRIVATE)


def _ec2_id(kind: str) -> AfterValidator:
    return matches(rf"{kind}-[0-9a-f]{{8,17}}", f"like '{kind}-0123456789abcdef0'")


_LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_EMAIL = re.compile(rf"(?=.{{3,254}}$)[\w.!#$%&'*+/=?^`{{|}}~-]{{1,64}}@{_LABEL}(\.{_LABEL})+", re.ASCII)
"""An ordinary e-mail address: no quotes or comments, and a dot in the domain."""

# Account and region
Account = Annotated[str, matches(r"[0-9]{12}", "the 12 digits of an account's id")]
Region = Annotated[str, matches(r"[a-z]{2,}(-[a-z]+)+-[1-9][0-9]?", "a region's name, such as 'us-east-1'")]

# The rule of `cdk bootstrap --qualifier`. The qualifier is part of the names of roles and buckets.
Qualifier = Annotated[str, matches(r"[a-z0-9]{1,10}", "1 to 10 lower-case letters and digits")]

# Names
StageName = Annotated[
    str,
    # CloudFormation cuts `trainyard-<stage>-` to 24 characters in generated names, and the permissions boundary
    # recognises the stage's resources by this prefix.
    matches(r"[a-z][a-z0-9-]{0,12}", "1 to 13 lower-case letters, digits and hyphens"),
]
TeamName = Annotated[
    str,
    require(
        lambda value: bool(re.fullmatch(TEAM_PATTERN, value)),
        "must be at most 31 lower-case letters, digits and hyphens",
    ),
]
# ECR's rule for tags
ImageTag = Annotated[
    str, matches(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", "at most 128 letters, digits, '_', '.' and '-'")
]
InstanceTypes = Annotated[
    tuple[str, ...],
    require(bool, "at least one is needed"),
    distinct("lists a type twice"),
]
MachineImage = Annotated[str, matches(r"ami-[0-9a-f]{8,17}|ssm:/[A-Za-z0-9._/-]+", "'ami-…' or 'ssm:/…'")]
DeviceName = Annotated[str, matches(r"/dev/\w+", "a device such as '/dev/sda1'")]
PolicyName = Annotated[str, matches(r"[\w+=,.@-]{1,128}", "a managed policy's name, without its ARN")]
MemberPrincipal = Annotated[
    str, matches(r"arn:aws[\w-]*:iam::\d{12}:(role|user)/[\w+=,.@/-]+", "ARNs of IAM users or roles")
]
SecretVariables = Annotated[
    tuple[
        Annotated[
            str,
            require(
                # Variables that decide where and as whom a job runs, or that have a separate secret
                lambda value: not re.match(r"AWS_|TRAINYARD_|LD_|PYTHON|HF_TOKEN$|PATH$", value),
                "'{}' cannot come from a secret",
            ),
            matches(r"[A-Z][A-Z0-9_]{0,63}", "the name of a variable, such as 'WANDB_API_KEY'"),
        ],
        ...,
    ],
    distinct("lists a variable twice"),
]
Emails = Annotated[
    tuple[
        Annotated[
            str,
            require(lambda value: bool(_EMAIL.fullmatch(value)), "'{}' is not an e-mail address"),
        ],
        ...,
    ],
    distinct("lists an address twice"),
]

# GitHub. A wildcard in one of these would admit other repositories.
Repository = Annotated[str, matches(r"(?!-)[\w-]{1,39}/(?!\.\.?$)[\w.-]{1,100}", "'owner/name'")]
GitHubId = Annotated[int, require(lambda value: value >= 1, "must be at least 1, not {}")]
GitHubEnvironment = Annotated[str, matches(r"(?! )[\w .-]{1,255}(?<! )", "a name")]
Branch = Annotated[
    str,
    # Nobody could assume a role that trusts refs/heads/refs/heads/main.
    require(
        lambda value: not value.startswith("refs/"),
        "must be a branch name without 'refs/heads/', not '{}'",
    ),
    # Excludes names that git-check-ref-format(1) refuses, because no branch can have them.
    matches(r"(?![-/.])(?!.*(?:\.\.|//|/\.|\.lock(?:/|$)))[\w./-]{1,255}(?<![/.])", "a branch name"),
]
OidcProvider = Annotated[
    str,
    matches(
        r"arn:aws[\w-]*:iam::\d{12}:oidc-provider/token\.actions\.githubusercontent\.com",
        "the ARN of the provider of token.actions.githubusercontent.com",
    ),
]

# The network
VpcId = Annotated[str, _ec2_id("vpc")]
SecurityGroupId = Annotated[str, _ec2_id("sg")]
SubnetId = Annotated[str, _ec2_id("subnet")]
SubnetIds = Annotated[
    tuple[SubnetId, ...],
    distinct("lists a subnet twice"),
    require(bool, "at least one is needed"),
]
RouteTableIds = Annotated[tuple[Annotated[str, _ec2_id("rtb")], ...], distinct("lists a route table twice")]
VpcCidr = Annotated[
    str,
    require(_is_private_sixteen, "must be a private /16 other than Docker's, such as '10.1.0.0/16', not '{}'"),
]
# infra/network/stack.py reserves addresses for eight zones; no region has more than six.
ZoneId = Annotated[str, matches(r"[a-z]+\d-az[1-8]", "an id such as 'use1-az2'")]
ZoneIds = Annotated[tuple[ZoneId, ...], distinct("lists a zone twice")]

Ports = Annotated[tuple[Annotated[int, between(1, 65_535)], ...], distinct("lists a port twice")]
EgressPorts = Annotated[Ports, require(lambda ports: 443 in ports, "must include 443, over which jobs reach AWS")]
ProxyUrl = Annotated[
    str,
    # Templates, instances' user data and job definitions contain the URL, and many people may read those.
    require(lambda value: "@" not in value, "must not contain a user or password; admit the stage's addresses instead"),
    matches(r"https?://[A-Za-z0-9.-]{1,253}:[1-9]\d{0,4}", "'http://HOST:PORT'"),
]
ProxyBypass = Annotated[
    tuple[Annotated[str, matches(r"[A-Za-z0-9.:/-]{1,255}", "a host, a '.domain', an address or a range")], ...],
    distinct("lists a host twice"),
    # EC2 limits user data to 16 KiB.
    require(lambda hosts: len(",".join(hosts)) <= 500, "must have at most 500 characters together"),
]

# Encryption
KmsKeyArn = Annotated[
    str, matches(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:key/[A-Za-z0-9-]{1,128}", "'arn:aws:kms:REGION:ACCOUNT:key/ID'")
]

# Numbers
Nodes = Annotated[int, between(0, 1_000)]
NodesAtLeastOne = Annotated[int, between(1, 1_000)]
Share = Annotated[float, between(0.01, 1_000)]  # Batch's weight factor is the inverse, from 0.0001 to 999.9999
Usd = Annotated[
    float,
    require(lambda value: value >= 0.01, "must be at least 0.01, not {}"),
    # JSON, and so a template, cannot represent infinity.
    require(lambda value: value <= 1e9, "must be at most 1000000000 (leave it out for no limit), not {}"),
]
Reclaims = Annotated[int, between(1, 10)]  # Batch allows at most ten attempts
FailedJobs = Annotated[int, require(lambda value: value >= 1, "must be at least 1, not {}")]
VolumeGib = Annotated[int, between(100, 16_384)]  # the Gaudi image takes tens of GiB; gp3 volumes hold up to 16 TiB
CpuVolumeGib = Annotated[int, between(30, 16_384)]  # 30 GiB: size of the ECS-optimised AMI
FsxGib = Annotated[
    int,
    # PERSISTENT_2 file systems start at 1,200 GiB and grow in steps of 2,400.
    require(
        lambda value: value == 1_200 or (value >= 0 and value % 2_400 == 0),
        "must be 0, 1200 or a multiple of 2400, not {}",
    ),
]

# Reserved capacity
ReservationTarget = Annotated[
    str,
    matches(
        r"cr-[0-9a-f]{8,17}|arn:aws[a-z-]*:resource-groups:[a-z0-9-]+:\d{12}:group/[\w.-]+",
        "the id of a capacity reservation, 'cr-0123456789abcdef0', or the ARN of a resource group of reservations",
    ),
]

# Times
SpotWaitHours = Annotated[
    float,
    # Limits of jobStateTimeLimitActions: 600 to 86,400 seconds
    require(lambda value: 1 / 6 <= value <= 24, "must be from 10 minutes (0.17) to 24, not {}"),
]
RetentionDays = Annotated[int, between(1, 3_650)]
LOG_RETENTION_DAYS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3653)
"""Values that CloudWatch Logs accepts (API reference, PutRetentionPolicy)."""
LogRetentionDays = Annotated[
    int,
    require(lambda value: value in LOG_RETENTION_DAYS, f"must be one of {', '.join(map(str, LOG_RETENTION_DAYS))}"),
]
