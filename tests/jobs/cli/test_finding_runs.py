"""How a run is found: by its id, the beginning of one, its name, or as the latest."""

import json
import time
from collections.abc import Mapping
from datetime import datetime, timezone

from jobs.aws.connection import Aws
from jobs.client.storage import put_spec
from jobs.contract.plan import plan
from jobs.contract.run import new_run_id
from jobs.contract.spec import JobSpec
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.submitting import SPEC, RunCommand


def next_second() -> None:
    """Run ids tell runs apart by the second: of two in the same one, neither is the newer."""
    time.sleep(1 - time.time() % 1)


def test_a_run_is_found_by_id_by_prefix_by_name_and_as_the_latest(
    aws_trainyard: Trainyard, run_command: RunCommand
) -> None:
    older = run_command(["true"], name="found-by").plan.run_id
    next_second()
    newer = run_command(["true"], name="found-by").plan.run_id
    next_second()
    longer_name = run_command(["true"], name="found-by-another").plan.run_id

    def found(text: str) -> str:
        finished = aws_trainyard("status", text, "-o", "json")
        assert finished.returncode == 0, finished.stderr
        return str(json.loads(finished.stdout)["run_id"])

    assert found(older) == older
    assert found("found-by") == newer
    assert found("found-by-a") == longer_name
    assert found("latest") == longer_name
    several = aws_trainyard("status", "found-b")
    assert several.returncode == 2
    assert "error: 'found-b' begins 3 run ids" in several.stderr
    none = aws_trainyard("status", "fund-by")
    assert none.returncode == 4
    assert "run 'fund-by' not found in stage 'dev'; did you mean 'found-by'?" in none.stderr


def test_without_a_command_it_says_how_to_go_on_with_the_newest_run(
    aws_trainyard: Trainyard, run_command: RunCommand
) -> None:
    run_id = run_command(["false"]).plan.run_id
    shown = aws_trainyard()
    assert shown.returncode == 0
    assert f"The newest run of stage 'dev' is {run_id}: " in shown.stdout
    assert f"trainyard resume {run_id}" in shown.stdout


def test_the_latest_run_is_that_of_ones_own_team(
    aws_trainyard: Trainyard, run_command: RunCommand, embedded: Aws, stage: DeployedStage
) -> None:
    ours = run_command(["true"]).plan.run_id
    next_second()
    spec = {**SPEC, "name": "theirs", "team": "product"}
    theirs = plan(JobSpec.model_validate(spec), stage, run_id=new_run_id("theirs", now=datetime.now(timezone.utc)))
    put_spec(embedded, theirs)

    def found(*arguments: str) -> str:
        return str(json.loads(aws_trainyard("status", *arguments, "-o", "json").stdout)["run_id"])

    assert found("latest") == ours
    assert found("latest", "--team", "product") == found("product/latest") == theirs.run_id
    unknown = aws_trainyard("status", "latest", "--team", "produce")
    assert unknown.returncode == 4
    assert "did you mean 'product'?" in unknown.stderr


def test_a_run_that_batch_has_forgotten_is_still_there(
    aws_trainyard: Trainyard, embedded: Aws, stage: DeployedStage
) -> None:
    run_id = "forgotten-20200131-120000-beef"
    embedded.s3.put_object(Bucket=stage.run_bucket, Key=f"research/{run_id}/spec.yaml", Body=b"name: forgotten\n")
    line = b'{"step": 8, "eval_accuracy": 0.75, "samples_per_second": 12.5}\n'
    embedded.s3.put_object(Bucket=stage.run_bucket, Key=f"research/{run_id}/metrics.jsonl", Body=line)
    status = aws_trainyard("status", "forgotten")
    assert status.returncode == 0
    assert "unknown to AWS Batch by now" in status.stdout
    assert "step 8, accuracy 0.75, samples/s 12.5" in status.stdout
    fetched = aws_trainyard("fetch", "forgotten").stdout.split()
    assert fetched == [f"runs/{run_id}/metrics.jsonl", f"runs/{run_id}/spec.yaml"]
    logs = aws_trainyard("logs", "forgotten")
    assert logs.returncode == 4
    assert f"next: trainyard fetch {run_id}" in logs.stderr


def test_tab_completes_run_ids(
    trainyard: Trainyard, deployed_environment: Mapping[str, str], run_command: RunCommand
) -> None:
    run_id = run_command(["true"], name="completed").plan.run_id
    asked = {"_TRAINYARD_COMPLETE": "complete_bash", "COMP_WORDS": "trainyard status compl", "COMP_CWORD": "2"}
    completed = trainyard(environment={**deployed_environment, **asked})
    assert completed.stdout.split() == [run_id]
    without_aws = trainyard(environment=asked)
    assert (without_aws.stdout.strip(), without_aws.stderr) == ("", "")
