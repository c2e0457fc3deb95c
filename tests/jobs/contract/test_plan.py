import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from jobs.contract.dependencies import Awaited
from jobs.contract.errors import INTERRUPTED_EXIT_CODE, UsageError
from jobs.contract.flags import parse_flags
from jobs.contract.launcher_options import LauncherOptions, Limits
from jobs.contract.plan import plan
from jobs.contract.retries import RETRY_RULES
from jobs.contract.spec import parse_spec
from jobs.kinds.finetune_classification import FinetuneClassification
from tests.support.jobs.planning import ARGUMENTS, EMBEDDED, LARGE, RUN_ID, STAGE, command_of, environment_of, spec

SPECS = sorted((Path(__file__).parents[3] / "jobs" / "specs").glob("*.yaml"))
MAX_PAYLOAD_BYTES = 30 * 1024
"""AWS Batch's limit of a SubmitJob request."""


def test_the_whole_request() -> None:
    arguments = {
        "model": "s3://elsewhere/m",
        "train_data": "data://shared/t.jsonl",
        "epochs": 1,
        "learning_rate": 1e-4,
    }
    planned = plan(spec(arguments=arguments, attempts=5, timeout_hours=1.5), STAGE, run_id=RUN_ID)
    assert planned.request == {
        "jobName": RUN_ID,
        "jobQueue": "arn:queue/gaudi",
        "jobDefinition": "arn:definition/research:3",
        "shareIdentifier": "research",
        "ecsPropertiesOverride": {
            "taskProperties": [
                {
                    "containers": [
                        {
                            "name": "main",
                            "command": [
                                "python",
                                "-m",
                                "jobs.train.launch",
                                "--instance-type=dl1.24xlarge",
                                "--nproc-per-node=8",
                                "--capacity=spot",
                                "finetune-classification",
                                "--learning-rate=0.0001",
                                "--warmup-ratio=0.1",
                                "--lr-scheduler-type=linear",
                                "--optimizer=adamw",
                                "--hpu-trainer=optimum-habana",
                                "--weight-decay=0.0",
                                "--global-batch-size=32",
                                "--max-batch-size-per-rank=32",
                                "--eval-batch-size=64",
                                "--final-evaluation=true",
                                "--checkpoint-every-steps=auto",
                                "--mean-hours-between-reclaims=6.0",
                                "--keep-checkpoints=2",
                                "--log-every-steps=10",
                                "--stop-on-nan=false",
                                "--seed=42",
                                "--model=s3://elsewhere/m",
                                "--train-data=s3://data-bucket/shared/t.jsonl",
                                "--eval-fraction=0.1",
                                "--text-column=text",
                                "--label-column=label",
                                "--max-length=128",
                                "--length-buckets=auto",
                                "--epochs=1.0",
                                "--on-bad-rows=error",
                                "--max-bad-rows=100",
                            ],
                            "environment": [
                                {"name": "TRAINYARD_RUN_URI", "value": f"s3://run-bucket/research/{RUN_ID}/"},
                                {"name": "TRAINYARD_ACCELERATOR", "value": "hpu"},
                            ],
                        }
                    ]
                }
            ]
        },
        "retryStrategy": {
            "attempts": 5,
            "evaluateOnExit": [
                {"onStatusReason": "Host EC2*", "action": "RETRY"},
                {"onExitCode": "75", "action": "RETRY"},
                {"onStatusReason": "Task failed to start*", "action": "RETRY"},
                {"onReason": "*", "action": "EXIT"},
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


def test_a_plan_tells_where_it_runs_and_what_it_costs() -> None:
    planned = plan(spec(), STAGE, run_id=RUN_ID)
    assert str(planned.run_location) == f"s3://run-bucket/research/{RUN_ID}/"
    assert (planned.queue, planned.queue_reason) == (
        "spot",
        "one node of dl1.24xlarge: Spot, started again after a reclaim",
    )
    assert (planned.accelerator, planned.accelerator_reason) == ("hpu", "dl1.24xlarge of stage 'dev'")
    assert (planned.nnodes, planned.nproc_per_node) == (1, 8)
    assert (planned.on_demand_usd_per_hour, planned.spot_usd_per_hour) == (13.10904, 3.93)
    assert planned.notes == ()


def test_the_launcher_gets_every_limit_of_a_spec_as_it_is() -> None:
    limits = {
        "max_usd": 40.0,
        "max_hours": 30.0,
        "hang_timeout_seconds": 600.0,
        "stop_if_idle_minutes": 5.0,
        "start_timeout_seconds": 60.5,
        "health": {"seconds": 20.0, "min_teraflops": 100.0, "min_gigabytes_per_second": 10.0},
    }
    assert limits.keys() == Limits.model_fields.keys()
    told = command_of(plan(spec(**limits), STAGE, run_id=RUN_ID))
    flags = told[told.index("jobs.train.launch") + 1 : told.index("finetune-classification")]
    assert parse_flags(LauncherOptions, flags, program="test").model_dump(include=set(limits)) == limits


def test_data_is_found_in_the_stages_bucket() -> None:
    planned = plan(spec(), STAGE, run_id=RUN_ID)
    assert planned.inputs == (
        ("model", "s3://data-bucket/shared/m", "a pretrained model's folder"),
        ("train_data", "s3://data-bucket/shared/t.jsonl", "a table of examples"),
    )
    # The spec that is kept with the run names what was really read.
    assert planned.spec.arguments["model"] == "s3://data-bucket/shared/m"


def test_a_team_pays_by_its_share_and_writes_under_its_name_within_the_kinds_time() -> None:
    planned = plan(spec(team="nlp-core"), STAGE, run_id=RUN_ID)
    assert planned.request["shareIdentifier"] == "nlpcore", "Batch takes letters and digits only"
    assert planned.request["jobDefinition"] == "arn:definition/nlp:1"
    assert planned.run_location.key == f"nlp-core/{RUN_ID}/"
    assert planned.request["timeout"] == {"attemptDurationSeconds": 12 * 3600}


def test_cards_that_stay_idle_are_paid_for() -> None:
    planned = plan(spec(resources={"nproc_per_node": 2}), STAGE, run_id=RUN_ID)
    assert planned.nproc_per_node == 2
    assert planned.notes == ("uses 2 of the 8 HPUs of a dl1.24xlarge; the whole instance is paid for",)
    assert planned.spot_usd_per_hour == 3.93


def test_an_accelerated_kind_on_a_stage_of_cpu_instances_asks_for_cpu() -> None:
    planned = plan(spec(), replace(STAGE, instance_type=STAGE.cpu_instance_type), run_id=RUN_ID)
    assert environment_of(planned)["TRAINYARD_ACCELERATOR"] == "cpu"
    assert planned.nproc_per_node == 1
    assert planned.notes == ()


def test_on_the_embedded_aws_the_machine_decides_what_to_train_on() -> None:
    planned = plan(spec(), EMBEDDED, run_id=RUN_ID)
    assert environment_of(planned)["TRAINYARD_ACCELERATOR"] == "auto"
    assert planned.accelerator_reason == ("the embedded AWS runs jobs on this machine; on AWS: hpu of dl1.24xlarge")
    assert "--nproc-per-node=2" in command_of(planned)
    assert planned.notes == ("runs 2 ranks on this machine instead of 8; the global batch size stays",)
    # Everything else is what AWS would get.
    assert planned.request["jobQueue"] == "arn:queue/gaudi"


@pytest.mark.parametrize(
    ("status_reason", "reason", "exit_code", "action"),
    [
        ("Host EC2 (instance i-0123456789abcdef0) terminated.", None, None, "RETRY"),
        ("Essential container in task exited", None, INTERRUPTED_EXIT_CODE, "RETRY"),
        ("Essential container in task exited", None, 1, "EXIT"),
        ("Essential container in task exited", "OutOfMemoryError: Container killed", 137, "EXIT"),
        ("Task failed to start", "CannotPullContainerError: i/o timeout", None, "RETRY"),
        ("Task failed to start", "DockerTimeoutError: Could not transition to created", None, "RETRY"),
        ("Essential container in task exited", None, 0, "EXIT"),
    ],
)
def test_what_starts_a_job_again(status_reason: str, reason: str | None, exit_code: int | None, action: str) -> None:
    # As Batch reads them: in order, the first that matches; a condition on what is absent does not match.
    given = {"onStatusReason": status_reason, "onReason": reason, "onExitCode": exit_code}
    matching = [
        rule["action"]
        for rule in RETRY_RULES
        if all(
            given[key] is not None and _matches(str(given[key]), pattern)
            for key, pattern in rule.items()
            if key != "action"
        )
    ]
    assert matching[:1] == [action]
    assert len(RETRY_RULES) <= 5
    assert all("*" not in pattern.rstrip("*") for rule in RETRY_RULES for pattern in rule.values())


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_the_ready_specs_can_be_planned_and_fit_batchs_limit(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        ready = parse_spec(document, origin=path.name)
        for stage in (LARGE, replace(LARGE, embedded_processes=2)):
            planned = plan(ready, stage, run_id=f"{ready.name}-20261121-120005-00ab")
            assert len(json.dumps(planned.request)) < MAX_PAYLOAD_BYTES


def test_what_a_plan_waits_for_is_in_its_request() -> None:
    earlier = Awaited(run_id="clean-20261121-120005-00ab", job_id="5f3a", queue="cpu-spot", arguments=("train_data",))
    together = Awaited(run_id="bert-20261121-120005-00ac", job_id=None, queue="spot", arguments=("model",))
    planned = plan(spec(), LARGE, run_id=RUN_ID, awaited=(earlier, together))
    assert planned.request["dependsOn"] == [{"jobId": "5f3a"}, {"jobId": "<job id of bert-20261121-120005-00ac>"}]
    submitted = planned.with_job_ids({"bert-20261121-120005-00ac": "77b0"})
    assert submitted.request == {**planned.request, "dependsOn": [{"jobId": "5f3a"}, {"jobId": "77b0"}]}
    # Only a run on Spot can be moved, and only where there is an On-Demand queue.
    assert [note for note in planned.notes if "moved to On-Demand" in note] == [together.note(LARGE)]
    assert plan(spec(), STAGE, run_id=RUN_ID, awaited=(earlier, together)).notes == ()
    # A team's may be moved to its own On-Demand queue, not to one that others share.
    own = replace(together, queue="spot@research")
    assert own.note(LARGE) is None
    assert own.note(replace(LARGE, queues={**LARGE.queues, "on-demand@research": "arn:own"})) == together.note(LARGE)
    assert "dependsOn" not in plan(spec(), LARGE, run_id=RUN_ID).with_job_ids({}).request


def _matches(text: str, pattern: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


def test_a_model_is_pushed_to_the_hub_only_for_a_team_that_has_a_secret() -> None:
    pushing = spec(arguments={**ARGUMENTS, "push_to_hub": "acme/reviews"})
    other_team = replace(STAGE, huggingface_teams=frozenset({"nlp-core"}))
    for stage in (other_team, EMBEDDED):
        with pytest.raises(UsageError, match=r"team 'research' has no secret for a Hugging Face token in stage 'dev'"):
            plan(pushing, stage, run_id=RUN_ID)
    its_own = replace(STAGE, huggingface_teams=frozenset({"research"}))
    assert "--push-to-hub=acme/reviews" in command_of(plan(pushing, its_own, run_id=RUN_ID))


def test_metrics_go_to_a_tracker_only_for_a_team_whose_secret_has_what_it_takes() -> None:
    reporting = spec(arguments={**ARGUMENTS, "report_to": ["wandb", "mlflow"]})
    half = replace(STAGE, secret_variables={"research": frozenset({"WANDB_API_KEY"}), "nlp-core": frozenset()})
    with pytest.raises(
        UsageError, match=r"no secret in stage 'dev' with what it takes for mlflow \(MLFLOW_TRACKING_URI"
    ):
        plan(reporting, half, run_id=RUN_ID)
    both = replace(STAGE, secret_variables={"research": frozenset({"WANDB_API_KEY", "MLFLOW_TRACKING_URI"})})
    assert '--report-to=["wandb", "mlflow"]' in command_of(plan(reporting, both, run_id=RUN_ID))
    one = spec(arguments={**ARGUMENTS, "report_to": "wandb"})
    assert '--report-to=["wandb"]' in command_of(plan(one, half, run_id=RUN_ID))


def test_all_that_a_plan_refuses_is_told_at_once() -> None:
    arguments = {**ARGUMENTS, "push_to_hub": "acme/reviews", "global_batch_size": 4}
    arguments["train_data"] = "data://nlp-core/t.jsonl"
    with pytest.raises(UsageError) as caught:
        plan(spec(arguments=arguments, max_usd=0.0001), STAGE, run_id=RUN_ID)
    budget, push, ranks, reads = str(caught.value).splitlines()
    assert budget.startswith("max_usd: 0.0001 leaves 0.0 minutes")
    assert "; next: set max_usd to more than" in budget
    assert push.startswith("arguments.push_to_hub: team 'research' has no secret")
    assert ranks == "global_batch_size 4 does not divide over 8 ranks; next: set it to 8"
    assert reads.startswith("arguments.train_data: s3://data-bucket/nlp-core/t.jsonl is of team 'nlp-core'")


def test_arguments_that_ecs_would_not_start_a_container_with_lie_among_the_runs_files() -> None:
    tables = [f"data://shared/{'t' * 60}-{number}.jsonl" for number in range(2000)]
    arguments = {**ARGUMENTS, "train_data": tables}
    several = {"resources": {"nnodes": 2, "capacity": "on-demand"}}
    on_two = plan(spec(arguments=arguments, **several), LARGE, run_id=RUN_ID)
    for planned in (plan(spec(arguments=arguments), STAGE, run_id=RUN_ID), on_two):
        assert planned.arguments_file is not None
        # Room is left for what AWS Batch adds; the job's own options stay where one sees them.
        request = json.dumps(planned.request)
        assert len(request) < 8192 - 1024
        assert f'"--arguments-file={planned.arguments_file.name}", "finetune-classification"]' in request
        stored = FinetuneClassification.model_validate_json(planned.arguments_file.content)
        assert stored.train_data == [table.replace("data://", "s3://data-bucket/") for table in tables]
    short = plan(spec(arguments={**ARGUMENTS, "train_data": tables[:40]}), STAGE, run_id=RUN_ID)
    assert short.arguments_file is None
    assert any(flag.startswith("--train-data=") for flag in command_of(short))


@pytest.mark.parametrize(
    "location", ["data://nlp-core/t.jsonl", "s3://data-bucket/nlp-core/t.jsonl", "s3://run-bucket/nlp-core/t.jsonl"]
)
def test_data_of_another_team_is_refused(location: str) -> None:
    with pytest.raises(UsageError, match=r"arguments.train_data: .* is of team 'nlp-core', .* 'research' cannot read"):
        plan(spec(arguments={**ARGUMENTS, "train_data": location}), STAGE, run_id=RUN_ID)
    plan(spec(team="nlp-core", arguments={**ARGUMENTS, "train_data": location}), STAGE, run_id=RUN_ID)
    elsewhere = location.replace("-bucket", "-elsewhere").replace("data://nlp-core", "data://nlp-cores")
    plan(spec(arguments={**ARGUMENTS, "train_data": elsewhere}), STAGE, run_id=RUN_ID)
