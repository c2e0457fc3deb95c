"""What a rule is, and how a function becomes one."""

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
    """One rule."""

    id: str
    """`TY-<what it is about>-<what it asks for>`."""
    reason: str
    """What happens on AWS where it is broken."""
    next_step: str
    source: str
    find: Callable[[StageTemplates], Iterable[Finding]]


Find = Callable[[StageTemplates], Iterable[Finding]]


def rule(id_: str, *, next_step: str, source: str) -> Callable[[Find], Rule]:
    """Makes a rule of a function; its docstring becomes the reason."""

    def make(find: Find) -> Rule:
        assert find.__doc__ is not None, f"{id_} gives no reason"  # noqa: S101 - a slip of ours, seen at import
        return Rule(id=id_, reason=" ".join(find.__doc__.split()), next_step=next_step, source=source, find=find)

    return make


def rules_of(module: ModuleType) -> Iterable[Rule]:
    """All rules that a module defines, in their order."""
    return (value for value in vars(module).values() if isinstance(value, Rule))


def found(resource: Resource, location: str) -> Finding:
    """A finding at a property of `resource`, by its path below `Properties`."""
    return Finding(resource=resource, location=f"Properties.{location}")
