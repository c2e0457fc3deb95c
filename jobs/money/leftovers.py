"""What stays of a stage after `cdk destroy`, with its cost a month: buckets, keys, secrets, logs, images and the like.

A leftover has the stage's tags and belongs to none of its stacks. While the stage has stacks, only buckets, secrets and
log groups count, because stacks also use resources that they do not list, such as AMIs and old job definitions.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code, explain, is_denied
from jobs.money.prices import GB_OF_S3, kept_prices

KINDS: Mapping[str, tuple[str, str]] = {
    "bucket": (":s3:::", "AWS::S3::Bucket"),
    "secret": (":secret:", "AWS::SecretsManager::Secret"),
    "log-group": (":log-group:", "AWS::Logs::LogGroup"),
    "repository": (":repository/", "AWS::ECR::Repository"),
    "build-record": (":imagebuilder:", ""),
    "machine-image": (":image/", ""),
    "snapshot": (":snapshot/", "AWS::ImageBuilder::Image"),
    "job-definition": (":job-definition/", ""),
    "key": (":key/", "AWS::KMS::Key"),
    "other": ("", ""),
}
"""Kinds in the order of deletion, with a part of their ARNs, and their type in kept_prices.json unless they are free.

An AMI is deleted before its snapshots, and keys last, because they decrypt what may stay.
"""

PASSING = (":instance/", ":natgateway/", ":job/")
"""Parts of ARNs that AWS lists for a while after their end: an hour, and a week for jobs of Batch."""

_OUTSIDE_STACKS = ("bucket", "secret", "log-group")
_MISSING = re.compile(r"404|NoSuchBucket|(Repository|Resource)?NotFoundException|Invalid(AMIID|Snapshot)\.\w+")
"""Codes of errors about resources that no longer exist."""

Arns = dict[tuple[str, str], str]
"""ARNs by kind and name."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """One resource that stays."""

    kind: str
    name: str
    arn: str
    size_bytes: int | None = None
    """Its size if the cost depends on it. None if AWS does not report it, for example of a bucket from today."""
    usd_a_month: float | None = None
    """Its cost, or None if it is unknown."""


@dataclass(kw_only=True)
class Leftovers:
    """Everything that stays of a stage."""

    stacks: list[str]
    """Names of the stacks that the stage still has."""
    found: list[Leftover] = field(default_factory=list)
    """In the order of deletion."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Why AWS did not answer, by the kind of resource."""

    @contextmanager
    def asking(self, kind: str) -> Iterator[None]:
        """Record that AWS denies a request about resources of a kind, and continue."""
        try:
            yield
        except Exception as error:
            if not is_denied(error):
                raise
            self.refusals[kind] = str(explain(error))


def find(aws: Aws, stage: str) -> Leftovers:
    """Return what stays of a stage. Raises ClientError if AWS does not list stacks and tagged resources."""
    stacks = _stacks(aws, stage)
    left = Leftovers(stacks=sorted(stacks))
    arns = {(kind_of(arn), _name(arn)): arn for arn in tagged(aws, stage) if not any(part in arn for part in PASSING)}
    if stacks:
        owned = set().union(*stacks.values())
        arns = {key: arn for key, arn in arns.items() if key[0] in _OUTSIDE_STACKS and not {key[1], arn} & owned}
    else:
        with left.asking("snapshot"):
            arns = _snapshots(aws, [name for kind, name in arns if kind == "machine-image"]) | arns
        with left.asking("job-definition"):
            active = _job_definitions(aws, stage)
            arns = {key: arn for key, arn in arns.items() if key[0] != "job-definition"} | active
    order = list(KINDS)
    for kind, name in sorted(arns, key=lambda key: (order.index(key[0]), key[1])):
        left.found += _look(aws, left, kind, name, arns[kind, name])
    return left


