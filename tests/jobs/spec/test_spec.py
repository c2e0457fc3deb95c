from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.core.errors import UsageError
from jobs.spec import other_names
from jobs.spec.catalog import CATALOG
from jobs.spec.kinds.script import Script
from jobs.spec.spec import JobSpec, parse_spec, spec_json_schema, spec_keys

SPECS = sorted((Path(__file__).parents[3] / "jobs" / "specs").glob("*.yaml"))

SMALLEST: dict[str, Any] = {
    "name": "reviews",
    "job": "finetune-classification",
    "arguments": {"model": "data://shared/m", "train_data": "data://shared/t.jsonl"},
}


NO_REPOSITORY = "is not a repository: it contains '--' or '..', or ends in '.git', '-' or '.'"


def refused(data: object) -> str:
    """Return the error message without the file's name at the start of each line."""
    with pytest.raises(UsageError) as caught:
        parse_spec(data, origin="a.yaml")
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert all(line.startswith(("a.yaml: ", "Next: ")) for line in lines)
    return "\n".join(line.removeprefix("a.yaml: ") for line in lines)


def test_short_spec_gets_defaults() -> None:
    spec = parse_spec(SMALLEST, origin="a.yaml")
    assert (spec.team, spec.attempts, spec.timeout_hours) == ("research", 3, None)
    assert (spec.resources.nnodes, spec.resources.nproc_per_node) == (1, None)
    assert spec.kind is CATALOG["finetune-classification"]


def test_each_kind_has_a_ready_spec() -> None:
    documents = [document for path in SPECS for document in yaml.safe_load_all(path.read_text())]
    assert {parse_spec(document, origin="a ready spec").job for document in documents} == set(CATALOG)


@pytest.mark.parametrize(
    ("data", "what"), [(None, "an empty document"), ([], "a list"), (3, "a number"), (True, "true or false")]
)
def test_spec_that_is_not_a_mapping_is_rejected(data: object, what: str) -> None:
    assert refused(data) == (
        f"a spec must be a mapping of keys to values, not {what}\nNext: start from one of the specs in jobs/specs/"
    )


