from collections.abc import Callable
from typing import Any

import pytest

from infra.stages import CapacityReservation, Pool
from tests.support.infra.instances import CPU, GAUDI, capacity, environments, launch_data
from tests.support.infra.synthesis import Templates

Synthesised = Callable[..., Templates]


@pytest.fixture(scope="module")
def compute(templates: Templates) -> dict[str, Any]:
    """The compute stack of a stage with every capacity that there is."""
    return templates["prod/compute"]


@pytest.fixture(scope="module")
def launch_templates(compute: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: launch_data(compute, name) for name in environments(compute)}


def test_launch_templates_leave_to_batch_what_is_batchs(launch_templates: dict[str, dict[str, Any]]) -> None:
    # Trap: Batch ignores these, and who reads the template believes them.
    ignored = {
        "InstanceType",
        "InstanceMarketOptions",
        "IamInstanceProfile",
        "SecurityGroupIds",
        "ImageId",
        "Placement",
    }
    for data in launch_templates.values():
        assert not ignored & data.keys()
        assert all("SubnetId" not in interface for interface in data.get("NetworkInterfaces", []))


def test_metadata_wants_a_token_and_reaches_no_further_than_the_host(
    launch_templates: dict[str, dict[str, Any]],
) -> None:
    for data in launch_templates.values():
        assert data["MetadataOptions"] == {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        }


def test_root_volumes_are_encrypted_and_as_large_as_the_settings_say(synthesised: Synthesised) -> None:
    settings = {"machine_image": "ami-0123456789abcdef0", "root_device_name": "/dev/xvdb"}
    compute = synthesised(root_volume_gib=700, cpu_root_volume_gib=300, **settings)["compute"]
    volume = {"VolumeType": "gp3", "Throughput": 500, "Encrypted": True, "DeleteOnTermination": True}
    assert launch_data(compute, f"{GAUDI}-spot")["BlockDeviceMappings"] == [
        {"DeviceName": "/dev/xvdb", "Ebs": {**volume, "VolumeSize": 700}}
    ]
    assert launch_data(compute, f"{CPU}-spot")["BlockDeviceMappings"] == [
        {"DeviceName": "/dev/xvda", "Ebs": {**volume, "VolumeSize": 300}}
    ]


def test_volumes_are_tagged(launch_templates: dict[str, dict[str, Any]]) -> None:
    for data in launch_templates.values():
        (volume,) = (item for item in data["TagSpecifications"] if item["ResourceType"] == "volume")
        assert {tag["Key"]: tag["Value"] for tag in volume["Tags"]} == {
            "trainyard:project": "trainyard",
            "trainyard:stage": "prod",
            "trainyard:team": "research",
        }


@pytest.mark.parametrize(
    ("instance_type", "cards"), [("dl1.24xlarge", 4), ("p4d.24xlarge", 4), ("g5.48xlarge", 1), ("g6e.48xlarge", 4)]
)
def test_several_nodes_get_an_efa_interface_on_each_network_card(
    synthesised: Synthesised, instance_type: str, cards: int
) -> None:
    compute = synthesised(instance_type=instance_type, machine_image=None, max_multinode_nodes=2)["compute"]
    interfaces = launch_data(compute, f"{Pool(instance_type=instance_type).id}-multinode")["NetworkInterfaces"]
    # Trap: a device index other than 1 on the further cards, or two interfaces on one card, and nothing starts.
    assert [(item["NetworkCardIndex"], item["DeviceIndex"]) for item in interfaces] == [
        (card, 0 if card == 0 else 1) for card in range(cards)
    ]
    assert {item["InterfaceType"] for item in interfaces} == {"efa"}
    (group,) = {item["Groups"][0]["Fn::GetAtt"][0] for item in interfaces}
    assert "JobSecurityGroup" in group


@pytest.mark.parametrize("instance_type", ["dl1.24xlarge", "g5.48xlarge"])
def test_no_interface_gets_a_public_address(synthesised: Synthesised, instance_type: str) -> None:
    compute = synthesised(instance_type=instance_type, machine_image=None, max_multinode_nodes=2)["compute"]
    interfaces = launch_data(compute, f"{Pool(instance_type=instance_type).id}-multinode")["NetworkInterfaces"]
    asked = [item.get("AssociatePublicIpAddress") for item in interfaces]
    # Trap: EC2 refuses the question where there are several interfaces, even where the answer is no.
    assert asked == ([False] if len(interfaces) == 1 else [None] * len(interfaces))


def test_types_without_efa_have_several_nodes_over_tcp(synthesised: Synthesised) -> None:
    compute = synthesised(instance_type="g5.4xlarge", machine_image=None, max_multinode_nodes=2)["compute"]
    assert "NetworkInterfaces" not in launch_data(compute, "g5-4xlarge-1-21-0-multinode")
    assert "SecurityGroupIds" in capacity(compute, "g5-4xlarge-1-21-0-multinode")


ID = "cr-0123456789abcdef0"
GROUP = "arn:aws:resource-groups:us-east-1:123456789012:group/promised"


@pytest.mark.parametrize(
    ("reservation", "target"),
    [
        (CapacityReservation(target=ID), {"CapacityReservationId": ID}),
        (CapacityReservation(target=GROUP), {"CapacityReservationResourceGroupArn": GROUP}),
        (CapacityReservation(target=ID, is_block=True), {"CapacityReservationId": ID}),
    ],
)
def test_on_demand_instances_run_in_promised_capacity_and_spot_ones_do_not(
    synthesised: Synthesised, reservation: CapacityReservation, target: dict[str, str]
) -> None:
    compute = synthesised(
        instance_type="p5.48xlarge",
        machine_image=None,
        max_on_demand_nodes=1,
        max_multinode_nodes=2,
        capacity_reservation=reservation,
    )["compute"]
    pool = "p5-48xlarge-1-21-0"
    for name in ("on-demand", "multinode"):
        data = launch_data(compute, f"{pool}-{name}")
        assert data["CapacityReservationSpecification"] == {"CapacityReservationTarget": target}
        market = {"MarketType": "capacity-block"} if reservation.is_block else None
        assert data.get("InstanceMarketOptions") == market
        # A block lies together already, and EC2 refuses a placement group around it.
        grouped = name == "multinode" and not reservation.is_block
        assert ("PlacementGroup" in capacity(compute, f"{pool}-{name}")) is grouped
    spot = launch_data(compute, f"{pool}-spot")
    assert not {"CapacityReservationSpecification", "InstanceMarketOptions"} & spot.keys()
