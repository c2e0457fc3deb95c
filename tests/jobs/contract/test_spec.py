from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.contract.catalog import CATALOG
from jobs.contract.errors import UsageError
from jobs.contract.spec import JobSpec, parse_spec, spec_json_schema

SPECS = sorted((Path(__file__).parents[3] / "jobs" / "specs").glob("*.yaml"))

SMALLEST: dict[str, Any] = {
    "name": "reviews",
    "job": "finetune-classification",
    "arguments": {"model": "data://shared/m", "train_data": "data://shared/t.jsonl"},
}


NO_REPOSITORY = "can be no repository: it has '--' or '..', or ends in '.git', '-' or '.'"


def refused(data: object) -> str:
    """What the user reads, without the file's name in front of each line."""
    with pytest.raises(UsageError) as caught:
        parse_spec(data, origin="a.yaml")
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert all(line.startswith(("a.yaml: ", "Next: ")) for line in lines)
    return "\n".join(line.removeprefix("a.yaml: ") for line in lines)


def test_a_short_spec_has_defaults_for_the_rest() -> None:
    spec = parse_spec(SMALLEST, origin="a.yaml")
    assert (spec.team, spec.attempts, spec.timeout_hours) == ("research", 3, None)
    assert (spec.resources.nnodes, spec.resources.nproc_per_node) == (1, None)
    assert spec.kind is CATALOG["finetune-classification"]


def test_there_are_ready_specs_and_each_kind_has_one() -> None:
    documents = [document for path in SPECS for document in yaml.safe_load_all(path.read_text())]
    assert {parse_spec(document, origin="a ready spec").job for document in documents} == set(CATALOG)


@pytest.mark.parametrize(
    ("data", "what"),
    [(None, "empty"), ([], "a list"), ("name", "text"), (3, "a number"), (0.5, "a number"), (True, "true or false")],
)
def test_what_is_no_mapping_is_refused(data: object, what: str) -> None:
    assert refused(data) == (
        f"a spec is a mapping of keys to values, this is {what}\nNext: start from one of jobs/specs/"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nam": "x"}, "nam: unknown key; did you mean 'name'?"),
        ({"resources": {"nnode": 1}}, "resources.nnode: unknown key; did you mean 'nnodes'?"),
        (
            {"gpu": 1},
            (
                "gpu: unknown key; there is 'arguments', 'attempts', 'hang_timeout_seconds', 'health', 'job', "
                "'max_hours', 'max_usd', 'name', 'resources', 'start_timeout_seconds', 'stop_if_idle_minutes', "
                "'sweep', 'team', 'timeout_hours'"
            ),
        ),
        ({"resources": 8}, "resources: must hold keys and their values, not 8"),
        (
            {"resources": {"nproc_per_node": "all"}},
            ("resources.nproc_per_node: must be a whole number, not 'all'"),
        ),
        (
            {"resources": {"nnodes": 2, "min_nnodes": 1}},
            "resources: min_nnodes: it is for several nodes on Spot: capacity: spot, and nnodes more than 1",
        ),
        (
            {"resources": {"nnodes": 2, "min_nnodes": 3, "capacity": "spot"}},
            "resources: min_nnodes: 3 are more than the 2 of nnodes",
        ),
        (
            {"resources": {"nnodes": 10_001, "capacity": "spot"}},
            "resources: nnodes: on Spot a job has at most 10000 nodes",
        ),
        ({"resources": {"nnodes": 0}}, "resources.nnodes: must be at least 1, not 0"),
        ({"attempts": 11}, "attempts: must be at most 10, not 11"),
        ({"resources": {"nnodes": True}}, "resources.nnodes: must be a number, not True"),
        ({"timeout_hours": 337}, "timeout_hours: must be at most 336, not 337"),
        ({"arguments": None}, "arguments: must hold keys and their values, not None"),
        (
            {"job": "finetune-clasification"},
            ("job: job kind 'finetune-clasification' not found; did you mean 'finetune-classification'?"),
        ),
        ({"job": None}, "job: must be text, not None"),
    ],
)
def test_mistakes_are_told_with_their_path(changed: dict[str, Any], message: str) -> None:
    assert refused({**SMALLEST, **changed}) == message


@pytest.mark.parametrize("name", ["", "Reviews", "-a", "a" * 64, "é", "a\n"])
def test_names_that_s3_batch_and_logs_could_not_all_hold_are_refused(name: str) -> None:
    assert refused({**SMALLEST, "name": name}) == (
        f"name: {name!r} does not fit: lower-case letters, digits and hyphens, at most 63"
    )


@pytest.mark.parametrize("team", ["", "../x", "a" * 32, "*"])
def test_a_team_cannot_reach_out_of_its_prefix(team: str) -> None:
    assert refused({**SMALLEST, "team": team}) == (
        f"team: {team!r} does not fit: lower-case letters, digits and hyphens, at most 31"
    )