NAME = "lower-case letters, digits and hyphens"
INVALID_CHARACTER = "must not contain NUL or lone surrogates"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nam": "x"}, "nam: unknown key; did you mean 'name'?"),
        ({"resources": {"nnode": 1}}, "resources.nnode: unknown key; did you mean 'nnodes'?"),
        (
            {"zone": 1},
            (
                "zone: unknown key; available: 'arguments', 'attempts', 'env', 'hang_timeout_seconds', 'health', "
                "'job', 'max_hours', 'max_usd', 'name', 'priority', 'resources', 'start_timeout_seconds', "
                "'stop_if_idle_minutes', 'sweep', 'team', 'timeout_hours'"
            ),
        ),
        ({"gpu": "L40S"}, "gpu: unknown key here; use resources.gpu"),
        ({"resources": 8}, "resources: must be a mapping of keys to values, not 8"),
        ({"resources": {"instance_types": "g5.xlarge"}}, "resources.instance_types: must be a list: ['g5.xlarge']"),
        ({"resources": {"nproc_per_node": "all"}}, "resources.nproc_per_node: must be a whole number, not 'all'"),
        (
            {"resources": {"nnodes": 2, "min_nnodes": 1}},
            "resources: min_nnodes needs several nodes on Spot: set capacity: spot and nnodes to more than 1",
        ),
        (
            {"resources": {"nnodes": 1, "min_nnodes": 1, "capacity": "spot"}},
            "resources: min_nnodes needs several nodes on Spot: set capacity: spot and nnodes to more than 1",
        ),
        (
            {"resources": {"nnodes": 2, "min_nnodes": 3, "capacity": "spot"}},
            "resources: min_nnodes (3) is more than nnodes (2)",
        ),
        (
            {"resources": {"nnodes": 10_001, "capacity": "spot"}},
            "resources: nnodes: a job on Spot can have at most 10000 nodes",
        ),
        ({"resources": {"nnodes": 0}}, "resources.nnodes: must be at least 1, not 0"),
        ({"attempts": 11}, "attempts: must be at most 10, not 11"),
        ({"resources": {"nnodes": True}}, "resources.nnodes: must be a number, not True"),
        ({"timeout_hours": 337}, "timeout_hours: must be at most 336, not 337"),
        ({"timeout_hours": "1:30"}, "timeout_hours: must be a number, not '1:30'; write hours as a number: 1.5"),
        ({"timeout_hours": b"soon"}, "timeout_hours: must be a number, not b'soon'"),
        (
            {"job": "finetune-clasification"},
            "job: job kind 'finetune-clasification' not found; did you mean 'finetune-classification'?",
        ),
        ({"job": "mlm"}, "job: job kind 'mlm' not found; did you mean 'pretrain-mlm'?"),
        ({"job": "LoRA"}, "job: job kind 'LoRA' not found; did you mean 'script' (run your own training script)?"),
        ({"epochs": 3}, "epochs: unknown key here; use arguments.epochs"),
        ({"num_gpus": 3}, "num_gpus: unknown key; use resources.nproc_per_node"),
        ({"job": None}, "job: must be text, not None"),
        ({"name": "latest"}, "name: 'latest' stands for the newest run; choose another name"),
        ({"env": {"RANK": "1"}}, "env: RANK: the platform sets it for each job"),
        ({"env": {"AWS_REGION": "x"}}, "env: AWS_REGION: the platform sets it for each job"),
        ({"env": {"PATH": "/x"}}, "env: PATH: the image or the launcher sets it"),
        ({"env": {"A": True}}, 'env: A: must be text; put the value in quotes: A: "1"'),
        (
            {"env": {"A-B": "1"}},
            "env: 'A-B' is not the name of a variable: use letters, digits and '_', no digit first",
        ),
        ({"arguments": None}, "arguments: must be a mapping of keys to values, not None"),
        ({"arguments": {}}, "arguments.model: is required"),
        ({"arguments": {"model": "m"}}, "arguments: set 'train_data' or 'glue_task'"),
        *(
            ({"name": name}, f"name: {name!r} is not valid; expected {NAME}, at most 63 characters")
            for name in ("", "Reviews", "-a", "a" * 64, "\u00e9", "a\n")
        ),
        *(
            ({"team": team}, f"team: {team!r} is not valid; expected {NAME}, at most 31 characters")
            for team in ("", "../x", "a" * 32, "*")
        ),
    ],
    ids=str,
)
def test_errors_name_the_path_of_the_key(changed: dict[str, Any], message: str) -> None:
    assert refused({**SMALLEST, **changed}) == message


