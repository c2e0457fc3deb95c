"""Rules for launch templates: what Batch takes from them, what it ignores, and what EFA needs."""

import email.parser
import re
from collections.abc import Iterable, Iterator

from infra.rules.rule import Finding, found, rule
from infra.rules.stage_templates import COMPUTE_ENVIRONMENT, LAUNCH_TEMPLATE, Resource, StageTemplates, text
from jobs.contract.instance_types import INSTANCE_TYPES

_GUIDE = "AWS Batch User Guide, Use Amazon EC2 launch templates"
_IGNORED = (
    "InstanceType",
    "InstanceRequirements",
    "IamInstanceProfile",
    "InstanceMarketOptions",
    "DisableApiTermination",
)

_AT_A_SPOT_NOTICE = (
    "ECS_ENABLE_SPOT_INSTANCE_DRAINING=true",
    "ECS_CONTAINER_STOP_TIMEOUT=",
    "/meta-data/spot/instance-action",
    "docker stop -t ",
)
"""What user data does against the loss of a job's last two minutes."""


def _with_template(stage: StageTemplates) -> Iterator[tuple[Resource, Resource]]:
    """Yield each compute environment whose launch template is of this stage, with it."""
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        template = stage.launch_template(environment)
        if template is not None:
            yield environment, template


@rule(
    "TY-LaunchTemplate-NumberedVersion",
    next_step="take the version from the template's LatestVersionNumber",
    source=f"{_GUIDE}: $Default and $Latest are read when the compute environment is made or updated",
)
def numbered_version(stage: StageTemplates) -> Iterable[Finding]:
    """Batch reads $Default and $Latest once; later edits of the template then never reach an instance."""
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        if environment.get("ComputeResources.LaunchTemplate") is None:
            continue
        match environment.get("ComputeResources.LaunchTemplate.Version"):
            case {"Fn::GetAtt": [_, "LatestVersionNumber"]}:
                pass
            case str(number) if number.isdigit():
                pass
            case _:
                yield found(environment, "ComputeResources.LaunchTemplate.Version")


@rule(
    "TY-LaunchTemplate-OnePlaceForSecurityGroups",
    next_step="name the security groups in the template's interfaces, or in the compute environment where it has none",
    source=f"{_GUIDE}: securityGroupIds and network interfaces exclude each other",
)
def one_place_for_security_groups(stage: StageTemplates) -> Iterable[Finding]:
    """With interfaces in the launch template, security groups on the compute environment make it INVALID; with groups
    in neither, instances get the VPC's default one, which lets nothing out.
    """
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        interfaces = stage.interfaces(environment)
        on_environment = bool(environment.get("ComputeResources.SecurityGroupIds"))
        if on_environment if interfaces else not on_environment:
            yield found(environment, "ComputeResources.SecurityGroupIds")
        template = stage.launch_template(environment)
        if template is not None and not all(interface.get("Groups") for interface in interfaces):
            yield found(template, "LaunchTemplateData.NetworkInterfaces")


@rule(
    "TY-LaunchTemplate-MimeUserData",
    next_step="render the user data with ec2.MultipartUserData",
    source=f"{_GUIDE}, Amazon EC2 user data: MIME multi-part archive",
)
def mime_user_data(stage: StageTemplates) -> Iterable[Finding]:
    """Batch adds a part of its own to the user data. What is no MIME multipart archive, or has a blank line between a
    boundary and its part's headers, makes the compute environment INVALID or is not run.
    """
    for _, template in _with_template(stage):
        user_data = template.get("LaunchTemplateData.UserData")
        if user_data is not None and not _is_multipart(text(user_data)):
            yield found(template, "LaunchTemplateData.UserData")


def _is_multipart(archive: str) -> bool:
    message = email.parser.Parser().parsestr(archive)
    parts = message.get_payload()
    boundary = message.get_boundary()
    if not message.is_multipart() or not parts or boundary is None or "MIME-Version" not in message:
        return False
    blank_after_boundary = re.search(rf"^--{re.escape(boundary)}\n\s*\n", archive, re.MULTILINE)
    return blank_after_boundary is None and f"--{boundary}--" in archive


@rule(
    "TY-LaunchTemplate-NothingIgnored",
    next_step="say it on the compute environment",
    source=f"{_GUIDE}: the parameters that Batch ignores",
)
def nothing_ignored(stage: StageTemplates) -> Iterable[Finding]:
    """Batch takes instance type, role, subnets and the Spot request from the compute environment; what the template
    says of them has no effect and misleads its reader. A Capacity Block has no other place than the template, and AWS's
    own example of Batch puts it there.
    """
    for environment, template in _with_template(stage):
        for name in _IGNORED:
            if name == "InstanceMarketOptions" and stage.is_capacity_block(environment):
                continue
            if template.get(f"LaunchTemplateData.{name}") is not None:
                yield found(template, f"LaunchTemplateData.{name}")
        if any("SubnetId" in interface for interface in template.get("LaunchTemplateData.NetworkInterfaces", [])):
            yield found(template, "LaunchTemplateData.NetworkInterfaces")


