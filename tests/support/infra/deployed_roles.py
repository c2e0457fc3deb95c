"""The roles of a stage as CloudFormation would create them, with the templates' functions resolved."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from moto.iam.aws_managed_policies import aws_managed_policies_data

from tests.support.infra.policy_evaluation import Decision, Document, Request, as_list, evaluate
from tests.support.infra.synthesis import resources

ACCOUNT = "123456789012"
REGION = "us-east-1"

_PSEUDO = {
    "AWS::AccountId": ACCOUNT,
    "AWS::Partition": "aws",
    "AWS::Region": REGION,
    "AWS::URLSuffix": "amazonaws.com",
}
_ARN_OF_TYPE = {
    "AWS::Batch::JobDefinition": "arn:aws:batch:{region}:{account}:job-definition/{name}:1",
    "AWS::Batch::JobQueue": "arn:aws:batch:{region}:{account}:job-queue/{name}",
    "AWS::Batch::ComputeEnvironment": "arn:aws:batch:{region}:{account}:compute-environment/{name}",
    "AWS::CodeBuild::Project": "arn:aws:codebuild:{region}:{account}:project/{name}",
    "AWS::ECR::Repository": "arn:aws:ecr:{region}:{account}:repository/{name}",
    "AWS::IAM::ManagedPolicy": "arn:aws:iam::{account}:policy/{name}",
    "AWS::IAM::OIDCProvider": "arn:aws:iam::{account}:oidc-provider/{name}",
    "AWS::IAM::Role": "arn:aws:iam::{account}:role/{name}",
    "AWS::KMS::Key": "arn:aws:kms:{region}:{account}:key/{name}",
    "AWS::Lambda::Function": "arn:aws:lambda:{region}:{account}:function:{name}",
    "AWS::Logs::LogGroup": "arn:aws:logs:{region}:{account}:log-group:{name}:*",
    "AWS::S3::Bucket": "arn:aws:s3:::{name}",
    "AWS::SNS::Topic": "arn:aws:sns:{region}:{account}:{name}",
    "AWS::SQS::Queue": "arn:aws:sqs:{region}:{account}:{name}",
    "AWS::SecretsManager::Secret": "arn:aws:secretsmanager:{region}:{account}:secret:{name}-AbCdEf",
}
_REF_IS_ARN = {
    "AWS::Batch::ComputeEnvironment",
    "AWS::Batch::JobDefinition",
    "AWS::Batch::JobQueue",
    "AWS::IAM::ManagedPolicy",
    "AWS::SNS::Topic",
    "AWS::SecretsManager::Secret",
}


@dataclass(frozen=True, kw_only=True)
class Role:
    """A role with the policies that apply to it."""

    stack: str
    logical_id: str
    arn: str
    trust: Document
    identity: tuple[Document, ...]
    boundary: tuple[Document, ...] | None
    tags: Mapping[str, str] = field(hash=False)

    @property
    def name(self) -> str:
        """Return the stack, and the logical id without its hash."""
        return f"{self.stack}/{self.logical_id[:-8]}"

    def decide_in(self, action: str, resource: str, context: Mapping[str, str | Sequence[str]]) -> Decision:
        """Return IAM's decision, with `context` and the condition keys that every request has."""
        always = {"aws:RequestedRegion": REGION, "aws:PrincipalAccount": ACCOUNT, "aws:PrincipalArn": self.arn}
        tags = {f"aws:PrincipalTag/{key}": value for key, value in self.tags.items()}
        request = Request(action=action, resource=resource, context={**always, **tags, **context})
        return evaluate(request, self.identity, boundary=self.boundary)