def test_names_of_other_tools_lead_to_keys_that_exist() -> None:
    keys = {key for kind in CATALOG for key in spec_keys(kind)}
    assert {key for _, key, _ in other_names.ROWS} <= keys | {""}
    script = {"name": "mine", "job": "script", "arguments": {"code": ".", "command": "train.py", "lr": 1, "model": "m"}}
    assert refused(script).splitlines() == [
        "arguments.lr: unknown key; settings of your script go under arguments.parameters, or into arguments.command",
        "arguments.model: unknown key; use inputs, which you name",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epoch": 1}, "arguments.epoch: unknown key; did you mean 'epochs'?"),
        (
            {"training_arguments": {"max_grad_nor": 1}},
            "arguments.training_arguments.max_grad_nor: unknown key; did you mean 'max_grad_norm'?",
        ),
        (
            {"training_arguments": {"optim": "sgd"}},
            (
                "arguments.training_arguments.optim: unknown key; use arguments.optimizer, "
                "adamw, adafactor, sgd, rmsprop or adagrad"
            ),
        ),
        (
            {"training_arguments": {"weight_decay": 3}},
            "arguments.training_arguments.weight_decay: unknown key here; use arguments.weight_decay",
        ),
        (
            {"training_arguments": {"bf16": True}},
            "arguments.training_arguments.bf16: unknown key; remove it: the precision follows from the card",
        ),
        (
            {"warmup_steps": 9},
            "arguments.warmup_steps: unknown key here; use arguments.training_arguments.warmup_steps",
        ),
        ({"lr": 1}, "arguments.lr: unknown key; use learning_rate"),
        ({"batch_size": 8}, "arguments.batch_size: unknown key; use global_batch_size, for all cards together"),
        (
            {"per-device-train-batch-size": 8},
            (
                "arguments.per-device-train-batch-size: unknown key; use global_batch_size, for all cards together: "
                "multiply by the number of cards and gradient_accumulation_steps"
            ),
        ),
        ({"nnodes": 2}, "arguments.nnodes: unknown key here; use resources.nnodes"),
        ({"fp16": True}, "arguments.fp16: unknown key; remove it: the precision follows from the card"),
        ({"epochs": "two"}, "arguments.epochs: must be a number, not 'two'"),
        ({"model": 3}, "arguments.model: must be text, not 3"),
        ({"seed": -1}, "arguments.seed: must be at least 0, not -1"),
        ({"seed": 2**70}, f"arguments.seed: must be at most {2**32 - 1}, not {2**70}"),
        ({"label_column": ""}, "arguments.label_column: must not be empty"),
        ({"log_every_steps": 10**400}, f"arguments.log_every_steps: must be between -{2**53} and {2**53}"),
        ({"epochs": float("inf")}, "arguments.epochs: must be a finite number, not inf"),
        ({"epochs": True}, "arguments.epochs: must be a number, not True"),
        ({"warmup_ratio": 1}, "arguments.warmup_ratio: must be less than 1, not 1"),
        ({"learning_rate": 0}, "arguments.learning_rate: must be more than 0, not 0"),
        (
            {"push_to_hub": "acm\u00e9/reviews"},
            (
                "arguments.push_to_hub.repository: 'acm\u00e9/reviews' is not valid; expected repository on the "
                "Hugging Face Hub (org/name)"
            ),
        ),
        ({"push_to_hub": "a/b--c"}, f"arguments.push_to_hub.repository: 'a/b--c' {NO_REPOSITORY}"),
        ({"text_column": "a\0b"}, f"arguments.text_column: {INVALID_CHARACTER}"),
        ({"train_data": ["t.csv", "\ud800.csv"]}, f"arguments.train_data: {INVALID_CHARACTER}"),
        (
            {"train_data": None, "glue_task": "sst2", "eval_data": "t.csv"},
            "arguments: without 'train_data', 'glue_task' uses its own held-out data; remove 'eval_data'",
        ),
        (
            {"early_stopping_patience": 2},
            "arguments: 'early_stopping_patience' needs 'metric_for_best_model' to compare evaluations",
        ),
        (
            {"metric_for_best_model": "eval_f1"},
            "arguments: 'metric_for_best_model' compares evaluations: set 'evaluate_every_steps'",
        ),
        (
            {"gaudi_config": "g", "hpu_trainer": "transformers"},
            (
                "arguments: 'gaudi_config' is for optimum-habana's Trainer; remove it, or remove 'hpu_trainer: "
                "transformers'"
            ),
        ),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(changed: dict[str, Any], message: str) -> None:
    assert refused({**SMALLEST, "arguments": {**SMALLEST["arguments"], **changed}}) == message


def test_unknown_metric_is_rejected_with_the_closest_one() -> None:
    best = {"metric_for_best_model": "eval_acuracy", "evaluate_every_steps": 5}
    message = refused({**SMALLEST, "arguments": {**SMALLEST["arguments"], **best}})
    assert message.endswith("metric_for_best_model: unknown metric 'eval_acuracy'; did you mean 'eval_accuracy'?")


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("notebook", {"files": "hf://org/name"}, "arguments.files: hf://org/name: a folder is read from s3://"),
        *(
            ("notebook", {"tensorboard_logdir": place}, f"arguments.tensorboard_logdir: '{place}' is neither a folder")
            for place in ("/etc", "a/../../x", "data://x", "file:///etc")
        ),
        ("notebook", {"idle_timeout_hours": 0}, "arguments.idle_timeout_hours: must be more than 0"),
        ("fabric-check", {"largest_message_bytes": 8}, "arguments: 'smallest_message_bytes' is larger than 'largest_m"),
        ("evaluate", {"model": "m", "data": "t.csv", "text_column": "predicted"}, "arguments: 'predicted' is a column"),
        (
            "pretrain-mlm",
            {"data": "d", "config": "c", "layers": 2},
            "arguments: 'config' sets the model's shape; remove",
        ),
        ("pretrain-mlm", {"data": "d", "model": "m", "heads": 4}, "arguments: 'model' sets the model's shape; remove "),
        ("pretrain-mlm", {"data": "d", "hidden_size": 10, "heads": 3}, "arguments: hidden_size 10 is not divisible"),
        ("prepare-corpus", {"data": ["a.txt", "a.txt"]}, "arguments: 'data' contains a.txt twice"),
        ("prepare-corpus", {"data": ["a.csv"], "text_columns": ["a", "b"]}, "arguments: 'text_columns' has 2 columns"),
        ("script", {"code": "https://x", "command": "a.py"}, "arguments.code: 'https://x' is not a folder; cl"),
        ("script", {"code": ".", "command": "/a.py"}, "arguments: '/a.py' is not a file below the code's folder"),
        ("script", {"code": ".", "command": "'a"}, "arguments.command: has unbalanced quotes"),
        (
            "script",
            {"code": ".", "command": "bash a.sh"},
            "arguments: 'command' starts with 'bash', which is not a Python",
        ),
        (
            "script",
            {"code": ".", "command": "a.py {ouput}"},
            "arguments: 'command': unknown placeholder {ouput}; did you mean 'output'?",
        ),
        ("script", {"code": ".", "command": "a.py", "streamed_inputs": ["x"]}, "arguments: 'streamed_inputs': unknown"),
        (
            "script",
            {"code": ".", "command": "a.py", "conversations": ["x"]},
            "arguments: 'conversations': unknown input",
        ),
        ("script", {"code": ".", "command": "a.py", "inputs": {"A": "x"}}, "arguments.inputs: 'A' is not a valid inp"),
        *(
            ("script", {"code": ".", "command": command}, f"arguments.command: {message}")
            for command, message in {
                "a.py > log.txt": "has '>', but no shell reads the command: remove it, because the log is kept",
                "a.py 2>&1": "has '2>', but no shell reads the command: remove it, because the log is kept",
                "a.py | tee log": "has '|', but no shell reads the command: put the commands into a script",
                "a.py && b.py": "has '&&', but no shell reads the command: put the commands into a script",
                "cd one && python a.py": "begins with cd; set arguments.workdir to the folder",
                "A=1 python a.py": "begins with a variable; set it in the spec: env: {A: ...}",
                "python -W ignore a.py": "has the option -W of Python, which is not supported here; set it in the spec",
                "python -u": "names no script",
            }.items()
        ),
        ("script", {"code": ".", "command": "torchrun a.py"}, "arguments: 'command' starts with 'torchrun'; leave it"),
        ("script", {"code": ".", "command": "a.py", "keep": ["../x"]}, "arguments.keep.0: '../x' is not a file or"),
        ("script", {"code": ".", "command": "a.py", "wheelhouse": "w"}, "arguments: 'wheelhouse' needs 'requiremen"),
    ],
    ids=str,
)
def test_each_kind_rejects_invalid_arguments(kind: str, arguments: dict[str, Any], message: str) -> None:
    assert refused({"name": "a", "job": kind, "arguments": arguments}).startswith(message)


