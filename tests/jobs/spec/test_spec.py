from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.core.errors import UsageError
from jobs.spec.catalog import CATALOG
from jobs.spec.spec import JobSpec, parse_spec, spec_json_schema

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


@pytest.mark.parametrize(("data", "what"), [(None, "empty"), ([], "a list"), (3, "a number"), (True, "true or false")])
def test_what_is_no_mapping_is_refused(data: object, what: str) -> None:
    assert refused(data) == (
        f"a spec is a mapping of keys to values, this is {what}\nNext: start from one of jobs/specs/"
    )


NO_CHARACTER = "a NUL or half a surrogate pair is no character of a text"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nam": "x"}, "nam: unknown key; did you mean 'name'?"),
        ({"resources": {"nnode": 1}}, "resources.nnode: unknown key; did you mean 'nnodes'?"),
        (
            {"gpu": 1},
            (
                "gpu: unknown key; available: 'arguments', 'attempts', 'hang_timeout_seconds', 'health', 'job', "
                "'max_hours', 'max_usd', 'name', 'resources', 'start_timeout_seconds', 'stop_if_idle_minutes', "
                "'sweep', 'team', 'timeout_hours'"
            ),
        ),
        ({"resources": 8}, "resources: must hold keys and their values, not 8"),
        ({"resources": {"nproc_per_node": "all"}}, "resources.nproc_per_node: must be a whole number, not 'all'"),
        (
            {"resources": {"nnodes": 2, "min_nnodes": 1}},
            "resources: min_nnodes: it is for several nodes on Spot: capacity: spot, and nnodes more than 1",
        ),
        (
            {"resources": {"nnodes": 1, "min_nnodes": 1, "capacity": "spot"}},
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
        ({"timeout_hours": "1:30"}, "timeout_hours: must be a number, not '1:30'; write hours as a number: 1.5"),
        (
            {"job": "finetune-clasification"},
            "job: job kind 'finetune-clasification' not found; did you mean 'finetune-classification'?",
        ),
        ({"job": None}, "job: must be text, not None"),
        ({"name": "latest"}, "name: 'latest' stands for the newest run; choose another name"),
        ({"arguments": None}, "arguments: must hold keys and their values, not None"),
        ({"arguments": {}}, "arguments.model: missing; it has no default"),
        ({"arguments": {"model": "m"}}, "arguments: name 'train_data' or a 'glue_task'"),
        *(
            ({"name": name}, f"name: {name!r} does not fit: lower-case letters, digits and hyphens, at most 63")
            for name in ("", "Reviews", "-a", "a" * 64, "\u00e9", "a\n")
        ),
        *(
            ({"team": team}, f"team: {team!r} does not fit: lower-case letters, digits and hyphens, at most 31")
            for team in ("", "../x", "a" * 32, "*")
        ),
    ],
    ids=str,
)
def test_mistakes_are_told_with_their_path(changed: dict[str, Any], message: str) -> None:
    assert refused({**SMALLEST, **changed}) == message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epoch": 1}, "arguments.epoch: unknown key; did you mean 'epochs'?"),
        ({"epochs": "two"}, "arguments.epochs: must be a number, not 'two'"),
        ({"model": 3}, "arguments.model: must be text, not 3"),
        ({"seed": -1}, "arguments.seed: must be at least 0, not -1"),
        ({"seed": 2**70}, f"arguments.seed: must be at most {2**32 - 1}, not {2**70}"),
        ({"label_column": ""}, "arguments.label_column: must not be empty"),
        ({"log_every_steps": 10**400}, f"arguments.log_every_steps: a number has to lie within {2**53} of zero"),
        ({"epochs": float("inf")}, "arguments.epochs: must be a finite number, not inf"),
        ({"epochs": True}, "arguments.epochs: must be a number, not True"),
        ({"warmup_ratio": 1}, "arguments.warmup_ratio: must be less than 1, not 1"),
        ({"learning_rate": 0}, "arguments.learning_rate: must be more than 0, not 0"),
        (
            {"push_to_hub": "acm\u00e9/reviews"},
            (
                "arguments.push_to_hub: 'acm\u00e9/reviews' does not fit: org/name on the Hugging Face Hub to push the "
                "model to as well"
            ),
        ),
        ({"push_to_hub": "a/b--c"}, f"arguments.push_to_hub: 'a/b--c' {NO_REPOSITORY}"),
        ({"text_column": "a\0b"}, f"arguments.text_column: {NO_CHARACTER}"),
        ({"train_data": ["t.csv", "\ud800.csv"]}, f"arguments.train_data: {NO_CHARACTER}"),
        (
            {"train_data": None, "glue_task": "sst2", "eval_data": "t.csv"},
            "arguments: without 'train_data', 'glue_task' brings its own held-out data; leave 'eval_data' out",
        ),
        (
            {"early_stopping_patience": 2},
            "arguments: 'early_stopping_patience' needs 'metric_for_best_model', which says what is better",
        ),
        (
            {"metric_for_best_model": "eval_f1"},
            "arguments: 'metric_for_best_model' chooses among evaluations: set 'evaluate_every_steps'",
        ),
        (
            {"gaudi_config": "g", "hpu_trainer": "transformers"},
            (
                "arguments: 'gaudi_config' is for optimum-habana's Trainer; leave out either it or 'hpu_trainer: "
                "transformers'"
            ),
        ),
    ],
    ids=str,
)
def test_arguments_that_no_job_could_work_with_are_refused(changed: dict[str, Any], message: str) -> None:
    assert refused({**SMALLEST, "arguments": {**SMALLEST["arguments"], **changed}}) == message


