"""The build of a pool's AMI in EC2 Image Builder: components, recipe, first build, and a pipeline for later builds.

    aws imagebuilder start-image-pipeline-execution --image-pipeline-arn …     build the recipe on today's Ubuntu

Components are the unmodified documents in documents/; the recipe passes what differs between pools as parameters.
Components and recipes cannot be changed, so each version contains a hash of its content: every edit creates a new
version, and a new AMI.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Return version and SHA-256 of AWS's EFA installer, from the file that the images also use.

    The values are those that AWS ParallelCluster pins (aws-parallelcluster-cookbook, attributes/environment.rb).
    """
    path = Path(__file__).parents[2] / "images" / "shared" / "efa-installer.sha256"
    found = _EFA_ARCHIVE.fullmatch(path.read_text())
    assert found is not None, path  # noqa: S101 - a file of this repository, which sha256sum also reads
    return found["version"], found["sha256"]


ROOT_DEVICE_NAME = "/dev/sda1"
"""Root device of Ubuntu's AMIs."""

_BUILD_INSTANCE_TYPE = "m6id.4xlarge"
"""Instance type of builds. It has NVMe disks, to test the RAID, and twice the memory of DL1's huge pages. It needs no
accelerator, because drivers are compiled for a kernel, not for a card."""

_ROOT_VOLUME_GIB = 100
"""Root volume of the AMI: the settings' minimum for instances, whose root volumes cannot be smaller."""

_TESTS: dict[str, Any] = {"image_tests_enabled": True, "timeout_minutes": 90}

_KEPT_IMAGES = 3
_KEPT_WEEKS_AFTER_LAUNCH = 4


@dataclass(frozen=True, kw_only=True)
class BuildSite:
    """Subnet, security group and roles of the instances that build AMIs, shared by all pools."""

    subnet: ec2.ISubnet
    security_group: ec2.ISecurityGroup
    profile: iam.InstanceProfile
    role: iam.Role
    lifecycle_role: iam.IRole


