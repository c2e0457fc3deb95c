"""What a stage costs while no job runs, counted from its templates.

python -m infra.idle_costs     a table for the README: each stage of infra/settings.py, each price with its source

Prices are of us-east-1, in US dollars. Storage depends on what is in it, so it is told by its price a GB.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aws_cdk as cdk

from infra.app import build
from infra.rules.stage_templates import Template
from infra.stages.checks import selected_stages
from infra.stdout import end_with_reader
from jobs.contract.errors import TrainyardError

HOURS_A_MONTH = 730
"""AWS's own convention for a month."""

Properties = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Price:
    """What one type of resource costs for being there."""

    type: str
    what: str
    unit: str
    """With its article: `an hour`."""
    usd: float
    """For one unit."""
    usd_a_month: Callable[[Properties], float] | None
    """Of one resource, by its properties; None where it depends on how much is stored."""
    turned_off_by: str
    """The setting."""
    source: str
    """Where the price was read, and when the page said it."""


def _hourly(usd: float) -> Callable[[Properties], float]:
    return lambda _: usd * HOURS_A_MONTH


def _monthly(usd: float) -> Callable[[Properties], float]:
    return lambda _: usd


def _interface_endpoint(properties: Properties) -> float:
    # A gateway endpoint costs nothing; an interface endpoint its hours in each subnet.
    interface = properties.get("VpcEndpointType") == "Interface"
    return 0.01 * HOURS_A_MONTH * len(properties["SubnetIds"]) if interface else 0.0


def _file_system(properties: Properties) -> float:
    return 0.145 * float(properties["StorageCapacity"])


PRICES = (
    Price(
        type="AWS::EC2::NatGateway",
        what="NAT gateway",
        unit="an hour",
        usd=0.045,
        usd_a_month=_hourly(0.045),
        turned_off_by="nat_gateways=0",
        source="zeonedge.com on NAT gateways, 2026-04-10",
    ),
    Price(
        type="AWS::EC2::EIP",
        what="public address of a NAT gateway",
        unit="an hour",
        usd=0.005,
        usd_a_month=_hourly(0.005),
        turned_off_by="nat_gateways=0",
        source="AWS's announcement for 2024-02-01, as told by doit.com",
    ),
    Price(
        type="AWS::EC2::VPCEndpoint",
        what="interface endpoint, in each subnet (S3's gateway endpoint: nothing)",
        unit="an hour",
        usd=0.01,
        usd_a_month=_interface_endpoint,
        turned_off_by="interface_endpoints=False, with NAT",
        source="awsnegotiations.com on PrivateLink, 2026-05",
    ),
    Price(
        type="AWS::KMS::Key",
        what="own KMS key; the first two yearly rotations add as much each",
        unit="a month",
        usd=1.0,
        usd_a_month=_monthly(1.0),
        turned_off_by="own_kms_key=False",
        source="aws.amazon.com/kms/pricing; rotations: memory of AWS's page, unconfirmed",
    ),
    Price(
        type="AWS::FSx::FileSystem",
        what="FSx for Lustre, for each GiB of its size, full or empty",
        unit="a GiB-month",
        usd=0.145,
        usd_a_month=_file_system,
        turned_off_by="fsx_gib=0",
        source="c3x.dev on aws_fsx_lustre_file_system (SSD, 125 MB/s/TiB), undated",
    ),
    Price(
        type="AWS::SecretsManager::Secret",
        what="secret with a team's Hugging Face token",
        unit="a month",
        usd=0.40,
        usd_a_month=_monthly(0.40),
        turned_off_by="huggingface_token=False",
        source="hivebook.wiki on Secrets Manager, undated",
    ),
    Price(
        type="AWS::CloudWatch::Dashboard",
        what="dashboard; an account's first three cost nothing",
        unit="a month",
        usd=3.0,
        usd_a_month=_monthly(3.0),
        turned_off_by="nothing: it is within the three",
        source="factualminds.com on CloudWatch, 2026-06-13; free tier: aws.amazon.com/cloudwatch/pricing",
    ),
    Price(
        type="AWS::CloudWatch::Alarm",
        what="alarm; an account's first ten cost nothing",
        unit="a month",
        usd=0.10,
        usd_a_month=_monthly(0.10),
        turned_off_by="nothing: they are within the ten",
        source="memory of AWS's price list, unconfirmed; free tier: aws.amazon.com/cloudwatch/pricing",
    ),
    Price(
        type="AWS::S3::Bucket",
        what="data, runs and access logs in S3, old versions included",
        unit="a GB-month",
        usd=0.023,
        usd_a_month=None,
        turned_off_by="less data; checkpoint_retention_days, noncurrent_retention_days",
        source="learning-aws.readthedocs.io on S3 Standard, undated",
    ),
    Price(
        type="AWS::ECR::Repository",
        what="job images in ECR",
        unit="a GB-month",
        usd=0.10,
        usd_a_month=None,
        turned_off_by="fewer images",
        source="cloudburn.io on ECR, 2026-03",
    ),
    Price(
        type="AWS::ImageBuilder::Image",
        what="snapshots of the AMIs that the stage builds",
        unit="a GB-month",
        usd=0.05,
        usd_a_month=None,
        turned_off_by="machine_image: an AMI of your own",
        source="memory of AWS's price list, unconfirmed",
    ),
    Price(
        type="AWS::Logs::LogGroup",
        what="kept logs",
        unit="a GB-month",
        usd=0.03,
        usd_a_month=None,
        turned_off_by="log_retention_days",
        source="memory of AWS's price list, unconfirmed",
    ),
    Price(
        type="AWS::EC2::FlowLog",
        what="flow logs taken in; next to none while no instance runs",
        unit="a GB",
        usd=0.50,
        usd_a_month=None,
        turned_off_by="a VPC of your own",
        source="factualminds.com on CloudWatch, 2026-06-13",
    ),
)