class DeployedStage:
    """All stacks of a stage. `templates` maps stack names (`jobs`, …) to templates."""

    def __init__(self, stage: str, templates: Mapping[str, dict[str, Any]]) -> None:
        self.stage = stage
        self._templates = templates

    def arn(self, stack: str, logical_id: str) -> str:
        """Return the ARN of a resource."""
        resource_type = self._templates[stack]["Resources"][logical_id]["Type"]
        service, kind = resource_type.lower().split("::")[1:] if resource_type.startswith("AWS::") else ("custom", "x")
        form = _ARN_OF_TYPE.get(resource_type, f"arn:aws:{service}:{{region}}:{{account}}:{kind}/{{name}}")
        return form.format(region=REGION, account=ACCOUNT, name=self._name(stack, logical_id))

    def only(self, stack: str, resource_type: str, prefix: str = "") -> str:
        """Return the logical id of the only resource of a type whose logical id starts with `prefix`."""
        found = [name for name in resources(self._templates[stack], resource_type) if name.startswith(prefix)]
        assert len(found) == 1, found
        return found[0]

    def role(self, stack: str, prefix: str) -> Role:
        (found,) = (role for role in self.roles if role.stack == stack and role.logical_id.startswith(prefix))
        return found

    @cached_property
    def roles(self) -> list[Role]:
        return [
            self._role(stack, logical_id, properties)
            for stack, template in self._templates.items()
            for logical_id, properties in resources(template, "AWS::IAM::Role").items()
        ]

    def published(self, name: str) -> str:
        """Return the value of a parameter of the stage."""
        return self._parameter(f"/trainyard/{self.stage}/{name}")

    def resolve(self, stack: str, value: Any) -> Any:
        """Return a value of a template with its functions resolved."""
        match value:
            case {"Ref": name}:
                return self._ref(stack, name)
            case {"Fn::GetAtt": [name, "Arn" | "JobQueueArn" | "ComputeEnvironmentArn" | "TopicArn"]}:
                return self.arn(stack, name)
            case {"Fn::GetAtt": [name, attribute]}:
                return f"{self._name(stack, name)}.{attribute}"
            case {"Fn::Join": [separator, parts]}:
                return separator.join(self.resolve(stack, part) for part in self.resolve(stack, parts))
            case {"Fn::Split": [separator, text]}:
                return self.resolve(stack, text).split(separator)
            case {"Fn::Select": [index, parts]}:
                return self.resolve(stack, parts)[int(index)]
            case {"Fn::Sub": str(text)}:
                return re.sub(r"\$\{([^}]+)\}", lambda found: str(self._ref(stack, found[1])), text)
            case {"Fn::ImportValue": name}:
                return self._exported(name)
            case dict():
                assert not any(key.startswith("Fn::") for key in value), f"cannot resolve {value}"
                return {key: self.resolve(stack, item) for key, item in value.items()}
            case list():
                return [self.resolve(stack, item) for item in value]
        return value

    def _role(self, stack: str, logical_id: str, properties: Mapping[str, Any]) -> Role:
        boundary = properties.get("PermissionsBoundary")
        return Role(
            stack=stack,
            logical_id=logical_id,
            arn=self.arn(stack, logical_id),
            trust=self.resolve(stack, properties["AssumeRolePolicyDocument"]),
            identity=tuple(self._identity(stack, logical_id, properties)),
            boundary=None if boundary is None else self._boundary(self.resolve(stack, boundary)),
            tags={tag["Key"]: tag["Value"] for tag in properties.get("Tags", [])},
        )

    def _identity(self, stack: str, logical_id: str, properties: Mapping[str, Any]) -> Iterator[Document]:
        for policy in properties.get("Policies", []):
            yield self.resolve(stack, policy["PolicyDocument"])
        for arn in self.resolve(stack, properties.get("ManagedPolicyArns", [])):
            yield self._managed(arn)
        name = self._name(stack, logical_id)
        for other, template in self._templates.items():
            for resource_type in ("AWS::IAM::Policy", "AWS::IAM::ManagedPolicy"):
                for policy in resources(template, resource_type).values():
                    if name in self.resolve(other, policy.get("Roles", [])):
                        yield self.resolve(other, policy["PolicyDocument"])

    def _boundary(self, arn: str) -> tuple[Document, ...] | None:
        """Return the stage's own boundary, or None for the account's, which may admit everything."""
        return (self._managed(arn),) if "-access-Boundary" in arn else None

    def _managed(self, arn: str) -> Document:
        if arn.startswith("arn:aws:iam::aws:policy/"):
            return aws_managed_policies()[arn]
        for stack, template in self._templates.items():
            for logical_id, policy in resources(template, "AWS::IAM::ManagedPolicy").items():
                if self.arn(stack, logical_id) == arn:
                    document = self.resolve(stack, policy["PolicyDocument"])
                    assert isinstance(document, dict)
                    return document
        raise AssertionError(f"unknown policy {arn}")

    def _name(self, stack: str, logical_id: str) -> str:
        """Return a name like CloudFormation's generated ones, with a constant suffix."""
        name = f"trainyard-{self.stage}-{stack}-{logical_id}-1A2B3C"
        is_bucket = self._templates[stack]["Resources"][logical_id]["Type"] == "AWS::S3::Bucket"
        return name.lower() if is_bucket else name

    def _ref(self, stack: str, name: str) -> Any:
        if name in _PSEUDO:
            return _PSEUDO[name]
        template = self._templates[stack]
        if name in template.get("Parameters", {}):
            parameter = template["Parameters"][name]
            reads_ssm = parameter["Type"].startswith("AWS::SSM::Parameter::Value")
            return self._parameter(parameter["Default"]) if reads_ssm else parameter["Default"]
        resource = template["Resources"][name]
        if resource["Type"] == "AWS::SSM::Parameter":
            return resource["Properties"]["Name"]
        return self.arn(stack, name) if resource["Type"] in _REF_IS_ARN else self._name(stack, name)

    def _parameter(self, path: str) -> str:
        for stack, template in self._templates.items():
            for parameter in resources(template, "AWS::SSM::Parameter").values():
                if self.resolve(stack, parameter["Name"]) == path:
                    return str(self.resolve(stack, parameter["Value"]))
        return f"value-of{path}"

    def _exported(self, name: str) -> Any:
        for stack, template in self._templates.items():
            for output in template.get("Outputs", {}).values():
                if self.resolve(stack, output.get("Export", {}).get("Name")) == name:
                    return self.resolve(stack, output["Value"])
        raise AssertionError(f"nothing exports {name}")


@cache
def aws_managed_policies() -> dict[str, Document]:
    """Return the documents of AWS's managed policies by ARN."""
    return {
        f"arn:aws:iam::aws:policy{policy.get('Path', '/')}{name}": policy["Document"]
        for name, policy in json.loads(aws_managed_policies_data).items()
    }


def statements(role: Role) -> Iterator[Mapping[str, Any]]:
    """Yield every statement of a role's identity policies."""
    for document in role.identity:
        yield from as_list(document["Statement"])