@rule(
    "TY-LaunchTemplate-Imdsv2",
    next_step="set metadataOptions.httpTokens to 'required'",
    source="Amazon EC2 User Guide, Use the Instance Metadata Service: session tokens",
)
def imdsv2(stage: StageTemplates) -> Iterable[Finding]:
    """Without required session tokens, whoever makes a job fetch a URL can read the instance's credentials."""
    for template in stage.of_type(LAUNCH_TEMPLATE):
        if template.get("LaunchTemplateData.MetadataOptions.HttpTokens") != "required":
            yield found(template, "LaunchTemplateData.MetadataOptions.HttpTokens")


@rule(
    "TY-LaunchTemplate-EncryptedVolumes",
    next_step="name the root device in blockDeviceMappings with encrypted: true",
    source="Amazon EBS User Guide, Amazon EBS encryption",
)
def encrypted_volumes(stage: StageTemplates) -> Iterable[Finding]:
    """A volume that the template does not call encrypted is as the AMI has it: data and tokens of jobs in the clear."""
    for template in stage.of_type(LAUNCH_TEMPLATE):
        volumes = [
            mapping["Ebs"] for mapping in template.get("LaunchTemplateData.BlockDeviceMappings", []) if "Ebs" in mapping
        ]
        if not volumes or not all(volume.get("Encrypted") is True for volume in volumes):
            yield found(template, "LaunchTemplateData.BlockDeviceMappings")


@rule(
    "TY-LaunchTemplate-NoPublicAddress",
    next_step="leave associatePublicIpAddress out, and let instances reach out through NAT or endpoints",
    source="Amazon EC2 User Guide, Elastic network interfaces: no public address with several interfaces",
)
def no_public_address(stage: StageTemplates) -> Iterable[Finding]:
    """EC2 refuses a public address where there is more than one interface, and with a single one it opens the
    instance to the internet.
    """
    for template in stage.of_type(LAUNCH_TEMPLATE):
        for interface in template.get("LaunchTemplateData.NetworkInterfaces", []):
            if interface.get("AssociatePublicIpAddress"):
                yield found(template, "LaunchTemplateData.NetworkInterfaces")


@rule(
    "TY-LaunchTemplate-NoKeyPair",
    next_step="remove keyName: people get in through Session Manager",
    source="AWS Systems Manager User Guide, Session Manager",
)
def no_key_pair(stage: StageTemplates) -> Iterable[Finding]:
    """A key pair is a long-lived secret for SSH, which no security group here lets in."""
    for template in stage.of_type(LAUNCH_TEMPLATE):
        if template.get("LaunchTemplateData.KeyName") is not None:
            yield found(template, "LaunchTemplateData.KeyName")


@rule(
    "TY-LaunchTemplate-EfaCards",
    next_step="give each network card of the type one EFA interface: device index 0 on card 0, and 1 on the others",
    source="Amazon EC2 User Guide, Maximize network bandwidth on instances with multiple network cards",
)
def efa_cards(stage: StageTemplates) -> Iterable[Finding]:
    """Two EFA interfaces on one card, or one on a card that the type lacks, and EC2 starts no instance; fewer than
    it has cards, and the paid bandwidth lies idle.
    """
    for environment, template in _with_template(stage):
        interfaces = template.get("LaunchTemplateData.NetworkInterfaces", [])
        if not stage.efa_interfaces(environment):
            continue
        placed = sorted((int(item.get("NetworkCardIndex", 0)), int(item.get("DeviceIndex", 0))) for item in interfaces)
        rows = [INSTANCE_TYPES.get(name) for name in environment.get("ComputeResources.InstanceTypes", [])]
        for row in rows:
            if row is not None and placed != [(card, min(card, 1)) for card in range(row.network_cards)]:
                yield found(template, "LaunchTemplateData.NetworkInterfaces")


@rule(
    "TY-LaunchTemplate-SpotDraining",
    next_step="render the user data with infra/compute/user_data.py, which writes both settings and a service that "
    "waits for the Spot notice",
    source="Amazon ECS Developer Guide, Container agent configuration: off, and 30 s, by default; Draining container "
    "instances: tasks that belong to no service are not stopped",
)
def spot_draining(stage: StageTemplates) -> Iterable[Finding]:
    """Without both settings the agent ignores the Spot notice, and kills 30 s after SIGTERM; and even with them nobody
    tells a job of Batch, which belongs to no service: the two minutes that EC2 gives are lost.
    """
    for environment, template in _with_template(stage):
        if environment.get("ComputeResources.Type") != "SPOT":
            continue
        user_data = text(template.get("LaunchTemplateData.UserData", ""))
        if not all(part in user_data for part in _AT_A_SPOT_NOTICE):
            yield found(template, "LaunchTemplateData.UserData")