class Component(Construct):
    """An Image Builder component: a document in documents/."""

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
    """The first build of a pool's AMI, and another whenever its content changes. CloudFormation waits for each."""

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
        """Create the build. `job_image`: a URI, or `ssm:` and the name of the SSM parameter that holds one.

        `parameter`: name of the SSM parameter to which the pipeline writes the ids of its AMIs.
        """
        super().__init__(scope, name)
        self._name = f"{Stack.of(self).stack_name}-{pool.id}"
        tags = {**tags, "trainyard:pool": pool.id, "trainyard:release": pool.software.name}
        self.version = _recipe_version(stage, pool, job_image, components, tags)
        log_group = self._logs(stage).ref
        content: dict[str, Any] = {
            "image_recipe_arn": self._recipe(stage, pool, _steps(stage, pool, job_image), components, tags).attr_arn,
            "infrastructure_configuration_arn": self._infrastructure(site, tags).attr_arn,
            "enhanced_image_metadata_enabled": True,
        }
        distribution = self._distribution("Distribution", self._name, tags)
        # Separate, because CloudFormation creates the parameter for its own build, and would fail if it existed.
        distribution_of_pipeline = self._distribution(
            "PipelineDistribution", f"{self._name}-pipeline", tags, parameter=parameter
        )
        self.image = imagebuilder.CfnImage(
            self,
            "Image",
            **content,
            distribution_configuration_arn=distribution.attr_arn,
            image_tests_configuration=imagebuilder.CfnImage.ImageTestsConfigurationProperty(**_TESTS),
            logging_configuration=imagebuilder.CfnImage.ImageLoggingConfigurationProperty(log_group_name=log_group),
            deletion_settings=imagebuilder.CfnImage.DeletionSettingsProperty(
                execution_role=site.lifecycle_role.role_arn
            ),
            tags=dict(tags),
        )
        # A replaced AMI is in use until the compute stack is deployed after this one, so it is kept and the lifecycle
        # policy deletes it later. Deleting the stack deletes its AMI.
        self.image.cfn_options.update_replace_policy = CfnDeletionPolicy.RETAIN
        self.image.cfn_options.deletion_policy = CfnDeletionPolicy.DELETE
        self.image.node.add_dependency(site.role)
        imagebuilder.CfnImagePipeline(
            self,
            "Pipeline",
            **content,
            name=self._name,
            # No schedule: it would cost hours of an instance, and change the AMI of jobs unexpectedly.
            description=f"Builds the AMI of {pool.row.name} and release {pool.software.name} on today's Ubuntu",
            distribution_configuration_arn=distribution_of_pipeline.attr_arn,
            image_tests_configuration=imagebuilder.CfnImagePipeline.ImageTestsConfigurationProperty(**_TESTS),
            logging_configuration=imagebuilder.CfnImagePipeline.PipelineLoggingConfigurationProperty(
                image_log_group_name=log_group, pipeline_log_group_name=log_group
            ),
            image_tags=dict(tags),
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
        stage: Stage,
        pool: Pool,
        steps: Sequence[tuple[str, dict[str, str]]],
        components: Mapping[str, Component],
        tags: Mapping[str, str],
    ) -> imagebuilder.CfnImageRecipe:
        return imagebuilder.CfnImageRecipe(
            self,
            "Recipe",
            name=self._name,
            version=self.version,
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
                    # Not the key of own_kms_key, which admits no service roles of Spot and Auto Scaling.
                    ebs=imagebuilder.CfnImageRecipe.EbsInstanceBlockDeviceSpecificationProperty(
                        volume_type="gp3",
                        volume_size=_ROOT_VOLUME_GIB,
                        encrypted=True,
                        kms_key_id=stage.ebs_key_arn,
                        delete_on_termination=True,
                    ),
                )
            ],
            ami_tags=dict(tags),
        )

    def _logs(self, stage: Stage) -> logs.CfnLogGroup:
        """Create the log group of all builds. It is kept after the stack, because only it explains a failed build.

        Image Builder can only log without a role of ours below /aws/imagebuilder/ (API reference,
        PipelineLoggingConfiguration), so the name is set here. It ends with the last part of the stack's id, so that
        the next stack of this name does not collide with a kept group.
        """
        name = Fn.join("/", ["/aws/imagebuilder", self._name, Fn.select(2, Fn.split("/", Aws.STACK_ID))])
        group = logs.CfnLogGroup(self, "Logs", log_group_name=name, retention_in_days=stage.log_retention_days)
        group.apply_removal_policy(RemovalPolicy.RETAIN)
        acknowledge(
            group,
            "CloudWatch Logs encrypts every log group at rest with an AWS key, at no charge; no secret is logged",
            "NIST.800.53.R5-CloudWatchLogGroupEncrypted",
        )
        return group

    def _expire(self, role: iam.IRole, tags: Mapping[str, str]) -> None:
        policy = imagebuilder.CfnLifecyclePolicy
        policy(
            self,
            "Lifecycle",
            name=self._name,
            description=f"Keeps {_KEPT_IMAGES} AMIs, and those launched in the last {_KEPT_WEEKS_AFTER_LAUNCH} weeks",
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
    """Return the names of the documents for the pool's AMI, in the order in which they run."""
    return [document for document, _ in _steps(stage, pool, "")]


def _steps(stage: Stage, pool: Pool, job_image: str) -> list[tuple[str, dict[str, str]]]:
    """Return the documents and their parameters, which depend only on the stage and the pool."""
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
        *([("efa", {"Version": efa_version, "Sha256": efa_sha256})] if pool.row.efa_cards else []),
        ("scratch", {}),
        ("job-image", {"Image": job_image}),
    ]


def _recipe_version(
    stage: Stage, pool: Pool, job_image: str, components: Mapping[str, Component], tags: Mapping[str, str]
) -> str:
    """Return a version that changes whenever the content of the AMI does."""
    # Only the part of the URI that is known at synthesis: the repository's name depends on its encryption.
    known_part_of_job_image = job_image.rpartition(":")[2].removeprefix(parameter_path(stage.name))
    return _version(
        pool.software.name.rpartition(".")[0],
        {
            "documents": [components[document].data for document in documents(stage, pool)],
            "parameters": _steps(stage, pool, known_part_of_job_image),
            "own_kms_key": stage.own_kms_key,
            **({"ebs_key_arn": stage.ebs_key_arn} if stage.ebs_key_arn else {}),
            "parent_image": _parent_image(pool.software.os),
            "root_volume_gib": _ROOT_VOLUME_GIB,
            "tags": sorted(tags),
        },
    )


def _parent_image(os: str) -> str:
    """Return Canonical's AMI of an operating system named as in releases.toml (`ubuntu22.04`).

    Image Builder resolves it at each build.
    """
    version = os.removeprefix("ubuntu")
    return f"ssm:/aws/service/canonical/ubuntu/server/{version}/stable/current/amd64/hvm/ebs-gp2/ami-id"


def _version(prefix: str, content: object) -> str:
    """Return `<major>.<minor>.<hash of content>`; Image Builder only accepts numbers below 2^30."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{prefix}.{int(digest[:7], 16)}"
