"""Draw specs of every kind from the JSON Schema of a spec, damage some, and pass them through `submit --dry-run`."""

import contextlib
import copy
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import yaml
from botocore.validate import ParamValidator
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from jobs.aws.connection import Aws
from jobs.cli.options import Mode
from jobs.cli.submit import submit_specs
from jobs.cli.terminal import run_reporting
from jobs.container.launcher.request import parse
from jobs.core.run import MANIFEST
from jobs.core.words import printable
from jobs.runs import planning as run_planning
from jobs.runs.batch import read_stage
from jobs.runs.planning import plan_runs
from jobs.runs.submit import delete_spec, put_spec
from jobs.spec.arguments import (
    ARTIFACT_FOLDER,
    CONFIGURATION_FOLDER,
    FILES_FOLDER,
    MODEL_FOLDER,
    TOKENIZER_FOLDER,
    SourceMarker,
    _marks,
)
from jobs.spec.catalog import CATALOG
from jobs.spec.plan import Plan
from jobs.spec.spec import spec_json_schema
from jobs.spec.submit_job import MAX_OVERRIDES_CHARACTERS
from tests.support.fuzz import hostile
from tests.support.fuzz.findings import Nonsense, Round, draw_each
from tests.support.jobs.submitting import DATA_KEY, MODEL_KEY


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


EXIT_CODES = range(5)
"""Exit codes of a command that follows no job (jobs/core/errors.py)."""

_SCHEMA = spec_json_schema()
_ARTIFACT_KEY = "tests/artifact"
_MODELS = (f"data://{MODEL_KEY}", "hf://org/model", "s3://bucket/model")
_TABLES = (f"data://{DATA_KEY}", "hf://org/name?config=a&split=train", "s3://bucket/a.csv", "run://no-run/a.jsonl")
_ARTIFACTS = (f"data://{_ARTIFACT_KEY}", "run://no-run", "run://no-run/model", "s3://bucket/artifact")
_SOURCES = {
    **dict.fromkeys((MODEL_FOLDER, CONFIGURATION_FOLDER), _MODELS),
    **dict.fromkeys((FILES_FOLDER, ARTIFACT_FOLDER, TOKENIZER_FOLDER), _ARTIFACTS),
}
"""Locations of each kind, so that many specs pass the check of their arguments."""


def put_inputs(aws: Aws, stage: str) -> None:
    """Upload the inputs of valid specs to a stage's bucket."""
    bucket = read_stage(aws, stage).data_bucket
    for key, content in (
        (f"{MODEL_KEY}/config.json", b"{}"),
        (DATA_KEY, b'{"text": "good", "label": 1}\n'),
        (f"{_ARTIFACT_KEY}/{MANIFEST}", b"{}"),
    ):
        aws.s3.put_object(Bucket=bucket, Key=key, Body=content)


@dataclass(frozen=True)
class Case:
    """One attempt: the file, the values of `--set`, and whether the spec is certainly malformed."""

    content: bytes
    overrides: tuple[str, ...] = ()
    is_malformed: bool = False


def fuzz(round_: Round, aws: Aws, stage: str, folder: Path, *, count: int, number: int) -> None:
    """Pass `count` specs through `trainyard submit --dry-run`, against the AWS that `aws` connects to."""
    path = folder / "spec.yaml"

    def look_at(case: Case) -> None:
        path.write_bytes(case.content)
        round_.look((case.content.decode(errors="replace"), case.overrides), lambda: _submit(aws, stage, path, case))

    draw_each(cases(round_.canary), look_at, count=count, number=number)


def _submit(aws: Aws, stage: str, path: Path, case: Case) -> bool:
    plans: list[Plan] = []

    def planning(*arguments: Any, **options: Any) -> list[Plan]:
        plans.extend(plan_runs(*arguments, **options))
        return plans

    with patch.object(run_planning, "plan_runs", planning):
        code, stdout = dry_run(aws, stage, path, case.overrides)
    if code == 0:
        if case.is_malformed:
            raise Nonsense("a malformed spec was accepted")
        requests = json.loads(stdout, parse_constant=_no_constant)
        for planned, request in zip(plans, requests if isinstance(requests, list) else [requests], strict=True):
            put_spec(aws, planned)  # the run's folder has arguments that are too long for the command line
            _check_request(request, aws)
            delete_spec(aws, planned)
    return code == 0


def dry_run(aws: Aws, stage: str, path: Path, overrides: tuple[str, ...] = ()) -> tuple[int, str]:
    return reported(lambda _: submit_specs(aws, stage, path, overrides, mode=Mode.DRY_RUN, yes=False, output="json"))


