"""Compute: the Spot compute environments, and the queues whose capacity the teams share."""

from aws_cdk import aws_batch as batch
from aws_cdk import aws_iam as iam
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from infra.constructs.compute_environment import MachineImage, SpotComputeEnvironment
from infra.constructs.stage_stack import StageStack, acknowledge
from infra.network_stack import NetworkStack
from infra.settings import Stage
from jobs.queues import CPU_SPOT, GAUDI_SPOT
from jobs.stage import CPU_INSTANCE_TYPE, INSTANCE_TYPE, queue_parameter, share_identifier

_AMAZON_LINUX_ROOT_DEVICE = "/dev/xvda"


class ComputeStack(StageStack):
    """Job queues, published under the names that a plan picks from."""

    def __init__(self, scope: Construct, *, stage: Stage, network: NetworkStack) -> None:
        super().__init__(scope, "compute", stage=stage, description="compute environments and job queues")
        profile = self._instance_profile()
        accelerated = SpotComputeEnvironment(
            self,
            "Accelerated",
            row=stage.row,
            max_nodes=stage.max_nodes,
            machine_image=MachineImage(
                root_device_name=stage.root_device_name, ami_id=self._ami_id(stage.machine_image)
            ),
            root_volume_gib=stage.root_volume_gib,
            subnets=network.job_subnets,
            security_group=network.job_security_group,
            instance_profile=profile,
            instance_tags=self.instance_tags,
        )
        cpu = SpotComputeEnvironment(
            self,
            "Cpu",
            row=stage.cpu_row,
            max_nodes=stage.max_cpu_nodes,
            machine_image=MachineImage(root_device_name=_AMAZON_LINUX_ROOT_DEVICE),
            root_volume_gib=stage.cpu_root_volume_gib,
            subnets=network.job_subnets,
            security_group=network.job_security_group,
            instance_profile=profile,
            instance_tags=self.instance_tags,
        )
        policy = self._scheduling_policy(stage)
        self._queue(GAUDI_SPOT, accelerated, policy)
        self._queue(CPU_SPOT, cpu, policy)
        self.publish(INSTANCE_TYPE, stage.instance_type)
        self.publish(CPU_INSTANCE_TYPE, stage.cpu_instance_type)

    def _queue(self, name: str, environment: SpotComputeEnvironment, policy: batch.CfnSchedulingPolicy) -> None:
        queue = batch.CfnJobQueue(
            self,
            f"Queue-{name}",
            state="ENABLED",
            priority=1,
            # From the first day: fair share cannot be added to a queue that was created without it.
            scheduling_policy_arn=policy.attr_arn,
            compute_environment_order=[
                batch.CfnJobQueue.ComputeEnvironmentOrderProperty(
                    order=1, compute_environment=environment.resource.attr_compute_environment_arn
                )
            ],
        )
        self.publish(queue_parameter(name), queue.attr_job_queue_arn)

    def _scheduling_policy(self, stage: Stage) -> batch.CfnSchedulingPolicy:
        return batch.CfnSchedulingPolicy(
            self,
            "TeamShares",
            fairshare_policy=batch.CfnSchedulingPolicy.FairsharePolicyProperty(
                share_decay_seconds=stage.share_decay_hours * 3600,
                # Nothing is held back for teams that run nothing.
                compute_reservation=0,
                share_distribution=[
                    batch.CfnSchedulingPolicy.ShareAttributesProperty(
                        share_identifier=share_identifier(team.name),
                        # Batch weighs usage: half the factor is twice the share.
                        weight_factor=round(1 / team.share, 4),
                    )
                    for team in stage.teams
                ],
            ),
        )

    def _instance_profile(self) -> iam.InstanceProfile:
        role = iam.Role(
            self,
            "InstanceRole",
            description="Instances that run jobs: join the cluster, be reached by Session Manager",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
            managed_policies=[
                iam.ManagedPolicy.from_aws_managed_policy_name("service-role/AmazonEC2ContainerServiceforEC2Role"),
                iam.ManagedPolicy.from_aws_managed_policy_name("AmazonSSMManagedInstanceCore"),
            ],
        )
        acknowledge(
            role,
            "The ECS agent and the SSM agent call what AWS keeps in these two policies, and more with each version; "
            "a list of our own would break instances. Jobs do not run under this role.",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/service-role/"
            "AmazonEC2ContainerServiceforEC2Role]",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/AmazonSSMManagedInstanceCore]",
        )
        return iam.InstanceProfile(self, "InstanceProfile", role=role)

    def _ami_id(self, machine_image: str | None) -> str:
        assert machine_image is not None  # noqa: S101
        if not machine_image.startswith("ssm:"):
            return machine_image
        # A parameter of the template: CloudFormation reads it anew at each deployment, so a new AMI needs no edit.
        return ssm.StringParameter.value_for_typed_string_parameter_v2(
            self, machine_image.removeprefix("ssm:"), ssm.ParameterValueType.AWS_EC2_IMAGE_ID
        )
