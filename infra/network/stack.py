"""Network: a VPC with routes out and none in, either created by the stage or an existing one."""

from collections.abc import Sequence
from ipaddress import IPv4Network
from itertools import cycle

from aws_cdk import Annotations, CfnResource, Fn
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.security_groups import job_security_group
from infra.constructs.stage_stack import RetainedLogGroup, StageStack, acknowledge
from infra.stages import ExistingVpc, Pool, Stage
from infra.stages.network_plan import (
    DEFAULT_ZONE_COUNT,
    ENDPOINT_SERVICES,
    egress_ports,
    endpoint_zone_count,
    fsx_subnet_index,
    has_interface_endpoints,
    offering_indices,
    reserved_subnet_index,
    uses_default_security_group,
    zone_ids,
)
from jobs.core.instance_types import InstanceType

ENDPOINT_SECURITY_GROUP = "security-group/endpoints"
"""SSM parameter: security group of the interface endpoints; other stacks add rules to it. Only present if the stage
creates endpoints."""

LAST_ZONE_NUMBER = 8
"""Highest zone number (the end of a zone's id) with reserved addresses. The settings refuse higher ones; AWS's go up to
six."""


class Zone(Construct):
    """A zone's subnets, named after the zone, with addresses that depend on the zone only.

    So adding or removing a zone, NAT or endpoints never replaces another zone's subnet, in which instances may be
    running. CloudFormation could not replace it anyway, because its addresses are taken until the old subnet is
    deleted.
    """

    def __init__(self, vpc: ec2.Vpc, *, addresses: str, zone_id: str | None, index: int) -> None:
        """Create the subnet. `addresses`: range of the VPC. Without `zone_id`, use the region's zone at `index`."""
        name = zone_id or f"zone-{index + 1}"
        super().__init__(vpc.stack, name)
        self._zone_id = zone_id
        self._zone = Fn.select(index, Fn.get_azs())
        self._vpc = vpc
        # Zones without an id have separate addresses. So if the settings later name the zones, the new subnets can be
        # created before the old ones are deleted.
        self._slot = int(zone_id.rpartition("az")[2]) - 1 if zone_id else LAST_ZONE_NUMBER + index
        self._sixteenths = list(IPv4Network(addresses).subnets(new_prefix=20))
        # The subnet comes with its own route table.
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
        """Create a NAT gateway and its public subnet, which holds nothing else."""
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
            "The NAT gateway's route out. Nothing else is in this subnet; subnets with instances have no such route",
            "NIST.800.53.R5-VPCNoUnrestrictedRouteToIGW",
        )
        assert internet_gateway.internet_gateway_id is not None  # noqa: S101 - narrows the type; it attaches one
        public.add_default_internet_route(internet_gateway.internet_gateway_id, internet_gateway)
        return public.add_nat_gateway()

    def _place(self, subnet: ec2.Subnet) -> None:
        """Place a subnet by zone id; the L2 only takes zone letters, which differ between accounts."""
        if self._zone_id is None:
            return
        resource = subnet.node.default_child
        assert isinstance(resource, ec2.CfnSubnet)  # noqa: S101 - narrows the type; the L2 is built on it
        resource.availability_zone = None
        resource.availability_zone_id = self._zone_id


class TaskNetwork(Construct):
    """Rules in the VPC's default security group that let the nodes of a multi-node job reach each other and AWS.

    Every node's container has its own network interface (ECS's awsvpc mode). Batch puts it into the security groups of
    the compute environment, else into the VPC's default group (docs.aws.amazon.com/batch/latest/userguide/mnp-ce).
    Only a launch template can define EFA interfaces, and with such a template Batch refuses security groups of the
    environment (its error is in issue 21577 of aws/aws-cdk). So no other group can serve EFA. The network stack has
    emptied the default group, and only stages with multi-node jobs on EFA instances have these rules. EFA traffic does
    not pass these interfaces.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        stage: Stage,
        default_group_id: str,
        endpoint_group: ec2.ISecurityGroup | None,
    ) -> None:
        """Create the rules. `endpoint_group`: security group of the VPC's interface endpoints, if there are any."""
        super().__init__(scope, name)
        nodes = "Nodes of one job: rendezvous, and traffic outside EFA"
        # TCP only: allowing all protocols would restore the rule that the network stack removed from the group.
        from_nodes = ec2.CfnSecurityGroupIngress(
            self,
            "NodesFromNodes",
            group_id=default_group_id,
            source_security_group_id=default_group_id,
            ip_protocol="tcp",
            from_port=0,
            to_port=65535,
            description=nodes,
        )
        acknowledge(
            from_nodes,
            "The rule admits only members of this group and no address; ranks choose their own ports",
            "NIST.800.53.R5-EC2RestrictedCommonPorts",
        )
        ec2.CfnSecurityGroupEgress(
            self,
            "NodesToNodes",
            group_id=default_group_id,
            destination_security_group_id=default_group_id,
            ip_protocol="tcp",
            from_port=0,
            to_port=65535,
            description=nodes,
        )
        for (protocol, port), description in egress_ports(stage).items():
            ec2.CfnSecurityGroupEgress(
                self,
                "NodesOut" if (protocol, port) == ("tcp", 443) else f"NodesOut-{protocol}-{port}",
                group_id=default_group_id,
                cidr_ip="0.0.0.0/0",
                ip_protocol=protocol,
                from_port=port,
                to_port=port,
                description=description,
            )
        if endpoint_group:
            admit_nodes(self, endpoint_group, default_group_id=default_group_id)


