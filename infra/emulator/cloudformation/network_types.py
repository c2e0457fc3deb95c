"""EC2: networks, security groups and launch templates. No packet passes any of them, and no instance starts."""

from dataclasses import dataclass
from typing import Any

from infra.emulator.cloudformation.api import Api, Properties
from infra.emulator.cloudformation.resource_type import TYPES, Made, Plain, ResourceType, without


@dataclass(frozen=True, kw_only=True)
class Ec2(Plain):
    """A type of EC2: made by one operation, then tagged by its id."""

    service: str = "ec2"
    tagging: tuple[str, str, str] | None = ("CreateTags", "DeleteTags", "Resources")
    left_out: frozenset[str] = frozenset({"Tags"})
    afterwards: tuple[str, ...] = ()
    """Properties that `finish` sets."""

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        made = super().create(api, name, without(properties, *self.afterwards))
        self.change_tags(api, made, {}, properties)
        self.finish(api, made, {}, properties)
        return made

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        super().change(api, made, without(old, *self.afterwards), without(new, *self.afterwards))
        self.finish(api, made, old, new)
        return made

    def finish(self, api: Api, made: Made, old: Properties, new: Properties) -> None:
        """Set the properties of `afterwards`, of which `old` has those that were set before."""

    def tagged_by(self, made: Made) -> Any:
        return [made.ref]


class Vpc(Ec2):
    """AWS::EC2::VPC."""

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        made = super().create(api, name, properties)
        filters = [{"Name": "vpc-id", "Values": [made.ref]}, {"Name": "group-name", "Values": ["default"]}]
        [group] = api("DescribeSecurityGroups", Filters=filters)["SecurityGroups"]
        made.attributes["DefaultSecurityGroup"] = group["GroupId"]
        return made

    def finish(self, api: Api, made: Made, old: Properties, new: Properties) -> None:
        for name in self.afterwards:
            if name in new and new[name] != old.get(name):
                api("ModifyVpcAttribute", VpcId=made.ref, **{name: {"Value": new[name]}})


class Subnet(Ec2):
    """AWS::EC2::Subnet."""

    def finish(self, api: Api, made: Made, old: Properties, new: Properties) -> None:
        public = new.get("MapPublicIpOnLaunch", False)
        if public != old.get("MapPublicIpOnLaunch"):
            api("ModifySubnetAttribute", SubnetId=made.ref, MapPublicIpOnLaunch={"Value": public})


class VpcEndpoint(Ec2):
    """AWS::EC2::VPCEndpoint."""

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        lists = ("RouteTableIds", "SecurityGroupIds", "SubnetIds")
        super().change(api, made, without(old, *lists), without(new, *lists))
        for name in lists:
            before, after = set(old.get(name, [])), set(new.get(name, []))
            for verb, ids in (("Add", after - before), ("Remove", before - after)):
                if ids:
                    api("ModifyVpcEndpoint", VpcEndpointId=made.ref, **{f"{verb}{name}": sorted(ids)})
        return made


class Address(Ec2):
    """AWS::EC2::EIP."""

    def tagged_by(self, made: Made) -> Any:
        return [made.attributes["AllocationId"]]

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        del properties
        api("ReleaseAddress", AllocationId=made.attributes["AllocationId"])


class LaunchTemplate(Ec2):
    """AWS::EC2::LaunchTemplate; other data are another version of it."""

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        data = new["LaunchTemplateData"]
        super().change(api, made, {**old, "LaunchTemplateData": data}, new)
        version = api("CreateLaunchTemplateVersion", LaunchTemplateId=made.ref, LaunchTemplateData=data)
        latest = version["LaunchTemplateVersion"]["VersionNumber"]
        return Made(made.ref, {**made.attributes, "LatestVersionNumber": latest}, made.name)