@pytest.mark.parametrize(
    ("command", "length", "word"), [("a.py", 150_000, "150,"), ("a.py {parameters.x}{parameters.x}", 70_000, "140,000")]
)
def test_parameters_too_long_for_a_process_are_refused(command: str, length: int, word: str) -> None:
    arguments = {"code": ".", "command": command, "parameters": {"x": "z" * length}}
    message = refused({"name": "a", "job": "script", "arguments": arguments})
    assert message.startswith(f"arguments: 'parameters.x' has {length:,} bytes, which makes a word of the script's ")
    assert f"environment {word}" in message


@pytest.mark.parametrize(
    ("command", "first", "later"),
    [
        ("a.py --resume {last_checkpoint} x", "a.py x", "a.py --resume /c x"),
        ("a.py --resume={last_checkpoint} x", "a.py x", "a.py --resume=/c x"),
        ("a.py --lr=1 {last_checkpoint}", "a.py --lr=1", "a.py --lr=1 /c"),
        ("a.py out {last_checkpoint}", "a.py out", "a.py out /c"),
    ],
)
def test_a_command_without_a_checkpoint_leaves_its_option_out(command: str, first: str, later: str) -> None:
    script = Script(code=".", command=command)
    assert script.filled({}) == first.split()
    assert script.filled({"last_checkpoint": "/c"}) == later.split()