def tagged(aws: Aws, stage: str) -> Iterator[str]:
    """Yield the ARN of each resource with the tags of a stage. AWS may list deleted resources for a while."""
    tags = {"trainyard:project": "trainyard", "trainyard:stage": stage}
    pages = aws.client("resourcegroupstaggingapi").get_paginator("get_resources")
    for page in pages.paginate(TagFilters=[{"Key": key, "Values": [value]} for key, value in tags.items()]):
        yield from (item["ResourceARN"] for item in page["ResourceTagMappingList"])


def kind_of(arn: str) -> str:
    return next(kind for kind, (part, _) in KINDS.items() if part in arn)


def _name(arn: str) -> str:
    """Return the name in an ARN such as `…:log-group:NAME:*` or `arn:aws:s3:::NAME`; of other kinds, the ARN."""
    resource = arn.split(":", 5)[5].removesuffix(":*")
    return {"other": arn, "bucket": resource}.get(kind_of(arn)) or re.split("[:/]", resource, maxsplit=1)[1]


def _stacks(aws: Aws, stage: str) -> dict[str, set[str]]:
    """Return the names or ARNs of all resources, by stack of the stage.

    The names of stage `dev-2` begin with those of `dev`; its descriptions do not (infra/constructs/stage_stack.py).
    """
    client = aws.client("cloudformation")
    listed = [each for page in client.get_paginator("describe_stacks").paginate() for each in page["Stacks"]]
    names = [each["StackName"] for each in listed if each.get("Description", "").startswith(f"trainyard {stage}: ")]
    pages = {name: client.get_paginator("list_stack_resources").paginate(StackName=name) for name in names}
    return {
        name: {each.get("PhysicalResourceId", "") for page in found for each in page["StackResourceSummaries"]}
        for name, found in pages.items()
    }


def _snapshots(aws: Aws, images: list[str]) -> Arns:
    """Return the snapshots of AMIs, which need not have the AMIs' tags."""
    named: Any = [{"Name": "image-id", "Values": images}]
    found = aws.ec2.describe_images(Owners=["self"], Filters=named)["Images"] if images else []
    disks = [mapping.get("Ebs", {}) for image in found for mapping in image["BlockDeviceMappings"]]
    ids = [disk["SnapshotId"] for disk in disks if "SnapshotId" in disk]
    return {("snapshot", name): f"arn:aws:ec2:{aws.region_name}::snapshot/{name}" for name in ids}


def _job_definitions(aws: Aws, stage: str) -> Arns:
    """Return the active revisions. Batch lists deregistered ones for half a year."""
    pages = aws.batch.get_paginator("describe_job_definitions").paginate(status="ACTIVE")
    listed = [each for page in pages for each in page["jobDefinitions"]]
    arns = [each["jobDefinitionArn"] for each in listed if each.get("tags", {}).get("trainyard:stage") == stage]
    return {("job-definition", _name(arn)): arn for arn in arns}


def _look(aws: Aws, left: Leftovers, kind: str, name: str, arn: str) -> Iterator[Leftover]:
    """Yield a leftover with its size and cost, unless it no longer exists."""
    size = None
    try:
        with left.asking(kind):
            size = _size(aws, kind, name, arn)
    except LookupError:
        return
    except Exception as error:
        if not _MISSING.fullmatch(error_code(error)):
            raise
        return
    yield Leftover(kind=kind, name=name, arn=arn, size_bytes=size, usd_a_month=_usd_a_month(kind, size))