_RULES = {"SecurityGroupIngress": "Ingress", "SecurityGroupEgress": "Egress"}
_EVERYWHERE = {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"}
"""The rule that a group has for what goes out, as long as its template names none."""


class SecurityGroup(Ec2):
    """AWS::EC2::SecurityGroup; the rules of its template change in place, and separate ones stay."""

    def finish(self, api: Api, made: Made, old: Properties, new: Properties) -> None:
        for key, direction in _RULES.items():
            none = [_EVERYWHERE] if direction == "Egress" else []
            before, after = (one.get(key) or none for one in (old, new))
            for rule in before:
                if rule not in after:
                    _rule(api, f"RevokeSecurityGroup{direction}", made.ref, rule)
            for rule in after:
                if rule not in before:
                    _rule(api, f"AuthorizeSecurityGroup{direction}", made.ref, rule)


@dataclass(frozen=True)
class SeparateRule(ResourceType):
    """A security group rule declared as a separate resource."""

    service = "ec2"
    direction: str

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        answer = _rule(api, f"AuthorizeSecurityGroup{self.direction}", properties["GroupId"], properties)
        identifier = answer["SecurityGroupRules"][0]["SecurityGroupRuleId"]
        return Made(identifier, {"Id": identifier}, name)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        del made
        _rule(api, f"RevokeSecurityGroup{self.direction}", properties["GroupId"], properties)


def _rule(api: Api, operation: str, group_id: str, rule: Properties) -> dict[str, Any]:
    """Add a rule of a template to a group, or take it away."""
    description = {"Description": rule["Description"]} if "Description" in rule else {}
    permission: dict[str, Any] = {key: rule[key] for key in ("IpProtocol", "FromPort", "ToPort") if key in rule}
    if "CidrIp" in rule:
        permission["IpRanges"] = [{"CidrIp": rule["CidrIp"], **description}]
    elif "CidrIpv6" in rule:
        permission["Ipv6Ranges"] = [{"CidrIpv6": rule["CidrIpv6"], **description}]
    for prefix in ("Source", "Destination"):
        if group := rule.get(f"{prefix}SecurityGroupId"):
            permission["UserIdGroupPairs"] = [{"GroupId": group, **description}]
        if prefixes := rule.get(f"{prefix}PrefixListId"):
            permission["PrefixListIds"] = [{"PrefixListId": prefixes, **description}]
    return api(operation, GroupId=group_id, IpPermissions=[permission])


@dataclass(frozen=True)
class Link(ResourceType):
    """A link between two resources, which has no id."""

    service = "ec2"
    create_by: str
    delete_by: str
    named_by: tuple[str, ...]
    """The properties that say which one it is."""

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        api(self.create_by, **properties)
        return Made("|".join(str(properties[key]) for key in self.named_by), {}, name)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        del made
        api(self.delete_by, **{key: properties[key] for key in self.named_by})


TYPES |= {
    "AWS::EC2::EIP": Address(
        create_by="AllocateAddress",
        ref="PublicIp",
        attributes={"AllocationId": "AllocationId", "PublicIp": "PublicIp"},
        delete_by=("ReleaseAddress", "AllocationId"),
    ),
    "AWS::EC2::FlowLog": Ec2(
        create_by="CreateFlowLogs",
        ref="FlowLogIds.0",
        delete_by=("DeleteFlowLogs", "FlowLogIds[]"),
        renamed={"ResourceId": "ResourceIds[]"},
    ),
    "AWS::EC2::InternetGateway": Ec2(
        create_by="CreateInternetGateway",
        ref="InternetGateway.InternetGatewayId",
        delete_by=("DeleteInternetGateway", "InternetGatewayId"),
    ),
    "AWS::EC2::LaunchTemplate": LaunchTemplate(
        create_by="CreateLaunchTemplate",
        name_property="LaunchTemplateName",
        attributes={"LatestVersionNumber": "LaunchTemplate.LatestVersionNumber"},
        ref="LaunchTemplate.LaunchTemplateId",
        delete_by=("DeleteLaunchTemplate", "LaunchTemplateId"),
    ),
    "AWS::EC2::NatGateway": Ec2(
        create_by="CreateNatGateway", ref="NatGateway.NatGatewayId", delete_by=("DeleteNatGateway", "NatGatewayId")
    ),
    "AWS::EC2::Route": Link("CreateRoute", "DeleteRoute", ("RouteTableId", "DestinationCidrBlock")),
    "AWS::EC2::RouteTable": Ec2(
        create_by="CreateRouteTable", ref="RouteTable.RouteTableId", delete_by=("DeleteRouteTable", "RouteTableId")
    ),
    "AWS::EC2::SecurityGroup": SecurityGroup(
        create_by="CreateSecurityGroup",
        name_property="GroupName",
        attributes={"GroupId": "GroupId"},
        ref="GroupId",
        delete_by=("DeleteSecurityGroup", "GroupId"),
        renamed={"GroupDescription": "Description"},
        afterwards=tuple(_RULES),
    ),
    "AWS::EC2::SecurityGroupEgress": SeparateRule("Egress"),
    "AWS::EC2::SecurityGroupIngress": SeparateRule("Ingress"),
    "AWS::EC2::Subnet": Subnet(
        create_by="CreateSubnet",
        ref="Subnet.SubnetId",
        delete_by=("DeleteSubnet", "SubnetId"),
        afterwards=("MapPublicIpOnLaunch",),
    ),
    "AWS::EC2::SubnetRouteTableAssociation": Ec2(
        create_by="AssociateRouteTable",
        ref="AssociationId",
        delete_by=("DisassociateRouteTable", "AssociationId"),
    ),
    "AWS::EC2::VPC": Vpc(
        create_by="CreateVpc",
        attributes={"CidrBlock": "Vpc.CidrBlock"},
        ref="Vpc.VpcId",
        delete_by=("DeleteVpc", "VpcId"),
        afterwards=("EnableDnsHostnames", "EnableDnsSupport"),
    ),
    "AWS::EC2::VPCEndpoint": VpcEndpoint(
        create_by="CreateVpcEndpoint",
        ref="VpcEndpoint.VpcEndpointId",
        delete_by=("DeleteVpcEndpoints", "VpcEndpointIds[]"),
    ),
    "AWS::EC2::VPCGatewayAttachment": Link(
        "AttachInternetGateway", "DetachInternetGateway", ("InternetGatewayId", "VpcId")
    ),
}
