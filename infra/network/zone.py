"""One availability zone of a VPC that a stage makes for itself: a private subnet, and NAT where there is some."""

from ipaddress import IPv4Network

from aws_cdk import Fn
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from infra.constructs.stage_stack import acknowledge

LAST_ZONE_NUMBER = 8
"""Highest number at the end of a zone's id that has addresses set aside; AWS's own go to six. Settings are checked."""


class Zone(Construct):
    """A zone's subnets, named by the zone, with addresses that depend on nothing else.

    So a zone that is added or removed, NAT or endpoints never move the subnet of another zone, in which instances may
    be running: CloudFormation would have to replace it, and could not, since its addresses are taken until it is gone.
    """

    def __init__(self, vpc: ec2.Vpc, *, addresses: str, zone_id: str | None, index: int) -> None:
        """`addresses`: the VPC's. `zone_id` None: the zone at `index` of the region's, whichever that is there."""
        name = zone_id or f"zone-{index + 1}"
        super().__init__(vpc.stack, name)
        self._zone_id = zone_id
        self._zone = Fn.select(index, Fn.get_azs())
        self._vpc = vpc
        # Zones without an id have addresses of their own, so that naming them can make room for the new before the
        # old are gone.
        self._slot = int(zone_id.rpartition("az")[2]) - 1 if zone_id else LAST_ZONE_NUMBER + index
        self._sixteenths = list(IPv4Network(addresses).subnets(new_prefix=20))
        # One route table for each subnet comes with it.
        self.private_subnet = ec2.PrivateSubnet(
            self,
            "Private",
            vpc_id=vpc.vpc_id,
            availability_zone=self._zone,
            cidr_block=str(self._sixteenths[self._slot]),
            map_public_ip_on_launch=False,
        )
        self._place(self.private_subnet)

    def add_nat_gateway(self, internet_gateway: ec2.CfnVPCGatewayAttachment) -> ec2.CfnNatGateway:
        """Make a NAT gateway with the public subnet that it needs, in which nothing else is."""
        public = ec2.PublicSubnet(
            self,
            "Public",
            vpc_id=self._vpc.vpc_id,
            availability_zone=self._zone,
            cidr_block=str(list(self._sixteenths[-1].subnets(new_prefix=24))[self._slot]),
            map_public_ip_on_launch=False,
        )
        self._place(public)
        acknowledge(
            public,
            "The way out of the NAT gateway, the only thing in this subnet; subnets with instances have no such route",
            "NIST.800.53.R5-VPCNoUnrestrictedRouteToIGW",
        )
        assert internet_gateway.internet_gateway_id is not None  # noqa: S101 - narrows the type; it attaches one
        public.add_default_internet_route(internet_gateway.internet_gateway_id, internet_gateway)
        return public.add_nat_gateway()

    def _place(self, subnet: ec2.Subnet) -> None:
        """Place a subnet by the zone's id; the L2 knows letters only, which differ between accounts."""
        if self._zone_id is None:
            return
        resource = subnet.node.default_child
        assert isinstance(resource, ec2.CfnSubnet)  # noqa: S101 - narrows the type; the L2 is built on it
        resource.availability_zone = None
        resource.availability_zone_id = self._zone_id
