"""A Batch compute environment of one instance type, and the launch template its instances start from."""

from collections.abc import Sequence
from dataclasses import dataclass

from aws_cdk import Fn, Stack
from aws_cdk import aws_batch as batch
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from jobs.instance_types import InstanceType

STOP_TIMEOUT_SECONDS = 100
"""Between SIGTERM and SIGKILL: most of the two minutes that a Spot notice gives.

torch may take 30 s to end the ranks, and the record of the attempt is written after that. No checkpoint is begun: the
newest complete one stays, and the next attempt resumes from it.
"""

_AGENT_CONFIGURATION = {
    "ECS_CONTAINER_STOP_TIMEOUT": f"{STOP_TIMEOUT_SECONDS}s",  # the agent's own default is 30 s
    "ECS_ENABLE_SPOT_INSTANCE_DRAINING": "true",  # off by default
    # The three below are ecs-init's defaults on Amazon Linux; other AMIs start the agent without them. Batch runs a
    # one-node job in the host's network, where the agent needs a switch of its own to hand out the job's role.
    "ECS_ENABLE_TASK_IAM_ROLE": "true",
    "ECS_ENABLE_TASK_IAM_ROLE_NETWORK_HOST": "true",
    "ECS_ENABLE_AWSLOGS_EXECUTIONROLE_OVERRIDE": "true",
    "ECS_AVAILABLE_LOGGING_DRIVERS": '["json-file","awslogs"]',
}


@dataclass(frozen=True, kw_only=True)
class MachineImage:
    """What instances boot."""

    root_device_name: str
    """As the AMI calls it."""
    ami_id: str | None = None
    """None: the AMI that Batch picks, the ECS-optimised Amazon Linux 2023."""


class SpotComputeEnvironment(Construct):
    """Spot instances of one type, none while nothing runs.

    The L2 of aws-batch is left aside: it adds CPU instance types by default and renders the launch template without a
    version, and then edits of the template never reach an instance.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        row: InstanceType,
        max_nodes: int,
        machine_image: MachineImage,
        root_volume_gib: int,
        subnets: Sequence[ec2.ISubnet],
        security_group: ec2.ISecurityGroup,
        instance_profile: iam.IInstanceProfile,
        instance_tags: dict[str, str],
    ) -> None:
        super().__init__(scope, name)
        tag_list = [{"key": key, "value": value} for key, value in sorted(instance_tags.items())]
        self.launch_template = ec2.CfnLaunchTemplate(
            self,
            "LaunchTemplate",
            tag_specifications=[
                ec2.CfnLaunchTemplate.LaunchTemplateTagSpecificationProperty(
                    resource_type="launch-template", tags=tag_list
                )
            ],
            # Batch itself sets instance type, role, subnets, security groups and the Spot request. A network interface
            # here would exclude the compute environment's security groups.
            launch_template_data=ec2.CfnLaunchTemplate.LaunchTemplateDataProperty(
                metadata_options=ec2.CfnLaunchTemplate.MetadataOptionsProperty(
                    http_endpoint="enabled",
                    http_tokens="required",
                    # One hop is the host itself, in whose network Batch runs a one-node job; a second would hand the
                    # instance's role to containers on a bridge as well.
                    http_put_response_hop_limit=1,
                ),
                block_device_mappings=[
                    ec2.CfnLaunchTemplate.BlockDeviceMappingProperty(
                        device_name=machine_image.root_device_name,
                        ebs=ec2.CfnLaunchTemplate.EbsProperty(
                            volume_type="gp3", volume_size=root_volume_gib, encrypted=True, delete_on_termination=True
                        ),
                    )
                ],
                # Batch tags the instances; their volumes are tagged by the template only.
                tag_specifications=[
                    ec2.CfnLaunchTemplate.TagSpecificationProperty(resource_type="volume", tags=tag_list)
                ],
                user_data=Fn.base64(_user_data(row)),
            ),
        )
        self.resource = batch.CfnComputeEnvironment(
            self,
            "Resource",
            type="MANAGED",
            state="ENABLED",
            # With this, no name, no service role (so the service-linked one) and this allocation strategy, Batch
            # changes instances in place: queue and running jobs stay.
            replace_compute_environment=False,
            update_policy=batch.CfnComputeEnvironment.UpdatePolicyProperty(
                terminate_jobs_on_update=False,
                # Jobs may end on the old instances for as long as Batch allows; what runs longer is started again on
                # the new ones and resumes from its last checkpoint.
                job_execution_timeout_minutes=360,
            ),
            compute_resources=batch.CfnComputeEnvironment.ComputeResourcesProperty(
                type="SPOT",
                # No bidPercentage: the price is capped at On-Demand anyway, a lower cap only adds interruptions.
                allocation_strategy="SPOT_PRICE_CAPACITY_OPTIMIZED",
                instance_types=[row.name],
                minv_cpus=0,
                maxv_cpus=row.vcpus * max_nodes,
                subnets=[subnet.subnet_id for subnet in subnets],
                security_group_ids=[security_group.security_group_id],
                instance_role=instance_profile.instance_profile_arn,
                ec2_configuration=[
                    batch.CfnComputeEnvironment.Ec2ConfigurationObjectProperty(
                        image_type="ECS_AL2023", image_id_override=machine_image.ami_id
                    )
                ],
                update_to_latest_image_version=machine_image.ami_id is None,
                launch_template=batch.CfnComputeEnvironment.LaunchTemplateSpecificationProperty(
                    launch_template_id=self.launch_template.ref,
                    # A number: Batch reads $Default or $Latest once, and later versions never reach an instance.
                    version=self.launch_template.attr_latest_version_number,
                ),
                tags={"Name": f"{Stack.of(self).stack_name}-{name}", **instance_tags},
            ),
        )


def _user_data(row: InstanceType) -> str:
    """MIME multipart, as Batch demands: it appends a part of its own."""
    script = ec2.UserData.for_linux()
    script.add_commands("set -euo pipefail", "mkdir -p /etc/ecs", "cat >>/etc/ecs/ecs.config <<'CONFIGURATION'")
    script.add_commands(*(f"{name}={value}" for name, value in _AGENT_CONFIGURATION.items()), "CONFIGURATION")
    if row.huge_pages:
        script.add_commands(
            f"echo vm.nr_hugepages={row.huge_pages} >/etc/sysctl.d/60-hugepages.conf",
            "sysctl --quiet --load=/etc/sysctl.d/60-hugepages.conf",
        )
    parts = ec2.MultipartUserData()
    parts.add_user_data_part(script, ec2.MultipartBody.SHELL_SCRIPT, True)
    return parts.render()
