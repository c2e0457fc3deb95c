"""Storage: the data bucket that jobs read, the run bucket that they write to, and a bucket for their access logs.

`own_kms_key` adds a key that encrypts these buckets and what other stacks keep. `fsx_gib` adds a file system that shows
the shared part of the data bucket.
"""

from collections.abc import Sequence

from aws_cdk import CfnResource, Duration, RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from constructs import Construct

from infra.constructs.security_groups import BOTH_WAYS, lustre_rules
from infra.constructs.stage_stack import StageStack, acknowledge
from infra.network.stack import NetworkStack
from infra.stages import Stage
from infra.storage.team_secret import TeamSecret, secret_kinds
from jobs.core.run import CACHE_TAG, CHECKPOINT_TAG
from jobs.core.stage import DATA_BUCKET, RUN_BUCKET, SHARED_DATA_MOUNT, SHARED_PREFIX, variable_names_parameter

KMS_KEY = "kms-key"
"""SSM parameter: ARN of the stage's own key. Only present if the stage has one."""

FSX_DNS_NAME = "fsx/dns-name"
"""SSM parameter: host name of the file system. Only present if the stage has one."""

FSX_MOUNT_NAME = "fsx/mount-name"
"""SSM parameter: mount name of the file system. Only present if the stage has one."""

FSX_SECURITY_GROUP = "security-group/fsx"
"""SSM parameter: security group of the file servers; the compute stack adds rules for teams' instances."""

CONTAINER_PATH = "/fsx"
"""Mount point of the file system in containers, read-only."""

_THROUGHPUT_MBPS_PER_TIB = 125
"""The lowest and cheapest throughput of PERSISTENT_2."""

_LUSTRE_VERSION = "2.15"

_ACCESS_LOG_DAYS = 365

PRUNED_DAYS = 3
"""Days for which a deleted checkpoint or cache can be restored: a weekend. A run writes and deletes terabytes of
checkpoints, so keeping them as long as other deleted objects would cost more than storing its results.

A version keeps its tags, rules for noncurrent versions may filter by them, and of two rules the shorter one applies.
Sources: Amazon S3 User Guide, "Lifecycle configuration elements", and "Examples of S3 Lifecycle configuration".
"""


