import pytest

from infra.observability.functions import stop_at_budget
from jobs.core.errors import ConfigurationError, UsageError
from jobs.core.stage import (
    BUDGETS,
    STAGE_BUDGET,
    BudgetStop,
    DeployedStage,
    budget_stop_parameter,
    huggingface_secret_parameter,
    image_parameter,
    image_repository_parameter,
    job_definition_parameter,
    job_image_parameter,
    parameter_path,
    queue_parameter,
    share_identifier,
    variable_names_parameter,
)

PARAMETERS = {
    "bucket/data": "data-1a2b",
    "bucket/run": "runs-3c4d",
    "log-group": "logs-5e6f",
    "instance-type": "dl1.24xlarge",
    "cpu-instance-type": "m6i.4xlarge",
    "queue/spot": "arn:queue/gaudi",
    "queue/cpu-spot": "arn:queue/cpu",
    "image-repository/gaudi": "account.dkr.ecr/gaudi",
    "job-definition/research/finetune-classification": "arn:definition/research:3",
    "job-definition/product/finetune-classification": "arn:definition/product:1",
    "job-definition/product/build-corpus": "arn:definition/corpus:1",
}


def test_names_of_parameters_are_stable() -> None:
    # Deployed stages are found by these names, so a change affects everyone who has deployed one.
    assert parameter_path("dev") == "/trainyard/dev/"
    assert queue_parameter("spot") == "queue/spot"
    assert job_definition_parameter("research", "script") == "job-definition/research/script"
    assert job_definition_parameter("a", "b", several_nodes=True) == "job-definition-multinode/a/b"
    assert queue_parameter("spot", retiring="p4d-24xlarge-1-23-0") == "queue/spot/p4d-24xlarge-1-23-0"
    assert queue_parameter("spot", team="health") == "team-queue/health/spot"
    assert queue_parameter("spot", team="health", retiring="old") == "team-queue/health/spot/old"
    assert image_repository_parameter("gaudi") == "image-repository/gaudi"
    assert image_parameter("gaudi-notebook", "1.21.0") == "image/gaudi-notebook/1.21.0"
    assert job_image_parameter("notebook") == "job-image/notebook"
    assert budget_stop_parameter("research") == "budget-stop/research"
    assert (STAGE_BUDGET, f"{BUDGETS}/") == (stop_at_budget.STAGE_BUDGET, stop_at_budget.TEAM_BUDGETS)
    assert (share_identifier("research"), share_identifier("nlp-core-2")) == ("research", "nlpcore2")


def test_stage_is_built_from_its_parameters() -> None:
    stage = DeployedStage.from_parameters("dev", PARAMETERS)
    assert (stage.data_bucket, stage.run_bucket, stage.log_group) == ("data-1a2b", "runs-3c4d", "logs-5e6f")
    assert (stage.instance_type.name, stage.cpu_instance_type.name) == ("dl1.24xlarge", "m6i.4xlarge")
    assert (stage.teams, stage.default_team) == (("product", "research"), "research")
    assert stage.queue("cpu-spot") == "arn:queue/cpu"
    assert stage.job_definition("research", "finetune-classification") == "arn:definition/research:3"
    assert not any((stage.images, stage.job_images, stage.huggingface_teams, stage.secret_variables))
    assert stage.teams_with_queues == frozenset()
    assert not stage.emulated
    assert DeployedStage.from_parameters("dev", PARAMETERS, emulated_processes=2).emulated
    alone = {name: value for name, value in PARAMETERS.items() if "/research/" not in name}
    assert DeployedStage.from_parameters("dev", alone).default_team == "product"