FREE = frozenset(
    {
        # Paid for by use only, or not at all.
        "AWS::Batch::ComputeEnvironment",  # with minvCpus 0, which a rule holds
        "AWS::Batch::JobDefinition",
        "AWS::Batch::JobQueue",
        "AWS::Batch::SchedulingPolicy",
        "AWS::Budgets::Budget",  # only budgets with actions of AWS's own cost something
        "AWS::CodeBuild::Project",
        "AWS::EC2::InternetGateway",
        "AWS::EC2::LaunchTemplate",
        "AWS::EC2::PlacementGroup",
        "AWS::EC2::Route",
        "AWS::EC2::RouteTable",
        "AWS::EC2::SecurityGroup",
        "AWS::EC2::SecurityGroupEgress",
        "AWS::EC2::SecurityGroupIngress",
        "AWS::EC2::Subnet",
        "AWS::EC2::SubnetRouteTableAssociation",
        "AWS::EC2::VPC",
        "AWS::EC2::VPCGatewayAttachment",
        "AWS::Events::Rule",
        "AWS::FSx::DataRepositoryAssociation",
        "AWS::IAM::InstanceProfile",
        "AWS::IAM::ManagedPolicy",
        "AWS::IAM::OIDCProvider",
        "AWS::IAM::Policy",
        "AWS::IAM::Role",
        "AWS::ImageBuilder::Component",
        "AWS::ImageBuilder::DistributionConfiguration",
        "AWS::ImageBuilder::ImagePipeline",
        "AWS::ImageBuilder::ImageRecipe",
        "AWS::ImageBuilder::InfrastructureConfiguration",
        "AWS::ImageBuilder::LifecyclePolicy",
        "AWS::Lambda::EventInvokeConfig",
        "AWS::Lambda::Function",
        "AWS::Lambda::Permission",
        "AWS::Logs::MetricFilter",  # its metric costs in months in which a job fails
        "AWS::S3::BucketPolicy",
        "AWS::SNS::Subscription",
        "AWS::SNS::Topic",
        "AWS::SNS::TopicPolicy",
        "AWS::SQS::Queue",
        "AWS::SQS::QueuePolicy",
        "AWS::SSM::Parameter",
        "Custom::VpcRestrictDefaultSG",
    }
)
"""Types that cost nothing for being there. A type that is neither here nor above fails a test."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """What a stage has of one price."""

    price: Price
    count: int
    usd_a_month: float | None
    """None: it depends on how much is stored."""


def idle_costs(templates: Sequence[Template]) -> list[Line]:
    """What the templates of one stage cost while no job runs. Raises KeyError for a type of which nothing is known."""
    lines = []
    resources = [resource for template in templates for resource in template["Resources"].values()]
    priced = {price.type: price for price in PRICES}
    for resource in resources:
        if resource["Type"] not in priced and resource["Type"] not in FREE:
            raise KeyError(resource["Type"])
    for price in PRICES:
        mine = [resource.get("Properties", {}) for resource in resources if resource["Type"] == price.type]
        of_each = price.usd_a_month
        total = None if of_each is None else sum(of_each(properties) for properties in mine)
        if mine and total != 0:
            lines.append(Line(price=price, count=len(mine), usd_a_month=total))
    return lines


def table(stages: Mapping[str, Sequence[Line]]) -> Iterator[str]:
    """Markdown: a row for each price that any stage has, a column for each stage."""
    yield f"| what | price | {' | '.join(f'`{stage}`, a month' for stage in stages)} | turned off by | source |"
    yield f"|---|---|{'---:|' * len(stages)}---|---|"
    for price in PRICES:
        found = [next((line for line in lines if line.price is price), None) for lines in stages.values()]
        if any(found):
            unit = f"${price.usd:g} {price.unit}"
            cells = " | ".join(map(_cell, found))
            yield f"| {price.what} | {unit} | {cells} | {price.turned_off_by} | {price.source} |"
    totals = (sum(line.usd_a_month or 0 for line in lines) for lines in stages.values())
    yield f"| **together, without storage** | | {' | '.join(f'**${total:.2f}**' for total in totals)} | | |"


def _cell(line: Line | None) -> str:
    if line is None:
        return "none"
    return "by size" if line.usd_a_month is None else f"{line.count}: ${line.usd_a_month:.2f}"


def main() -> None:
    context = json.loads((Path(__file__).parents[1] / "cdk.json").read_text())["context"]
    rows = selected_stages()
    with tempfile.TemporaryDirectory() as directory:
        app = cdk.App(context=context, outdir=directory)
        build(app, rows)
        assembly = app.synth()
        stages = {
            row.name: idle_costs(
                [stack.template for stack in assembly.get_nested_assembly(f"assembly-{row.name}").stacks]
            )
            for row in rows
        }
    end_with_reader()
    print("\n".join(table(stages)))


if __name__ == "__main__":
    try:
        main()
    except TrainyardError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
