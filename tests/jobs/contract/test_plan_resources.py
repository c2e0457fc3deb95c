import json
from dataclasses import replace
from typing import Any

import pytest
from botocore.session import get_session
from botocore.validate import ParamValidator

from jobs.contract import catalog
from jobs.contract.catalog import CATALOG
from jobs.contract.errors import ConfigurationError, TrainyardError, UsageError
from jobs.contract.instance_types import instance_type
from jobs.contract.plan import plan
from jobs.contract.stage import DeployedStage
from tests.support.jobs.planning import ARGUMENTS, EMBEDDED, LARGE, RUN_ID, STAGE, command_of, environment_of, spec


def test_several_nodes_that_start_together_need_their_own_queue() -> None:
    planned = plan(spec(resources={"nnodes": 2}), LARGE, run_id=RUN_ID)
    assert planned.request["jobQueue"] == "arn:queue/multinode"
    assert planned.queue_reason == (
        "several nodes: started together, On-Demand; resources.capacity: spot starts each as Spot has it"
    )
    assert planned.capacity == "on-demand"
    assert planned.usd_per_hour == planned.on_demand_usd_per_hour == 2 * 13.10904


APART = replace(
    LARGE,
    queues={**LARGE.queues, "spot@research": "arn:queue/own", "cpu-spot@research": "arn:queue/own-cpu"},
)
"""A stage whose team `research` has instances of its own, on Spot only."""


def test_a_team_runs_in_its_own_queues_where_it_has_some() -> None:
    planned = plan(spec(team="research"), APART, run_id=RUN_ID)
    assert (planned.queue, planned.request["jobQueue"]) == ("spot@research", "arn:queue/own")
    assert planned.queue_reason == "one node of dl1.24xlarge: Spot, started again after a reclaim"
    assert planned.capacity == "spot"
    others = plan(spec(team="nlp-core"), APART, run_id=RUN_ID)
    assert (others.queue, others.request["jobQueue"]) == ("spot", "arn:queue/gaudi")


