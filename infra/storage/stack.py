"""Storage: the data bucket that jobs read, the run bucket that they write, and the log of who touched them.

With `own_kms_key` also the key that these buckets, and what other stacks keep, are encrypted with; with `fsx_gib` a
file system that shows what all teams share of the data bucket.
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
from infra.storage.team_secret import TeamSecret, kinds_of
from jobs.core.run import CACHE_TAG, CHECKPOINT_TAG
from jobs.core.stage import DATA_BUCKET, RUN_BUCKET, SHARED_DATA_MOUNT, SHARED_PREFIX, variable_names_parameter

CONTAINER_PATH = "/fsx"
"""Where containers see it, read-only."""

_THROUGHPUT_MBPS_PER_TIB = 125
"""The least that PERSISTENT_2 offers, and the cheapest."""

_LUSTRE_VERSION = "2.15"


def file_server_group(scope: Construct, vpc: ec2.IVpc) -> ec2.SecurityGroup:
    """Make the security group of the file servers, whose rules come with the file system."""
    return ec2.SecurityGroup(
        scope,
        "FileServerSecurityGroup",
        vpc=vpc,
        description="FSx for Lustre: its own protocol, among file servers and with jobs",
        allow_all_outbound=False,
    )


class SharedFileSystem(Construct):
    """A file system that caches the bucket: it holds nothing that the bucket does not, and nothing flows back.

    So it has no backups, and goes with its stack. Only `shared/` is linked: the file system has no notion of teams,
    and whoever mounts it reads all of it.
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
        """Make it in `subnet`, with servers in the group `servers`, for instances in the group `jobs`.

        `key` None: encrypted with AWS's key for FSx.
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
        # FSx refuses to make a file system whose servers could not reach each other.
        for rule in self._let_through(servers, jobs):
            self.resource.add_resource_dependency(rule)
        fsx.CfnDataRepositoryAssociation(
            self,
            "Shared",
            file_system_id=self.resource.ref,
            file_system_path="/",
            data_repository_path=f"s3://{bucket.bucket_name}/{SHARED_PREFIX}/",
            batch_import_meta_data_on_create=True,
            # No export policy: jobs do not write there.
            s3=fsx.CfnDataRepositoryAssociation.S3Property(
                auto_import_policy=fsx.CfnDataRepositoryAssociation.AutoImportPolicyProperty(
                    events=["NEW", "CHANGED", "DELETED"]
                )
            ),
        )

    @property
    def dns_name(self) -> str:
        return self.resource.attr_dns_name

    @property
    def mount_name(self) -> str:
        """Return what follows `@tcp:/` where it is mounted."""
        return self.resource.attr_lustre_mount_name

    def _let_through(self, servers: ec2.ISecurityGroup, jobs: ec2.ISecurityGroup) -> list[CfnResource]:
        """Return the rules by which file servers and jobs' instances reach each other.

        In the stack of the file system, so that the network knows nothing of it.
        """
        groups = {"Servers": servers.security_group_id, "Jobs": jobs.security_group_id}
        return lustre_rules(self, groups, [("Servers", "Servers"), *BOTH_WAYS])


KMS_KEY = "kms-key"
"""Parameter that holds the ARN of the stage's own key; there only while the stage has one."""
FSX_DNS_NAME = "fsx/dns-name"
"""Parameter that holds the file server's name; there only while the stage has a file system, as the next one."""
FSX_MOUNT_NAME = "fsx/mount-name"
FSX_SECURITY_GROUP = "security-group/fsx"
"""Parameter that holds the file servers' group, to which the instances of teams are added."""

_ACCESS_LOG_DAYS = 365