def admit_nodes(scope: Construct, endpoint_group: ec2.ISecurityGroup, *, default_group_id: str) -> None:
    """Let the nodes of multi-node jobs reach the VPC's interface endpoints."""
    ec2.CfnSecurityGroupIngress(
        scope,
        "EndpointsFromNodes",
        group_id=endpoint_group.security_group_id,
        source_security_group_id=default_group_id,
        ip_protocol="tcp",
        from_port=443,
        to_port=443,
        description="Nodes of multi-node jobs",
    )


class NetworkStack(StageStack):
    """The stack of the VPC, its routes out, and the security group of the instances that run jobs."""

    vpc: ec2.IVpc
    job_subnets: Sequence[ec2.ISubnet]
    """Subnets in which instances start. Instances never get a public address."""

    def __init__(self, scope: Construct, *, stage: Stage) -> None:
        super().__init__(scope, "network", stage=stage, description="VPC and the security group of jobs")
        self._zone_ids = zone_ids(stage) if stage.vpc is None else ()
        route_tables = self._make_vpc() if stage.vpc is None else self._use_vpc(stage.vpc)
        if route_tables:
            # Free, and traffic from S3 bypasses NAT and its charges.
            ec2.CfnVPCEndpoint(
                self,
                "S3Endpoint",
                vpc_id=self.vpc.vpc_id,
                service_name=f"com.amazonaws.{self.region}.s3",
                vpc_endpoint_type="Gateway",
                route_table_ids=list(route_tables),
            )
        self.job_security_group = job_security_group(self, vpc=self.vpc, stage=stage)
        endpoint_group = self._interface_endpoints() if has_interface_endpoints(stage) else None
        if endpoint_group:
            # Published instead of exported, because endpoints may be removed later.
            self.publish(ENDPOINT_SECURITY_GROUP, endpoint_group.security_group_id)
        if uses_default_security_group(stage):
            self._admit_multinode_containers(endpoint_group)
        self._export_always()

    def subnets_offering(self, types: Sequence[InstanceType]) -> list[ec2.ISubnet]:
        """Return the subnets in zones that are known to offer one of the types, or all subnets if none is."""
        return [self.job_subnets[index] for index in offering_indices(self.stage_row, types)] or list(self.job_subnets)

    def on_demand_subnets(self, pool: Pool, types: Sequence[InstanceType]) -> list[ec2.ISubnet]:
        """Return the subnets of a pool's On-Demand instances: one if they run in reserved capacity."""
        reserved = reserved_subnet_index(self.stage_row, pool)
        return self.subnets_offering(types) if reserved is None else [self.job_subnets[reserved]]

    @property
    def availability_zones(self) -> list[str]:
        """Return []: ec2.Vpc checks its zones against these, which the CDK looks up if the stage has an account."""
        return []

    @property
    def fsx_subnet(self) -> ec2.ISubnet:
        """Return the subnet of FSx, which has one. Instances in other zones reach it too."""
        return self.job_subnets[fsx_subnet_index(self.stage_row)]

    def _admit_multinode_containers(self, endpoint_group: ec2.ISecurityGroup | None) -> None:
        if isinstance(self.vpc, ec2.Vpc):
            default_group_id = self.vpc.vpc_default_security_group
            TaskNetwork(
                self,
                "TaskNetwork",
                stage=self.stage_row,
                default_group_id=default_group_id,
                endpoint_group=endpoint_group,
            )
        # The stage does not change the default group of an existing VPC.
        elif endpoint_group and self.stage_row.vpc and self.stage_row.vpc.default_security_group_id:
            admit_nodes(self, endpoint_group, default_group_id=self.stage_row.vpc.default_security_group_id)

    def _export_always(self) -> None:
        """Export what other stacks may import, even while no stack imports it.

        Otherwise a deployment that ends the last import (for example, by removing the file system) would fail: it would
        start here and delete an export that is still in use.
        """
        self.export_value(self.job_security_group.security_group_id)
        if self.stage_row.vpc is None:
            for value in (self.vpc.vpc_id, *(subnet.subnet_id for subnet in self.job_subnets)):
                self.export_value(value)

    def _make_vpc(self) -> Sequence[str]:
        """Create a VPC with a private subnet per zone. Return the subnets' route tables."""
        stage = self.stage_row
        vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(stage.vpc_cidr),
            # Subnets are created below: the L2's would move when a zone is added or removed, and the L2 would look up
            # zones if the stage names its account.
            subnet_configuration=[],
            availability_zones=[],
            create_internet_gateway=False,
            restrict_default_security_group=True,
        )
        self.vpc = vpc
        ids: Sequence[str | None] = self._zone_ids or [None] * DEFAULT_ZONE_COUNT
        zones = [Zone(vpc, addresses=stage.vpc_cidr, zone_id=zone_id, index=index) for index, zone_id in enumerate(ids)]
        self.job_subnets = [zone.private_subnet for zone in zones]
        if stage.nat_gateways:
            self._route_through_nat(zones, zones[: stage.nat_gateways])
        self._log_default_group_handler()
        self._log_traffic()
        return [zone.private_subnet.route_table.route_table_id for zone in zones]

    def _use_vpc(self, existing: ExistingVpc) -> Sequence[str]:
        """Import the VPC that the settings name. Return its route tables from the settings."""
        # The CDK requires zones to divide subnets among them, but nothing here uses them.
        self.vpc = ec2.Vpc.from_vpc_attributes(self, "Vpc", vpc_id=existing.vpc_id, availability_zones=["any"])
        Annotations.of(self).acknowledge_warning(
            "@aws-cdk/aws-ec2:noSubnetRouteTableId", "nothing here reads a subnet's route table"
        )
        self.job_subnets = [
            ec2.Subnet.from_subnet_id(self, subnet_id, subnet_id) for subnet_id in existing.private_subnet_ids
        ]
        return existing.private_route_table_ids

    def _route_through_nat(self, zones: Sequence[Zone], zones_with_nat: Sequence[Zone]) -> None:
        gateway = ec2.CfnInternetGateway(self, "InternetGateway")
        attached = ec2.CfnVPCGatewayAttachment(
            self, "InternetGatewayAttachment", vpc_id=self.vpc.vpc_id, internet_gateway_id=gateway.ref
        )
        nat_gateways = [zone.add_nat_gateway(attached) for zone in zones_with_nat]
        for zone, nat_gateway in zip(zones, cycle(nat_gateways), strict=False):
            zone.private_subnet.add_default_nat_route(nat_gateway.ref)

    def _log_traffic(self) -> None:
        log = RetainedLogGroup(self, "FlowLogs", retention_days=self.stage_row.log_retention_days)
        role = iam.Role(
            self,
            "FlowLogRole",
            description="The VPC's flow log: write to its log group",
            assumed_by=iam.ServicePrincipal(
                "vpc-flow-logs.amazonaws.com",
                conditions={
                    "StringEquals": {"aws:SourceAccount": self.account},
                    "ArnLike": {
                        "aws:SourceArn": self.format_arn(service="ec2", resource="vpc-flow-log", resource_name="*")
                    },
                },
            ),
        )
        iam.ManagedPolicy(
            self,
            "WriteFlowLogs",
            roles=[role],
            statements=[
                iam.PolicyStatement(
                    actions=["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"],
                    resources=[log.log_group_arn],
                )
            ],
        )
        ec2.CfnFlowLog(
            self,
            "FlowLog",
            resource_type="VPC",
            resource_id=self.vpc.vpc_id,
            traffic_type="ALL",
            log_destination_type="cloud-watch-logs",
            log_group_name=log.log_group_name,
            deliver_logs_permission_arn=role.role_arn,
        )

    def _log_default_group_handler(self) -> None:
        """Give the CDK function that empties the VPC's default security group a log group that expires."""
        provider = self.node.find_child("Custom::VpcRestrictDefaultSGCustomResourceProvider")
        handler, role = provider.node.find_child("Handler"), provider.node.find_child("Role")
        assert isinstance(handler, CfnResource)  # noqa: S101 - narrows the types; the CDK creates both as bare resources
        assert isinstance(role, CfnResource)  # noqa: S101
        log = RetainedLogGroup(self, "DefaultGroupHandlerLogs", retention_days=self.stage_row.log_retention_days)
        handler.add_property_override("LoggingConfig", {"LogGroup": log.log_group_name})
        handler.remove_resource_dependency(role)  # implied by the reference to the role

    def _interface_endpoints(self) -> ec2.SecurityGroup:
        """Create interface endpoints: routes to AWS without NAT, which are also used if there is NAT."""
        group = ec2.SecurityGroup(
            self,
            "EndpointSecurityGroup",
            vpc=self.vpc,
            description="VPC endpoints: HTTPS from instances of the stage",
            allow_all_outbound=False,
        )
        group.add_ingress_rule(self.job_security_group, ec2.Port.tcp(443), "Jobs")
        for name in ENDPOINT_SERVICES:
            ec2.InterfaceVpcEndpoint(
                self,
                f"Endpoint-{name}",
                vpc=self.vpc,
                service=ec2.InterfaceVpcEndpointAwsService(name),
                subnets=ec2.SubnetSelection(subnets=list(self.job_subnets[: endpoint_zone_count(self.stage_row)])),
                security_groups=[group],
                open=False,  # the rule above is narrower than the whole VPC
            )
        return group
