"""How resources of each type are created, changed in place and deleted.

Most types are rows, which name the operations of the service's API. botocore's model of the API defines the properties
of an operation. A stack fails if it has a type that is in neither TYPES nor RECORDED.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.emulator.cloudformation.api import Api, Properties, PropertyError, has_parameter

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
"""Types that are only recorded, without a service. Custom resources are recorded too; their functions do not run."""


@dataclass
class PhysicalResource:
    """A resource that exists."""

    ref: str
    """Its physical id, returned by Ref."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Values for Fn::GetAtt."""
    name: str = ""
    """Its name, from the template or generated."""


@dataclass(frozen=True, kw_only=True)
class Tagging:
    """The operations that change the tags of a type."""

    add: str = "TagResource"
    remove: str = "UntagResource"
    resource: str = "ResourceArn"
    """The parameter that names the resource."""
    attribute: str = ""
    """The attribute with the value of `resource`. Default: Ref."""


class ResourceType(ABC):
    """A type of resources."""

    service: str
    """Its name in boto3."""
    name_property: str = ""
    """The property with the physical name; empty if the service generates an id."""
    tagging: Tagging | None = None
    """How tags change. If it is None, tags are ordinary properties."""

    @abstractmethod
    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        """Create a resource."""

    @abstractmethod
    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        """Change a resource in place. Excludes tags if `tagging` is set."""

    @abstractmethod
    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        """Delete a resource."""

    def change_tags(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> None:
        """Change the tags of a resource in place."""
        assert self.tagging is not None  # noqa: S101 - narrows the type
        before, after = (_pairs(one.get("Tags")) for one in (old, new))
        # The ARN of a log group ends in ":*", except in requests for its tags.
        which = str(physical.attributes.get(self.tagging.attribute, physical.ref)).removesuffix(":*")
        named = {self.tagging.resource: [which] if self.service == "ec2" else which}
        if gone := sorted(before.keys() - after.keys()):
            # EC2 takes tags, other services take their keys.
            keys = {"Tags": [{"Key": key} for key in gone]} if self.service == "ec2" else {"TagKeys": gone}
            api(self.tagging.remove, **named, **keys)
        if after:
            api(self.tagging.add, **named, Tags=after)


class Immutable(ResourceType):
    """A type that AWS never changes in place, or that moto cannot change."""

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        raise cannot_change({*old, *new} - {key for key in old if old[key] == new.get(key)})


class Recreated(ResourceType):
    """A type whose change deletes the resource and creates it again under its name. It has no state to lose."""

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        self.delete(api, physical, old)
        return self.create(api, physical.name, new)


Operation = tuple[str, Properties]
"""An operation, and its parameters besides those that name the resource."""


@dataclass(frozen=True)
class Items:
    """A list property whose items are added and removed one by one."""

    add: str
    remove: str
    parameter: str
    """The parameter for an item, or the key that names it if items are objects."""

    def operations(self, before: list[Any], after: list[Any]) -> list[Operation]:
        """Return the operations that turn one list into the other."""
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
    """Default: `create_by` with `Delete` instead of `Create`."""
    ids: tuple[str, ...] = ()
    """Parameters that name a resource; `Ids[]` takes a list. The value is the property or attribute of that name, else
    Ref. Default: the last step of `ref`, or `name_property`."""
    update_by: str = ""
    """The operation that changes a resource; `create_by` if that operation overwrites."""
    name_property: str = ""
    ref: str = ""
    """Path of the id in the response. If empty, the name or the properties in `ids` are the id."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Names for Fn::GetAtt, and their paths in the response. `:…` is the end of an ARN, with {name}."""
    ignored: frozenset[str] = frozenset()
    """Properties that are not sent to any operation."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Properties whose parameter has another name; `Ids[]` takes a list."""
    setters: Mapping[str, Callable[[Any], Operation]] = field(default_factory=dict)
    """Properties with a separate operation, built from the value, or from None if the template dropped it."""
    items: Mapping[str, Items] = field(default_factory=dict)
    reset_values: Mapping[str, Any] = field(default_factory=dict)
    """Values for `update_by` of properties that the template dropped."""
    recreate: bool = False
    """Whether a change deletes the resource and creates it again under its name. It has no state to lose."""
    disable: Mapping[str, Any] = field(default_factory=dict)
    """Parameters with which `update_by` disables a resource before its deletion."""
    tagging: Tagging | None = None

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        later = [key for key in (*self.setters, *self.items) if not self._takes(self.create_by, key)]
        done = without(properties, *later)
        named = {self.name_property: name} if self.name_property else {}
        answer = api(self.create_by, **self._parameters({**done, **named}))
        attributes = {
            key: api.arn(at[1:].format(name=name)) if at.startswith(":") else _at(at, answer)
            for key, at in self.attributes.items()
        }
        physical = PhysicalResource(str(_at(self.ref, answer)) if self.ref else name, attributes, name)
        if not self.ref and not self.name_property:
            physical.ref = "|".join(map(str, self.named(physical, properties).values()))
        for key in later:
            if key not in properties:
                continue
            try:
                self._set(api, physical, key, {}, properties)
            except Exception:
                self.delete(api, physical, done)
                raise
            done[key] = properties[key]
        return physical

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        if self.recreate:
            self.delete(api, physical, old)
            return self.create(api, physical.name, new)
        changed = sorted(key for key in {*old, *new} - self.ignored if old.get(key) != new.get(key))
        separate = [key for key in changed if key in self.setters or key in self.items]
        combined = [key for key in changed if key not in separate]
        if combined and self.update_by == self.create_by:
            return self.create(api, physical.name, new)
        if fixed := [key for key in combined if not self._updates(key, new)]:
            raise cannot_change(fixed)
        if combined:
            taken = {key: item for key, item in {**self.reset_values, **new}.items() if self._updates(key, new)}
            api(self.update_by, **{**self._parameters(taken), **self.named(physical, new)})
        for key in separate:
            self._set(api, physical, key, old, new)
        return physical

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        for key in self.items:
            self._set(api, physical, key, properties, {})
        if self.disable:
            api(self.update_by, **self.named(physical, properties), **self.disable)
        api(self.delete_by or self.create_by.replace("Create", "Delete"), **self.named(physical, properties))

    def named(self, physical: PhysicalResource, properties: Properties) -> dict[str, Any]:
        """Return the parameters that name a resource."""
        known = {**physical.attributes, self.name_property: physical.name, **properties}
        found = {}
        for parameter in self.ids or (self.ref.rsplit(".", 1)[-1] or self.name_property,):
            name = parameter.removesuffix("[]")
            which = known.get(name, physical.ref)
            found[name] = which if name == parameter else [which]
        return found

    def _parameters(self, properties: Properties) -> dict[str, Any]:
        parameters = {}
        for key, item in without(properties, *self.ignored).items():
            parameter = self.renamed.get(key, key)
            parameters[parameter.removesuffix("[]")] = [item] if parameter.endswith("[]") else item
        return parameters

    def _set(self, api: Api, physical: PhysicalResource, key: str, old: Properties, new: Properties) -> None:
        if key in self.setters:
            operations = [self.setters[key](new.get(key))]
        else:
            operations = self.items[key].operations(old.get(key, []), new.get(key, []))
        for operation, parameters in operations:
            api(operation, **{**self.named(physical, new), **parameters})

    def _updates(self, key: str, new: Properties) -> bool:
        """Return whether `update_by` can set a property, or reset one that the template dropped."""
        return self._takes(self.update_by, key) and (key in new or key in self.reset_values)

    def _takes(self, operation: str, key: str) -> bool:
        return bool(operation) and has_parameter(self.service, operation, self.renamed.get(key, key).removesuffix("[]"))


TYPES: dict[str, ResourceType] = {}
"""All types by their names in templates."""


def cannot_change(names: Iterable[str]) -> PropertyError:
    """Return the error for properties that AWS changes in place and the emulator cannot."""
    return PropertyError(
        f"the emulator cannot change {', '.join(sorted(names))} in place, as AWS would; restart it "
        "('trainyard local down', then 'up')"
    )


def without(properties: Properties, *names: str) -> dict[str, Any]:
    return {name: value for name, value in properties.items() if name not in names}


def is_true(value: Any) -> bool:
    """Parse a boolean, which templates may give as text."""
    return str(value).lower() == "true"


def _at(path: str, answer: Any) -> Any:
    """Return the value at a path such as `Vpc.VpcId` or `FlowLogIds.0`, or None."""
    for step in path.split("."):
        answer = answer[int(step)] if isinstance(answer, list) else (answer or {}).get(step)
    return answer


def _pairs(tags: Any) -> dict[str, str]:
    return dict(tags) if isinstance(tags, Mapping) else {tag["Key"]: tag["Value"] for tag in tags or ()}
