"""A question to EC2 before an AMI is built: whether it offers the instance type that will boot it.

An AMI takes an hour, and Batch refuses a compute environment of a type that EC2 does not list ("Instance type can only
be one of …", says CreateComputeEnvironment), so a deployment would fail after that hour. Templates ask nothing by
themselves: a function of the stack does, when it is deployed, and again before each new AMI.
"""

from pathlib import Path

import aws_cdk as cdk
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from infra.constructs.function import Function
from infra.constructs.stage_stack import acknowledge
from infra.stages import Pool, Stage

_CODE = Path(__file__).parent / "functions" / "offer.py"


class OfferQuestion(Construct):
    """The function that asks; `of` makes what fails where the answer is no."""

    def __init__(self, scope: Construct, name: str, *, stage: Stage) -> None:
        super().__init__(scope, name)
        self._function = Function(
            self,
            "Function",
            handler="index.handler",
            code=lambda_.Code.from_inline(_CODE.read_text()),
            description="Before an AMI is built: does EC2 offer its instance type?",
            environment={},
            log_retention_days=stage.log_retention_days,
        )
        self._function.execution_role.allow("Ask", ["ec2:DescribeInstanceTypeOfferings"], "*")
        self._function.execution_role.explain(
            "EC2 knows no resources for this question: it can only be allowed on all of them", "*"
        )
        acknowledge(
            self._function,
            "CloudFormation itself calls it, waits for its answer and shows why it failed",
            "NIST.800.53.R5-LambdaDLQ",
        )

    def of(self, pool: Pool, *, build: str) -> cdk.CfnResource:
        """Return a resource that cannot be made where EC2 does not offer the pool's type. `build` names its AMI."""
        resource = cdk.CustomResource(
            self,
            f"Pool-{pool.id}",
            service_token=self._function.function_arn,
            resource_type="Custom::InstanceTypeOffer",
            service_timeout=cdk.Duration.minutes(2),
            properties={
                "InstanceType": pool.instance_type,
                "Build": build,
                "Otherwise": f"EC2 offers {pool.instance_type} in no zone of this region, and Batch would refuse it: "
                "no AMI is built for it. Next: another `instance_type` in infra/settings.py (python -m infra.preflight "
                "names those on offer), or build_unoffered=True where AWS has promised you this one",
            },
        )
        child = resource.node.default_child
        assert isinstance(child, cdk.CfnResource)  # noqa: S101 - narrows the type; the L2 is built on it
        return child
