"""YAML of a spec, whoever wrote it: within limits of size, and with the line of a mistake.

A file of a few hundred bytes can stand for more values than any machine holds, and one in the run bucket was perhaps
not written by `trainyard submit`.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from jobs.core.errors import UsageError
from jobs.core.words import shortened

MAX_SPEC_BYTES = 1_000_000
"""A spec has some hundred bytes; what is larger is something else."""

_MAX_VALUES = 10_000
"""A file has at most so many values, those counted again that an alias repeats."""

_MAX_DEPTH = 100
"""Values lie inside each other at most so deep."""

_MAX_DIGITS = 1000
"""A longer number, in hexadecimal or sexagesimal digits, takes PyYAML minutes, or can't be shown by Python."""

_OCTAL_IN_1_1 = re.compile(r"[-+]?0[0-7]+")

_TOO_DEEP = "its values lie too deep inside each other"

_SHOWN_CHARACTERS = 40
"""An error shows so many characters of a value that cannot be read."""


@dataclass(frozen=True)
class Document:
    """One part of a file, and the line that it begins on."""

    line: int
    data: Any


def parse_documents(text: str, *, origin: str) -> list[Document]:
    """Return the documents of a text that lies at `origin`. Raises UsageError, with the line, where it is no YAML."""
    loader = None
    documents = []
    try:
        loader = _Loader(text)
        while (node := loader.get_node() if loader.check_node() else None) is not None:
            documents.append(Document(node.start_mark.line + 1, loader.construct_document(node)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UsageError(f"{origin}: {place}{shortened(str(error.problem or error.context))}") from None
    except yaml.YAMLError as error:
        # A character that YAML forbids; its message carries lines of its own about the reader.
        raise UsageError(f"{origin}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UsageError(f"{origin}: {_TOO_DEEP}") from None
    except ValueError as error:
        # Python's own, which PyYAML's scanner lets through: an escape beyond Unicode's end, a version of 5,000 digits.
        place = f"line {loader.line + 1}, column {loader.column + 1}: " if loader else ""
        raise UsageError(f"{origin}: {place}this cannot be read ({error})") from None
    finally:
        if loader is not None:
            loader.dispose()
    return documents


def dump_spec(data: Any) -> str:
    """Write a spec so that every reader of YAML, of 1.1 or 1.2, reads the same values."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads plain values by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema).

    PyYAML follows YAML 1.1, to which `no` is a boolean, 1:30 is 90 and 010 is 8. Two differences from 1.2 remain. 010
    is refused, because other readers take it for 8. 1e-5 and 08 are text, as to PyYAML: where a number is expected, it
    is read from that text, and a script's parameter keeps its spelling.

    It refuses a key given twice, of which PyYAML would silently keep the last.
    It also says where a value is that looks like a date or a number and is none, and it stops at what is too large:
    a few hundred bytes of aliases can stand for more values than any machine holds.
    """

    bool_values: ClassVar = {"true": True, "false": False}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0
        self._sizes: dict[yaml.Node, int] = {}
        """How many values each finished node holds, itself included."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark, before = event.start_mark, self._values
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if isinstance(node, yaml.ScalarNode):
            node.value = _with_whole_characters(node)
        if not isinstance(event, yaml.AliasEvent):
            self._values += 1
            self._sizes[node] = self._values - before
        elif node in self._sizes:
            self._values += self._sizes[node]
        else:
            raise yaml.composer.ComposerError(None, None, f"'{event.anchor}' lies inside itself", mark)
        if self._values > _MAX_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {_MAX_VALUES} values", mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            _check_digits(node)
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            # What constructors raise: of `!!timestamp 2020-13-45`, of a number of 5,000 digits, of `!!bool maybe`.
            kind = node.tag.rpartition(":")[2]
            text = str(node.value)
            shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"'{shown}' cannot be read as {kind} ({error}); put quotes around what is text",
                node.start_mark,
            ) from None

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        if _OCTAL_IN_1_1.fullmatch(text):
            raise ValueError("other readers of YAML take its 0 for octal; leave the 0 out where it is a number")
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)

    def construct_fraction(self, node: yaml.ScalarNode) -> float:
        text = self.construct_scalar(node)
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key '{key.value}' is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader of YAML 1.1 or of 1.2 would take for something else."""


_PLAIN = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?([1-9][0-9]*|0[0-7]*)|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": ("<<", "<"),
}
"""What plain text is read as, and the characters that it begins with."""

_Loader.yaml_implicit_resolvers = {}  # in place of SafeLoader's, which are those of YAML 1.1
for _kind, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), [*_first, ""])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_fraction)
# What SafeDumper leaves plain although some reader takes it for a number or a boolean: 1e5, 0o17, 08, y.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"(?:0o[0-7]+|[-+]?[0-9.]+([eE][-+]?[0-9]+)?|[yYnN])\Z"),
    list("-+.0123456789yYnN"),
)


def _with_whole_characters(node: yaml.ScalarNode) -> str:
    """Return a text whose pairs of surrogates are characters, as in JSON, which writes those beyond 16 bits so."""
    try:
        return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise yaml.composer.ComposerError(
            None, None, "half a surrogate pair is no character", node.start_mark
        ) from None


def _check_digits(node: yaml.Node) -> None:
    if node.tag.endswith((":int", ":float")) and len(node.value) > _MAX_DIGITS:
        raise ValueError(f"more than {_MAX_DIGITS} digits")