def test_a_metric_that_the_job_lacks_is_refused_with_the_closest() -> None:
    best = {"metric_for_best_model": "eval_acuracy", "evaluate_every_steps": 5}
    said = refused({**SMALLEST, "arguments": {**SMALLEST["arguments"], **best}})
    assert "'eval_acuracy' is no metric of this job; did you mean 'eval_accuracy'?; it has eval_accuracy, " in said


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("notebook", {"files": "hf://org/name"}, "arguments.files: hf://org/name: a folder is read from s3://"),
        *(
            ("notebook", {"tensorboard_logdir": place}, f"arguments.tensorboard_logdir: '{place}' is neither a folder")
            for place in ("/etc", "a/../../x", "data://x", "file:///etc")
        ),
        ("notebook", {"idle_timeout_hours": 0}, "arguments.idle_timeout_hours: must be more than 0"),
        ("fabric-check", {"largest_message_bytes": 8}, "arguments: 'smallest_message_bytes' is more than 'largest_mes"),
        ("evaluate", {"model": "m", "data": "t.csv", "text_column": "predicted"}, "arguments: the predictions have a"),
        (
            "pretrain-mlm",
            {"data": "d", "config": "c", "layers": 2},
            "arguments: 'config' says the model's shape; leave",
        ),
        ("pretrain-mlm", {"data": "d", "model": "m", "heads": 4}, "arguments: 'model' has a shape; leave out config, "),
        ("pretrain-mlm", {"data": "d", "hidden_size": 10, "heads": 3}, "arguments: hidden_size 10 does not divide"),
        ("prepare-corpus", {"data": ["a.txt", "a.txt"]}, "arguments: 'data' names a.txt twice"),
        ("prepare-corpus", {"data": ["a.csv"], "text_columns": ["a", "b"]}, "arguments: 'text_columns' names 2 colum"),
        ("script", {"code": "https://x", "command": "a.py"}, "arguments.code: 'https://x' is no folder; clone"),
        ("script", {"code": ".", "command": "/a.py"}, "arguments: '/a.py' is no file below the folder of the code"),
        ("script", {"code": ".", "command": "'a"}, "arguments.command: its quotes do not fit together"),
        (
            "script",
            {"code": ".", "command": "bash a.sh"},
            "arguments: 'command' begins with 'bash', which is no Python",
        ),
        (
            "script",
            {"code": ".", "command": "a.py {ouput}"},
            "arguments: 'command' names {ouput}, which is no place; d",
        ),
        ("script", {"code": ".", "command": "a.py", "streamed_inputs": ["x"]}, "arguments: 'streamed_inputs': 'x' is "),
        ("script", {"code": ".", "command": "a.py", "inputs": {"A": "x"}}, "arguments.inputs: 'A' cannot name an inp"),
        ("script", {"code": ".", "command": "a.py", "wheelhouse": "w"}, "arguments: 'wheelhouse' is what 'requirem"),
    ],
    ids=str,
)
def test_each_kind_refuses_what_it_cannot_do(kind: str, arguments: dict[str, Any], message: str) -> None:
    assert refused({"name": "a", "job": kind, "arguments": arguments}).startswith(message)


def test_mistakes_in_the_spec_and_in_its_arguments_are_told_together_and_shortly() -> None:
    lines = refused({**SMALLEST, "attempts": "two", "arguments": {"model": 3}}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["attempts", "arguments.model"]
    lines = refused({**SMALLEST, "attempts": "x" * 100_000, "y" * 100_000: 1}).splitlines()
    assert all(len(line) < 1300 for line in lines)
    assert lines[0].startswith("attempts: must be a whole number")
    assert lines[1].endswith("'stop_if_idle_minutes', 'sweep', 'team', 'timeout_hours'")
    lines = refused({**SMALLEST, **{f"k{number}": 1 for number in range(5000)}}).splitlines()
    assert (len(lines), lines[-1]) == (21, "4980 mistakes more")
    for key in ("name", "job"):
        without = {name: value for name, value in SMALLEST.items() if name != key}
        assert refused(without) == f"{key}: missing; it has no default"


def test_the_schema_for_editors_spells_out_the_spec_and_the_arguments_of_each_kind() -> None:
    schema = spec_json_schema()
    assert set(schema["properties"]) == set(JobSpec.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["job"]["enum"] == sorted(CATALOG)
    assert schema["required"] == ["name", "job"]
    assert "the team that pays" in schema["properties"]["team"]["description"]
    branches = {item["if"]["properties"]["job"]["const"]: item["then"]["properties"] for item in schema["allOf"]}
    assert branches.keys() == CATALOG.keys()
    for name, properties in branches.items():
        definition = schema["$defs"][properties["arguments"]["$ref"].removeprefix("#/$defs/")]
        assert set(definition["properties"]) == set(CATALOG[name].arguments.model_fields)
        assert definition["additionalProperties"] is False
        seed = definition["properties"].get("seed")
        assert seed is None or (seed["minimum"], seed["maximum"]) == (0, 2**32 - 1)
