"""What EC2 Image Builder makes one pool's AMI from: components, recipe, and the first build of it.

    aws imagebuilder start-image-pipeline-execution --image-pipeline-arn …     the same recipe on today's Ubuntu

Components are the documents of documents/, as they are; whatever differs between pools is a parameter that the recipe
gives them. Components and recipes cannot be changed once they are made, so the version of each carries a hash of what
is in it: whatever is edited becomes a new version, and a new AMI.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aws_cdk import Aws, CfnDeletionPolicy, Fn, RemovalPolicy, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_imagebuilder as imagebuilder
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.constructs.stage_stack import acknowledge
from infra.stages import Pool, Stage
from jobs.core.stage import parameter_path

DOCUMENTS = Path(__file__).parent / "documents"

_EFA_ARCHIVE = re.compile(r"(?P<sha256>[0-9a-f]{64})  aws-efa-installer-(?P<version>[\d.]+)\.tar\.gz\n")


def efa_installer() -> tuple[str, str]:
    """Return version and SHA-256 of AWS's EFA installer: the same for hosts as in images, which the file is beside.

    They are as AWS ParallelCluster pins them (aws-parallelcluster-cookbook, attributes/environment.rb).
    """
    path = Path(__file__).parents[2] / "images" / "shared" / "efa-installer.sha256"
    found = _EFA_ARCHIVE.fullmatch(path.read_text())
    assert found is not None, path  # noqa: S101 - the project's own file, which sha256sum reads as well
    return found["version"], found["sha256"]


ROOT_DEVICE_NAME = "/dev/sda1"
"""Ubuntu's."""

_BUILD_INSTANCE_TYPE = "m6id.4xlarge"
"""Has NVMe disks, for the RAID's test, and twice the memory that DL1's huge pages take. No accelerator: drivers are
compiled for a kernel, not for a card."""

_ROOT_VOLUME_GIB = 100
"""The least that settings allow for an instance's root volume, which cannot be smaller than its AMI's."""

_TEST_TIMEOUT_MINUTES = 90

_KEPT_IMAGES = 3
_KEPT_WEEKS_AFTER_LAUNCH = 4


@dataclass(frozen=True, kw_only=True)
class BuildSite:
    """The subnet, group and roles of the instance that an AMI is made on; the same for all pools."""

    subnet: ec2.ISubnet
    security_group: ec2.ISecurityGroup
    profile: iam.InstanceProfile
    role: iam.Role
    lifecycle_role: iam.IRole


class Component(Construct):
    """A document of documents/, as Image Builder knows it."""

    def __init__(self, scope: Construct, name: str) -> None:
        super().__init__(scope, f"Component-{name}")
        self.data = (DOCUMENTS / f"{name}.yaml").read_text()
        resource_name = f"{Stack.of(self).stack_name}-{name}"
        self.resource = imagebuilder.CfnComponent(
            self,
            "Resource",
            name=resource_name,
            platform="Linux",
            version=_version("1.0", self.data),
            data=self.data,
        )


