"""A Batch compute environment of one or more instance types, with its launch template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jsii
from aws_cdk import AspectPriority, Aspects, Fn, IAspect, Stack
from aws_cdk import aws_batch as batch
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct, IConstruct

from infra.compute.user_data import FileSystem, user_data
from infra.stages import CapacityReservation
from jobs.core.instance_types import ImageType, InstanceType
from jobs.core.queues import Capacity

ROOT_VOLUME_MIB_PER_SECOND = 500
"""Throughput of root volumes. With gp3's default of 125, unpacking a job image of tens of GiB takes minutes, while the
accelerators wait. The maximum at gp3's 3,000 operations per second is 750 (EBS user guide: 0.25 MiB/s for each)."""

TAG_PREFIX = "trainyard:"
"""Prefix of the stage's own tags."""
_MOST_IMPORTANT = 1_000
"""Priority of a removal that no tag of an app overrides. The CDK adds tags with 100 and removes them with 200."""


class LaunchTemplate(ec2.CfnLaunchTemplate):
    """A launch template, which sets what Batch does not: metadata service, volumes, user data and EFA interfaces.

    Batch sets instance type, role, subnets, the Spot request and, if the template has no interfaces, security groups.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        root_device_name: str,
        root_volume_gib: int,
        ebs_key_arn: str | None,
        user_data: str,
        tags: dict[str, str],
        efa: "EfaInterfaces | None" = None,
        reservation: CapacityReservation | None = None,
    ) -> None:
        self._tags = tags
        tag_list = [{"key": key, "value": value} for key, value in sorted(tags.items())]
        template = ec2.CfnLaunchTemplate
        super().__init__(
            scope,
            name,
            tag_specifications=[
                template.LaunchTemplateTagSpecificationProperty(resource_type="launch-template", tags=tag_list)
            ],
            launch_template_data=template.LaunchTemplateDataProperty(
                metadata_options=template.MetadataOptionsProperty(
                    http_endpoint="enabled",
                    http_tokens="required",
                    # One hop reaches only the host's network, which single-node jobs use. A second hop would give
                    # containers on a bridge network the instance's role. Jobs get their own role from the ECS agent, at
                    # another address.
                    http_put_response_hop_limit=1,
                ),
                block_device_mappings=[
                    template.BlockDeviceMappingProperty(
                        device_name=root_device_name,
                        ebs=template.EbsProperty(
                            volume_type="gp3",
                            volume_size=root_volume_gib,
                            throughput=ROOT_VOLUME_MIB_PER_SECOND,
                            encrypted=True,
                            kms_key_id=ebs_key_arn,
                            delete_on_termination=True,
                        ),
                    )
                ],
                network_interfaces=efa.render() if efa else None,
                capacity_reservation_specification=_target(reservation) if reservation else None,
                # Batch's guide says it ignores market options, but AWS's own example of Batch on Capacity Blocks sets
                # them (1.architectures/3.aws-batch of aws-samples/awsome-distributed-training). Not tested on AWS.
                instance_market_options=(
                    template.InstanceMarketOptionsProperty(market_type="capacity-block")
                    if reservation and reservation.is_block
                    else None
                ),
                # Batch tags the instances, but only the template can tag their volumes.
                tag_specifications=[template.TagSpecificationProperty(resource_type="volume", tags=tag_list)],
                user_data=Fn.base64(user_data),
            ),
        )

    def add_tags(self, tags: Mapping[str, str]) -> None:
        """Add tags to instances and volumes. Batch merges an instance's tags with those of the compute environment.

        Source: AWS Batch User Guide, "Use Amazon EC2 launch templates with AWS Batch".
        """
        specifications = [
            {"ResourceType": kind, "Tags": [{"Key": key, "Value": given[key]} for key in sorted(given)]}
            for kind, given in (("instance", tags), ("volume", {**tags, **self._tags}))
        ]
        self.add_property_override("LaunchTemplateData.TagSpecifications", specifications)


def _target(reservation: CapacityReservation) -> ec2.CfnLaunchTemplate.CapacityReservationSpecificationProperty:
    """Return the specification that makes instances run only in the reservation."""
    template, target = ec2.CfnLaunchTemplate, reservation.target
    is_group = target.startswith("arn:")
    return template.CapacityReservationSpecificationProperty(
        capacity_reservation_target=template.CapacityReservationTargetProperty(
            capacity_reservation_id=None if is_group else target,
            capacity_reservation_resource_group_arn=target if is_group else None,
        )
    )


class EfaInterfaces:
    """An EFA interface on each network card of a type that can have one.

    The instance's primary interface is on the first card, which has no EFA on p6-b300.48xlarge.

    `security_group` must allow all traffic among its members.
    """

    def __init__(self, row: InstanceType, *, security_group: ec2.ISecurityGroup) -> None:
        self._efa_cards = row.efa_cards
        self._security_group = security_group

    def render(self) -> list[ec2.CfnLaunchTemplate.NetworkInterfaceProperty]:
        cards = sorted({0, *self._efa_cards})
        return [
            ec2.CfnLaunchTemplate.NetworkInterfaceProperty(
                description=f"{'EFA' if card in self._efa_cards else 'Interface'} on network card {card}",
                network_card_index=card,
                # Only the primary interface, on the first card, has device index 0.
                device_index=min(card, 1),
                interface_type="efa" if card in self._efa_cards else None,
                groups=[self._security_group.security_group_id],
                delete_on_termination=True,
                # With several interfaces, EC2 assigns no public address and refuses this option.
                associate_public_ip_address=False if len(cards) == 1 else None,
            )
            for card in cards
        ]


_TYPES: dict[Capacity, tuple[str, str]] = {
    "spot": ("SPOT", "SPOT_PRICE_CAPACITY_OPTIMIZED"),
    "on-demand": ("EC2", "BEST_FIT_PROGRESSIVE"),
}
"""Batch's type for a capacity, and an allocation strategy that can be changed in place."""


