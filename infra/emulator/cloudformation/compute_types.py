"""Declare the types of Batch, EC2 and Image Builder. Networks carry no traffic, and no instance or image build starts.

moto has no Image Builder. The emulator implements what other parts of a stack depend on. An image has an AMI that EC2
lists, and any change gives it a new AMI. A component or recipe is refused if its name and version are already used.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moto.core.exceptions import JsonRESTError

from infra.emulator.cloudformation.api import Api, Properties, PropertyError
from infra.emulator.cloudformation.resource_type import (
    TYPES,
    Immutable,
    Operation,
    PhysicalResource,
    Row,
    Tagging,
    is_true,
    without,
)

_TAGGING = Tagging(add="CreateTags", remove="DeleteTags", resource="Resources")


@dataclass(frozen=True, kw_only=True)
class Ec2(Row):
    """A type of EC2: created by one operation, then tagged by its id."""

    service: str = "ec2"
    tagging: Tagging | None = _TAGGING
    ignored: frozenset[str] = frozenset({"Tags"})

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        physical = super().create(api, name, properties)
        self.change_tags(api, physical, {}, properties)
        return physical


class Vpc(Ec2):
    """AWS::EC2::VPC."""

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        physical = super().create(api, name, properties)
        filters = [{"Name": "vpc-id", "Values": [physical.ref]}, {"Name": "group-name", "Values": ["default"]}]
        [group] = api("DescribeSecurityGroups", Filters=filters)["SecurityGroups"]
        physical.attributes["DefaultSecurityGroup"] = group["GroupId"]
        return physical


class VpcEndpoint(Ec2):
    """AWS::EC2::VPCEndpoint."""

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        lists = ("RouteTableIds", "SecurityGroupIds", "SubnetIds")
        super().change(api, physical, without(old, *lists), without(new, *lists))
        for name in lists:
            before, after = set(old.get(name, [])), set(new.get(name, []))
            for verb, ids in (("Add", after - before), ("Remove", before - after)):
                if ids:
                    api("ModifyVpcEndpoint", VpcEndpointId=physical.ref, **{f"{verb}{name}": sorted(ids)})
        return physical


class LaunchTemplate(Ec2):
    """AWS::EC2::LaunchTemplate; changed data become a new version."""

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        changed = super().change(api, physical, old, new)
        [found] = api("DescribeLaunchTemplates", LaunchTemplateIds=[physical.ref])["LaunchTemplates"]
        return PhysicalResource(changed.ref, {"LatestVersionNumber": found["LatestVersionNumber"]}, changed.name)


_RULES = {"SecurityGroupIngress": "Ingress", "SecurityGroupEgress": "Egress"}
_EVERYWHERE = {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"}
"""The egress rule of a group if its template has none."""


class SecurityGroup(Ec2):
    """AWS::EC2::SecurityGroup; rules in its properties change in place, and separate rules are kept."""

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        physical = super().create(api, name, without(properties, *_RULES))
        self._set_rules(api, physical, {}, properties)
        return physical

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        super().change(api, physical, without(old, *_RULES), without(new, *_RULES))
        self._set_rules(api, physical, old, new)
        return physical

    def _set_rules(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> None:
        for key, direction in _RULES.items():
            none = [_EVERYWHERE] if direction == "Egress" else []
            before, after = (one.get(key) or none for one in (old, new))
            for verb, rules, others in (("Revoke", before, after), ("Authorize", after, before)):
                for rule in rules:
                    if rule not in others:
                        _rule(api, f"{verb}SecurityGroup{direction}", physical.ref, rule)


@dataclass(frozen=True)
class SeparateRule(Immutable):
    """A security group rule declared as a separate resource."""

    service = "ec2"
    direction: str

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        answer = _rule(api, f"AuthorizeSecurityGroup{self.direction}", properties["GroupId"], properties)
        return PhysicalResource(answer["SecurityGroupRules"][0]["SecurityGroupRuleId"], {}, name)

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        _rule(api, f"RevokeSecurityGroup{self.direction}", properties["GroupId"], properties)


def _rule(api: Api, operation: str, group_id: str, rule: Properties) -> dict[str, Any]:
    """Add a rule to a group, or remove it."""
    given = without(rule, "GroupId")
    description = {"Description": given.pop("Description")} if "Description" in given else {}
    permission: dict[str, Any] = {key: given.pop(key) for key in ("IpProtocol", "FromPort", "ToPort") if key in given}
    if "CidrIp" in given:
        permission["IpRanges"] = [{"CidrIp": given.pop("CidrIp"), **description}]
    for group in ("SourceSecurityGroupId", "DestinationSecurityGroupId"):
        if group in given:
            permission["UserIdGroupPairs"] = [{"GroupId": given.pop(group), **description}]
    if given:
        raise PropertyError(f"the emulator does not support {', '.join(given)} of security group rules")
    return api(operation, GroupId=group_id, IpPermissions=[permission])


def _switch(operation: str, name: str, *, default: bool) -> Any:
    """Return the setter of a boolean attribute of a network. `default` applies if the template does not set it."""

    def change(value: Any) -> Operation:
        return operation, {name: {"Value": default if value is None else is_true(value)}}

    return change


def _batch(kind: str, **more: Any) -> Row:
    """Return the row of a type of Batch that must be disabled before it can be deleted."""
    arn = f"{kind[0].lower()}{kind[1:]}Arn"
    return Row(
        service="batch",
        name_property=f"{kind}Name",
        create_by=f"Create{kind}",
        ref=arn,
        attributes={f"{kind}Arn": arn},
        update_by=f"Update{kind}",
        ids=(kind,),
        disable={"State": "DISABLED"},
        tagging=Tagging(),
        **more,
    )


class JobDefinition(Row):
    """AWS::Batch::JobDefinition; each change registers a revision, which is part of Ref."""

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        changed = self.create(api, physical.name, new)
        if not is_true(new.get("ResourceRetentionPolicy", {}).get("SkipDeregisterOnUpdate")):
            self.delete(api, physical, old)
        return changed


@dataclass(frozen=True)
class Versioned(Immutable):
    """A type whose identity is its name and version."""

    service = "imagebuilder"
    kind: str
    """Its name in ARNs."""
    _taken: ClassVar[set[str]] = set()

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        arn = api.arn(f"{self.kind}/{properties['Name']}/{properties['Version']}")
        if arn in self._taken:
            raise JsonRESTError(
                "ResourceAlreadyExistsException",
                f"The following resource '{self.kind}' already exists: '{arn}'. Change its version.",
            )
        self._taken.add(arn)
        return PhysicalResource(arn, {"Arn": arn}, name)

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        self._taken.discard(physical.ref)


class Image(Immutable):
    """AWS::ImageBuilder::Image: an AMI that is created and deleted with the resource."""

    service = "ec2"

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        recipe, version = properties["ImageRecipeArn"].split("/")[-2:]
        ami = api("RegisterImage", Name=f"{recipe} {version}")["ImageId"]
        if properties.get("Tags"):
            api("CreateTags", Resources=[ami], Tags=properties["Tags"])
        arn = api.arn(f"image/{recipe}/{version}/{ami}", service="imagebuilder")
        return PhysicalResource(arn, {"Arn": arn, "ImageId": ami}, name)

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        api("DeregisterImage", ImageId=physical.attributes["ImageId"])


TYPES |= {
    "AWS::Batch::ComputeEnvironment": _batch(
        "ComputeEnvironment",
        ignored=frozenset({"ReplaceComputeEnvironment"}),
        setters={"UpdatePolicy": lambda policy: ("UpdateComputeEnvironment", {"UpdatePolicy": policy})},
    ),
    "AWS::Batch::JobDefinition": JobDefinition(
        service="batch",
        name_property="JobDefinitionName",
        create_by="RegisterJobDefinition",
        ref="jobDefinitionArn",
        attributes={"JobDefinitionArn": "jobDefinitionArn"},
        ids=("JobDefinition",),
        ignored=frozenset({"ResourceRetentionPolicy"}),
        delete_by="DeregisterJobDefinition",
    ),
    "AWS::Batch::JobQueue": _batch("JobQueue", reset_values={"JobStateTimeLimitActions": []}),
    "AWS::Batch::SchedulingPolicy": Row(
        service="batch",
        name_property="Name",
        create_by="CreateSchedulingPolicy",
        ref="arn",
        attributes={"Arn": "arn"},
        update_by="UpdateSchedulingPolicy",
        tagging=Tagging(),
    ),
    "AWS::EC2::EIP": Ec2(
        create_by="AllocateAddress",
        ref="PublicIp",
        attributes={"AllocationId": "AllocationId", "PublicIp": "PublicIp"},
        ids=("AllocationId",),
        delete_by="ReleaseAddress",
        tagging=replace(_TAGGING, attribute="AllocationId"),
    ),
    "AWS::EC2::FlowLog": Ec2(
        create_by="CreateFlowLogs", ref="FlowLogIds.0", renamed={"ResourceId": "ResourceIds[]"}, ids=("FlowLogIds[]",)
    ),
    "AWS::EC2::InternetGateway": Ec2(create_by="CreateInternetGateway", ref="InternetGateway.InternetGatewayId"),
    "AWS::EC2::LaunchTemplate": LaunchTemplate(
        name_property="LaunchTemplateName",
        create_by="CreateLaunchTemplate",
        ref="LaunchTemplate.LaunchTemplateId",
        attributes={"LatestVersionNumber": "LaunchTemplate.LatestVersionNumber"},
        setters={"LaunchTemplateData": lambda data: ("CreateLaunchTemplateVersion", {"LaunchTemplateData": data})},
    ),
    "AWS::EC2::NatGateway": Ec2(create_by="CreateNatGateway", ref="NatGateway.NatGatewayId"),
    "AWS::EC2::Route": Row(service="ec2", create_by="CreateRoute", ids=("RouteTableId", "DestinationCidrBlock")),
    "AWS::EC2::RouteTable": Ec2(create_by="CreateRouteTable", ref="RouteTable.RouteTableId"),
    "AWS::EC2::SecurityGroup": SecurityGroup(
        name_property="GroupName",
        create_by="CreateSecurityGroup",
        renamed={"GroupDescription": "Description"},
        ref="GroupId",
        attributes={"GroupId": "GroupId"},
    ),
    "AWS::EC2::SecurityGroupEgress": SeparateRule("Egress"),
    "AWS::EC2::SecurityGroupIngress": SeparateRule("Ingress"),
    "AWS::EC2::Subnet": Ec2(
        create_by="CreateSubnet",
        ref="Subnet.SubnetId",
        setters={
            "MapPublicIpOnLaunch": _switch("ModifySubnetAttribute", "MapPublicIpOnLaunch", default=False),
        },
    ),
    "AWS::EC2::SubnetRouteTableAssociation": Ec2(
        create_by="AssociateRouteTable", ref="AssociationId", delete_by="DisassociateRouteTable"
    ),
    "AWS::EC2::VPC": Vpc(
        create_by="CreateVpc",
        ref="Vpc.VpcId",
        setters={
            "EnableDnsHostnames": _switch("ModifyVpcAttribute", "EnableDnsHostnames", default=False),
            "EnableDnsSupport": _switch("ModifyVpcAttribute", "EnableDnsSupport", default=True),
        },
    ),
    "AWS::EC2::VPCEndpoint": VpcEndpoint(
        create_by="CreateVpcEndpoint",
        ref="VpcEndpoint.VpcEndpointId",
        ids=("VpcEndpointIds[]",),
        delete_by="DeleteVpcEndpoints",
    ),
    "AWS::EC2::VPCGatewayAttachment": Row(
        service="ec2",
        create_by="AttachInternetGateway",
        ids=("InternetGatewayId", "VpcId"),
        delete_by="DetachInternetGateway",
    ),
    "AWS::ImageBuilder::Component": Versioned("component"),
    "AWS::ImageBuilder::Image": Image(),
    "AWS::ImageBuilder::ImageRecipe": Versioned("image-recipe"),
}