class MachineImageBuild(Construct):
    """The build of one pool's AMI, first and whenever anything in it changes; CloudFormation waits for it."""

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        stage: Stage,
        pool: Pool,
        job_image: str,
        components: Mapping[str, Component],
        site: BuildSite,
        tags: Mapping[str, str],
        parameter: str,
    ) -> None:
        """`job_image`: a URI, or `ssm:` and the parameter that holds one.

        `parameter`: name of the SSM parameter that the pipeline writes the ids of its AMIs into.
        """
        super().__init__(scope, name)
        self._name = f"{Stack.of(self).stack_name}-{pool.id}"
        tags = {**tags, "trainyard:pool": pool.id, "trainyard:release": pool.software.name}
        self.version = _recipe_version(stage, pool, job_image, components, tags)
        recipe = self._recipe(pool, _steps(stage, pool, job_image), components, tags, version=self.version)
        infrastructure = self._infrastructure(site, tags)
        distribution = self._distribution("Distribution", self._name, tags)
        # Of its own: CloudFormation writes the parameter for its own build, and could not make one that is there.
        distribution_of_pipeline = self._distribution(
            "PipelineDistribution", f"{self._name}-pipeline", tags, parameter=parameter
        )
        log_group = self._logs(stage).ref
        self.image = self._first_build(
            site,
            tags,
            recipe=recipe.attr_arn,
            infrastructure=infrastructure.attr_arn,
            distribution=distribution.attr_arn,
            log_group=log_group,
        )
        self._pipeline(
            pool,
            tags,
            log_group=log_group,
            recipe=recipe.attr_arn,
            infrastructure=infrastructure.attr_arn,
            distribution=distribution_of_pipeline.attr_arn,
        )
        self._expire(site.lifecycle_role, {key: tags[key] for key in ("trainyard:stage", "trainyard:pool")})

    def _infrastructure(self, site: BuildSite, tags: Mapping[str, str]) -> imagebuilder.CfnInfrastructureConfiguration:
        return imagebuilder.CfnInfrastructureConfiguration(
            self,
            "Infrastructure",
            name=self._name,
            instance_profile_name=site.profile.instance_profile_name,
            instance_types=[_BUILD_INSTANCE_TYPE],
            instance_metadata_options=imagebuilder.CfnInfrastructureConfiguration.InstanceMetadataOptionsProperty(
                http_tokens="required", http_put_response_hop_limit=1
            ),
            subnet_id=site.subnet.subnet_id,
            security_group_ids=[site.security_group.security_group_id],
            terminate_instance_on_failure=True,
            resource_tags=dict(tags),
        )

    def _first_build(
        self,
        site: BuildSite,
        tags: Mapping[str, str],
        *,
        recipe: str,
        infrastructure: str,
        distribution: str,
        log_group: str,
    ) -> imagebuilder.CfnImage:
        """Make the resource for whose AMI CloudFormation waits."""
        image = imagebuilder.CfnImage(
            self,
            "Image",
            image_recipe_arn=recipe,
            infrastructure_configuration_arn=infrastructure,
            distribution_configuration_arn=distribution,
            image_tests_configuration=imagebuilder.CfnImage.ImageTestsConfigurationProperty(
                image_tests_enabled=True, timeout_minutes=_TEST_TIMEOUT_MINUTES
            ),
            enhanced_image_metadata_enabled=True,
            logging_configuration=imagebuilder.CfnImage.ImageLoggingConfigurationProperty(log_group_name=log_group),
            deletion_settings=imagebuilder.CfnImage.DeletionSettingsProperty(
                execution_role=site.lifecycle_role.role_arn
            ),
            tags=dict(tags),
        )
        # The AMI that another takes the place of is booted until the compute stack is deployed after this one: it
        # stays, and the lifecycle policy deletes it later. When the stack goes, so does its AMI.
        image.cfn_options.update_replace_policy = CfnDeletionPolicy.RETAIN
        image.cfn_options.deletion_policy = CfnDeletionPolicy.DELETE
        image.node.add_dependency(site.role)
        return image

    def _pipeline(
        self,
        pool: Pool,
        tags: Mapping[str, str],
        *,
        recipe: str,
        infrastructure: str,
        distribution: str,
        log_group: str,
    ) -> None:
        """Make the pipeline with which people build the same recipe on today's Ubuntu."""
        imagebuilder.CfnImagePipeline(
            self,
            "Pipeline",
            name=self._name,
            # No schedule: it would cost hours of an instance and change what jobs run on, unasked.
            description=f"Builds the AMI of {pool.instance_type} and release {pool.software.name} on today's Ubuntu",
            image_recipe_arn=recipe,
            infrastructure_configuration_arn=infrastructure,
            distribution_configuration_arn=distribution,
            image_tests_configuration=imagebuilder.CfnImagePipeline.ImageTestsConfigurationProperty(
                image_tests_enabled=True, timeout_minutes=_TEST_TIMEOUT_MINUTES
            ),
            enhanced_image_metadata_enabled=True,
            logging_configuration=imagebuilder.CfnImagePipeline.PipelineLoggingConfigurationProperty(
                image_log_group_name=log_group, pipeline_log_group_name=log_group
            ),
            image_tags=dict(tags),
        )

    def _distribution(
        self, construct_id: str, name: str, tags: Mapping[str, str], *, parameter: str | None = None
    ) -> imagebuilder.CfnDistributionConfiguration:
        return imagebuilder.CfnDistributionConfiguration(
            self,
            construct_id,
            name=name,
            distributions=[
                imagebuilder.CfnDistributionConfiguration.DistributionProperty(
                    region=Stack.of(self).region,
                    ami_distribution_configuration={
                        "Name": f"{self._name} {{{{ imagebuilder:buildDate }}}}",
                        "AmiTags": dict(tags),
                    },
                    ssm_parameter_configurations=[
                        imagebuilder.CfnDistributionConfiguration.SsmParameterConfigurationProperty(
                            parameter_name=parameter, data_type="aws:ec2:image"
                        )
                    ]
                    if parameter
                    else None,
                )
            ],
        )

    def _recipe(
        self,
        pool: Pool,
        steps: Sequence[tuple[str, dict[str, str]]],
        components: Mapping[str, Component],
        tags: Mapping[str, str],
        *,
        version: str,
    ) -> imagebuilder.CfnImageRecipe:
        return imagebuilder.CfnImageRecipe(
            self,
            "Recipe",
            name=self._name,
            version=version,
            parent_image=_parent_image(pool.software.os),
            components=[
                imagebuilder.CfnImageRecipe.ComponentConfigurationProperty(
                    component_arn=components[document].resource.attr_arn,
                    parameters=[
                        imagebuilder.CfnImageRecipe.ComponentParameterProperty(name=key, value=[value])
                        for key, value in parameters.items()
                    ]
                    or None,
                )
                for document, parameters in steps
            ],
            block_device_mappings=[
                imagebuilder.CfnImageRecipe.InstanceBlockDeviceMappingProperty(
                    device_name=ROOT_DEVICE_NAME,
                    # With AWS's key: one of the stage's own would need grants for the roles of Spot and Auto Scaling.
                    ebs=imagebuilder.CfnImageRecipe.EbsInstanceBlockDeviceSpecificationProperty(
                        volume_type="gp3", volume_size=_ROOT_VOLUME_GIB, encrypted=True, delete_on_termination=True
                    ),
                )
            ],
            ami_tags=dict(tags),
        )

    def _logs(self, stage: Stage) -> logs.CfnLogGroup:
        """Make the log group of all builds, which stays when the stack goes: after one that failed it alone says why.

        Image Builder writes without a role of ours only below /aws/imagebuilder/ (API reference of
        PipelineLoggingConfiguration), so the name is given; the last part of the stack's id in it keeps a group that
        stayed out of the way of the next stack of this name.
        """
        name = Fn.join("/", ["/aws/imagebuilder", self._name, Fn.select(2, Fn.split("/", Aws.STACK_ID))])
        group = logs.CfnLogGroup(self, "Logs", log_group_name=name, retention_in_days=stage.log_retention_days)
        group.apply_removal_policy(RemovalPolicy.RETAIN)
        acknowledge(
            group,
            "CloudWatch Logs encrypts every log group at rest with a key of AWS's, at no charge; no secret is logged",
            "NIST.800.53.R5-CloudWatchLogGroupEncrypted",
        )
        return group

    def _expire(self, role: iam.IRole, tags: Mapping[str, str]) -> None:
        policy = imagebuilder.CfnLifecyclePolicy
        policy(
            self,
            "Lifecycle",
            name=self._name,
            description=f"Keeps {_KEPT_IMAGES} AMIs, and what booted in the last {_KEPT_WEEKS_AFTER_LAUNCH} weeks",
            status="ENABLED",
            execution_role=role.role_arn,
            resource_type="AMI_IMAGE",
            resource_selection=policy.ResourceSelectionProperty(tag_map=dict(tags)),
            policy_details=[
                policy.PolicyDetailProperty(
                    action=policy.ActionProperty(
                        type="DELETE", include_resources=policy.IncludeResourcesProperty(amis=True, snapshots=True)
                    ),
                    filter=policy.FilterProperty(type="COUNT", value=_KEPT_IMAGES),
                    exclusion_rules=policy.ExclusionRulesProperty(
                        amis=policy.AmiExclusionRulesProperty(
                            last_launched=policy.LastLaunchedProperty(unit="WEEKS", value=_KEPT_WEEKS_AFTER_LAUNCH)
                        )
                    ),
                )
            ],
        )