@pytest.mark.parametrize(
    "command",
    ["python3 -u a.py '>' \"a && b\" <|end|> >=2 a|b", "/usr/bin/python3.12 -m a.b x", "a.py {parameters.a}"],
)
def test_a_leading_python_is_ignored_and_quoted_operators_are_text(command: str) -> None:
    words = Script(code=".", command=command, parameters={"a": 1}).words
    assert words[0] in ("a.py", "-m")
    assert words[0] != "a.py" or words[1:] in ([">", "a && b", "<|end|>", ">=2", "a|b"], ["{parameters.a}"])


def test_errors_of_spec_and_arguments_are_reported_together() -> None:
    lines = refused({**SMALLEST, "attempts": "two", "arguments": {"model": 3}}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["attempts", "arguments.model"]
    lines = refused({**SMALLEST, "attempts": "x" * 100_000, "y" * 100_000: 1}).splitlines()
    assert all(len(line) < 1300 for line in lines)
    assert lines[0].startswith("attempts: must be a whole number")
    assert lines[1].endswith("'stop_if_idle_minutes', 'sweep', 'team', 'timeout_hours'")
    lines = refused({**SMALLEST, **{f"k{number}": 1 for number in range(5000)}}).splitlines()
    assert (len(lines), lines[-1]) == (21, "4980 more errors")
    for key in ("name", "job"):
        without = {name: value for name, value in SMALLEST.items() if name != key}
        assert refused(without) == f"{key}: is required"


def test_json_schema_includes_the_arguments_of_each_kind() -> None:
    schema = spec_json_schema()
    assert set(schema["properties"]) == set(JobSpec.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["job"]["enum"] == sorted(CATALOG)
    assert schema["required"] == ["name", "job"]
    assert "the team of infra/settings.py that pays" in schema["properties"]["team"]["description"]
    branches = {item["if"]["properties"]["job"]["const"]: item["then"]["properties"] for item in schema["allOf"]}
    assert branches.keys() == CATALOG.keys()
    for name, properties in branches.items():
        definition = schema["$defs"][properties["arguments"]["$ref"].removeprefix("#/$defs/")]
        assert set(definition["properties"]) == set(CATALOG[name].arguments.model_fields)
        assert definition["additionalProperties"] is False
        seed = definition["properties"].get("seed")
        assert seed is None or (seed["minimum"], seed["maximum"]) == (0, 2**32 - 1)
