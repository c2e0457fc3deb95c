"""Reads the YAML of a spec safely: with limits on its size, and with line numbers in errors.

A few hundred bytes of YAML can stand for more values than fit into memory, and a spec in the run bucket may not have
come from `trainyard submit`.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from jobs.core.errors import UsageError
from jobs.core.words import shortened

MAX_SPEC_BYTES = 1_000_000
"""A spec has a few hundred bytes; a larger file is something else."""

_MAX_VALUES = 10_000
"""Maximum number of values in a file, counting the values that an alias repeats."""

_MAX_DEPTH = 100
"""Maximum nesting depth of values."""

_MAX_DIGITS = 1000
"""Maximum digits of a number. Longer hexadecimal or sexagesimal numbers take PyYAML minutes, or Python cannot print
them."""

_OCTAL_IN_1_1 = re.compile(r"[-+]?0[0-7]+")

_TOO_DEEP = "its values are nested too deeply"

_SHOWN_CHARACTERS = 40
"""Characters of an invalid value that an error shows."""


@dataclass(frozen=True)
class Document:
    """One document of a file, and the line on which it starts."""

    line: int
    data: Any


def parse_documents(text: str, *, origin: str) -> list[Document]:
    """Return the YAML documents of a text from `origin`. Raises UsageError, with the line, if the YAML is invalid."""
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
        # A character that YAML forbids; the other lines of the message are about the reader.
        raise UsageError(f"{origin}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UsageError(f"{origin}: {_TOO_DEEP}") from None
    except ValueError as error:
        # Errors of Python that PyYAML's scanner does not catch: an escape beyond Unicode, a version with 5,000 digits.
        place = f"line {loader.line + 1}, column {loader.column + 1}: " if loader else ""
        raise UsageError(f"{origin}: {place}cannot be read ({error})") from None
    finally:
        if loader is not None:
            loader.dispose()
    return documents


def dump_spec(data: Any) -> str:
    """Return a spec as YAML from which every reader, of YAML 1.1 or 1.2, gets the same values."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads plain values by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema).

    PyYAML follows YAML 1.1, in which `no` is a boolean, 1:30 is 90 and 010 is 8. Two differences from 1.2 remain. 010
    is rejected, because other readers take it for 8. 1e-5 and 08 are text, as in PyYAML: a field that expects a number
    parses the text, and a script's parameter keeps its spelling.

    Duplicate keys are rejected; PyYAML would silently keep the last one. Errors name the line of a value that looks
    like a date or a number but is not valid. Files with too many values are rejected, because aliases multiply
    them.
    """

    bool_values: ClassVar = {"true": True, "false": False}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0
        self._sizes: dict[yaml.Node, int] = {}
        """Number of values in each finished node, including itself."""

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
            node.value = _with_joined_surrogates(node)
        if not isinstance(event, yaml.AliasEvent):
            self._values += 1
            self._sizes[node] = self._values - before
        elif node in self._sizes:
            self._values += self._sizes[node]
        else:
            raise yaml.composer.ComposerError(None, None, f"'{event.anchor}' contains itself", mark)
        if self._values > _MAX_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {_MAX_VALUES} values", mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            _check_digits(node)
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            # Constructors raise these for `!!timestamp 2020-13-45`, a number of 5,000 digits, `!!bool maybe`.
            kind = node.tag.rpartition(":")[2]
            text = str(node.value)
            shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"'{shown}' cannot be read as {kind} ({error}); put text in quotes",
                node.start_mark,
            ) from None

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        if _OCTAL_IN_1_1.fullmatch(text):
            raise ValueError("other YAML readers take the leading 0 for octal; remove it if this is a number")
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)

    def construct_fraction(self, node: yaml.ScalarNode) -> float:
        text = self.construct_scalar(node)
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key '{key.value}'", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that readers of YAML 1.1 and 1.2 would take for another type, or divide into different lines."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # U+0085, U+2028 and U+2029 end a line in YAML 1.1 only (YAML 1.2, 5.4). Double quotes escape them.
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, '"' if re.search("[\x85\u2028\u2029]", text) else None
    )


_Dumper.add_representer(str, _represent_text)


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
"""By type: the pattern of its plain text, and the characters that such text can start with."""

_Loader.yaml_implicit_resolvers = {}  # replaces SafeLoader's, which follow YAML 1.1
for _kind, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), [*_first, ""])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_fraction)
# Text that SafeDumper does not quote although some readers take it for a number or a boolean: 1e5, 0o17, 08, y.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"(?:0o[0-7]+|[-+]?[0-9.]+([eE][-+]?[0-9]+)?|[yYnN])\Z"),
    list("-+.0123456789yYnN"),
)


def _with_joined_surrogates(node: yaml.ScalarNode) -> str:
    """Return the text with surrogate pairs joined into characters; JSON escapes characters beyond 16 bits as pairs."""
    try:
        return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise yaml.composer.ComposerError(None, None, "a lone surrogate is not a character", node.start_mark) from None


def _check_digits(node: yaml.Node) -> None:
    if node.tag.endswith((":int", ":float")) and len(node.value) > _MAX_DIGITS:
        raise ValueError(f"more than {_MAX_DIGITS} digits")
