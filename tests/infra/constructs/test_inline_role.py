import aws_cdk as cdk
from aws_cdk import assertions
from aws_cdk import aws_iam as iam

from infra.constructs.inline_role import InlineRole

ONLY_HERE = {"StringEquals": {"aws:RequestedRegion": "us-east-1"}}


def test_each_statement_has_its_own_conditions() -> None:
    stack = cdk.Stack()
    role = InlineRole(stack, "Role", description="x", assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"))
    role.allow("Read", ["s3:GetObject"], "a", "b", conditions=ONLY_HERE)
    role.allow("Write", ["s3:PutObject"], "a")
    role.deny("Nothing", ["s3:DeleteObject"], not_resources=["c"], conditions=ONLY_HERE)
    (policy,) = assertions.Template.from_stack(stack).find_resources("AWS::IAM::Policy").values()
    assert policy["Properties"]["PolicyDocument"]["Statement"] == [
        {"Sid": "Read", "Effect": "Allow", "Action": "s3:GetObject", "Resource": ["a", "b"], "Condition": ONLY_HERE},
        {"Sid": "Write", "Effect": "Allow", "Action": "s3:PutObject", "Resource": "a"},
        {"Sid": "Nothing", "Effect": "Deny", "Action": "s3:DeleteObject", "NotResource": "c", "Condition": ONLY_HERE},
    ]
