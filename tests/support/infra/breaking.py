"""Ways to break a stage's templates, one thing at a time, and the rule that must notice each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.infra.synthesis import Templates

COMPUTE_ENVIRONMENT = "AWS::Batch::ComputeEnvironment"
LAUNCH_TEMPLATE = "AWS::EC2::LaunchTemplate"
JOB_QUEUE = "AWS::Batch::JobQueue"
SCHEDULING_POLICY = "AWS::Batch::SchedulingPolicy"

Properties = dict[str, Any]
Where = Callable[[Properties], bool]
Change = Callable[[Properties], None]
REMOVED = object()


@dataclass(frozen=True)
class Break:
    """One thing that goes wrong."""

    rule: str
    """Id of the rule that must find it."""
    what: str
    apply: Callable[[Templates], None]
    variant: str = "all"
    """Name of the row of tests/support/infra/variants.py whose templates are broken."""


def on(resource_type: str, change: Change, where: Where = lambda _: True) -> Callable[[Templates], None]:
    """Change every resource of a type that `where` picks; there has to be one."""

    def apply(templates: Templates) -> None:
        picked = [
            resource.setdefault("Properties", {})
            for template in templates.values()
            for resource in template["Resources"].values()
            if resource["Type"] == resource_type and where(resource.get("Properties", {}))
        ]
        assert picked, f"no {resource_type} to break"
        for properties in picked:
            change(properties)

    return apply


def put(path: str, value: Any = REMOVED) -> Change:
    """Set the property at a dotted path (numbers are places in lists), or remove it."""

    def change(properties: Properties) -> None:
        *above, last = (int(key) if key.isdigit() else key for key in path.split("."))
        place: Any = properties
        for key in above:
            place = place[key] if isinstance(key, int) else place.setdefault(key, {})
        if value is REMOVED:
            del place[last]
        else:
            place[last] = value

    return change


def replace_text(value: Any, old: str, new: str) -> Any:
    """Return a value with `old` replaced in every string in it."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [replace_text(item, old, new) for item in value]
    if isinstance(value, dict):
        return {key: replace_text(item, old, new) for key, item in value.items()}
    return value


def user_data(old: str, new: str) -> Change:
    """Replace `old`, which has to be there, in the user data of a launch template."""

    def change(properties: Properties) -> None:
        data = properties["LaunchTemplateData"]
        assert old in str(data["UserData"]).replace("\\n", "\n")
        data["UserData"] = replace_text(data["UserData"], old, new)

    return change


def _spot(properties: Properties) -> bool:
    return bool(properties["ComputeResources"]["Type"] == "SPOT")


def _grouped(properties: Properties) -> bool:
    return "PlacementGroup" in properties["ComputeResources"]


def _with_interfaces(properties: Properties) -> bool:
    return bool(properties["LaunchTemplateData"].get("NetworkInterfaces"))


def _mixed(properties: Properties) -> bool:
    return len(properties["ComputeEnvironmentOrder"]) > 1


def _from_group(properties: Properties) -> bool:
    return "SourceSecurityGroupId" in properties and properties.get("IpProtocol") == "-1"


def _to_group(properties: Properties) -> bool:
    return "DestinationSecurityGroupId" in properties and properties.get("IpProtocol") == "-1"


def _reversed(properties: Properties) -> None:
    entries = properties["ComputeEnvironmentOrder"]
    for entry, order in zip(entries, [entry["Order"] for entry in reversed(entries)], strict=True):
        entry["Order"] = order


def _four_environments(properties: Properties) -> None:
    first = properties["ComputeEnvironmentOrder"][0]
    properties["ComputeEnvironmentOrder"] = [{**first, "Order": order} for order in range(1, 5)]


def _fargate_beside(templates: Templates) -> None:
    """Make one of two environments of a queue a Fargate one."""
    for template in templates.values():
        for queue in template["Resources"].values():
            if queue["Type"] == JOB_QUEUE and _mixed(queue["Properties"]):
                name = queue["Properties"]["ComputeEnvironmentOrder"][1]["ComputeEnvironment"]["Fn::GetAtt"][0]
                template["Resources"][name]["Properties"]["ComputeResources"]["Type"] = "FARGATE"
                return
    raise AssertionError("no queue of two environments")


