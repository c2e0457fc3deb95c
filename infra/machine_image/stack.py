"""Machine image: an AMI for each pool of Gaudi instances, with the driver of the release that its job images have.

AWS offers none that Batch could use: what Habana publishes lacks the ECS agent, what ECS publishes lacks the driver. So
EC2 Image Builder makes one of Ubuntu 22.04, in about an hour at the first deployment, and again when its release or a
document of infra/machine_image/documents/ changes. Between builds it costs the storage of its snapshots.

A parameter holds the newest one's id: CloudFormation writes that of an AMI which a deployment built, and touches it no
more; the pipeline writes that of each AMI it builds later. The compute stack reads it at each deployment. The job image
has to be built between these two, for the AMI to hold it:

    cdk deploy 'dev/image'      the repositories, which `trainyard images push` then fills
    cdk deploy 'dev/*'          the AMI, and all that boots it

The same AMI on today's Ubuntu, with the job image if there was none:

    aws imagebuilder start-image-pipeline-execution --image-pipeline-arn …      takes about an hour
    cdk deploy 'dev/compute'

AMIs that others took the place of outlive the stack, and their snapshots cost. What deletes all of a stage's:

    aws ec2 describe-images --owners self --filters Name=tag:trainyard:stage,Values=dev --query 'Images[].[ImageId]' \
        --output text | xargs -rn1 aws ec2 deregister-image --delete-associated-snapshots --image-id

Not proven, since no such instance could be had: that the AMI, which inherits `uefi-preferred` from Canonical's, boots
on DL1 with its legacy BIOS; that jobs of several nodes run on it (AWS supports task networking in `awsvpc` mode on its
own Linux only, and Batch's multi-node jobs use it); that a release's driver compiles for Canonical's kernel of the
day. The first and the last end the build or keep the instance out of the cluster, with a log; nothing else is harmed.
"""

from collections.abc import Sequence
from pathlib import Path

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from infra.constructs.function import Function
from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import StageStack, acknowledge
from infra.image.published import PublishedImages, pool_image_parameter
from infra.image.stack import ImageStack
from infra.machine_image.build import BuildSite, Component, MachineImageBuild, documents
from infra.network.stack import ENDPOINT_SECURITY_GROUP, NetworkStack
from infra.stages import Pool, Stage
from infra.stages.network_plan import has_interface_endpoints

_CODE = Path(__file__).parent / "functions" / "offer.py"


class OfferQuestion(Construct):
    """The function that asks; `of` makes what fails where the answer is no."""

    def __init__(self, scope: Construct, name: str, *, stage: Stage) -> None:
        super().__init__(scope, name)
        self._function = Function(
            self,
            "Function",
            handler="index.handler",
            code=lambda_.Code.from_inline(_CODE.read_text()),
            description="Before an AMI is built: does EC2 offer its instance type?",
            environment={},
            log_retention_days=stage.log_retention_days,
        )
        self._function.execution_role.allow("Ask", ["ec2:DescribeInstanceTypeOfferings"], "*")
        self._function.execution_role.explain(
            "EC2 knows no resources for this question: it can only be allowed on all of them", "*"
        )
        acknowledge(
            self._function,
            "CloudFormation itself calls it, waits for its answer and shows why it failed",
            "NIST.800.53.R5-LambdaDLQ",
        )

    def of(self, pool: Pool, *, build: str) -> cdk.CfnResource:
        """Return a resource that cannot be made where EC2 does not offer the pool's type. `build` names its AMI."""
        resource = cdk.CustomResource(
            self,
            f"Pool-{pool.id}",
            service_token=self._function.function_arn,
            resource_type="Custom::InstanceTypeOffer",
            service_timeout=cdk.Duration.minutes(2),
            properties={
                "InstanceType": pool.instance_type,
                "Build": build,
                "Otherwise": f"EC2 offers {pool.instance_type} in no zone of this region, and Batch would refuse it: "
                "no AMI is built for it. Next: another `instance_type` in infra/settings.py (python -m infra.preflight "
                "names those on offer), or build_unoffered=True where AWS has promised you this one",
            },
        )
        child = resource.node.default_child
        assert isinstance(child, cdk.CfnResource)  # noqa: S101 - narrows the type; the L2 is built on it
        return child


def machine_image_parameter(stage: Stage, pool: Pool) -> str:
    """Return the name of the SSM parameter that holds the id of the newest AMI which a stage built for a pool.

    Below /imagebuilder/, which is all that Image Builder's service-linked role may write (AWS's policy
    AWSServiceRoleForImageBuilder).
    """
    return f"/imagebuilder/trainyard-{stage.name}/machine-image/{pool.id}"


def built_pools(stage: Stage) -> list[Pool]:
    """Return the pools whose AMI the stage builds itself."""
    return [pool for pool in (stage.pool, *stage.retiring) if pool.builds_machine_image]


class MachineImageStack(StageStack):
    """The stack of AMIs, only for stages with `built_pools`."""

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
        question = None if stage.build_unoffered else OfferQuestion(self, "Offer", stage=stage)
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
            if question:
                build.image.add_dependency(question.of(pool, build=build.version))
            ssm.CfnParameter(
                self,
                f"Parameter-{pool.id}",
                name=machine_image_parameter(stage, pool),
                type="String",
                # SSM checks that it is the id of an AMI; with this type only may a template's parameter read it so.
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
            # In their subnets AWS's names lead to the endpoints, NAT or not.
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
        """`parameters`: names of those that say which job image to pull."""
        role = InlineRole(
            self,
            "BuildRole",
            description="Instances that AMIs are made on: be run by Image Builder, pull the job image",
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
        # AWS's two policies read every parameter of the account, and every object of it that is called .iso.
        role.deny("OtherParameters", ["ssm:GetParameter*"], not_resources=own)
        installers = self.format_arn(service="s3", region="", account="", resource="ec2imagebuilder*")
        role.deny("OtherObjects", ["s3:GetObject"], not_resources=[installers])
        acknowledge(
            role,
            "Image Builder documents these two for the instance that it runs components on, and adds to them what its "
            "agent comes to call. The instance lives for an hour and runs this repository's documents only.",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/EC2InstanceProfileForImageBuilder]",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/AmazonSSMManagedInstanceCore]",
        )
        role.explain("ecr:GetAuthorizationToken knows no resources: it can only be allowed on all of them", "*")
        return role

    def _lifecycle_role(self) -> iam.Role:
        role = iam.Role(
            self,
            "LifecycleRole",
            description="Image Builder, to delete AMIs that it made",
            assumed_by=iam.ServicePrincipal("imagebuilder.amazonaws.com"),
            managed_policies=[
                iam.ManagedPolicy.from_aws_managed_policy_name("service-role/EC2ImageBuilderLifecycleExecutionPolicy")
            ],
        )
        acknowledge(
            role,
            "AWS's own policy for this purpose: it deletes AMIs and snapshots only that carry Image Builder's tag",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/service-role/"
            "EC2ImageBuilderLifecycleExecutionPolicy]",
        )
        return role
