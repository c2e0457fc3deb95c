"""How each type of resource is made, changed in place and deleted.

Most types are rows: which operations of their service's API do what. The API's own model (botocore's) says which
properties an operation takes. Of a type that has no row here, and is not in RECORDED, a stack is refused.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.emulator.cloudformation.api import Api, Properties, PropertyError, takes

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


@dataclass(frozen=True, kw_only=True)
class Tagging:
    """How the tags of a type are changed."""

    add: str = "TagResource"
    remove: str = "UntagResource"
    resource: str = "ResourceArn"
    """The parameter that names the resource."""
    attribute: str = ""
    """The attribute that it is named by; empty: Ref."""


class ResourceType(ABC):
    """One type."""

    service: str
    """As boto3 calls it."""
    name_property: str = ""
    """The property with the physical name; empty if the service makes up an id."""
    tagging: Tagging | None = None
    """None if tags are properties like any other."""

    @abstractmethod
    def create(self, api: Api, name: str, properties: Properties) -> Made:
        """Make one."""

    @abstractmethod
    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        """Bring one to these properties in place; if `tagging` says how, tags are changed besides."""

    @abstractmethod
    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        """Delete one."""

    def change_tags(self, api: Api, made: Made, old: Properties, new: Properties) -> None:
        """Change the tags of one in place."""
        assert self.tagging is not None  # noqa: S101 - narrows the type
        before, after = (_pairs(one.get("Tags")) for one in (old, new))
        # The ARN of a log group ends in ":*", but not for those who tag it.
        which = str(made.attributes.get(self.tagging.attribute, made.ref)).removesuffix(":*")
        named = {self.tagging.resource: [which] if self.service == "ec2" else which}
        if gone := sorted(before.keys() - after.keys()):
            # EC2 takes tags, all others their keys.
            keys = {"Tags": [{"Key": key} for key in gone]} if self.service == "ec2" else {"TagKeys": gone}
            api(self.tagging.remove, **named, **keys)
        if after:
            api(self.tagging.add, **named, Tags=after)


class Fixed(ResourceType):
    """A type that AWS never changes in place, or moto cannot."""

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        raise refusal({*old, *new} - {key for key in old if old[key] == new.get(key)})


class Remade(ResourceType):
    """A type that a change deletes and makes again under its name: it holds nothing that would be lost."""

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        self.delete(api, made, old)
        return self.create(api, made.name, new)


Operation = tuple[str, Properties]
"""An operation, and what it is given besides what names the resource."""


@dataclass(frozen=True)
class Items:
    """A property that is a list, of which each item is added and removed by itself."""

    add: str
    remove: str
    parameter: str
    """The parameter that takes an item; of items that are objects, the key that names one."""

    def operations(self, before: list[Any], after: list[Any]) -> list[Operation]:
        """Return what leads from one list to the other."""
        gone = [(self.remove, {self.parameter: self._named(item)}) for item in before if item not in after]
        added = [
            (self.add, item if isinstance(item, Mapping) else {self.parameter: item})
            for item in after
            if item not in before
        ]
        return [*gone, *added]

    def _named(self, item: Any) -> Any:
        return item[self.parameter] if isinstance(item, Mapping) else item


@dataclass(frozen=True, kw_only=True)
class Row(ResourceType):
    """A type whose properties are parameters of its service's operations."""

    service: str
    create_by: str
    delete_by: str = ""
    """Empty: `Delete…`, as `create_by` is `Create…`."""
    ids: tuple[str, ...] = ()
    """The parameters that name one, `Ids[]` if it takes a list: the property or attribute of that name, else Ref.
    Empty: the last step of `ref`, or `name_property`."""
    update_by: str = ""
    """The operation that changes it; `create_by`, if that takes the place of what was there."""
    name_property: str = ""
    ref: str = ""
    """Where the answer has the id, step by step; empty: the name is the id, or the properties of `ids` are."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Names of Fn::GetAtt, and where the answer has them; `:…`: the end of an ARN, with {name} in it."""
    left_out: frozenset[str] = frozenset()
    """Properties that no operation takes."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Properties whose parameter has another name; `Ids[]` if it takes a list."""
    sets: Mapping[str, Callable[[Any], Operation]] = field(default_factory=dict)
    """Properties that have an operation of their own, made from the value, or from None once the template drops it."""
    items: Mapping[str, Items] = field(default_factory=dict)
    emptied: Mapping[str, Any] = field(default_factory=dict)
    """What `update_by` is given for properties that the template no longer has."""
    remade: bool = False
    """A change deletes it and makes it again under its name: it holds nothing that would be lost."""
    disable: Mapping[str, Any] = field(default_factory=dict)
    """What `update_by` is given before it can be deleted."""
    tagging: Tagging | None = None

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        afterwards = [key for key in (*self.sets, *self.items) if not self._takes(self.create_by, key)]
        done = without(properties, *afterwards)
        named = {self.name_property: name} if self.name_property else {}
        answer = api(self.create_by, **self._parameters({**done, **named}))
        attributes = {
            key: api.arn(at[1:].format(name=name)) if at.startswith(":") else _at(at, answer)
            for key, at in self.attributes.items()
        }
        made = Made(str(_at(self.ref, answer)) if self.ref else name, attributes, name)
        if not self.ref and not self.name_property:
            made.ref = "|".join(map(str, self.named(made, properties).values()))
        for key in afterwards:
            if key not in properties:
                continue
            try:
                self._set(api, made, key, {}, properties)
            except Exception:
                self.delete(api, made, done)
                raise
            done[key] = properties[key]
        return made

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        if self.remade:
            self.delete(api, made, old)
            return self.create(api, made.name, new)
        changed = sorted(key for key in {*old, *new} - self.left_out if old.get(key) != new.get(key))
        alone = [key for key in changed if key in self.sets or key in self.items]
        together = [key for key in changed if key not in alone]
        if together and self.update_by == self.create_by:
            return self.create(api, made.name, new)
        if fixed := [key for key in together if not self._updates(key, new)]:
            raise refusal(fixed)
        if together:
            taken = {key: item for key, item in {**self.emptied, **new}.items() if self._updates(key, new)}
            api(self.update_by, **{**self._parameters(taken), **self.named(made, new)})
        for key in alone:
            self._set(api, made, key, old, new)
        return made

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        for key in self.items:
            self._set(api, made, key, properties, {})
        if self.disable:
            api(self.update_by, **self.named(made, properties), **self.disable)
        api(self.delete_by or self.create_by.replace("Create", "Delete"), **self.named(made, properties))

    def named(self, made: Made, properties: Properties) -> dict[str, Any]:
        """Return the parameters that name a resource."""
        known = {**made.attributes, self.name_property: made.name, **properties}
        found = {}
        for parameter in self.ids or (self.ref.rsplit(".", 1)[-1] or self.name_property,):
            name = parameter.removesuffix("[]")
            which = known.get(name, made.ref)
            found[name] = which if name == parameter else [which]
        return found

    def _parameters(self, properties: Properties) -> dict[str, Any]:
        parameters = {}
        for key, item in without(properties, *self.left_out).items():
            parameter = self.renamed.get(key, key)
            parameters[parameter.removesuffix("[]")] = [item] if parameter.endswith("[]") else item
        return parameters

    def _set(self, api: Api, made: Made, key: str, old: Properties, new: Properties) -> None:
        if key in self.sets:
            operations = [self.sets[key](new.get(key))]
        else:
            operations = self.items[key].operations(old.get(key, []), new.get(key, []))
        for operation, parameters in operations:
            api(operation, **{**self.named(made, new), **parameters})

    def _updates(self, key: str, new: Properties) -> bool:
        """Say whether `update_by` brings a property to what a template says, or no longer says."""
        return self._takes(self.update_by, key) and (key in new or key in self.emptied)

    def _takes(self, operation: str, key: str) -> bool:
        return bool(operation) and takes(self.service, operation, self.renamed.get(key, key).removesuffix("[]"))


TYPES: dict[str, ResourceType] = {}
"""By their names in templates."""


def refusal(names: Iterable[str]) -> PropertyError:
    """Return the error for properties that AWS would change in place, and this cannot."""
    return PropertyError(
        f"the emulator cannot change {', '.join(sorted(names))} in place, as AWS would: start it afresh "
        "('trainyard local down', then 'up')"
    )


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
