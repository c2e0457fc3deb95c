"""What the picture shows, read off a stage's templates: stacks, what is in them, and what flows between them."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.rules.stage_templates import PARAMETER, Resource, StageTemplates, Template

_PLUMBING = re.compile(
    # What every resource of its kind brings along, and what the arrows show already.
    r"AWS::(IAM::(Policy|InstanceProfile)|SSM::Parameter|S3::BucketPolicy|KMS::Alias|CDK::Metadata"
    r"|EC2::(Route|RouteTable|SubnetRouteTableAssociation|VPCGatewayAttachment|EIP|SecurityGroup(In|E)gress)"
    r"|Lambda::(Permission|EventInvokeConfig)|SNS::(TopicPolicy|Subscription)|SQS::QueuePolicy"
    r"|Logs::(ResourcePolicy|LogStream))|Custom::.*"
)
_ABBREVIATIONS = {"Nat": "NAT", "Oidc": "OIDC", "OIDC": "OIDC", "Vpc": "VPC", "VPC": "VPC"}
_SOURCES = {"aws.batch": "AWS Batch", "aws.ec2": "EC2", "aws.cloudformation": "CloudFormation"}
_SERVICES_SHOWN = {"FSx", "KMS", "SNS", "SQS", "EventSchemas"}
"""Services whose resources are not known without their name: a topic, a key, a file system."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One box."""

    name: str
    title: str
    lines: Sequence[str]
    """What is in it, in plain words with counts."""
    outside: bool = False
    """True: no stack, but whom the stacks deal with."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One arrow, from who gives to who takes."""

    source: str
    target: str
    labels: Sequence[str]
    """What flows."""
    read_when_deployed: bool = False
    """True: through a parameter in SSM, so that its value may change. False: a reference that CloudFormation guards."""


@dataclass(kw_only=True)
class Picture:
    """Boxes and arrows."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


def read(templates: Mapping[str, Template]) -> Picture:
    """`templates` in the order of their deployment, keyed by the construct paths of their stacks."""
    stage = StageTemplates(templates)
    picture = Picture(nodes=[_stack(stage, path, template) for path, template in templates.items()])
    for path, template in templates.items():
        picture.edges += _references(stage, path, template)
        picture.edges += _parameter_reads(stage, path, template)
    _add_outsiders(picture, stage)
    return picture


def plain(resource_type: str, count: int = 1) -> str:
    """A resource type in words: `AWS::Batch::JobQueue` is a job queue, of which there may be several."""
    parts = resource_type.split("::")
    words = re.findall(r"OIDC|VPC|[A-Z]+(?![a-z])|[A-Z][a-z0-9]+", parts[-1])
    said = [_ABBREVIATIONS.get(word, word if word.isupper() else word.lower()) for word in words]
    if parts[1] in _SERVICES_SHOWN:
        said.insert(0, parts[1])
    if count == 1:
        return " ".join(said)
    last = said[-1]
    if re.search("[^aeiou]y$", last):
        last = f"{last.removesuffix('y')}ies"
    elif last.endswith(("s", "x")):
        last = f"{last}es"
    else:
        last = f"{last}s"
    return f"{count} {' '.join([*said[:-1], last])}"


def _stack(stage: StageTemplates, path: str, template: Template) -> Node:
    found: dict[str, list[str]] = defaultdict(list)
    for logical_id, resource in template["Resources"].items():
        if not _PLUMBING.fullmatch(resource["Type"]) and not _is_cdks_own(logical_id):
            found[resource["Type"]].append(logical_id)
    services: dict[str, list[str]] = defaultdict(list)
    for resource_type, ids in sorted(found.items()):
        service = resource_type.split("::")[1]
        words = plain(resource_type, len(ids)).replace(f"{service} ", "")
        names = _published_names(stage, path, ids) - set(words.split())
        services[service].append(words + (f" ({', '.join(sorted(names))})" if 0 < len(names) <= 4 else ""))
    lines = [f"{service}: {', '.join(words)}" for service, words in sorted(services.items())]
    published = {name.split("/")[0] for name in _published_by(stage, path)}
    if published:
        lines.append(f"→ SSM: {', '.join(sorted(published))}")
    description = str(template.get("Description", "")).partition(": ")[2]
    return Node(name=path.rpartition("/")[2], title=description, lines=lines)


def _published_names(stage: StageTemplates, path: str, logical_ids: Sequence[str]) -> set[str]:
    """What the command line calls them: the last parts of the parameters that hold their names."""
    return {
        name.rpartition("/")[2]
        for logical_id in logical_ids
        for name in stage.published_names(stage.resource(path, logical_id))
        if "/" in name
    }


def _is_cdks_own(logical_id: str) -> bool:
    """True for the functions and roles of CDK's custom resources, which do nothing once deployed."""
    return logical_id.startswith("Custom")


