"""Plans: the request, the placement with reasons, and what is rejected before any money is spent."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.session import get_session
from botocore.validate import ParamValidator

from jobs.core.errors import ConfigurationError, TrainyardError, UsageError
from jobs.core.images import child_name, images
from jobs.core.instance_types import INSTANCE_TYPES, InstanceType, instance_type
from jobs.core.queues import types_text
from jobs.core.stage import DeployedStage
from jobs.money.prices import Prices, Quote, recorded
from jobs.spec.arguments import parse_flags
from jobs.spec.catalog import CATALOG
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from jobs.spec.launcher_options import LauncherOptions, Limits
from jobs.spec.plan import plan
from jobs.spec.spec import parse_spec
from jobs.spec.submit_job import Dependency
from tests.support.jobs.planning import (
    ARGUMENTS,
    EMULATED,
    LADDER,
    LARGE,
    RUN_ID,
    STAGE,
    command_of,
    environment_of,
    spec,
)

SPECS = sorted((Path(__file__).parents[3] / "jobs" / "specs").glob("*.yaml"))
MAX_PAYLOAD_BYTES = 30 * 1024
"""AWS Batch's limit on a SubmitJob request."""

APART = replace(
    LARGE,
    queues={**LARGE.queues, "spot@research": "arn:queue/own", "cpu-spot@research": "arn:queue/own-cpu"},
)
"""A stage whose team `research` has its own instances, on Spot only."""


def test_the_whole_request() -> None:
    arguments = {"model": "s3://elsewhere/m", "train_data": "data://shared/t.jsonl", "learning_rate": 1e-4}
    planned = plan(spec(arguments=arguments, attempts=5, timeout_hours=1.5), STAGE, run_id=RUN_ID)
    resolved = FinetuneClassification.model_validate({**arguments, "train_data": "s3://data-bucket/shared/t.jsonl"})
    options = ["--instance-type=dl1.24xlarge", "--nproc-per-node=8", "--capacity=spot"]
    container = {
        "name": "main",
        "command": ["python", "-m", "jobs.container.launch", *options, "finetune-classification", *resolved.to_flags()],
        "environment": [
            {"name": "TRAINYARD_RUN_URI", "value": f"s3://run-bucket/research/{RUN_ID}/"},
            {"name": "TRAINYARD_ACCELERATOR", "value": "hpu"},
        ],
    }
    assert planned.request == {
        "jobName": RUN_ID,
        "jobQueue": "arn:queue/gaudi",
        "jobDefinition": "arn:definition/research:3",
        "shareIdentifier": "research",
        "ecsPropertiesOverride": {"taskProperties": [{"containers": [container]}]},
        "retryStrategy": {
            "attempts": 5,
            "evaluateOnExit": [
                {"onStatusReason": "Host EC2*", "action": "RETRY"},
                {"onExitCode": "75", "action": "RETRY"},
                {"onStatusReason": "Task failed to start*", "action": "RETRY"},
                {"onStatusReason": "*", "action": "EXIT"},
                {"onExitCode": "*", "action": "EXIT"},
            ],
        },
        "timeout": {"attemptDurationSeconds": 5400},
        "tags": {
            "trainyard:stage": "dev",
            "trainyard:run": RUN_ID,
            "trainyard:team": "research",
            "trainyard:job": "finetune-classification",
        },
        "propagateTags": True,
    }


def test_plan_has_placement_inputs_and_prices() -> None:
    planned = plan(spec(), STAGE, run_id=RUN_ID)
    assert str(planned.run_location) == f"s3://run-bucket/research/{RUN_ID}/"
    assert (planned.queue, planned.queue_reason) == (
        "spot",
        "one node of dl1.24xlarge on Spot: started again after a reclaim",
    )
    assert (planned.accelerator, planned.accelerator_reason) == ("hpu", "dl1.24xlarge of stage 'dev'")
    assert (planned.nnodes, planned.nproc_per_node) == (1, 8)
    assert (planned.on_demand_usd_per_hour, planned.spot_usd_per_hour) == (13.10904, 3.93)
    assert planned.notes == ()
    assert planned.inputs == (
        ("model", "s3://data-bucket/shared/m", "a pretrained model's folder"),
        ("train_data", "s3://data-bucket/shared/t.jsonl", "a table of examples"),
    )
    # The spec that is stored with the run has the resolved locations.
    assert planned.spec.arguments["model"] == "s3://data-bucket/shared/m"
    # The share identifier has only letters and digits, as Batch requires; the timeout is the kind's.
    other = plan(spec(team="nlp-core", resources={"nproc_per_node": 2}), STAGE, run_id=RUN_ID)
    assert (other.request["shareIdentifier"], other.request["jobDefinition"]) == ("nlpcore", "arn:definition/nlp:1")
    assert other.run_location.key == f"nlp-core/{RUN_ID}/"
    assert other.request["timeout"] == {"attemptDurationSeconds": 12 * 3600}
    assert (other.nproc_per_node, other.spot_usd_per_hour) == (2, 3.93)
    assert "schedulingPriorityOverride" not in other.request
    assert plan(spec(priority=-3), STAGE, run_id=RUN_ID).request["schedulingPriorityOverride"] == 7
    assert other.notes == ("uses 2 of the 8 HPUs of a dl1.24xlarge; you pay for the whole instance",)