def _spot_behind_multinode(templates: Templates) -> None:
    on(COMPUTE_ENVIRONMENT, put("ComputeResources.Type", "SPOT"), _grouped)(templates)
    on(COMPUTE_ENVIRONMENT, put("ComputeResources.AllocationStrategy", "SPOT_CAPACITY_OPTIMIZED"), _grouped)(templates)


def _no_group_in_interfaces(properties: Properties) -> None:
    for interface in properties["LaunchTemplateData"]["NetworkInterfaces"]:
        del interface["Groups"]


def _same_card(properties: Properties) -> None:
    for interface in properties["LaunchTemplateData"]["NetworkInterfaces"]:
        interface["NetworkCardIndex"] = 0


def _image_type(name: str) -> Change:
    return put("ComputeResources.Ec2Configuration", [{"ImageType": name}])


def of_rule(subject: str, *breaks: tuple[str, str, Callable[[Templates], None]]) -> list[Break]:
    return [Break(f"TY-{subject}-{asks}", what, apply) for asks, what, apply in breaks]


BREAKS = [
    *of_rule(
        "ComputeEnvironment",
        ("NoBidPercentage", "a bid", on(COMPUTE_ENVIRONMENT, put("ComputeResources.BidPercentage", 60))),
        (
            "NoSpotFleetRole",
            "a Spot Fleet role",
            on(
                COMPUTE_ENVIRONMENT, put("ComputeResources.SpotIamFleetRole", "arn:aws:iam::123456789012:role/r"), _spot
            ),
        ),
        (
            "InPlaceUpdates",
            "best fit",
            on(COMPUTE_ENVIRONMENT, put("ComputeResources.AllocationStrategy", "BEST_FIT")),
        ),
        ("InPlaceUpdates", "a service role", on(COMPUTE_ENVIRONMENT, put("ServiceRole", "arn:aws:iam::1:role/r"))),
        ("InPlaceUpdates", "a name", on(COMPUTE_ENVIRONMENT, put("ComputeEnvironmentName", "gaudi"))),
        ("InPlaceUpdates", "replacement by default", on(COMPUTE_ENVIRONMENT, put("ReplaceComputeEnvironment"))),
        ("NothingIdle", "vCPUs kept running", on(COMPUTE_ENVIRONMENT, put("ComputeResources.MinvCpus", 96))),
        (
            "ExplicitInstanceTypes",
            "optimal",
            on(COMPUTE_ENVIRONMENT, put("ComputeResources.InstanceTypes", ["optimal"])),
        ),
        ("ExplicitInstanceTypes", "a family", on(COMPUTE_ENVIRONMENT, put("ComputeResources.InstanceTypes", ["dl1"]))),
        ("RoomForAJob", "half a node", on(COMPUTE_ENVIRONMENT, put("ComputeResources.MaxvCpus", 8))),
        ("ImageType", "Amazon Linux 2", on(COMPUTE_ENVIRONMENT, _image_type("ECS_AL2"))),
        ("ImageType", "no image type", on(COMPUTE_ENVIRONMENT, put("ComputeResources.Ec2Configuration"))),
        ("TaggedInstances", "no tags", on(COMPUTE_ENVIRONMENT, put("ComputeResources.Tags", {"Name": "x"}))),
        ("EfaPlacement", "no group", on(COMPUTE_ENVIRONMENT, put("ComputeResources.PlacementGroup"), _grouped)),
        (
            "EfaPlacement",
            "two subnets",
            on(COMPUTE_ENVIRONMENT, put("ComputeResources.Subnets", ["subnet-1", "subnet-2"]), _grouped),
        ),
        ("EfaPlacement", "a spread group", on("AWS::EC2::PlacementGroup", put("Strategy", "spread"))),
    ),
    Break(
        "TY-ComputeEnvironment-GpuImage",
        "the plain image",
        on(COMPUTE_ENVIRONMENT, _image_type("ECS_AL2023")),
        variant="p4d-24xlarge",
    ),
    *of_rule(
        "LaunchTemplate",
        (
            "NumberedVersion",
            "$Default",
            on(COMPUTE_ENVIRONMENT, put("ComputeResources.LaunchTemplate.Version", "$Default")),
        ),
        (
            "NumberedVersion",
            "$Latest",
            on(COMPUTE_ENVIRONMENT, put("ComputeResources.LaunchTemplate.Version", "$Latest")),
        ),
        ("NumberedVersion", "none said", on(COMPUTE_ENVIRONMENT, put("ComputeResources.LaunchTemplate.Version"))),
        (
            "OnePlaceForSecurityGroups",
            "groups in both places",
            on(COMPUTE_ENVIRONMENT, put("ComputeResources.SecurityGroupIds", ["sg-1"]), _grouped),
        ),
        (
            "OnePlaceForSecurityGroups",
            "groups in no place",
            on(COMPUTE_ENVIRONMENT, put("ComputeResources.SecurityGroupIds"), _spot),
        ),
        (
            "OnePlaceForSecurityGroups",
            "interfaces without",
            on(LAUNCH_TEMPLATE, _no_group_in_interfaces, _with_interfaces),
        ),
        (
            "MimeUserData",
            "a plain script",
            on(LAUNCH_TEMPLATE, put("LaunchTemplateData.UserData", {"Fn::Base64": "#!/bin/bash\necho"})),
        ),
        (
            "MimeUserData",
            "a blank line after a boundary",
            on(LAUNCH_TEMPLATE, user_data("==\nContent-Type", "==\n\nContent-Type")),
        ),
        ("MimeUserData", "no last boundary", on(LAUNCH_TEMPLATE, user_data("==--", "=="))),
        (
            "NothingIgnored",
            "an instance type",
            on(LAUNCH_TEMPLATE, put("LaunchTemplateData.InstanceType", "dl1.24xlarge")),
        ),
        (
            "NothingIgnored",
            "a Spot request",
            on(LAUNCH_TEMPLATE, put("LaunchTemplateData.InstanceMarketOptions", {"MarketType": "spot"})),
        ),
        ("NothingIgnored", "a role", on(LAUNCH_TEMPLATE, put("LaunchTemplateData.IamInstanceProfile", {"Name": "x"}))),
        (
            "Imdsv2",
            "optional tokens",
            on(LAUNCH_TEMPLATE, put("LaunchTemplateData.MetadataOptions.HttpTokens", "optional")),
        ),
        ("Imdsv2", "nothing said", on(LAUNCH_TEMPLATE, put("LaunchTemplateData.MetadataOptions"))),
        (
            "EncryptedVolumes",
            "a volume in the clear",
            on(LAUNCH_TEMPLATE, put("LaunchTemplateData.BlockDeviceMappings.0.Ebs.Encrypted", False)),
        ),
        ("EncryptedVolumes", "the AMI's own", on(LAUNCH_TEMPLATE, put("LaunchTemplateData.BlockDeviceMappings"))),
        (
            "NoPublicAddress",
            "a public address",
            on(
                LAUNCH_TEMPLATE,
                put("LaunchTemplateData.NetworkInterfaces.0.AssociatePublicIpAddress", True),
                _with_interfaces,
            ),
        ),
        ("NoKeyPair", "a key pair", on(LAUNCH_TEMPLATE, put("LaunchTemplateData.KeyName", "me"))),
        ("EfaCards", "two on one card", on(LAUNCH_TEMPLATE, _same_card, _with_interfaces)),
        (
            "EfaCards",
            "a card left out",
            on(LAUNCH_TEMPLATE, lambda item: item["LaunchTemplateData"]["NetworkInterfaces"].pop(), _with_interfaces),
        ),
        (
            "SpotDraining",
            "no draining",
            on(LAUNCH_TEMPLATE, user_data("ECS_ENABLE_SPOT_INSTANCE_DRAINING=true", "")),
        ),
        ("SpotDraining", "30 seconds", on(LAUNCH_TEMPLATE, user_data("ECS_CONTAINER_STOP_TIMEOUT=", "X="))),
        ("SpotDraining", "nobody asks for the notice", on(LAUNCH_TEMPLATE, user_data("/spot/instance-action", "/x"))),
        ("SpotDraining", "nobody stops the job", on(LAUNCH_TEMPLATE, user_data("docker stop -t ", "echo "))),
    ),
    *of_rule(
        "JobQueue",
        ("MultinodeOnDemand", "several nodes on Spot", _spot_behind_multinode),
        ("AtMostThreeEnvironments", "four", on(JOB_QUEUE, _four_environments)),
        ("AtMostThreeEnvironments", "none", on(JOB_QUEUE, put("ComputeEnvironmentOrder", []))),
        ("FairShare", "no policy", on(JOB_QUEUE, put("SchedulingPolicyArn"))),
        *(
            (
                "TimeLimits",
                f"{key} {value}",
                on(
                    JOB_QUEUE,
                    put(
                        "JobStateTimeLimitActions",
                        [
                            {
                                "MaxTimeSeconds": 3600,
                                "Reason": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
                                "State": "RUNNABLE",
                                "Action": "CANCEL",
                                key: value,
                            }
                        ],
                    ),
                ),
            )
            for key, value in {
                "MaxTimeSeconds": 599,
                "Reason": "it took too long",
                "State": "SUBMITTED",
                "Action": "TERMINATE",
            }.items()
        ),
        (
            "TimeLimits",
            "more than a day",
            on(JOB_QUEUE, put("JobStateTimeLimitActions", [{"MaxTimeSeconds": 86401, "Reason": "x"}])),
        ),
    ),
    # Where the settings say how long a job waits for Spot, no queue has two kinds of capacity.
    Break("TY-JobQueue-SpotFirst", "On-Demand first", on(JOB_QUEUE, _reversed, _mixed), variant="existing"),
    Break("TY-JobQueue-OneKindOfCapacity", "Fargate beside EC2", _fargate_beside, variant="existing"),
    *of_rule(
        "SchedulingPolicy",
        (
            "Shares",
            "a hyphen",
            on(SCHEDULING_POLICY, put("FairsharePolicy.ShareDistribution.0.ShareIdentifier", "my-team")),
        ),
        (
            "Shares",
            "too light",
            on(SCHEDULING_POLICY, put("FairsharePolicy.ShareDistribution.0.WeightFactor", 0.00001)),
        ),
        ("Shares", "too heavy", on(SCHEDULING_POLICY, put("FairsharePolicy.ShareDistribution.0.WeightFactor", 1000))),
    ),
    *of_rule(
        "SecurityGroup",
        (
            "EfaAmongItself",
            "no ingress",
            on("AWS::EC2::SecurityGroupIngress", put("IpProtocol", "tcp"), _from_group),
        ),
        ("EfaAmongItself", "no egress", on("AWS::EC2::SecurityGroupEgress", put("IpProtocol", "tcp"), _to_group)),
        (
            "EfaAmongItself",
            "anywhere instead",
            on(
                "AWS::EC2::SecurityGroupEgress",
                lambda item: (item.pop("DestinationSecurityGroupId"), item.update(CidrIp="0.0.0.0/0"))[0],
                _to_group,
            ),
        ),
        (
            "NothingFromOutside",
            "SSH from the world",
            on(
                "AWS::EC2::SecurityGroup",
                put(
                    "SecurityGroupIngress", [{"CidrIp": "0.0.0.0/0", "IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}]
                ),
            ),
        ),
        (
            "NothingFromOutside",
            "a rule apart",
            on("AWS::EC2::SecurityGroupIngress", put("CidrIp", "0.0.0.0/0"), _from_group),
        ),
    ),
    *of_rule(
        "Subnet",
        ("Private", "public addresses", on("AWS::EC2::Subnet", put("MapPublicIpOnLaunch", True))),
        (
            "Private",
            "a route to the internet",
            on(
                "AWS::EC2::Route",
                lambda item: item.update(GatewayId={"Ref": "VpcIGW"}),
                lambda item: "NatGatewayId" in item,
            ),
        ),
    ),
]