def documents(stage: Stage, pool: Pool) -> list[str]:
    """Return the names of the documents that make the pool's AMI, in the order in which they are run."""
    return [document for document, _ in _steps(stage, pool, "")]


def _steps(stage: Stage, pool: Pool, job_image: str) -> list[tuple[str, dict[str, str]]]:
    """Return the documents with their parameters: all that one release's row decides, and nothing that another does."""
    efa_version, efa_sha256 = efa_installer()
    release = pool.software
    return [
        ("kernel", {"LustreClient": "true" if stage.fsx_gib else "false"}),
        ("container-host", {}),
        (
            "gaudi",
            {
                "Release": release.name,
                "PackageVersion": release.package_version,
                "HugePages": str(pool.row.huge_pages),
            },
        ),
        *([("efa", {"Version": efa_version, "Sha256": efa_sha256})] if pool.row.network_cards else []),
        ("scratch", {}),
        ("job-image", {"Image": job_image}),
    ]


def _recipe_version(
    stage: Stage, pool: Pool, job_image: str, components: Mapping[str, Component], tags: Mapping[str, str]
) -> str:
    """Return a version that changes whenever anything does that goes into the AMI."""
    # A repository has a name that is known at deployment only: another one for another encryption.
    known_of_job_image = job_image.rpartition(":")[2].removeprefix(parameter_path(stage.name))
    return _version(
        pool.software.name.rpartition(".")[0],
        {
            "documents": [components[document].data for document in documents(stage, pool)],
            "parameters": _steps(stage, pool, known_of_job_image),
            "own_kms_key": stage.own_kms_key,
            "parent_image": _parent_image(pool.software.os),
            "root_volume_gib": _ROOT_VOLUME_GIB,
            "tags": sorted(tags),
        },
    )


def _parent_image(os: str) -> str:
    """Return Canonical's AMI of an operating system, as the releases' rows call it: `ubuntu22.04`.

    Looked up by Image Builder at each build.
    """
    version = os.removeprefix("ubuntu")
    return f"ssm:/aws/service/canonical/ubuntu/server/{version}/stable/current/amd64/hvm/ebs-gp2/ami-id"


def _version(prefix: str, content: object) -> str:
    """Return `<major>.<minor>.<hash of content>`; Image Builder allows numbers below 2^30 only."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{prefix}.{int(digest[:7], 16)}"