def reported(command: Callable[[Any], object], arguments: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run a command like the console script, and return its exit code and stdout.

    Raises Nonsense for an undocumented exit code, an error without a message, or control characters in the output.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = run_reporting(command, arguments)
    printed = stdout.getvalue() + stderr.getvalue()
    if code not in EXIT_CODES:
        raise Nonsense(f"exit code {code}")
    if code and not stderr.getvalue().strip():
        raise Nonsense(f"exit code {code} without a message")
    if "Traceback" in stderr.getvalue():
        raise RuntimeError(stderr.getvalue())
    if printable(printed) != printed:
        raise Nonsense(f"control characters in the output: {printable(printed)!r}")
    return code, stdout.getvalue()


def _check_request(request: dict[str, Any], aws: Aws) -> None:
    """Raise Nonsense if AWS Batch would refuse the request, or the container would refuse its command line."""
    shape = aws.batch.meta.service_model.operation_model("SubmitJob").input_shape
    assert shape is not None
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        raise Nonsense(f"SubmitJob: {report.generate_report()}")
    for properties in request.get("nodeOverrides", {}).get("nodePropertyOverrides", [request]):
        overrides = properties["ecsPropertiesOverride"]
        (container,) = overrides["taskProperties"][0]["containers"]
        if len(json.dumps(overrides, ensure_ascii=False)) > MAX_OVERRIDES_CHARACTERS:
            raise Nonsense("overrides that are too long for ECS")
        command, environment = container["command"], {item["name"]: item["value"] for item in container["environment"]}
        if command[:3] != ["python", "-m", "jobs.container.launch"] or any("\0" in word for word in command):
            raise Nonsense(f"the command {command}")
        "\n".join(command).encode()
        try:
            # The launcher would look up the repository on the hub.
            launch = parse([word for word in command[3:] if not word.startswith("--push-to-hub=")], environment)
        except SystemExit:
            raise Nonsense(f"the container cannot read {command}") from None
        arguments = launch.arguments.model_dump(mode="json", exclude_none=True)
        jsonschema.validate(arguments, {**_SCHEMA["$defs"][launch.kind.name], "$defs": _SCHEMA["$defs"]})


def _no_constant(name: str) -> None:
    raise Nonsense(f"{name} in a request")


@st.composite
def cases(draw: DrawFn, canary: Path) -> Case:
    """Draw a spec file: valid, with a bad value, malformed, with damaged text, or with a hostile `--set`."""
    kinds = draw(st.lists(st.sampled_from(sorted(CATALOG)), min_size=1, max_size=2))
    documents = [draw(_documents(kind)) for kind in kinds]
    what = draw(st.sampled_from(("whole", "value", "malformed", "text", "override")))
    if what == "value":
        place, key = draw(st.sampled_from([place for document in documents for place in _places(document)]))
        place[key] = draw(hostile.values(canary))
    elif what == "malformed":
        _malform(draw, draw(st.sampled_from(documents)))
    content = yaml.safe_dump_all(documents, allow_unicode=False).encode("utf-8", "surrogatepass")
    if what == "text":
        content = draw(hostile.damaged(content, hostile.snippets(canary)))
    overrides: tuple[str, ...] = ()
    if what == "override":
        key = draw(
            st.sampled_from(("name", "team", "arguments.seed", "arguments.model", "resources.nnodes", "x", "a.b"))
        )
        value = draw(st.sampled_from([*hostile.texts(canary), *hostile.snippets(canary)]))
        overrides = (draw(st.sampled_from((f"{key}={value}", value, f"{value}={key}"))),)
    return Case(content, overrides, is_malformed=what == "malformed")


@cache
def _documents(kind: str) -> SearchStrategy[dict[str, Any]]:
    """Return a strategy of specs of a kind, with the arguments that the schema requires for the kind."""
    properties = {**_SCHEMA["properties"], "job": {"const": kind}, "arguments": {"$ref": f"#/$defs/{kind}"}}
    drawn = instances({**_SCHEMA, "properties": properties, "required": ["name", "job", "arguments"]}, _SCHEMA["$defs"])
    names = st.none() | st.none() | st.sampled_from(("reviews", "second", "a" * 63))
    return st.builds(_sensible, drawn, names, st.randoms(use_true_random=False))


def _sensible(document: dict[str, Any], name: str | None, random: Any) -> dict[str, Any]:
    """Give most specs one of the stage's teams and readable inputs, which random draws rarely have."""
    document, arguments = copy.deepcopy(document), dict(document["arguments"])
    document["name"] = name or document["name"]
    if random.random() < 0.8:
        document.pop("team", None)
        document.pop("resources", None)
        schema = _SCHEMA["$defs"][document["job"]]["properties"]
        for argument, field in CATALOG[document["job"]].arguments.model_fields.items():
            marker = next((mark for mark in _marks(field) if isinstance(mark, SourceMarker)), None)
            if marker is not None and (field.is_required() or argument == "train_data" or argument in arguments):
                location = random.choice(_SOURCES.get(marker.what, _TABLES)[: random.randint(1, 4)])
                arguments[argument] = [location] if schema[argument].get("type") == "array" else location
        if "global_batch_size" in schema:
            arguments["global_batch_size"] = 8 * random.randint(1, 16)
    return {**document, "arguments": arguments}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container (mapping or list) and the key of each nested value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _malform(draw: DrawFn, document: dict[str, Any]) -> None:
    """Change a spec so that no reader may accept it."""
    schema = _SCHEMA["$defs"][document["job"]]["properties"]
    numbers = [key for key, part in schema.items() if part.get("type") in ("integer", "number")]
    match draw(st.sampled_from(("unknown key", "missing key", "no number", "no name", "mapping"))):
        case "unknown key":
            place = draw(st.sampled_from([document, document["arguments"]]))
            place[draw(st.text(min_size=1, max_size=20)) + "?"] = 1
        case "missing key":
            del document[draw(st.sampled_from(("name", "job")))]
        case "no number":
            wrong = draw(st.sampled_from((float("nan"), float("inf"), -1, -0.5, 2**70, 10**400, True, "many", [1], {})))
            place, key = draw(
                st.sampled_from([(document, "max_usd"), *((document["arguments"], key) for key in numbers)])
            )
            place[key] = wrong
        case "no name":
            key = draw(st.sampled_from(("name", "team")))
            document[key] = draw(st.sampled_from(("../x", "A", "", "a\n", "a\0", "\ud800", "a" * 64, 1, [])))
        case _:
            place, key = draw(st.sampled_from([*_places(document)]))
            place[key] = {"no such key": 1}