def test_launcher_gets_every_limit_of_the_spec() -> None:
    limits = {
        "max_usd": 40.0,
        "max_hours": 30.0,
        "hang_timeout_seconds": 600.0,
        "stop_if_idle_minutes": 5.0,
        "start_timeout_seconds": 60.5,
        "health": {"seconds": 20.0, "min_teraflops": 100.0, "min_gigabytes_per_second": 10.0},
    }
    assert limits.keys() == Limits.model_fields.keys()
    command = command_of(plan(spec(**limits), STAGE, run_id=RUN_ID))
    flags = command[command.index("jobs.container.launch") + 1 : command.index("finetune-classification")]
    assert parse_flags(LauncherOptions, flags, program="test").model_dump(include=set(limits)) == limits


@pytest.mark.parametrize(
    ("name", "accelerator", "ranks"),
    [("m6i.4xlarge", "cpu", 1), ("g5.4xlarge", "cuda", 1), ("p4d.24xlarge", "cuda", 8)],
)
def test_same_spec_runs_on_other_instances(name: str, accelerator: str, ranks: int) -> None:
    planned = plan(spec(), replace(STAGE, instance_types=(instance_type(name),)), run_id=RUN_ID)
    assert environment_of(planned)["TRAINYARD_ACCELERATOR"] == accelerator
    assert {f"--instance-type={name}", f"--nproc-per-node={ranks}"} <= set(command_of(planned))
    assert planned.notes == ()