def test_optional_parameters_of_a_stage_are_read() -> None:
    pushed, deployed = (f"registry/gaudi@sha256:{letter * 64}" for letter in "ab")
    values = {
        **PARAMETERS,
        "release/gaudi": "1.21.0",
        "release/cpu": "cpu-2026.11",
        "image-tag": "1.21.0-0123456789ab",
        image_parameter("gaudi", "1.21.0"): pushed,
        job_image_parameter("finetune-classification"): deployed,
        "queue/spot/p4d-24xlarge-1-23-0": "arn:queue/old",
        "team-queue/research/spot": "arn:queue/own",
        "team-queue/research/spot/old": "arn:queue/own-old",
        "job-definition-multinode/research/finetune-classification": "arn:definition/several:2",
        "shared-data-mount": "/shared-data",
        "stage-budget": '{"limit_usd": 900, "topic": "arn:topic"}',
        "budget/product": '{"limit_usd": 500.5, "topic": "arn:topic"}',
        "budget/research": "damaged",
        "budget-stop/product": '{"budget_usd": 500, "since": "2026-11-20", "until": "2026-12-01"}',
        huggingface_secret_parameter("research"): "arn:secret",
        variable_names_parameter("research"): "WANDB_API_KEY MLFLOW_TRACKING_URI",
    }
    stage = DeployedStage.from_parameters("dev", values)
    assert stage.releases == {"gaudi": "1.21.0", "cpu": "cpu-2026.11"}
    assert stage.image_tag == "1.21.0-0123456789ab"
    assert stage.images == {("gaudi", "1.21.0"): pushed}
    assert stage.job_images == {"finetune-classification": deployed}
    # Jobs of a retiring pool are still found; the current queue is the one without a suffix.
    assert stage.queues["spot"] == "arn:queue/gaudi"
    assert stage.queues["spot/p4d-24xlarge-1-23-0"] == "arn:queue/old"
    # A team with its own instances has its own queues and never falls back to shared ones.
    assert stage.teams_with_queues == {"research"}
    assert (stage.queue("spot@research"), stage.queue("spot@research/old")) == ("arn:queue/own", "arn:queue/own-old")
    assert (stage.queue_of("research", "spot"), stage.queue_of("product", "spot")) == ("spot@research", "spot")
    assert stage.job_definition("research", "finetune-classification", several_nodes=True) == "arn:definition/several:2"
    assert stage.shared_data_mount == "/shared-data"
    assert [stage.budget_usd(owner) for owner in ("", "product", "research", "other")] == [900, 500.5, None, None]
    assert stage.budget_stop("research") is None
    assert stage.budget_stop("product") == BudgetStop(budget_usd=500.0, since="2026-11-20", until="2026-12-01")
    assert stage.huggingface_teams == {"research"}
    assert stage.secret_variables == {"research": {"WANDB_API_KEY", "MLFLOW_TRACKING_URI"}}
    # If jobs are processes, images are ignored.
    assert DeployedStage.from_parameters("dev", values, runs_containers=False).job_images == {}


@pytest.mark.parametrize("missing", ["bucket/data", "cpu-instance-type"])
def test_stage_without_a_required_parameter_is_not_deployed(missing: str) -> None:
    values = {name: value for name, value in PARAMETERS.items() if name != missing}
    with pytest.raises(ConfigurationError) as caught:
        DeployedStage.from_parameters("dev", values)
    assert str(caught.value) == (
        f"stage 'dev' is not deployed here: SSM has no /trainyard/dev/{missing}\n"
        "Next: cdk deploy 'dev/*' -c stage=dev (or, without an account: trainyard --stage dev local up)"
    )


@pytest.mark.parametrize(
    ("emulated_processes", "next_step"),
    [(None, "cdk deploy 'dev/*' -c stage=dev"), (2, "trainyard --stage dev local up")],
    ids=["AWS", "emulated"],
)
def test_missing_kind_team_or_queue_is_an_error(emulated_processes: int | None, next_step: str) -> None:
    stage = DeployedStage.from_parameters("dev", PARAMETERS, emulated_processes=emulated_processes)
    with pytest.raises(ConfigurationError, match="no job definition of 'build-corpus' for team 'research'") as caught:
        stage.job_definition("research", "build-corpus")
    assert caught.value.next_step == next_step
    with pytest.raises(UsageError, match="team 'reserch' not found in stage 'dev'; did you mean 'research'") as team:
        stage.job_definition("reserch", "finetune-classification")
    assert team.value.next_step == "correct 'team' in the spec, or add the team to infra/settings.py and deploy"
    with pytest.raises(UsageError, match="stage 'dev' has no queue 'spt'; did you mean 'spot'"):
        stage.queue("spt")
