"""Network: a VPC whose jobs reach out and that nothing reaches into."""

from aws_cdk import CfnResource, Fn
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from infra.constructs.log_group import RetainedLogGroup
from infra.constructs.stage_stack import StageStack
from infra.settings import Stage

_ROOM_FOR_ZONES = 3


class NetworkStack(StageStack):
    """VPC, its way out, and the security group of the instances that run jobs."""

    def __init__(self, scope: Construct, *, stage: Stage) -> None:
        self._zones = len(stage.availability_zone_ids) or 2
        super().__init__(scope, "network", stage=stage, description="VPC and the security group of jobs")
        outward = stage.nat_gateways > 0
        # Private subnets come first and room is kept for more zones: NAT or a zone that is added or removed later must
        # not move the addresses of subnets that instances run in.
        private = ec2.SubnetConfiguration(
            name="private",
            subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS if outward else ec2.SubnetType.PRIVATE_ISOLATED,
            cidr_mask=19,
        )
        public = ec2.SubnetConfiguration(
            name="public", subnet_type=ec2.SubnetType.PUBLIC, cidr_mask=24, map_public_ip_on_launch=False
        )
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            max_azs=self._zones,
            reserved_azs=max(0, _ROOM_FOR_ZONES - self._zones),
            nat_gateways=stage.nat_gateways,
            subnet_configuration=[private, public] if outward else [private],
            restrict_default_security_group=True,
            gateway_endpoints={"S3": ec2.GatewayVpcEndpointOptions(service=ec2.GatewayVpcEndpointAwsService.S3)},
        )
        for subnets in (self.vpc.private_subnets, self.vpc.isolated_subnets, self.vpc.public_subnets):
            for subnet, zone_id in zip(subnets, stage.availability_zone_ids, strict=False):
                _place(subnet, zone_id)
        self._tidy_default_group_handler(stage.log_retention_days)
        flow_logs = RetainedLogGroup(self, "FlowLogs", retention_days=stage.log_retention_days)
        self.vpc.add_flow_log("FlowLog", destination=ec2.FlowLogDestination.to_cloud_watch_logs(flow_logs))
        self.job_security_group = self._job_security_group()
        if not outward:
            self._interface_endpoints()

    @property
    def availability_zones(self) -> list[str]:
        """The region's first zones, named when it is deployed: CDK would look them up in the account instead."""
        return [Fn.select(index, Fn.get_azs()) for index in range(self._zones)]

    @property
    def job_subnets(self) -> list[ec2.ISubnet]:
        return [*self.vpc.private_subnets, *self.vpc.isolated_subnets]

    def _tidy_default_group_handler(self, retention_days: int) -> None:
        """CloudFormation cannot empty the VPC's default security group, so CDK adds a function: let its log expire."""
        provider = self.node.find_child("Custom::VpcRestrictDefaultSGCustomResourceProvider")
        handler, role = provider.node.find_child("Handler"), provider.node.find_child("Role")
        assert isinstance(handler, CfnResource)  # noqa: S101 - narrows the types; CDK makes both as bare resources
        assert isinstance(role, CfnResource)  # noqa: S101
        log = RetainedLogGroup(self, "DefaultGroupHandlerLogs", retention_days=retention_days)
        handler.add_property_override("LoggingConfig", {"LogGroup": log.log_group_name})
        handler.remove_resource_dependency(role)  # already given by its reference to the role

    def _job_security_group(self) -> ec2.SecurityGroup:
        group = ec2.SecurityGroup(
            self,
            "JobSecurityGroup",
            vpc=self.vpc,
            description="Instances that run jobs: HTTPS out, anything among themselves, nothing in",
            allow_all_outbound=False,
        )
        group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "AWS, Hugging Face, package registries")
        # EFA's traffic is matched by rules that name the group, both ways, and never by 0.0.0.0/0. Written as bare
        # resources, since the L2 leaves the egress one out of a group that may reach everything, now or later.
        reason = "Ranks on other instances, over TCP and EFA"
        ec2.CfnSecurityGroupIngress(
            self,
            "JobsFromJobs",
            group_id=group.security_group_id,
            source_security_group_id=group.security_group_id,
            ip_protocol="-1",
            description=reason,
        )
        ec2.CfnSecurityGroupEgress(
            self,
            "JobsToJobs",
            group_id=group.security_group_id,
            destination_security_group_id=group.security_group_id,
            ip_protocol="-1",
            description=reason,
        )
        return group

    def _interface_endpoints(self) -> None:
        """The way to AWS where there is no NAT: all that an instance needs to join, pull, log and be reached by SSM."""
        group = ec2.SecurityGroup(
            self,
            "EndpointSecurityGroup",
            vpc=self.vpc,
            description="VPC endpoints: HTTPS from jobs",
            allow_all_outbound=False,
        )
        group.add_ingress_rule(self.job_security_group, ec2.Port.tcp(443), "Jobs")
        service = ec2.InterfaceVpcEndpointAwsService
        for name, endpoint in {
            "EcrApi": service.ECR,
            "EcrDocker": service.ECR_DOCKER,
            "Ecs": service.ECS,
            "EcsAgent": service.ECS_AGENT,
            "EcsTelemetry": service.ECS_TELEMETRY,
            "Logs": service.CLOUDWATCH_LOGS,
            "Sts": service.STS,
            "Ssm": service.SSM,
            "SsmMessages": service.SSM_MESSAGES,
            "SecretsManager": service.SECRETS_MANAGER,
            "Batch": service.BATCH,
        }.items():
            self.vpc.add_interface_endpoint(
                f"{name}Endpoint",
                service=endpoint,
                subnets=ec2.SubnetSelection(subnets=self.job_subnets),
                security_groups=[group],
                open=False,  # the rule above is narrower than the whole VPC
            )


def _place(subnet: ec2.ISubnet, zone_id: str) -> None:
    resource = subnet.node.default_child
    assert isinstance(resource, ec2.CfnSubnet)  # noqa: S101 - narrows the type; the L2 is built on it
    resource.availability_zone = None
    resource.availability_zone_id = zone_id