def test_emulator_trains_on_what_the_machine_has() -> None:
    planned = plan(spec(), EMULATED, run_id=RUN_ID)
    assert environment_of(planned)["TRAINYARD_ACCELERATOR"] == "auto"
    assert planned.accelerator_reason == "the emulator runs jobs on this machine; on AWS: hpu of dl1.24xlarge"
    assert "--nproc-per-node=2" in command_of(planned)
    assert planned.notes == ("runs 2 ranks on this machine instead of 8, with the same global batch size",)
    # Everything else is as on AWS.
    assert planned.request["jobQueue"] == "arn:queue/gaudi"


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_ready_specs_fit_batchs_request_limit(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        ready = parse_spec(document, origin=path.name)
        for stage in (LARGE, replace(LARGE, emulated_processes=2)):
            planned = plan(ready, stage, run_id=f"{ready.name}-20261121-120005-00ab")
            assert len(json.dumps(planned.request)) < MAX_PAYLOAD_BYTES


def test_dependencies_are_in_the_request() -> None:
    earlier = Dependency(
        run_id="clean-20261121-120005-00ab", job_id="5f3a", queue="cpu-spot", arguments=("train_data",)
    )
    together = Dependency(run_id="bert-20261121-120005-00ac", job_id=None, queue="spot", arguments=("model",))
    planned = plan(spec(), LARGE, run_id=RUN_ID, dependencies=(earlier, together))
    assert planned.request["dependsOn"] == [{"jobId": "5f3a"}, {"jobId": "<job id of bert-20261121-120005-00ac>"}]
    submitted = planned.with_job_ids({"bert-20261121-120005-00ac": "77b0"})
    assert submitted.request == {**planned.request, "dependsOn": [{"jobId": "5f3a"}, {"jobId": "77b0"}]}
    # Only a run on Spot can be moved, and only if there is an On-Demand queue.
    assert [note for note in planned.notes if "moved to On-Demand" in note] == [together.note(LARGE)]
    assert plan(spec(), STAGE, run_id=RUN_ID, dependencies=(earlier, together)).notes == ()
    # A run in a team's queue can be moved to the team's On-Demand queue, not to a shared one.
    own = replace(together, queue="spot@research")
    assert own.note(LARGE) is None
    assert own.note(replace(LARGE, queues={**LARGE.queues, "on-demand@research": "arn:own"})) == together.note(LARGE)


def test_request_names_who_submits_it() -> None:
    planned = plan(spec(), STAGE, run_id=RUN_ID)
    named = planned.submitted_by("assumed-role/research/alice,o'neil@example.org")
    # Batch refuses a tag with other characters than letters, digits, spaces and _.:/=+-@.
    assert named.request["tags"]["trainyard:submitter"] == "assumed-role/research/alice_o_neil@example.org"
    assert planned.submitted_by("") == planned


def test_pushes_and_trackers_need_the_teams_secret() -> None:
    pushing = spec(arguments={**ARGUMENTS, "push_to_hub": "acme/reviews"})
    for stage in (replace(STAGE, huggingface_teams=frozenset({"nlp-core"})), EMULATED):
        with pytest.raises(UsageError, match=r"team 'research' has no secret for a Hugging Face token in stage 'dev'"):
            plan(pushing, stage, run_id=RUN_ID)
    its_own = replace(STAGE, huggingface_teams=frozenset({"research"}))
    assert "--push-to-hub=acme/reviews" in command_of(plan(pushing, its_own, run_id=RUN_ID))
    each = spec(arguments={**ARGUMENTS, "push_to_hub": {"repository": "acme/reviews", "each_save": True}})
    whole = '--push-to-hub={"repository": "acme/reviews", "each_save": true}'
    assert whole in command_of(plan(each, its_own, run_id=RUN_ID))
    half = replace(STAGE, secret_variables={"research": frozenset({"WANDB_API_KEY"}), "nlp-core": frozenset()})
    with pytest.raises(UsageError, match=r"has no variable for mlflow \(MLFLOW_TRACKING_URI"):
        plan(spec(arguments={**ARGUMENTS, "report_to": ["wandb", "mlflow"]}), half, run_id=RUN_ID)
    one = plan(spec(arguments={**ARGUMENTS, "report_to": "wandb"}), half, run_id=RUN_ID)
    assert '--report-to=["wandb"]' in command_of(one)


def test_a_spec_sets_variables_of_its_job() -> None:
    planned = plan(spec(env={"HF_HUB_OFFLINE": 1, "MLFLOW_TRACKING_URI": "http://x"}), STAGE, run_id=RUN_ID)
    [container] = planned.request["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["environment"]
    half = replace(STAGE, secret_variables={"research": frozenset({"WANDB_API_KEY"}), "nlp-core": frozenset()})
    with pytest.raises(UsageError, match="env: WANDB_API_KEY already comes from the secret of team 'research'"):
        plan(spec(env={"WANDB_API_KEY": "x"}), half, run_id=RUN_ID)
    tracked = spec(arguments={**ARGUMENTS, "report_to": "mlflow"}, env={"MLFLOW_TRACKING_URI": "http://x"})
    plan(tracked, half, run_id=RUN_ID)


def test_all_errors_of_a_plan_are_reported_together() -> None:
    arguments = {**ARGUMENTS, "push_to_hub": "acme/reviews", "global_batch_size": 4}
    arguments["train_data"] = "data://nlp-core/t.jsonl"
    with pytest.raises(UsageError) as caught:
        plan(spec(arguments=arguments, max_usd=0.0001), STAGE, run_id=RUN_ID)
    push, reads, budget, ranks = str(caught.value).splitlines()
    assert budget.startswith("max_usd: 0.0001 pays for 0.0 more minutes")
    assert "; next: set max_usd to more than" in budget
    assert push.startswith("arguments.push_to_hub: team 'research' has no secret")
    assert ranks == "global_batch_size 4 is not divisible by 8 ranks; next: set it to 8"
    assert reads.startswith("arguments.train_data: s3://data-bucket/nlp-core/t.jsonl belongs to team 'nlp-core'")


def test_arguments_too_long_for_ecs_are_stored_as_a_file() -> None:
    tables = [f"data://shared/{'t' * 60}-{number}.jsonl" for number in range(2000)]
    arguments = {**ARGUMENTS, "train_data": tables}
    several = {"resources": {"nnodes": 2, "capacity": "on-demand"}}
    on_two = plan(spec(arguments=arguments, **several), LARGE, run_id=RUN_ID)
    for planned in (plan(spec(arguments=arguments), STAGE, run_id=RUN_ID), on_two):
        assert planned.arguments_file is not None
        # There is room for the variables that AWS Batch adds; the launcher's options stay on the command line.
        request = json.dumps(planned.request)
        assert len(request) < 8192 - 1024
        assert f'"--arguments-file={planned.arguments_file.name}", "finetune-classification"]' in request
        stored = FinetuneClassification.model_validate_json(planned.arguments_file.content)
        assert stored.train_data == [table.replace("data://", "s3://data-bucket/") for table in tables]
    short = plan(spec(arguments={**ARGUMENTS, "train_data": tables[:40]}), STAGE, run_id=RUN_ID)
    assert short.arguments_file is None
    assert any(flag.startswith("--train-data=") for flag in command_of(short))


@pytest.mark.parametrize(
    "env",
    [{"TEXT": '"' * 4000}, {f"V{number}": "1" for number in range(400)}, {"TEXT": "\N{GRINNING FACE}" * 4000}],
    ids=["escapes", "many", "emoji"],
)
def test_variables_too_long_for_batch_or_ecs_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"^env: the variables have [\d,]+ more characters than a job has room for"):
        plan(spec(arguments=ARGUMENTS, env=env), STAGE, run_id=RUN_ID)
    plan(spec(arguments=ARGUMENTS, env={"TEXT": "x" * 4000}), STAGE, run_id=RUN_ID)


@pytest.mark.parametrize("location", ["data://nlp-core/t.jsonl", "s3://run-bucket/nlp-core/t.jsonl"])
def test_data_of_another_team_is_rejected(location: str) -> None:
    with pytest.raises(
        UsageError, match=r"arguments.train_data: .* belongs to team 'nlp-core'; team 'research' cannot"
    ):
        plan(spec(arguments={**ARGUMENTS, "train_data": location}), STAGE, run_id=RUN_ID)
    plan(spec(team="nlp-core", arguments={**ARGUMENTS, "train_data": location}), STAGE, run_id=RUN_ID)
    elsewhere = location.replace("-bucket", "-elsewhere").replace("data://nlp-core", "data://nlp-cores")
    plan(spec(arguments={**ARGUMENTS, "train_data": elsewhere}), STAGE, run_id=RUN_ID)


def test_shared_data_is_read_from_its_mount() -> None:
    mounting = replace(STAGE, shared_data_mount="/shared-data")
    arguments = {"model": "data://shared/m", "train_data": "data://research/t.jsonl"}
    planned = plan(spec(arguments=arguments), mounting, run_id=RUN_ID)
    # Only the shared data is mounted.
    assert {"--model=/shared-data/m", "--train-data=s3://data-bucket/research/t.jsonl"} <= set(command_of(planned))
    # Inputs are checked on S3, which the laptop can reach, and the stored spec has the permanent locations.
    assert planned.inputs[0][:2] == ("model", "s3://data-bucket/shared/m")
    assert planned.spec.arguments["model"] == "s3://data-bucket/shared/m"
    on_a_laptop = replace(EMULATED, shared_data_mount="/shared-data")
    assert "--model=s3://data-bucket/shared/m" in command_of(plan(spec(), on_a_laptop, run_id=RUN_ID))
    tokenizing = {"job": "tokenize", "arguments": {"corpus": "data://shared/c", "tokenizer": "data://shared/t"}}
    assert "--corpus=s3://data-bucket/shared/c" in command_of(plan(spec(**tokenizing), mounting, run_id=RUN_ID))


def test_multinode_job_gets_its_command_by_node_overrides() -> None:
    one = plan(spec(), LARGE, run_id=RUN_ID)
    planned = plan(
        spec(resources={"nnodes": 3}, arguments={**ARGUMENTS, "global_batch_size": 48}), LARGE, run_id=RUN_ID
    )
    assert (planned.request["jobQueue"], planned.capacity) == ("arn:queue/multinode", "on-demand")
    assert planned.queue_reason == (
        "several nodes start together On-Demand, in one zone; with resources.capacity: spot, each starts when Spot "
        "has capacity"
    )
    assert planned.usd_per_hour == planned.on_demand_usd_per_hour == pytest.approx(3 * 13.10904)
    assert planned.request["jobDefinition"] == "arn:definition/several:7"
    # Trap: the number of nodes can be overridden only if the range is open.
    assert "ecsPropertiesOverride" not in planned.request
    (nodes,) = planned.request["nodeOverrides"]["nodePropertyOverrides"]
    assert (planned.request["nodeOverrides"]["numNodes"], nodes["targetNodes"]) == (3, "0:")
    (container,) = nodes["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    assert container["command"] == [
        {"--global-batch-size=32": "--global-batch-size=48", "--capacity=spot": "--capacity=on-demand"}.get(flag, flag)
        for flag in command_of(one)
    ]
    assert planned.request["retryStrategy"] == one.request["retryStrategy"]


def test_a_node_group_on_spot_is_an_array_of_single_node_jobs() -> None:
    one = plan(spec(), STAGE, run_id=RUN_ID)
    planned = plan(spec(resources={"nnodes": 4, "min_nnodes": 2, "capacity": "spot"}), STAGE, run_id=RUN_ID)
    same = {key: value for key, value in one.request.items() if key != "ecsPropertiesOverride"}
    found = {key: value for key, value in planned.request.items() if key != "ecsPropertiesOverride"}
    assert found == {**same, "arrayProperties": {"size": 4}}
    added = set(command_of(planned)) - set(command_of(one))
    assert added == {"--rendezvous-min-nnodes=2", "--rendezvous-attempts=3"}
    assert (planned.queue, planned.capacity, planned.usd_per_hour) == ("spot", "spot", 4 * 3.93)
    assert planned.queue_reason == "4 nodes of dl1.24xlarge on Spot: each starts separately, and again after a reclaim"
    assert planned.notes == (
        (
            "the 4 nodes start one by one, and cost money while they wait for each other; after 15 minutes, 2 are "
            "enough to start; if one is reclaimed, all save and restart, which counts as one of 3 attempts"
        ),
    )
    # By default, all nodes are needed.
    whole = plan(spec(resources={"nnodes": 4, "capacity": "spot"}), LARGE, run_id=RUN_ID)
    assert "--rendezvous-min-nnodes=4" in command_of(whole)
    assert "enough" not in whole.notes[0]


@pytest.mark.parametrize(
    "resources", [{}, {"nnodes": 2}, {"nnodes": 2, "capacity": "spot"}, {"capacity": "on-demand"}], ids=str
)
def test_requests_are_valid_for_the_api(resources: dict[str, Any]) -> None:
    planned = plan(spec(resources=resources), LARGE, run_id=RUN_ID)
    shape = get_session().get_service_model("batch").shape_for("SubmitJobRequest")
    report = ParamValidator().validate(planned.request, shape)
    assert not report.has_errors(), report.generate_report()


def test_queue_depends_on_team_capacity_and_kind() -> None:
    on_demand = plan(spec(resources={"capacity": "on-demand"}), LARGE, run_id=RUN_ID)
    assert (on_demand.queue, on_demand.request["jobQueue"]) == ("on-demand", "arn:queue/on-demand")
    assert on_demand.queue_reason == (
        "one node of dl1.24xlarge, On-Demand as resources.capacity requests: never interrupted"
    )
    assert (on_demand.capacity, on_demand.usd_per_hour) == ("on-demand", 13.10904)
    own = plan(spec(team="research"), APART, run_id=RUN_ID)
    assert (own.queue, own.request["jobQueue"], own.capacity) == ("spot@research", "arn:queue/own", "spot")
    others = plan(spec(team="nlp-core"), APART, run_id=RUN_ID)
    assert (others.queue, others.request["jobQueue"]) == ("spot", "arn:queue/gaudi")
    corpus = plan(spec(job="prepare-corpus", arguments={"data": ["data://shared/a.txt"]}), STAGE, run_id=RUN_ID)
    assert (corpus.request["jobQueue"], corpus.queue_reason) == (
        "arn:queue/cpu",
        "'prepare-corpus' needs no accelerator",
    )
    assert (corpus.instance_type.name, corpus.accelerator) == ("m6i.4xlarge", "cpu")


@pytest.mark.parametrize(
    ("resources", "queue", "names"),
    [
        ({}, "spot", "g6e.xlarge, else g5.xlarge or g5.4xlarge"),
        ({"gpu_memory_gib": 20}, "spot", "g6e.xlarge, else g5.xlarge or g5.4xlarge"),
        ({"gpu": "L40S"}, "spot-g6e.xlarge", "g6e.xlarge"),
        ({"gpu": "a10g"}, "spot-g5.xlarge", "g5.xlarge or g5.4xlarge"),
        ({"gpu_memory_gib": 40}, "spot-g6e.xlarge", "g6e.xlarge"),
        ({"instance_types": ["g5.4xlarge", "g5.xlarge"]}, "spot-g5.xlarge", "g5.xlarge or g5.4xlarge"),
        ({"capacity": "on-demand"}, "on-demand", "g6e.xlarge, else g5.xlarge or g5.4xlarge"),
        # Nodes that train together need equal cards.
        ({"nnodes": 2, "capacity": "spot"}, "spot-g6e.xlarge", "g6e.xlarge"),
        ({"nnodes": 2}, "multinode", "g6e.xlarge"),
    ],
    ids=str,
)
def test_a_spec_narrows_the_types_of_the_stage(resources: dict[str, Any], queue: str, names: str) -> None:
    planned = plan(spec(resources=resources), LADDER, run_id=RUN_ID)
    assert (planned.queue, types_text(planned.instance_types)) == (queue, names)
    assert planned.nproc_per_node == 1


def test_on_demand_jobs_have_the_reserved_type_only() -> None:
    reserved = replace(LADDER, reserved_instance_type=LADDER.instance_types[0])
    for stage, on_demand in ((LADDER, "g6e.xlarge g5.xlarge g5.4xlarge"), (reserved, "g6e.xlarge")):
        for capacity, names in (("on-demand", on_demand), ("spot", "g6e.xlarge g5.xlarge g5.4xlarge")):
            placed = plan(spec(resources={"capacity": capacity}), stage, run_id=RUN_ID)
            assert [row.name for row in placed.instance_types] == names.split()


def test_a_job_takes_the_prices_of_all_types_along() -> None:
    quotes = {"g6e.xlarge": 0.95, "g5.4xlarge": 0.7}

    def prices(row: InstanceType) -> Prices:
        known = recorded(row)
        quoted = Quote(usd_per_hour=quotes.get(row.name, 0), date="2026-11-28", source="EC2")
        return replace(known, spot=quoted) if row.name in quotes else known

    planned = plan(spec(max_usd=5), LADDER, run_id=RUN_ID, prices_of=prices)
    assert planned.usd_per_hour == 0.95
    options = [part for part in command_of(planned) if part.startswith(("--instance", "--other", "--spot"))]
    assert options == [
        "--instance-type=g6e.xlarge",
        '--other-instance-types={"g5.xlarge": null, "g5.4xlarge": 0.7}',
        "--spot-usd-per-hour=0.95",
    ]
    # The budget has to pay for the most expensive type.
    on_demand = {"capacity": "on-demand"}
    with pytest.raises(UsageError, match=r"max_usd: 0.1 pays for 3.2 more minutes of 1 x g6e.xlarge"):
        plan(spec(max_usd=0.1, resources=on_demand), LADDER, run_id=RUN_ID)


@pytest.mark.parametrize(
    ("resources", "message", "next_step"),
    [
        (
            {"gpu": "H100"},
            "that fit. It has g6e.xlarge (1 x L40S of 45 GiB), g5.xlarge or g5.4xlarge (1 x A10G of 22 GiB)",
            "change resources.gpu, or ask for other instance_types",
        ),
        (
            {"gpu_memory_gib": 80},
            "resources.gpu_memory_gib: no queue of stage 'dev' has only",
            "change resources.gpu_m",
        ),
        ({"instance_types": ["g5.2xlarge"]}, "resources.instance_types: no queue", "change resources.instance_types"),
        (
            {"instance_types": ["g5.xlarge"]},
            "that fit: the queue of g5.xlarge also starts other types. It has",
            "change resources.instance_types",
        ),
        (
            {"gpu": "L40S", "capacity": "on-demand"},
            "that fit: the queue of g6e.xlarge also starts other types",
            "set resources.capacity to 'spot', which has a queue of g6e.xlarge; or",
        ),
    ],
    ids=str,
)
def test_types_that_the_stage_lacks_are_refused(resources: dict[str, Any], message: str, next_step: str) -> None:
    with pytest.raises(UsageError) as error:
        plan(spec(resources=resources), LADDER, run_id=RUN_ID)
    assert message in str(error.value.args[0])
    assert error.value.next_step is not None
    assert error.value.next_step.startswith(next_step)


def test_notebook_is_one_process_with_all_cards() -> None:
    planned = plan(spec(job="notebook", arguments={"files": "data://research/earlier/"}), STAGE, run_id=RUN_ID)
    assert command_of(planned)[4:] == [
        "--nproc-per-node=1",
        "--capacity=spot",
        "notebook",
        "--files=s3://data-bucket/research/earlier/",
        "--tensorboard-logdir=.",
        "--idle-timeout-hours=2.0",
    ]
    assert (planned.accelerator, planned.notes) == ("hpu", ())
    one = {"resources": {"nproc_per_node": 1}}
    assert plan(spec(job="notebook", arguments={}, **one), EMULATED, run_id=RUN_ID).nproc_per_node == 1
    names = {child_name(row.image, kind.image) for row in INSTANCE_TYPES.values() for kind in CATALOG.values()}
    assert "gaudi-notebook" in names <= images().keys()


@pytest.mark.parametrize("until", ["2026-12-01", "2026-12-01T00:00:00+00:00"])
def test_budget_stop_ends_with_its_month(until: str) -> None:
    stop = json.dumps({"budget_usd": 500.0, "since": "2026-11-20", "until": until})
    stopped = replace(STAGE, budget_stops={"research": stop})
    with pytest.raises(UsageError, match=r"has used up its monthly budget of 500 USD .* from 2026-11-20 until 20"):
        plan(spec(), stopped, run_id="reviews-20261130-235959-00ab")
    assert plan(spec(), stopped, run_id="reviews-20261201-000000-00ab").notes == ()
    # A stop of the whole stage keeps jobs waiting but does not reject them.
    waiting = replace(STAGE, stage_stop=stop)
    [note] = plan(spec(), waiting, run_id="reviews-20261130-235959-00ab").notes
    assert note == (
        "stage 'dev' has used up its monthly budget of 500 USD: the job waits until 2026-12-01 or until the budget is "
        "raised"
    )
    assert plan(spec(), waiting, run_id="reviews-20261201-000000-00ab").notes == ()
    # So does a limit of what instances cost an hour.
    [note] = plan(spec(), replace(STAGE, hourly_stops=frozenset({"research"})), run_id=RUN_ID).notes
    assert note == (
        "the instances of team 'research' cost more than its max_usd_per_hour: the job waits until running jobs end, "
        "or until the limit is raised"
    )
    assert plan(spec(), replace(STAGE, hourly_stops=frozenset({"product"})), run_id=RUN_ID).notes == ()


@pytest.mark.parametrize("value", ["", "[1]", '{"budget_usd": 5, "until": "soon"}'])
def test_invalid_budget_stop_still_stops_jobs(value: str) -> None:
    stopped = replace(STAGE, budget_stops={"research": value})
    with pytest.raises(ConfigurationError, match="/trainyard/dev/budget-stop/research, which stops jobs") as caught:
        plan(spec(), stopped, run_id=RUN_ID)
    assert "aws ssm delete-parameter --name /trainyard/dev/budget-stop/research" in str(caught.value)


REPOSITORY = "123456789012.dkr.ecr.us-east-1.amazonaws.com/gaudi"
OLD, NEW = (f"{REPOSITORY}@sha256:{letter * 64}" for letter in "ab")
NEVER = f"{REPOSITORY}:not-built-yet"


def with_images(stage: DeployedStage, *, deployed: str, pushed: str, image_tag: str | None = None) -> DeployedStage:
    return replace(
        stage,
        releases={"gaudi": "1.21.0"},
        image_tag=image_tag,
        job_images={"finetune-classification": deployed},
        images={("gaudi", "1.21.0"): pushed, ("gaudi", "1.24.0"): OLD},
    )


@pytest.mark.parametrize(
    ("stage", "notes"),
    [
        (with_images(STAGE, deployed=NEW, pushed=NEW), ()),
        (
            with_images(STAGE, deployed=OLD, pushed=NEW),
            (f"runs in {OLD}; a newer image was pushed: 'cdk deploy 'dev/jobs' -c stage=dev' rolls it out",),
        ),
        # If the settings fix a tag, the older image is intended.
        (with_images(STAGE, deployed=f"{REPOSITORY}:1", pushed=NEW, image_tag="1"), ()),
        # A deployment has reset the parameter, and no image was pushed since.
        (
            with_images(STAGE, deployed=OLD, pushed=NEVER),
            (f"runs in {OLD}, which the stage no longer records: push an image before you deploy again",),
        ),
    ],
    ids=["current", "newer", "pinned", "reset"],
)
def test_newer_or_missing_images_are_noted(stage: DeployedStage, notes: tuple[str, ...]) -> None:
    assert plan(spec(), stage, run_id=RUN_ID).notes == notes


@pytest.mark.parametrize(
    ("stage", "pushed", "next_step"),
    [
        (STAGE, NEVER, "trainyard --stage dev images push gaudi, then cdk deploy 'dev/jobs' -c stage=dev"),
        (STAGE, NEW, "cdk deploy 'dev/jobs' -c stage=dev"),
        (EMULATED, NEVER, "trainyard --stage dev images push cpu, then trainyard --stage dev local up"),
    ],
    ids=["never pushed", "not deployed since", "emulated"],
)
def test_job_without_an_image_is_rejected(stage: DeployedStage, pushed: str, next_step: str) -> None:
    with pytest.raises(ConfigurationError, match="'finetune-classification' jobs had not been pushed") as caught:
        plan(spec(), with_images(stage, deployed=NEVER, pushed=pushed), run_id=RUN_ID)
    assert caught.value.next_step == next_step


FEWER = {"nnodes": 4, "min_nnodes": 3, "capacity": "spot"}
COMPILED = {"job": "pretrain-mlm", "arguments": {"data": "data://shared/packed", "torch_compile": True}}
NOTEBOOK = {"job": "notebook", "arguments": {}}
CORPUS = {"job": "prepare-corpus", "arguments": {"data": ["data://shared/a.txt"]}}
SCRIPT = {"job": "script", "arguments": {"code": f"s3://runs/research/code/{'0' * 64}.tar.gz", "command": "train.py"}}


@pytest.mark.parametrize(
    ("changed", "stage", "message"),
    [
        ({"resources": {"nproc_per_node": 9}}, STAGE, "9 ranks do not fit a dl1.24xlarge, which has 8 HPUs"),
        # It would be divisible by the two ranks that this machine runs.
        ({"arguments": {**ARGUMENTS, "global_batch_size": 4}}, EMULATED, "4 is not divisible by 8 ranks"),
        (
            {"arguments": {**ARGUMENTS, "global_batch_size": 9}, "resources": {"nproc_per_node": 3}},
            EMULATED,
            "9 is not divisible by 2 ranks.*set it to 6 or 12$",
        ),
        ({"resources": FEWER}, STAGE, "32 is not divisible by 24 ranks"),
        ({**SCRIPT, "resources": {**FEWER, "min_nnodes": 2}}, STAGE, r"resources\.min_nnodes: .* fewer than 4 nodes"),
        (COMPILED, STAGE, "works on GPUs only.*Habana's"),
        (
            COMPILED,
            replace(STAGE, instance_types=(instance_type("m6i.4xlarge"),)),
            "works on GPUs only, but the job runs on m6i.4xlarge; the image cpu has no compiler",
        ),
        ({"team": "vision"}, STAGE, "team 'vision' not found in stage 'dev'"),
        ({}, replace(STAGE, job_definitions={("research", "x"): "arn"}), "no job definition of 'finetune-classificat"),
        ({"resources": {"nnodes": 2}}, STAGE, "no queue for 2 On-Demand nodes.*max_multinode_nodes"),
        (
            {**COMPILED, "team": "vision", "resources": {"nnodes": 2}},
            STAGE,
            "team 'vision' not found.*no queue for 2 On-Demand nodes.*works on GPUs only",
        ),
        ({"resources": {"nnodes": 2}}, APART, "no queue for 2 On-Demand nodes"),  # the team's own queues are on Spot
        ({"resources": {"capacity": "on-demand"}}, STAGE, "has no On-Demand queue .* higher max_on_demand_nodes"),
        ({}, replace(LARGE, queues={"on-demand": "arn"}), "no Spot queue .*set resources.capacity to 'on-demand'$"),
        ({**CORPUS, "resources": {"nnodes": 2}}, STAGE, "'prepare-corpus' runs on one node, not on 2"),
        ({**CORPUS, "resources": {"capacity": "on-demand"}}, STAGE, "no On-Demand queue for .*capacity to 'spot'$"),
        ({**NOTEBOOK, "resources": {"nproc_per_node": 8}}, STAGE, "one process that uses all HPUs of the node"),
        ({**NOTEBOOK, "resources": {"nnodes": 2}}, LARGE, "runs on one node, not on 2\nNext: remove resources.nnodes"),
    ],
)
def test_impossible_placement_is_rejected_with_a_next_step(
    changed: dict[str, Any], stage: DeployedStage, message: str
) -> None:
    with pytest.raises(TrainyardError, match=f"(?s){message}"):
        plan(spec(**changed), stage, run_id=RUN_ID)
