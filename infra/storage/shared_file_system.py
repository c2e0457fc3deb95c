"""FSx for Lustre: what lies under `shared/` of the data bucket, as a file system that instances mount."""

from aws_cdk import CfnResource, RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from constructs import Construct

from infra.constructs.lustre_rules import BOTH_WAYS, lustre_rules
from jobs.core.stage import SHARED_PREFIX

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