def _published_by(stage: StageTemplates, path: str) -> Iterator[str]:
    for parameter in stage.of_type(PARAMETER):
        if parameter.stack == path and isinstance(parameter.get("Name"), str):
            yield parameter.get("Name").split("/", 3)[-1]


def _references(stage: StageTemplates, path: str, template: Template) -> Iterator[Edge]:
    found: dict[str, set[Resource]] = defaultdict(set)
    for value in _values(template, "Fn::ImportValue"):
        resource = stage.referred(path, value)
        if resource is not None:
            found[resource.stack].add(resource)
    yield from _edges(path, found, read_when_deployed=False)


def _parameter_reads(stage: StageTemplates, path: str, template: Template) -> Iterator[Edge]:
    found: dict[str, set[Resource]] = defaultdict(set)
    for declared in template.get("Parameters", {}).values():
        parameter = stage.parameter(declared.get("Default"))
        if parameter is not None and parameter.stack != path and "SSM" in str(declared.get("Type")):
            found[parameter.stack].add(_what_it_names(stage, parameter))
    yield from _edges(path, found, read_when_deployed=True)


def _what_it_names(stage: StageTemplates, parameter: Resource) -> Resource:
    """The resource whose name a parameter holds, which a repository's URI ends in; else the parameter itself."""
    value = parameter.get("Value")
    match value:
        case {"Fn::Join": [_, [*_, last]]}:
            value = last
    return stage.referred(parameter.stack, value) or parameter


def _edges(path: str, found: Mapping[str, set[Resource]], *, read_when_deployed: bool) -> Iterator[Edge]:
    for source, resources in found.items():
        counts = Counter(resource.type for resource in resources)
        yield Edge(
            source=source.rpartition("/")[2],
            target=path.rpartition("/")[2],
            labels=[plain(kind, count) for kind, count in sorted(counts.items())],
            read_when_deployed=read_when_deployed,
        )


def _add_outsiders(picture: Picture, stage: StageTemplates) -> None:
    """Whom the stacks deal with, as far as the templates say so."""
    flows: dict[tuple[str, str, bool], list[str]] = defaultdict(list)
    for rule in stage.of_type("AWS::Events::Rule"):
        pattern = rule.get("EventPattern", {})
        for source in pattern.get("source", []):
            flows[_SOURCES.get(source, source), _name(rule), True] += pattern.get("detail-type", ["events"])
    for subscription in stage.of_type("AWS::SNS::Subscription"):
        if subscription.get("Protocol") == "email":
            flows["people", _name(subscription), False].append("e-mail")
    for budget in stage.of_type("AWS::Budgets::Budget"):
        flows["AWS Budgets", _name(budget), True].append("what was spent")
    for role in stage.of_type("AWS::IAM::Role"):
        trusted = json.dumps(role.get("AssumeRolePolicyDocument", {}))
        if "token.actions.githubusercontent.com" in trusted:
            flows["GitHub Actions", _name(role), True].append("deploys by OIDC")
        elif '"AWS":' in trusted:
            flows["people", _name(role), True].append("submit and read results")
    for gateway in stage.of_type("AWS::EC2::NatGateway"):
        flows["internet", _name(gateway), False].append("HTTPS out")
    for project in stage.of_type("AWS::CodeBuild::Project"):
        flows["vault.habana.ai, PyPI", _name(project), True].append("base images, packages")
    for outsider in dict.fromkeys(name for name, _, _ in flows):
        picture.nodes.append(Node(name=outsider, title=outsider, lines=(), outside=True))
    for (outsider, stack, comes_in), labels in flows.items():
        source, target = (outsider, stack) if comes_in else (stack, outsider)
        picture.edges.append(Edge(source=source, target=target, labels=list(dict.fromkeys(labels))))


def _name(resource: Resource) -> str:
    return resource.stack.rpartition("/")[2]


def _values(value: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Every `{key: …}` in a template."""
    if isinstance(value, dict):
        if key in value:
            yield {key: value[key]}
        for item in value.values():
            yield from _values(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _values(item, key)
