"""Turn a JSON Schema into a strategy. Supports the parts of JSON Schema that a spec's schema uses."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


def instances(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> SearchStrategy[Any]:
    """Return a strategy of values that the schema allows. Raises LookupError for an unsupported keyword."""
    if "$ref" in schema:
        return instances(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([instances(part, definitions) for part in schema["anyOf"]])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return _object(schema, definitions)
        case "object":
            return st.dictionaries(st.text(), st.none() | st.integers() | st.text(), max_size=3)
        case "array":
            items = instances(schema["items"], definitions)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=schema.get("maxItems", 20))
        case "string" if "pattern" in schema:
            # In JSON Schema, `$` matches only at the very end; in Python also before a final newline.
            return st.from_regex(schema["pattern"].replace("$", r"\Z"))
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=schema.get("maxLength"))
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            low, high = (schema.get(end, schema.get(f"exclusive{end.capitalize()}")) for end in ("minimum", "maximum"))
            return st.floats(
                *(low, high),
                exclude_min="exclusiveMinimum" in schema,
                exclude_max="exclusiveMaximum" in schema,
                allow_nan=False,
                allow_infinity=False,
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    raise LookupError(f"unsupported JSON Schema: {schema}")


def _object(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> SearchStrategy[dict[str, Any]]:
    needed = set(schema.get("required", ()))
    fields = {name: instances(part, definitions) for name, part in schema["properties"].items()}
    return st.fixed_dictionaries(
        {name: field for name, field in fields.items() if name in needed},
        optional={name: field for name, field in fields.items() if name not in needed},
    )