@dataclass(frozen=True, kw_only=True)
class MachineImage:
    """The AMI of instances."""

    root_device_name: str
    """Device name of the root volume in the AMI."""
    image_type: ImageType
    """Batch's family of the AMI."""
    ami_id: str


@dataclass(frozen=True, kw_only=True)
class Instances:
    """Settings that the compute environments of one pool share."""

    row: InstanceType
    """The pool's first instance type. User data depends only on what all types of a pool have in common."""
    machine_image: MachineImage
    root_volume_gib: int
    ebs_key_arn: str | None
    """KMS key of the volumes, or None for the account's default key."""
    proxy: Mapping[str, str]
    """Proxy variables of the instances' services, empty without a proxy."""
    security_group: ec2.ISecurityGroup
    instance_profile: iam.IInstanceProfile
    log_group_name: str
    """Log group for boot logs and the logs of the ECS agent."""
    tags: dict[str, str]
    """Tags for instances and volumes, which CloudFormation does not tag."""
    team: str | None = None
    """The team whose jobs the instances run, or None if teams share them."""
    file_system: FileSystem | None = None
    """File system that instances mount at /fsx."""
    reservation: CapacityReservation | None = None
    """Reserved capacity for On-Demand instances."""


class ComputeEnvironment(Construct):
    """A compute environment, with no instances while nothing runs.

    It does not use the L2 of aws-batch, which adds CPU instance types by default, insists on security groups, and
    renders the launch template without a version, so that changes of the template never reach instances.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        instances: Instances,
        types: Sequence[InstanceType],
        capacity: Capacity,
        max_nodes: int,
        subnets: Sequence[ec2.ISubnet],
        multinode: bool = False,
    ) -> None:
        """Create the environment. Batch picks among `types`, all with the same card, by price and capacity.

        `multinode`: for jobs whose nodes start together, in the only one of `subnets`, with EFA if the type has it.
        Otherwise there is no EFA, and nodes that start one by one (`resources.capacity: spot`) connect over TCP on each
        instance's only interface: EC2 picks the zone with Spot capacity per node, and EFA cannot cross zones.
        """
        super().__init__(scope, name)
        row = instances.row
        efa = multinode and bool(row.efa_cards)
        reservation = instances.reservation if capacity == "on-demand" else None
        self.launch_template = LaunchTemplate(
            self,
            "LaunchTemplate",
            root_device_name=instances.machine_image.root_device_name,
            root_volume_gib=instances.root_volume_gib,
            ebs_key_arn=instances.ebs_key_arn,
            user_data=user_data(
                row,
                proxy=instances.proxy,
                log_group_name=instances.log_group_name,
                team=instances.team,
                file_system=instances.file_system,
            ),
            tags=instances.tags,
            reservation=reservation,
            efa=EfaInterfaces(row, security_group=instances.security_group) if efa else None,
        )
        batch_type, strategy = _TYPES[capacity]
        # EFA and cluster placement groups need one zone. A Capacity Block is already such a group, and accepts no
        # other.
        is_block = reservation is not None and reservation.is_block
        grouped = multinode and not is_block
        group = ec2.CfnPlacementGroup(self, "PlacementGroup", strategy="cluster") if grouped else None
        self.resource = batch.CfnComputeEnvironment(
            self,
            "Resource",
            type="MANAGED",
            state="ENABLED",
            # Batch updates instances in place, and keeps queues and running jobs, only with this, without a name, with
            # the service-linked role (the default), and with these allocation strategies.
            replace_compute_environment=False,
            update_policy=batch.CfnComputeEnvironment.UpdatePolicyProperty(
                terminate_jobs_on_update=False,
                # Time for jobs to end on the old instances: the maximum (API reference, UpdatePolicy). Batch restarts
                # longer jobs on the new instances, and they resume from their latest checkpoint.
                job_execution_timeout_minutes=7_200,
            ),
            compute_resources=batch.CfnComputeEnvironment.ComputeResourcesProperty(
                type=batch_type,
                # No bidPercentage: Spot prices cannot exceed On-Demand, and a lower cap only causes interruptions.
                allocation_strategy=strategy,
                instance_types=[each.name for each in types],
                minv_cpus=0,
                # Room for no more than max_nodes of the smallest type, which is what a job asks for.
                maxv_cpus=min(each.vcpus for each in types) * max_nodes,
                subnets=[subnet.subnet_id for subnet in subnets],
                # Batch accepts security groups either here or in the template's interfaces, not both.
                security_group_ids=None if efa else [instances.security_group.security_group_id],
                placement_group=group.ref if group else None,
                instance_role=instances.instance_profile.instance_profile_arn,
                ec2_configuration=[
                    batch.CfnComputeEnvironment.Ec2ConfigurationObjectProperty(
                        image_type=instances.machine_image.image_type,
                        image_id_override=instances.machine_image.ami_id,
                    )
                ],
                launch_template=batch.CfnComputeEnvironment.LaunchTemplateSpecificationProperty(
                    launch_template_id=self.launch_template.ref,
                    # A number: Batch resolves $Default and $Latest only once, so later versions never reach instances.
                    version=self.launch_template.attr_latest_version_number,
                ),
                tags={"Name": f"{Stack.of(self).stack_name}-{scope.node.id}-{name}", **instances.tags},
            ),
        )
        for resource in (self.resource, group):
            if resource is not None:
                # After the aspects that add tags, whose priority is MUTATING.
                Aspects.of(resource).add(_TagsOfInstances(self.launch_template), priority=AspectPriority.READONLY)


@jsii.implements(IAspect)
class _TagsOfInstances:
    """Moves the organisation's tags from a resource to the instances and volumes of its launch template.

    A changed tag would replace the resource, and a new compute environment ends all running jobs. Source: `Tags` is in
    `createOnlyProperties` in the registry's schemas of AWS::Batch::ComputeEnvironment and AWS::EC2::PlacementGroup.
    The stage's own tags stay on the resource, because policies and functions need them and they never change.
    """

    def __init__(self, launch_template: LaunchTemplate) -> None:
        self._launch_template = launch_template

    def visit(self, node: IConstruct) -> None:
        assert isinstance(node, batch.CfnComputeEnvironment | ec2.CfnPlacementGroup)  # noqa: S101 - narrows the type
        tags = {key: value for key, value in node.tags.tag_values().items() if not key.startswith(TAG_PREFIX)}
        for key in tags:
            node.tags.remove_tag(key, _MOST_IMPORTANT)
        if tags:
            self._launch_template.add_tags(tags)