class StorageStack(StageStack):
    """The stack of buckets, which are kept when it is deleted."""

    def __init__(self, scope: Construct, *, stage: Stage, network: NetworkStack) -> None:
        """`network` is where the file system is, or would be."""
        super().__init__(scope, "storage", stage=stage, description="data and run buckets")
        self._key = self._own_key() if stage.own_kms_key else None
        if self._key:
            # By name, not by reference: a stage may come to have a key, and give it up.
            self.publish(KMS_KEY, self._key.key_arn)
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
                    id=name,
                    tag_filters=dict([tag]),
                    expiration=Duration.days(stage.checkpoint_retention_days),
                )
                for name, tag in (("old-checkpoints", CHECKPOINT_TAG), ("old-caches", CACHE_TAG))
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
        # It is there without a file system too: rules of teams' own groups name it, in a stack that is deployed after
        # this one, and EC2 deletes no group that another's rules name.
        servers = file_server_group(self, network.vpc)
        self.publish(FSX_SECURITY_GROUP, servers.security_group_id)
        if stage.fsx_gib:
            file_system = SharedFileSystem(
                self,
                "SharedFileSystem",
                capacity_gib=stage.fsx_gib,
                bucket=self.data_bucket,
                subnet=network.multinode_subnet,
                servers=servers,
                jobs=network.job_security_group,
                key=self._key,
            )
            # By name, not by reference: another file system, in another subnet for instance, changes both.
            self.publish(FSX_DNS_NAME, file_system.dns_name)
            self.publish(FSX_MOUNT_NAME, file_system.mount_name)
            self.publish(SHARED_DATA_MOUNT, CONTAINER_PATH)
        for team in stage.teams:
            for kind in kinds_of(team):
                TeamSecret(self, kind, team=team, key=self._key)
            if team.secret_variables:
                self.publish(variable_names_parameter(team.name), " ".join(team.secret_variables))

    def key_arn(self, reader: Construct) -> str | None:
        """Return the ARN of the stage's own key, which encrypts another stack's images, secrets and topics as well.

        Its policy leaves to IAM who of the account may use it: another stack grants its roles in their own policies.
        """
        return self.published(KMS_KEY, reader=reader) if self._key else None

    def _own_key(self) -> kms.Key:
        key = kms.Key(
            self,
            "Key",
            description=f"trainyard {self.stage_row.name}: data, runs, images, secrets and alerts",
            enable_key_rotation=True,
            # What is encrypted with it outlives the stack, and is lost without it.
            removal_policy=RemovalPolicy.RETAIN,
        )
        # Services that publish to a topic need the topic's key, and have no IAM policy to be allowed it in. SNS names
        # the topic in the encryption context; EventBridge supports no condition on the source of a message to an
        # encrypted topic (SNS's guide on key management).
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
            key.add_to_resource_policy(self._file_system_may_use_the_key())
        return key

    def _file_system_may_use_the_key(self) -> iam.PolicyStatement:
        """Let FSx use the key, under a role that it makes with the file system, after the key.

        As in FSx's user guide on encrypted buckets, but for the role's name, which is not known beforehand.
        """
        service = "s3.data-source.lustre.fsx.amazonaws.com"
        return iam.PolicyStatement(
            sid="FileSystemReadsTheBuckets",
            principals=[iam.AnyPrincipal()],  # narrowed to that role of this account, by way of S3, below
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
        # S3 delivers access logs only into buckets that it encrypts with its own keys.
        key = self._key if access_logs_prefix else None
        bucket = s3.Bucket(
            self,
            name,
            versioned=True,
            encryption=s3.BucketEncryption.KMS if key else s3.BucketEncryption.S3_MANAGED,
            encryption_key=key,
            # One request to KMS for many objects, instead of one for each.
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
            "S3 keeps each object in three zones and versions bring back what was deleted; a second copy in another "
            "region would cost as much again, and an organisation that wants one adds it to this one place",
            "NIST.800.53.R5-S3BucketReplicationEnabled",
        )
        if key is None:
            acknowledge(
                bucket,
                "S3 encrypts each object with its own keys at no charge; a stage that sets own_kms_key gets a KMS key, "
                "except for access logs, which S3 does not deliver into a bucket with one",
                "NIST.800.53.R5-S3DefaultEncryptionKMS",
            )
        # A bucket that outlives its stack keeps its rules too. enforce_ssl has made the policy.
        assert bucket.policy is not None  # noqa: S101 - narrows the type
        bucket.policy.apply_removal_policy(RemovalPolicy.RETAIN)
        return bucket
