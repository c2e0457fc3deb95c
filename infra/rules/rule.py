"""The rule as a value, and the decorator that makes one of a function."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

from infra.rules.stage_templates import Resource, StageTemplates


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One place where a template breaks a rule."""

    resource: Resource
    location: str
    """Path of the property in the resource, or of the one that is missing: `Properties.Timeout`."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule: its id, its reason, and the function that finds what breaks it."""

    id: str
    """`TY-<what it is about>-<what it asks for>`."""
    reason: str
    """What happens on AWS where it is broken."""
    next_step: str
    source: str
    find: Callable[[StageTemplates], Iterable[Finding]]


Find = Callable[[StageTemplates], Iterable[Finding]]


def rule(id_: str, *, next_step: str, source: str) -> Callable[[Find], Rule]:
    """Make a rule of a function, whose docstring becomes the reason."""

    def make(find: Find) -> Rule:
        assert find.__doc__ is not None, f"{id_} gives no reason"  # noqa: S101 - a slip of ours, seen at import
        return Rule(id=id_, reason=" ".join(find.__doc__.split()), next_step=next_step, source=source, find=find)

    return make


def rules_of(module: ModuleType) -> Iterable[Rule]:
    """Return all rules that a module defines, in their order."""
    return (value for value in vars(module).values() if isinstance(value, Rule))


def found(resource: Resource, location: str) -> Finding:
    """Return a finding at a property of `resource`, by its path below `Properties`."""
    return Finding(resource=resource, location=f"Properties.{location}")
