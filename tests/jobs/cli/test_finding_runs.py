"""Finding a run by its id, the beginning of its id, its name, or as the latest."""

import json
import time
from datetime import datetime, timezone

from jobs.aws.connection import Aws
from jobs.core.run import new_run_id
from jobs.core.stage import DeployedStage
from jobs.runs.submit import put_spec
from jobs.spec.plan import plan
from jobs.spec.spec import JobSpec
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.submitting import SPEC, RunCommand


def next_second() -> None:
    """Wait for the next second: two run ids of the same second have no order."""
    time.sleep(1 - time.time() % 1)


def test_a_run_is_found_by_id_prefix_name_and_as_latest(
    aws_trainyard: Trainyard, run_command: RunCommand, emulated: Aws, stage: DeployedStage
) -> None:
    older = run_command(["true"], name="found-by").plan.run_id
    next_second()
    newer = run_command(["true"], name="found-by").plan.run_id
    next_second()
    longer_name = run_command(["false"], name="found-by-another").plan.run_id
    next_second()
    spec = {**SPEC, "name": "theirs", "team": "product"}
    theirs = plan(JobSpec.model_validate(spec), stage, run_id=new_run_id("theirs", now=datetime.now(timezone.utc)))
    put_spec(emulated, theirs)

    def found(*arguments: str) -> str:
        return str(json.loads(aws_trainyard("status", *arguments, "-o", "json", expect=0).stdout)["run_id"])

    assert found(older) == older
    assert found("found-by") == newer
    assert found("found-by-a") == found("latest") == longer_name
    assert found("latest", "--team", "product") == found("product/latest") == theirs.run_id
    assert "error: 3 run ids begin with 'found-b'" in aws_trainyard("status", "found-b", expect=2).stderr
    unknown = aws_trainyard("status", "fund-by", expect=4)
    assert "run 'fund-by' not found in stage 'dev'; did you mean 'found-by'?" in unknown.stderr
    assert "did you mean 'product'?" in aws_trainyard("status", "latest", "--team", "produce", expect=4).stderr

    # AND `trainyard` alone says what to do with the newest run
    shown = aws_trainyard(expect=0)
    assert f"The newest run of stage 'dev' is {longer_name}: " in shown.stdout
    assert f"trainyard resume {longer_name}" in shown.stdout

    # AND Tab completes run ids, without an error if AWS cannot be asked
    asked = {"_TRAINYARD_COMPLETE": "complete_bash", "COMP_WORDS": "trainyard status found-by-a", "COMP_CWORD": "2"}
    assert aws_trainyard(environment=asked).stdout.split() == [longer_name]
    without_aws = aws_trainyard(environment={**asked, "AWS_ENDPOINT_URL": "http://localhost:9"})
    assert (without_aws.stdout.strip(), without_aws.stderr) == ("", "")


def test_a_run_that_batch_has_forgotten_is_found(aws_trainyard: Trainyard, emulated: Aws, stage: DeployedStage) -> None:
    run_id = "forgotten-20200131-120000-beef"
    line = b'{"step": 8, "eval_accuracy": 0.75, "samples_per_second": 12.5}\n'
    for name, content in {"spec.yaml": b"name: forgotten\n", "metrics.jsonl": line}.items():
        emulated.s3.put_object(Bucket=stage.run_bucket, Key=f"research/{run_id}/{name}", Body=content)
    status = aws_trainyard("status", "forgotten", expect=0).stdout
    assert "unknown to AWS Batch" in status
    assert "step 8, accuracy 0.75, samples/s 12.5" in status
    fetched = aws_trainyard("fetch", "forgotten").stdout.split()
    assert fetched == [f"runs/{run_id}/metrics.jsonl", f"runs/{run_id}/spec.yaml"]
    assert f"next: trainyard fetch {run_id}" in aws_trainyard("logs", "forgotten", expect=4).stderr