def test_several_nodes_get_the_command_through_node_overrides() -> None:
    one = plan(spec(), LARGE, run_id=RUN_ID)
    planned = plan(
        spec(resources={"nnodes": 3}, arguments={**ARGUMENTS, "global_batch_size": 48}), LARGE, run_id=RUN_ID
    )
    assert planned.request["jobDefinition"] == "arn:definition/several:7"
    # Trap: a number of nodes can only be overridden where the range is open.
    assert "ecsPropertiesOverride" not in planned.request
    (nodes,) = planned.request["nodeOverrides"]["nodePropertyOverrides"]
    assert planned.request["nodeOverrides"]["numNodes"] == 3
    assert nodes["targetNodes"] == "0:"
    (container,) = nodes["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    assert container["name"] == "main"
    assert container["command"] == [
        {"--global-batch-size=32": "--global-batch-size=48", "--capacity=spot": "--capacity=on-demand"}.get(flag, flag)
        for flag in command_of(one)
    ]
    assert container["environment"][0] == {
        "name": "TRAINYARD_RUN_URI",
        "value": f"s3://run-bucket/research/{RUN_ID}/",
    }
    assert planned.request["retryStrategy"] == one.request["retryStrategy"]


def test_several_nodes_on_spot_are_the_children_of_an_array_of_jobs_of_one_node() -> None:
    one = plan(spec(), STAGE, run_id=RUN_ID)
    planned = plan(spec(resources={"nnodes": 4, "min_nnodes": 2, "capacity": "spot"}), STAGE, run_id=RUN_ID)
    overrides = "ecsPropertiesOverride"
    assert {key: value for key, value in planned.request.items() if key != overrides} == {
        **{key: value for key, value in one.request.items() if key != overrides},
        "arrayProperties": {"size": 4},
    }
    flags = command_of(planned)
    kind = flags.index("finetune-classification")
    assert flags == [
        *command_of(one)[: kind - 2],
        "--gang-min-nnodes=2",
        "--gang-attempts=3",
        *command_of(one)[kind - 2 :],
    ]
    assert (planned.queue, planned.capacity, planned.usd_per_hour) == ("spot", "spot", 4 * 3.93)
    assert planned.queue_reason == ("4 nodes of dl1.24xlarge: Spot, each started for itself, and again after a reclaim")
    [note] = planned.notes
    assert note == (
        "the 4 nodes start as they come, and are paid for while they wait for each other; after 15 minutes 2 begin; "
        "when one is taken away all save and start again, which is one of their 3 attempts"
    )
    # All of them are needed where the spec does not say otherwise
    whole = plan(spec(resources={"nnodes": 4, "capacity": "spot"}), LARGE, run_id=RUN_ID)
    assert "--gang-min-nnodes=4" in command_of(whole)
    assert "begin" not in whole.notes[0]
    assert "--gang-min-nnodes" not in " ".join(command_of(one))


@pytest.mark.parametrize(
    "resources", [{}, {"nnodes": 2}, {"nnodes": 2, "capacity": "spot"}, {"capacity": "on-demand"}], ids=str
)
def test_requests_have_the_shape_that_the_api_takes(resources: dict[str, Any]) -> None:
    planned = plan(spec(resources=resources), LARGE, run_id=RUN_ID)
    shape = get_session().get_service_model("batch").shape_for("SubmitJobRequest")
    report = ParamValidator().validate(planned.request, shape)
    assert not report.has_errors(), report.generate_report()


def test_a_job_that_must_not_be_interrupted_pays_for_on_demand() -> None:
    planned = plan(spec(resources={"capacity": "on-demand"}), LARGE, run_id=RUN_ID)
    assert planned.request["jobQueue"] == "arn:queue/on-demand"
    assert (planned.queue, planned.queue_reason) == (
        "on-demand",
        "one node of dl1.24xlarge: On-Demand, as resources.capacity asks; it is not interrupted",
    )
    assert (planned.capacity, planned.usd_per_hour) == ("on-demand", 13.10904)


def test_shared_data_is_read_from_the_file_system_where_the_stage_mounts_it() -> None:
    mounting = replace(STAGE, shared_data_mount="/shared-data")
    arguments = {"model": "data://shared/m", "train_data": "data://research/t.jsonl"}
    planned = plan(spec(arguments=arguments), mounting, run_id=RUN_ID)
    assert "--model=/shared-data/m" in command_of(planned)
    # Only what all teams share lies on it.
    assert "--train-data=s3://data-bucket/research/t.jsonl" in command_of(planned)
    # Whether it is there is looked up in S3, which the laptop can reach, and the kept spec names what lasts.
    assert planned.inputs[0][:2] == ("model", "s3://data-bucket/shared/m")
    assert planned.spec.arguments["model"] == "s3://data-bucket/shared/m"


def test_shared_data_is_read_from_s3_where_nothing_is_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_laptop = replace(EMBEDDED, shared_data_mount="/shared-data")
    assert "--model=s3://data-bucket/shared/m" in command_of(plan(spec(), on_a_laptop, run_id=RUN_ID))
    kind = replace(CATALOG["finetune-classification"], name="build-corpus", accelerated=False)
    monkeypatch.setitem(catalog.CATALOG, "build-corpus", kind)
    cpu = replace(
        STAGE, shared_data_mount="/shared-data", job_definitions={("research", "build-corpus"): "arn:definition/1"}
    )
    planned = plan(spec(job="build-corpus"), cpu, run_id=RUN_ID)
    assert "--model=s3://data-bucket/shared/m" in command_of(planned)


@pytest.mark.parametrize("until", ["2026-12-01", "2026-12-01T00:00:00+00:00"])
def test_a_stop_that_nobody_took_back_ends_with_its_month(until: str) -> None:
    stop = {"budget_usd": 500.0, "since": "2026-11-20", "until": until}
    stopped = replace(STAGE, budget_stops={"research": json.dumps(stop)})
    with pytest.raises(UsageError, match="has used up its monthly budget"):
        plan(spec(), stopped, run_id="reviews-20261130-235959-00ab")
    assert plan(spec(), stopped, run_id="reviews-20261201-000000-00ab")


@pytest.mark.parametrize(
    "value", ["", "[1]", '{"budget_usd": "much", "since": "a", "until": "b"}', '{"budget_usd": 5, "until": "soon"}']
)
def test_a_budget_stop_that_nobody_can_read_stops_all_the_same(value: str) -> None:
    stopped = replace(STAGE, budget_stops={"research": value})
    with pytest.raises(ConfigurationError, match="/trainyard/dev/budget-stop/research stops jobs") as caught:
        plan(spec(), stopped, run_id=RUN_ID)
    assert "aws ssm delete-parameter --name /trainyard/dev/budget-stop/research" in str(caught.value)


@pytest.mark.parametrize(("name", "cards"), [("g5.4xlarge", 1), ("p4d.24xlarge", 8)])
def test_the_same_spec_runs_on_cuda_instances(name: str, cards: int) -> None:
    planned = plan(spec(), replace(STAGE, instance_type=instance_type(name)), run_id=RUN_ID)
    assert environment_of(planned)["TRAINYARD_ACCELERATOR"] == "cuda"
    assert f"--instance-type={name}" in command_of(planned)
    assert f"--nproc-per-node={cards}" in command_of(planned)


def test_a_kind_without_accelerator_goes_to_the_cpu_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = replace(CATALOG["finetune-classification"], name="build-corpus", accelerated=False)
    monkeypatch.setitem(catalog.CATALOG, "build-corpus", kind)
    stage = replace(STAGE, job_definitions={("research", "build-corpus"): "arn:definition/corpus:1"})
    planned = plan(spec(job="build-corpus"), stage, run_id=RUN_ID)
    assert (planned.request["jobQueue"], planned.queue_reason) == (
        "arn:queue/cpu",
        "'build-corpus' needs no accelerator",
    )
    assert planned.instance_type.name == "m6i.4xlarge"
    assert environment_of(planned)["TRAINYARD_ACCELERATOR"] == "cpu"
    with pytest.raises(UsageError, match=r"^resources.nnodes: 'build-corpus' runs on one CPU instance, not on 2$"):
        plan(spec(job="build-corpus", resources={"nnodes": 2}), stage, run_id=RUN_ID)
    with pytest.raises(
        UsageError, match=r"no On-Demand queue for 'build-corpus'\nNext: set resources.capacity to 'spot'$"
    ):
        plan(spec(job="build-corpus", resources={"capacity": "on-demand"}), stage, run_id=RUN_ID)


def test_a_stage_without_money_takes_jobs_and_says_that_they_wait() -> None:
    record = json.dumps({"budget_usd": 500, "since": "2026-10-20T00:00:00+00:00", "until": "2999-12-01T00:00:00+00:00"})
    planned = plan(spec(), replace(STAGE, stage_stop=record), run_id=RUN_ID)
    assert planned.notes[0] == (
        "stage 'dev' has used up its monthly budget of 500 USD: the job waits until 2999-12-01, or until the budget is "
        "raised"
    )
    over = record.replace("2999-12-01", "2000-01-01")
    assert not any("budget" in note for note in plan(spec(), replace(STAGE, stage_stop=over), run_id=RUN_ID).notes)


FEWER = {"nnodes": 4, "min_nnodes": 3, "capacity": "spot"}
PACKED = {"data": "data://shared/packed"}
STOP = json.dumps({"budget_usd": 500.0, "since": "2026-11-20", "until": "2026-12-01"})


@pytest.mark.parametrize(
    ("changed", "stage", "message"),
    [
        (
            {"resources": {"nproc_per_node": 9}},
            STAGE,
            "9 ranks do not fit a dl1.24xlarge, which has 8 HPUs",
        ),
        ({"arguments": {**ARGUMENTS, "global_batch_size": 4}}, STAGE, "4 does not divide over 8 ranks.*set it to 8$"),
        # It divides over the two ranks that this machine would run.
        ({"arguments": {**ARGUMENTS, "global_batch_size": 4}}, EMBEDDED, "4 does not divide over 8 ranks"),
        (
            {"arguments": {**ARGUMENTS, "global_batch_size": 9}, "resources": {"nproc_per_node": 3}},
            EMBEDDED,
            "9 does not divide over 2 ranks.*set it to 6 or 12$",
        ),
        (
            {"arguments": {**ARGUMENTS, "global_batch_size": 32}, "resources": FEWER},
            STAGE,
            "32 does not divide over 24 ranks",
        ),
        (
            {
                "job": "script",
                "arguments": {"code": f"s3://runs/research/code/{'0' * 64}.tar.gz", "command": "train.py"},
                "resources": {**FEWER, "min_nnodes": 2},
            },
            STAGE,
            r"resources\.min_nnodes: .* fewer than 4 nodes.*one number of ranks",
        ),
        ({"job": "pretrain-mlm", "arguments": {**PACKED, "torch_compile": True}}, STAGE, "it is for GPUs.*Habana's"),
        (
            {"job": "pretrain-mlm", "arguments": {**PACKED, "torch_compile": True}},
            replace(STAGE, instance_type=instance_type("m6i.4xlarge")),
            "it is for GPUs, and the job is for m6i.4xlarge; the image cpu has no compiler",
        ),
        ({"team": "vision"}, STAGE, "team 'vision' not found in stage 'dev'"),
        ({}, replace(STAGE, job_definitions={("research", "x"): "arn"}), "no job definition of 'finetune-classificat"),
        ({"resources": {"nnodes": 2}}, STAGE, "no queue for several nodes.*max_multinode_nodes"),
        ({"resources": {"nnodes": 2}}, APART, "no queue for several nodes"),  # of its own
        (
            {"resources": {"capacity": "on-demand"}},
            STAGE,
            "has no On-Demand queue .* or have max_on_demand_nodes",
        ),
        ({"resources": {"capacity": "on-demand"}}, APART, "has no On-Demand queue"),
        ({}, replace(LARGE, queues={"on-demand": "arn"}), "no Spot queue .*set resources.capacity to 'on-demand'$"),
        ({}, replace(STAGE, budget_stops={"research": STOP}), "budget of 500 USD .* from 2026-11-20 until 2026-12-01"),
    ],
)
def test_what_the_stage_cannot_run_is_refused_with_what_next(
    changed: dict[str, Any], stage: DeployedStage, message: str
) -> None:
    with pytest.raises(TrainyardError, match=f"(?s){message}"):
        plan(spec(**changed), stage, run_id=RUN_ID)
