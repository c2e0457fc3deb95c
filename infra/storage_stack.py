"""Storage: the data bucket that jobs read, the run bucket that they write, and the log of who touched them."""

from collections.abc import Sequence

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_s3 as s3
from constructs import Construct

from infra.constructs.stage_stack import StageStack, acknowledge
from infra.settings import Stage
from jobs.runs import CHECKPOINT_TAG
from jobs.stage import DATA_BUCKET, RUN_BUCKET

_ACCESS_LOG_DAYS = 365


class StorageStack(StageStack):
    """Buckets with generated names, kept when the stack is deleted."""

    def __init__(self, scope: Construct, *, stage: Stage) -> None:
        super().__init__(scope, "storage", stage=stage, description="data and run buckets", stateful=True)
        self._noncurrent_days = stage.noncurrent_retention_days
        self._access_logs = self._bucket("AccessLogs", expire=Duration.days(_ACCESS_LOG_DAYS))
        acknowledge(
            self._access_logs,
            "It receives the other buckets' access logs; a log of it would log its own writing without end",
            "AwsSolutions-S1",
        )
        self.data_bucket = self._bucket("Data", access_logs_prefix="data/")
        self.run_bucket = self._bucket(
            "Runs",
            access_logs_prefix="runs/",
            rules=[
                s3.LifecycleRule(
                    id="old-checkpoints",
                    tag_filters=dict([CHECKPOINT_TAG]),
                    expiration=Duration.days(stage.checkpoint_retention_days),
                )
            ],
        )
        access_logs_arn = self.resolve(self._access_logs.bucket_arn)["Fn::GetAtt"]
        acknowledge(
            self._access_logs,
            "S3's logging service names the log objects itself; it may write from these buckets of this account only",
            *(f"AwsSolutions-IAM5[Resource::<{'.'.join(access_logs_arn)}>/{prefix}*]" for prefix in ("data/", "runs/")),
        )
        self.publish(DATA_BUCKET, self.data_bucket.bucket_name)
        self.publish(RUN_BUCKET, self.run_bucket.bucket_name)

    def _bucket(
        self,
        name: str,
        *,
        access_logs_prefix: str | None = None,
        expire: Duration | None = None,
        rules: Sequence[s3.LifecycleRule] = (),
    ) -> s3.Bucket:
        bucket = s3.Bucket(
            self,
            name,
            versioned=True,
            encryption=s3.BucketEncryption.S3_MANAGED,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            server_access_logs_bucket=self._access_logs if access_logs_prefix else None,
            server_access_logs_prefix=access_logs_prefix,
            removal_policy=RemovalPolicy.RETAIN,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="abandoned-parts-and-old-versions",
                    abort_incomplete_multipart_upload_after=Duration.days(7),
                    noncurrent_version_expiration=Duration.days(self._noncurrent_days),
                    expired_object_delete_marker=None if expire else True,
                    expiration=expire,
                ),
                *rules,
            ],
        )
        # A bucket that outlives its stack keeps its rules too. enforce_ssl has made the policy.
        assert bucket.policy is not None  # noqa: S101 - narrows the type
        bucket.policy.apply_removal_policy(RemovalPolicy.RETAIN)
        return bucket
