"""Asks EC2 for the stage's instance types before anything that costs money is created."""

from pathlib import Path

import aws_cdk as cdk
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from infra.constructs.function import Function
from infra.constructs.stage_stack import acknowledge
from infra.stages import Stage

_CODE = Path(__file__).parent / "functions" / "offer.py"


class InstanceTypeOffer(Construct):
    """Fails the deployment of its stack if EC2 offers one of the stage's instance types in no zone of the region.

    Batch refuses such types, but only after the network, with NAT priced by the hour, and the AMI have been created.
    EC2 is asked again when a type or its release changes. Types of retiring pools are not asked for.
    """

    def __init__(self, scope: Construct, name: str, *, stage: Stage) -> None:
        super().__init__(scope, name)
        function = Function(
            self,
            "Function",
            handler="index.handler",
            code=lambda_.Code.from_inline(_CODE.read_text()),
            description="Checks that EC2 offers the instance types",
            environment={},
            log_retention_days=stage.log_retention_days,
        )
        function.execution_role.allow("ReadOffers", ["ec2:DescribeInstanceTypeOfferings"], "*")
        function.execution_role.explain(
            "EC2 supports no resources for this call: it can only be allowed on all of them", "*"
        )
        acknowledge(
            function,
            "CloudFormation calls it, waits for the result, and shows why it failed",
            "NIST.800.53.R5-LambdaDLQ",
        )
        first, *others = stage.instance_types
        for resource, setting, instance_type, release in (
            ("instance_type", "instance_types", first, stage.pool.software),
            *((name, "instance_types", name, stage.pool.software) for name in others),
            ("cpu_instance_type", "cpu_instance_type", stage.cpu_instance_type, stage.cpu_software),
        ):
            cdk.CustomResource(
                self,
                resource,
                service_token=function.function_arn,
                resource_type="Custom::InstanceTypeOffer",
                service_timeout=cdk.Duration.minutes(2),
                properties={
                    "InstanceType": instance_type,
                    "Release": release.name,
                    "Otherwise": f"EC2 offers {instance_type} in no zone of this region, and Batch would refuse it. "
                    f"Nothing that costs money was created. Next: change `{setting}` in infra/settings.py "
                    "(python -m infra.preflight lists those on offer), or set allow_unoffered=True if AWS has promised "
                    "you this one",
                },
            )
