"""Settings with unusual values, in addition to infra/settings.py, for which the stacks must work."""

from infra.stages import Alerts, ExistingVpc, GitHub, Pool, Proxy, Stage, Team

_ALERTS = Alerts(emails=("ops@example.com",))
_CI = GitHub(repository="example/models", owner_id=123456, repository_id=456789, environment="production")
_PEOPLE = ("arn:aws:iam::123456789012:role/people/researcher",)

ALL = Stage(
    name="all",
    teams=(
        Team(
            name="research",
            share=2.0,
            shares_instances=True,
            monthly_budget_usd=20_000,
            huggingface_token=True,
            secret_variables=("WANDB_API_KEY", "MLFLOW_TRACKING_URI"),
            member_principals=_PEOPLE,
        ),
        Team(
            name="product",
            monthly_budget_usd=5_000,
            max_usd_per_hour=100,
            huggingface_token=True,
            member_principals=_PEOPLE,
        ),
    ),
    account="123456789012",
    region="us-east-1",
    retiring=(Pool(instance_types=("p4d.24xlarge",), release="cuda-2026.11"),),
    machine_image=None,
    max_nodes=8,
    max_on_demand_nodes=4,
    max_multinode_nodes=4,
    spot_wait_hours=4,
    availability_zone_ids=("use1-az2", "use1-az1"),
    nat_gateways=2,
    interface_endpoints=True,
    egress_ports=(443, 5671),
    egress_udp_ports=(53,),
    ebs_key_arn="arn:aws:kms:us-east-1:123456789012:key/0ea3fef3-80a7-4778-9d8c-1c0c60000000",
    own_kms_key=True,
    fsx_gib=1_200,
    monthly_budget_usd=30_000,
    max_usd_per_hour=200,
    alerts=_ALERTS,
    deploy_from=_CI,
    termination_protection=True,
)
"""A stage with every feature, in its own VPC."""

EXISTING_VPC = Stage(
    name="existing",
    teams=(Team(name="research", huggingface_token=True),),
    vpc=ExistingVpc(
        vpc_id="vpc-0123456789abcdef0",
        private_subnet_ids=("subnet-0123456789abcdef0", "subnet-0123456789abcdef1"),
        private_route_table_ids=("rtb-0123456789abcdef0",),
        default_security_group_id="sg-0123456789abcdef0",
    ),
    interface_endpoints=True,
    max_on_demand_nodes=1,
    max_multinode_nodes=2,
    permissions_boundary="organisation-boundary",
    alerts=_ALERTS,
)
"""A stage of an organisation with an existing network and permissions boundary."""

NO_NAT = Stage(
    name="closed",
    teams=(Team(name="research"),),
    nat_gateways=0,
    machine_image="ami-0123456789abcdef0",
    own_kms_key=True,
    vpc_cidr="172.20.0.0/16",
    proxy=Proxy(url="http://proxy.example.com:3128", bypass=(".example.com",)),
    bootstrap_qualifier="closed1",
    account="123456789012",
    dedicated_account=True,
    monthly_budget_usd=1_000,
)
"""No NAT, so jobs reach only AWS and what a proxy admits; with an organisation's address range and bootstrap, and a
budget of its account."""

CUDA = tuple(
    Stage(
        name=name.replace(".", "-"),
        teams=(Team(name="research"),),
        region="us-east-1" if efa else None,
        instance_types=(name,),
        max_on_demand_nodes=1,
        max_multinode_nodes=2 if efa else 0,
    )
    for name, efa in (("p4d.24xlarge", True), ("g5.4xlarge", False))
)
"""CUDA instances with EFA, and without."""

_MEMBERS = (Team(name="research", member_principals=_PEOPLE),)
HOME, WEST = (
    Stage(
        name=name,
        teams=_MEMBERS,
        account="123456789012",
        region=region,
        instance_types=("g5.xlarge",),  # without an AMI to build
        own_kms_key=name == "west",
        max_on_demand_nodes=int(name == "west"),
        reclaims_before_on_demand=1,
        spot_wait_hours=1,
        fallback_stage=other,
    )
    for name, region, other in (("home", "us-east-1", "west"), ("west", "us-west-2", "home"))
)
"""Two stages in two regions, each the fallback of the other; only the second has On-Demand capacity and a key."""

VARIANTS = (ALL, EXISTING_VPC, NO_NAT, *CUDA, HOME)
