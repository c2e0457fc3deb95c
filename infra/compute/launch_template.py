"""The launch template that a compute environment's instances start from."""

from aws_cdk import Fn
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from infra.stages import CapacityReservation
from jobs.core.instance_types import InstanceType

ROOT_VOLUME_MIB_PER_SECOND = 500
"""gp3's own 125 take minutes to unpack tens of GiB of a job image while the cards wait. Up to 750 come with its 3,000
operations a second (EBS user guide: 0.25 MiB/s for each)."""


class LaunchTemplate(ec2.CfnLaunchTemplate):
    """A launch template with what Batch leaves to it: metadata service, volumes, user data, and EFA's interfaces.

    Batch itself sets instance type, role, subnets, the Spot request and, where there are no interfaces here, security
    groups.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        root_device_name: str,
        root_volume_gib: int,
        user_data: str,
        tags: dict[str, str],
        efa: "EfaInterfaces | None" = None,
        reservation: CapacityReservation | None = None,
    ) -> None:
        tag_list = [{"key": key, "value": value} for key, value in sorted(tags.items())]
        of = ec2.CfnLaunchTemplate
        super().__init__(
            scope,
            name,
            tag_specifications=[
                of.LaunchTemplateTagSpecificationProperty(resource_type="launch-template", tags=tag_list)
            ],
            launch_template_data=of.LaunchTemplateDataProperty(
                metadata_options=of.MetadataOptionsProperty(
                    http_endpoint="enabled",
                    http_tokens="required",
                    # One hop is the host itself, in whose network Batch runs a one-node job; a second would hand the
                    # instance's role to containers on a bridge as well. Jobs get their own role from the ECS agent, at
                    # another address.
                    http_put_response_hop_limit=1,
                ),
                block_device_mappings=[
                    of.BlockDeviceMappingProperty(
                        device_name=root_device_name,
                        ebs=of.EbsProperty(
                            volume_type="gp3",
                            volume_size=root_volume_gib,
                            throughput=ROOT_VOLUME_MIB_PER_SECOND,
                            encrypted=True,
                            delete_on_termination=True,
                        ),
                    )
                ],
                network_interfaces=efa.render() if efa else None,
                capacity_reservation_specification=_target(reservation) if reservation else None,
                # Batch's guide says that it ignores market options, and AWS's own example of Batch on Capacity Blocks
                # sets them (1.architectures/3.aws-batch of aws-samples/awsome-distributed-training) [?].
                instance_market_options=(
                    of.InstanceMarketOptionsProperty(market_type="capacity-block")
                    if reservation and reservation.is_block
                    else None
                ),
                # Batch tags the instances; their volumes are tagged by the template only.
                tag_specifications=[of.TagSpecificationProperty(resource_type="volume", tags=tag_list)],
                user_data=Fn.base64(user_data),
            ),
        )


def _target(reservation: CapacityReservation) -> ec2.CfnLaunchTemplate.CapacityReservationSpecificationProperty:
    """Return the specification by which instances run in the reservation, or not at all."""
    of, target = ec2.CfnLaunchTemplate, reservation.target
    is_group = target.startswith("arn:")
    return of.CapacityReservationSpecificationProperty(
        capacity_reservation_target=of.CapacityReservationTargetProperty(
            capacity_reservation_id=None if is_group else target,
            capacity_reservation_resource_group_arn=target if is_group else None,
        )
    )


class EfaInterfaces:
    """An EFA interface on each network card of a type; `security_group` has to let its members talk both ways."""

    def __init__(self, row: InstanceType, *, security_group: ec2.ISecurityGroup) -> None:
        self._cards = row.network_cards
        self._security_group = security_group

    def render(self) -> list[ec2.CfnLaunchTemplate.NetworkInterfaceProperty]:
        return [
            ec2.CfnLaunchTemplate.NetworkInterfaceProperty(
                description=f"EFA on network card {card}",
                network_card_index=card,
                # Only the primary interface, on the first card, has device index 0.
                device_index=min(card, 1),
                interface_type="efa",
                groups=[self._security_group.security_group_id],
                delete_on_termination=True,
                # With several interfaces EC2 gives no public address, and refuses to be asked about one.
                associate_public_ip_address=False if self._cards == 1 else None,
            )
            for card in range(self._cards)
        ]
