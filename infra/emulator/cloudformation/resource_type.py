"""What every type of resource says: how one is made, changed in place and deleted.

A class registers itself under its name in templates. Most types need no more than a `Plain` row: operations of their
service's API. Of a type that has no class here, and is not in RECORDED, a stack is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.emulator.cloudformation.api import Api, Properties, PropertyError

RECORDED = frozenset(
    {
        "AWS::CDK::Metadata",
        "AWS::EC2::PlacementGroup",
        "AWS::FSx::DataRepositoryAssociation",
        "AWS::ImageBuilder::DistributionConfiguration",
        "AWS::ImageBuilder::ImagePipeline",
        "AWS::ImageBuilder::InfrastructureConfiguration",
        "AWS::ImageBuilder::LifecyclePolicy",
    }
)
"""Types that are kept on record, without a service behind them. So are all custom resources: no function runs."""


@dataclass
class Made:
    """A resource that is there."""

    ref: str
    """Its physical id, which Ref gives."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """What Fn::GetAtt gives."""
    name: str = ""
    """The name that it was made with, from its template or made up."""


class ResourceType:
    """One type."""

    service = ""
    """As boto3 calls it."""
    name_property = ""
    """The property with the physical name; empty if the service makes up an id."""
    tagging: tuple[str, str, str] | None = None
    """The operations that set and remove tags, and the parameter that names the resource."""

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        """Make one."""
        raise NotImplementedError

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        """Bring one to these properties in place; if `tagging` says how, tags are changed besides."""
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        if changed:
            raise PropertyError(
                f"the embedded AWS cannot change {', '.join(changed)} in place, as AWS would: start it afresh "
                "('trainyard local down', then 'up')"
            )
        return made

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        """Delete one."""
        raise NotImplementedError

    def tagged_by(self, made: Made) -> Any:
        """Return what the operations on tags name it by."""
        return made.ref

    def change_tags(self, api: Api, made: Made, old: Properties, new: Properties) -> None:
        """Change the tags of one in place."""
        assert self.tagging is not None  # noqa: S101 - narrows the type
        add, remove, parameter = self.tagging
        before, after = (_pairs(one.get("Tags")) for one in (old, new))
        named = {parameter: self.tagged_by(made)}
        if gone := sorted(before.keys() - after.keys()):
            # EC2 takes tags, all others their keys.
            which = {"Tags": [{"Key": key} for key in gone]} if self.service == "ec2" else {"TagKeys": gone}
            api(remove, **named, **which)
        if after:
            api(add, **named, Tags=after)


@dataclass(frozen=True, kw_only=True)
class Plain(ResourceType):
    """A type whose properties are the parameters of one operation."""

    service: str
    create_by: str
    delete_by: tuple[str, str]
    """An operation, and the parameter that takes the id; `Ids[]` if it takes a list."""
    name_property: str = ""
    ref: str = ""
    """Where the answer has the id, step by step; `=…`: a property that is the id; empty: the name is the id."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Names of Fn::GetAtt, and where the answer has them; `:…`: the end of an ARN, with {name} in it."""
    left_out: frozenset[str] = frozenset()
    """Properties that the operation does not take."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Properties whose parameter has another name; `Ids[]` if it takes a list."""
    put: bool = False
    """The same operation changes it."""
    remade: bool = False
    """A change deletes it and makes it again under its name: it holds nothing that would be lost."""
    tagging: tuple[str, str, str] | None = None

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        answer = api(self.create_by, **self.request(name, properties))
        ref = name
        if self.ref:
            ref = str(properties[self.ref[1:]] if self.ref.startswith("=") else _at(self.ref, answer))
        attributes = {
            key: api.arn(at[1:].format(name=name)) if at.startswith(":") else _at(at, answer)
            for key, at in self.attributes.items()
        }
        return Made(ref, attributes, name)

    def request(self, name: str, properties: Properties) -> dict[str, Any]:
        """Return what `create_by` is given."""
        request: dict[str, Any] = {self.name_property: name} if self.name_property else {}
        for key, item in without(properties, self.name_property, *self.left_out).items():
            parameter = self.renamed.get(key, key)
            request[parameter.removesuffix("[]")] = [item] if parameter.endswith("[]") else item
        return request

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        if self.put:
            return self.create(api, made.name, new)
        if self.remade:
            self.delete(api, made, old)
            return self.create(api, made.name, new)
        return super().change(api, made, old, new)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        operation, parameter = self.delete_by
        name = parameter.removesuffix("[]")
        api(operation, **{name: made.ref if name == parameter else [made.ref]})


TYPES: dict[str, ResourceType] = {}
"""By their names in templates."""


def without(properties: Properties, *names: str) -> dict[str, Any]:
    return {name: value for name, value in properties.items() if name not in names}


def holds(value: Any) -> bool:
    """Read a boolean, which templates may give as text."""
    return str(value).lower() == "true"


def _at(path: str, answer: Any) -> Any:
    """Return what is at a path such as `Vpc.VpcId` or `FlowLogIds.0`; None if there is nothing."""
    for step in path.split("."):
        answer = answer[int(step)] if isinstance(answer, list) else (answer or {}).get(step)
    return answer


def _pairs(tags: Any) -> dict[str, str]:
    return dict(tags) if isinstance(tags, Mapping) else {tag["Key"]: tag["Value"] for tag in tags or ()}