class SharedFileSystem(Construct):
    """A read-only cache of `shared/` in the bucket, which never writes back.

    So it has no backups, and is deleted with its stack. Only `shared/` is linked, because the file system cannot
    separate teams: anyone who mounts it can read all of it.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        capacity_gib: int,
        bucket: s3.IBucket,
        subnet: ec2.ISubnet,
        servers: ec2.ISecurityGroup,
        jobs: ec2.ISecurityGroup,
        key: kms.IKey | None,
    ) -> None:
        """Create the file system in `subnet`, with its servers in the group `servers`, for instances in the group
        `jobs`.

        Without `key`, AWS's key for FSx encrypts the file system.
        """
        super().__init__(scope, name)
        self.resource = fsx.CfnFileSystem(
            self,
            "Resource",
            file_system_type="LUSTRE",
            file_system_type_version=_LUSTRE_VERSION,
            storage_capacity=capacity_gib,
            storage_type="SSD",
            subnet_ids=[subnet.subnet_id],
            security_group_ids=[servers.security_group_id],
            kms_key_id=key.key_arn if key else None,
            lustre_configuration=fsx.CfnFileSystem.LustreConfigurationProperty(
                deployment_type="PERSISTENT_2",
                per_unit_storage_throughput=_THROUGHPUT_MBPS_PER_TIB,
                data_compression_type="LZ4",
                automatic_backup_retention_days=0,
            ),
        )
        self.resource.apply_removal_policy(RemovalPolicy.DESTROY)
        # FSx refuses to create a file system whose servers cannot reach each other.
        for rule in self._security_rules(servers, jobs):
            self.resource.add_resource_dependency(rule)
        fsx.CfnDataRepositoryAssociation(
            self,
            "Shared",
            file_system_id=self.resource.ref,
            file_system_path="/",
            data_repository_path=f"s3://{bucket.bucket_name}/{SHARED_PREFIX}/",
            batch_import_meta_data_on_create=True,
            # No export policy, because jobs do not write there.
            s3=fsx.CfnDataRepositoryAssociation.S3Property(
                auto_import_policy=fsx.CfnDataRepositoryAssociation.AutoImportPolicyProperty(
                    events=["NEW", "CHANGED", "DELETED"]
                )
            ),
        )

    def _security_rules(self, servers: ec2.ISecurityGroup, jobs: ec2.ISecurityGroup) -> list[CfnResource]:
        """Return the rules that let file servers and job instances reach each other.

        They are in this stack, so the network stack does not depend on the file system.
        """
        groups = {"Servers": servers.security_group_id, "Jobs": jobs.security_group_id}
        return lustre_rules(self, groups, [("Servers", "Servers"), *BOTH_WAYS])


class StorageStack(StageStack):
    """The stack of buckets and secrets, which are kept when the stack is deleted."""

    def __init__(self, scope: Construct, *, stage: Stage, network: NetworkStack) -> None:
        """Create the stack. `network` provides the subnet and the VPC of the file system."""
        super().__init__(scope, "storage", stage=stage, description="data and run buckets")
        self._key = self._own_key() if stage.own_kms_key else None
        if self._key:
            # Published instead of exported, because a stage may add or drop its key.
            self.publish(KMS_KEY, self._key.key_arn)
        self._noncurrent_days = stage.noncurrent_retention_days
        self._access_logs = self._bucket("AccessLogs", expire=Duration.days(_ACCESS_LOG_DAYS))
        acknowledge(
            self._access_logs,
            "It receives the other buckets' access logs; logging access to it would create logs about logs",
            "AwsSolutions-S1",
        )
        self.data_bucket = self._bucket("Data", access_logs_prefix="data/")
        self.run_bucket = self._bucket(
            "Runs",
            access_logs_prefix="runs/",
            rules=[
                s3.LifecycleRule(
                    id=name,
                    tag_filters=dict([tag]),
                    expiration=Duration.days(stage.checkpoint_retention_days),
                    # Also of checkpoints that a run deletes because newer ones replace them.
                    noncurrent_version_expiration=Duration.days(min(PRUNED_DAYS, stage.noncurrent_retention_days)),
                )
                for name, tag in (("old-checkpoints", CHECKPOINT_TAG), ("old-caches", CACHE_TAG))
            ],
        )
        access_logs_arn = self.resolve(self._access_logs.bucket_arn)["Fn::GetAtt"]
        acknowledge(
            self._access_logs,
            "S3's logging service names the log objects itself; it may write only for these buckets of this account",
            *(f"AwsSolutions-IAM5[Resource::<{'.'.join(access_logs_arn)}>/{prefix}*]" for prefix in ("data/", "runs/")),
        )
        self.publish(DATA_BUCKET, self.data_bucket.bucket_name)
        self.publish(RUN_BUCKET, self.run_bucket.bucket_name)
        # Created even without a file system: the rules of teams' own groups, in a stack deployed later, refer to this
        # group, and EC2 does not delete a group that other groups' rules refer to.
        servers = ec2.SecurityGroup(
            self,
            "FileServerSecurityGroup",
            vpc=network.vpc,
            description="FSx for Lustre: its own protocol, among file servers and with jobs",
            allow_all_outbound=False,
        )
        self.publish(FSX_SECURITY_GROUP, servers.security_group_id)
        if stage.fsx_gib:
            file_system = SharedFileSystem(
                self,
                "SharedFileSystem",
                capacity_gib=stage.fsx_gib,
                bucket=self.data_bucket,
                subnet=network.fsx_subnet,
                servers=servers,
                jobs=network.job_security_group,
                key=self._key,
            )
            # Published instead of exported: a replaced file system, for example in another subnet, changes both.
            self.publish(FSX_DNS_NAME, file_system.resource.attr_dns_name)
            self.publish(FSX_MOUNT_NAME, file_system.resource.attr_lustre_mount_name)
            self.publish(SHARED_DATA_MOUNT, CONTAINER_PATH)
        for team in stage.teams:
            for kind in secret_kinds(team):
                TeamSecret(self, kind, team=team, key=self._key)
            if team.secret_variables:
                self.publish(variable_names_parameter(team.name), " ".join(team.secret_variables))

    def key_arn(self, reader: Construct) -> str | None:
        """Return the ARN of the stage's own key, which also encrypts other stacks' images, secrets and topics.

        The key's policy leaves access to IAM: other stacks allow their roles to use the key in the roles' policies.
        """
        return self.published(KMS_KEY, reader=reader) if self._key else None

    def _own_key(self) -> kms.Key:
        key = kms.Key(
            self,
            "Key",
            description=f"trainyard {self.stage_row.name}: data, runs, images, secrets and alerts",
            enable_key_rotation=True,
            # Data encrypted with the key outlives the stack, and is lost without the key.
            removal_policy=RemovalPolicy.RETAIN,
        )
        # Services that publish to an encrypted topic need its key, and have no IAM policy that could allow it. SNS puts
        # the topic into the encryption context; EventBridge supports no source condition for encrypted topics (SNS
        # developer guide, key management).
        key.add_to_resource_policy(
            iam.PolicyStatement(
                sid="PublishToTopicsOfThisAccount",
                principals=[
                    iam.ServicePrincipal(f"{service}.amazonaws.com") for service in ("budgets", "cloudwatch", "events")
                ],
                actions=["kms:Decrypt", "kms:GenerateDataKey*"],
                resources=["*"],  # in a key's policy: this key
                conditions={
                    "ArnLike": {
                        "kms:EncryptionContext:aws:sns:topicArn": self.format_arn(service="sns", resource="*"),
                    }
                },
            )
        )
        if self.stage_row.fsx_gib:
            key.add_to_resource_policy(self._file_system_key_access())
        return key

    def _file_system_key_access(self) -> iam.PolicyStatement:
        """Return the statement that lets FSx use the key, under a role that FSx creates with the file system.

        It follows the FSx user guide on encrypted buckets, except that the role's name is not known in advance.
        """
        service = "s3.data-source.lustre.fsx.amazonaws.com"
        return iam.PolicyStatement(
            sid="FileSystemReadsTheBuckets",
            principals=[iam.AnyPrincipal()],  # the conditions limit this to that role of this account, through S3
            actions=["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"],
            resources=["*"],  # in a key's policy: this key
            conditions={
                "StringEquals": {
                    "kms:CallerAccount": self.account,
                    "kms:ViaService": f"s3.{self.region}.amazonaws.com",
                },
                "ArnLike": {
                    "aws:PrincipalArn": self.format_arn(
                        service="iam",
                        region="",
                        resource="role",
                        resource_name=f"aws-service-role/{service}/AWSServiceRoleForFSxS3Access_*",
                    )
                },
            },
        )

    def _bucket(
        self,
        name: str,
        *,
        access_logs_prefix: str | None = None,
        expire: Duration | None = None,
        rules: Sequence[s3.LifecycleRule] = (),
    ) -> s3.Bucket:
        # S3 only delivers access logs to buckets that are encrypted with S3's own keys.
        key = self._key if access_logs_prefix else None
        bucket = s3.Bucket(
            self,
            name,
            versioned=True,
            encryption=s3.BucketEncryption.KMS if key else s3.BucketEncryption.S3_MANAGED,
            encryption_key=key,
            # One KMS request for many objects instead of one per object.
            bucket_key_enabled=True if key else None,
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
        acknowledge(
            bucket,
            "S3 keeps each object in three zones, and versions restore deleted objects; a copy in another region would "
            "double the cost, and an organisation that wants a copy adds it here",
            "NIST.800.53.R5-S3BucketReplicationEnabled",
        )
        if key is None:
            acknowledge(
                bucket,
                "S3 encrypts each object with its own keys at no charge; own_kms_key adds a KMS key, except for access "
                "logs, which S3 does not deliver to a bucket with a KMS key",
                "NIST.800.53.R5-S3DefaultEncryptionKMS",
            )
        # The policy, which enforce_ssl created, must outlive the stack together with the bucket.
        assert bucket.policy is not None  # noqa: S101 - narrows the type
        bucket.policy.apply_removal_policy(RemovalPolicy.RETAIN)
        return bucket