@pytest.mark.parametrize("missing", ["name", "job"])
def test_what_has_no_default_must_be_there(missing: str) -> None:
    assert refused({key: value for key, value in SMALLEST.items() if key != missing}) == (
        f"{missing}: missing; it has no default"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "arguments.model: missing; it has no default"),
        ({"model": "m"}, "arguments: name 'train_data' or a 'glue_task'"),
        ({"model": "m", "train_data": "t.csv", "epoch": 1}, "arguments.epoch: unknown key; did you mean 'epochs'?"),
        (
            {"model": "m", "train_data": "t.csv", "epochs": "two"},
            "arguments.epochs: must be a number, not 'two'",
        ),
        ({"model": 3, "train_data": "t.csv"}, "arguments.model: must be text, not 3"),
    ],
)
def test_mistakes_in_arguments_are_told_with_their_path(arguments: dict[str, Any], message: str) -> None:
    assert refused({**SMALLEST, "arguments": arguments}) == message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": -1}, "arguments.seed: must be at least 0, not -1"),
        ({"label_column": ""}, "arguments.label_column: must not be empty"),
        ({"seed": 2**70}, f"arguments.seed: must be at most {2**32 - 1}, not {2**70}"),
        (
            {"max_batch_size_per_rank": 2**20 + 1},
            f"arguments.max_batch_size_per_rank: must be at most {2**20}, not {2**20 + 1}",
        ),
        ({"log_every_steps": 10**400}, f"arguments.log_every_steps: a number has to lie within {2**53} of zero"),
        ({"epochs": 1e300}, f"arguments.epochs: a number has to lie within {2**53} of zero"),
        (
            {"push_to_hub": "acm\u00e9/reviews"},
            (
                "arguments.push_to_hub: 'acm\u00e9/reviews' does not fit: org/name on the Hugging Face Hub to push the "
                "model to as well"
            ),
        ),
        *(
            ({"push_to_hub": name}, f"arguments.push_to_hub: '{name}' {NO_REPOSITORY}")
            for name in ("a/b--c", "a/b.git")
        ),
        ({"text_column": "a\0b"}, "arguments.text_column: a NUL or half a surrogate pair is no character of a text"),
        ({"text_column": "a\ud800"}, "arguments.text_column: a NUL or half a surrogate pair is no character of a text"),
        (
            {"train_data": ["t.csv", "\ud800.csv"]},
            "arguments.train_data: a NUL or half a surrogate pair is no character of a text",
        ),
    ],
)
def test_arguments_that_no_job_could_work_with_are_refused(changed: dict[str, Any], message: str) -> None:
    assert refused({**SMALLEST, "arguments": {**SMALLEST["arguments"], **changed}}) == message


def test_a_spec_cannot_be_called_what_stands_for_the_newest_run() -> None:
    assert refused({**SMALLEST, "name": "latest"}) == "name: 'latest' stands for the newest run; choose another name"


@pytest.mark.parametrize("kind", sorted(CATALOG))
def test_no_kind_takes_a_seed_that_is_no_seed(kind: str) -> None:
    field = CATALOG[kind].arguments.model_json_schema()["properties"].get("seed")
    assert field is None or (field["minimum"], field["maximum"]) == (0, 2**32 - 1)


def test_mistakes_in_the_spec_and_in_its_arguments_are_told_together() -> None:
    lines = refused({**SMALLEST, "attempts": "two", "arguments": {"model": 3}}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["attempts", "arguments.model"]


def test_a_mistake_is_told_shortly_however_long_the_value_is() -> None:
    lines = refused({**SMALLEST, "attempts": "x" * 100_000, "y" * 100_000: 1}).splitlines()
    assert all(len(line) < 1300 for line in lines)
    assert lines[0].startswith("attempts: must be a whole number")
    assert lines[1].endswith("'stop_if_idle_minutes', 'sweep', 'team', 'timeout_hours'")


def test_of_very_many_mistakes_the_first_are_told_and_the_others_counted() -> None:
    lines = refused({**SMALLEST, **{f"k{number}": 1 for number in range(5000)}}).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "4980 mistakes more"


def test_the_schema_for_editors_is_the_specs_own() -> None:
    schema = spec_json_schema()
    assert set(schema["properties"]) == set(JobSpec.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["job"]["enum"] == sorted(CATALOG)
    assert schema["required"] == ["name", "job"]
    assert "the team that pays" in schema["properties"]["team"]["description"]


@pytest.mark.parametrize("kind", sorted(CATALOG))
def test_the_schema_spells_out_the_arguments_of_each_kind(kind: str) -> None:
    schema = spec_json_schema()
    (branch,) = (item for item in schema["allOf"] if item["if"]["properties"]["job"]["const"] == kind)
    definition = schema["$defs"][branch["then"]["properties"]["arguments"]["$ref"].removeprefix("#/$defs/")]
    assert set(definition["properties"]) == set(CATALOG[kind].arguments.model_fields)
    assert definition["additionalProperties"] is False