def _size(aws: Aws, kind: str, name: str, arn: str) -> int | None:
    """Return a resource's size if its cost depends on it. Raises LookupError or ClientError if it does not exist."""
    gone = False
    match kind:
        case "bucket":
            return _bucket_size(aws, name)
        case "secret":
            gone = "DeletedDate" in aws.client("secretsmanager").describe_secret(SecretId=arn)
        case "log-group":
            groups = aws.logs.describe_log_groups(logGroupNamePrefix=name)["logGroups"]
            return {group["logGroupName"]: group.get("storedBytes", 0) for group in groups}[name]
        case "repository":
            pages = aws.ecr.get_paginator("describe_images").paginate(repositoryName=name)
            return sum(image["imageSizeInBytes"] for page in pages for image in page["imageDetails"])
        case "machine-image":
            gone = not aws.ec2.describe_images(ImageIds=[name])["Images"]
        case "snapshot":  # without a stored size, that of the volume, which is at least as large
            snapshot: Any = aws.ec2.describe_snapshots(SnapshotIds=[name])["Snapshots"][0]
            return int(snapshot.get("FullSnapshotSizeInBytes") or snapshot["VolumeSize"] * GB_OF_S3)
        case "key":
            gone = "DeletionDate" in aws.client("kms").describe_key(KeyId=name)["KeyMetadata"]
    if gone:
        raise LookupError
    return None


def _bucket_size(aws: Aws, name: str) -> int | None:
    """Return the size that S3 reports once a day, with all versions and unfinished uploads, or None.

    All of a stage's files are in the class Standard. Source: Amazon S3 User Guide, "Metrics and dimensions".
    """
    aws.s3.head_bucket(Bucket=name)
    now = datetime.now(timezone.utc)
    points = aws.client("cloudwatch").get_metric_statistics(
        Namespace="AWS/S3",
        MetricName="BucketSizeBytes",
        Dimensions=[{"Name": "BucketName", "Value": name}, {"Name": "StorageType", "Value": "StandardStorage"}],
        StartTime=now - timedelta(days=3),  # a report may be late
        EndTime=now,
        Period=86400,
        Statistics=["Average"],
    )["Datapoints"]
    return int(max(points, key=lambda point: point["Timestamp"])["Average"]) if points else None


def _usd_a_month(kind: str, size_bytes: int | None) -> float | None:
    price = kept_prices().get(KINDS[kind][1], {"usd": 0.0, "per": "month"})
    if price["per"] == "month":
        return None if kind == "other" else float(price["usd"])
    return None if size_bytes is None else float(price["usd"]) * size_bytes / GB_OF_S3


def delete(aws: Aws, item: Leftover) -> None:
    """Delete a leftover of any kind but `other`. Raises ClientError.

    Keys and secrets can be restored for 30 days, the default of their services.
    """
    _DELETIONS[item.kind](aws, item)


def _delete_bucket(aws: Aws, bucket: Leftover) -> None:
    """Delete a bucket with every version of every object."""
    for page in aws.s3.get_paginator("list_object_versions").paginate(Bucket=bucket.name):
        versions: list[Any] = [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
        objects: Any = [{"Key": each["Key"], "VersionId": each["VersionId"]} for each in versions]
        if objects:
            aws.s3.delete_objects(Bucket=bucket.name, Delete={"Objects": objects, "Quiet": True})
    aws.s3.delete_bucket(Bucket=bucket.name)


_DELETIONS: Mapping[str, Callable[[Aws, Leftover], Any]] = {
    "bucket": _delete_bucket,
    "secret": lambda aws, item: aws.client("secretsmanager").delete_secret(SecretId=item.arn),
    "log-group": lambda aws, item: aws.logs.delete_log_group(logGroupName=item.name),
    "repository": lambda aws, item: aws.ecr.delete_repository(repositoryName=item.name, force=True),
    "build-record": lambda aws, item: aws.client("imagebuilder").delete_image(imageBuildVersionArn=item.arn),
    "machine-image": lambda aws, item: aws.ec2.deregister_image(ImageId=item.name),
    "snapshot": lambda aws, item: aws.ec2.delete_snapshot(SnapshotId=item.name),
    "job-definition": lambda aws, item: aws.batch.deregister_job_definition(jobDefinition=item.arn),
    "key": lambda aws, item: aws.client("kms").schedule_key_deletion(KeyId=item.name),
}
