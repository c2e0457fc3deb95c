"""Machine image: an AMI for each pool of Gaudi instances, with the driver of the pool's release.

AWS has no suitable AMI: Habana's lack the ECS agent, and those for ECS lack the driver. So EC2 Image Builder creates
one from Ubuntu 22.04, in about an hour, at the first deployment and whenever its release or a document in
infra/machine_image/documents/ changes. Between builds, only its snapshots cost.

An SSM parameter holds the id of the latest AMI. CloudFormation writes it for AMIs that a deployment builds, and the
pipeline for AMIs that it builds later. The compute stack reads the parameter at each deployment, unless infra/amis.json
records an AMI.

infra/README.md and infra/docs/pools.md have the commands that build and delete AMIs; infra/docs/not-proven.md lists
what we could not confirm. A driver that does not compile fails the build. An instance that does not boot joins no
cluster. Neither does further harm.
"""

from collections.abc import Sequence

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import StageStack, acknowledge
from infra.image.stack import ImageStack, PublishedImages, pool_image_parameter
from infra.machine_image.build import BuildSite, Component, MachineImageBuild, documents
from infra.network.stack import ENDPOINT_SECURITY_GROUP, NetworkStack
from infra.stages import Pool, Stage
from infra.stages.amis import machine_image_parameter
from infra.stages.network_plan import has_interface_endpoints


def built_pools(stage: Stage) -> list[Pool]:
    """Return the pools whose AMIs the stage builds itself."""
    return [pool for pool in stage.pools if pool.builds_machine_image]


class MachineImageStack(StageStack):
    """The stack of AMIs; only stages with `built_pools` have it."""

    def __init__(self, scope: Construct, *, stage: Stage, network: NetworkStack, image: ImageStack) -> None:
        super().__init__(scope, "machine-image", stage=stage, description="AMIs of the Gaudi instances")
        pools = built_pools(stage)
        images = PublishedImages(self, image=image, names=dict.fromkeys(pool.row.image for pool in pools))
        role = self._build_role(images, [pool_image_parameter(stage, pool) for pool in pools])
        site = BuildSite(
            subnet=network.job_subnets[0],
            security_group=self._security_group(network),
            role=role,
            profile=iam.InstanceProfile(self, "BuildProfile", role=role),
            lifecycle_role=self._lifecycle_role(),
        )
        names = dict.fromkeys(name for pool in pools for name in documents(stage, pool))
        components = {name: Component(self, name) for name in names}
        for pool in pools:
            build = MachineImageBuild(
                self,
                f"Pool-{pool.id}",
                stage=stage,
                pool=pool,
                job_image=images.pool_image(pool),
                components=components,
                site=site,
                tags=self.instance_tags,
                parameter=machine_image_parameter(stage, pool),
            )
            ssm.CfnParameter(
                self,
                f"Parameter-{pool.id}",
                name=machine_image_parameter(stage, pool),
                type="String",
                # With this type, SSM checks that the value is an AMI's id, and template parameters can read it as one.
                data_type="aws:ec2:image",
                value=build.image.attr_image_id,
            )

    def _security_group(self, network: NetworkStack) -> ec2.SecurityGroup:
        group = ec2.SecurityGroup(
            self,
            "BuildSecurityGroup",
            vpc=network.vpc,
            description="Instances that AMIs are made on: HTTPS and HTTP out, nothing in",
            allow_all_outbound=False,
        )
        group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "AWS, Habana's packages")
        group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(80), "Ubuntu's mirrors, whose packages are signed")
        if has_interface_endpoints(self.stage_row):
            # In the endpoints' subnets, AWS's host names resolve to the endpoints, with or without NAT.
            ec2.CfnSecurityGroupIngress(
                self,
                "EndpointsFromBuild",
                group_id=network.published(ENDPOINT_SECURITY_GROUP, reader=self),
                source_security_group_id=group.security_group_id,
                ip_protocol="tcp",
                from_port=443,
                to_port=443,
                description="Instances that AMIs are made on",
            )
        return group

    def _build_role(self, images: PublishedImages, parameters: Sequence[str]) -> iam.Role:
        """Return the role of build instances. `parameters`: names of the SSM parameters with the job image to pull."""
        role = InlineRole(
            self,
            "BuildRole",
            description="Instances that build AMIs: run Image Builder's components, pull the job image",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        )
        for policy in ("EC2InstanceProfileForImageBuilder", "AmazonSSMManagedInstanceCore"):
            role.add_managed_policy(iam.ManagedPolicy.from_aws_managed_policy_name(policy))
        for repository in images.repositories.values():
            repository.grant_pull(role)
        own = [
            self.format_arn(service="ssm", resource="parameter", resource_name=name.removeprefix("/"))
            for name in parameters
        ]
        role.allow("FindJobImage", ["ssm:GetParameter"], *own)
        # AWS's two policies allow reading every SSM parameter, and every S3 object whose name ends in .iso.
        role.deny("OtherParameters", ["ssm:GetParameter*"], not_resources=own)
        installers = self.format_arn(service="s3", region="", account="", resource="ec2imagebuilder*")
        role.deny("OtherObjects", ["s3:GetObject"], not_resources=[installers])
        acknowledge(
            role,
            "Image Builder documents these two policies for instances that run components, and extends them as its "
            "agent needs. The instance lives for an hour and only runs this repository's documents.",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/EC2InstanceProfileForImageBuilder]",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/AmazonSSMManagedInstanceCore]",
        )
        role.explain("ecr:GetAuthorizationToken supports no resources: it can only be allowed on all of them", "*")
        return role

    def _lifecycle_role(self) -> iam.Role:
        role = iam.Role(
            self,
            "LifecycleRole",
            description="Lets Image Builder delete the AMIs that it built",
            assumed_by=iam.ServicePrincipal("imagebuilder.amazonaws.com"),
            managed_policies=[
                iam.ManagedPolicy.from_aws_managed_policy_name("service-role/EC2ImageBuilderLifecycleExecutionPolicy")
            ],
        )
        acknowledge(
            role,
            "AWS's own policy for this purpose: it only deletes AMIs and snapshots with Image Builder's tag",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/service-role/"
            "EC2ImageBuilderLifecycleExecutionPolicy]",
        )
        return role
