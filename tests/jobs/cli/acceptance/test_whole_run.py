"""The command, whole, on an embedded AWS of its own: deployed, used, reclaimed, destroyed, and reported as it was."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.cli.acceptance.runs import CORPUS
from jobs.contract.acceptance import CLAIMS, STEPS
from tests.jobs.cli.conftest import Trainyard
from tests.support.embedded_aws import EmbeddedAws, environment_of
from tests.support.jobs.terminal import TRAINYARD, Terminal

CACHE = Path(__file__).parents[4] / ".trainyard/cache"
"""The demo's downloads, shared by the tests."""


PROVEN_HERE = {"templates", "batch", "training", "collectives", "resumes", "gone"}
"""What an embedded AWS can show."""


def stacks(aws: EmbeddedAws) -> list[str]:
    found = aws.client("cloudformation").describe_stacks()["Stacks"]
    return [stack["StackName"] for stack in found if stack["StackName"].startswith("trainyard-dev-")]


@pytest.mark.timeout(600)
def test_it_proves_what_the_embedded_aws_can_show_and_nothing_else(
    trainyard: Trainyard, fresh_aws: EmbeddedAws, tmp_path: Path
) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    (tmp_path / ".trainyard").mkdir()
    (tmp_path / ".trainyard/cache").symlink_to(CACHE)
    environment = environment_of(fresh_aws.endpoint)
    finished = trainyard("acceptance", environment=environment)
    assert finished.returncode == 0, finished.stderr
    page, data = (tmp_path / line for line in finished.stdout.splitlines())
    report: dict[str, Any] = json.loads(data.read_text())

    outcomes = {claim["claim"]: claim["outcome"] for claim in report["claims"]}
    assert outcomes == {claim.name: "proven" if claim.name in PROVEN_HERE else "not proven here" for claim in CLAIMS}
    assert [(step["name"], step["error"] + step["undo_error"]) for step in report["steps"]] == [
        (name, "") for name in STEPS
    ]
    evidence = {claim["claim"]: claim["evidence"] for claim in report["claims"]}
    assert re.search(
        r"attempt 2 continued from step \d+ to 32; "
        r"\d+ s passed between attempts 1 and 2, and \d+ s more until a step began$",
        evidence["resumes"],
    )
    assert "could: the embedded AWS enforces no IAM" in evidence["iam"]
    assert report["spent_usd"] == 0

    # Nothing is left but what is meant to stay, and that is named.
    assert stacks(fresh_aws) == []
    named = next(claim["ids"] for claim in report["claims"] if claim["claim"] == "gone")
    assert named
    assert all(":s3:::" in arn or ":logs:" in arn or ":secretsmanager:" in arn for arn in named.values())
    s3 = fresh_aws.client("s3")
    objects = [s3.list_objects_v2(Bucket=bucket["Name"]) for bucket in s3.list_buckets()["Buckets"]]
    assert f"product/{CORPUS}" not in [item["Key"] for each in objects for item in each.get("Contents", [])]
    assert fresh_aws.health()["server_errors"] == []
    html = page.read_text()
    assert all(claim.text.replace("'", "&#39;") in html for claim in CLAIMS)

    # The same command does nothing again, and prints the same.
    again = trainyard("acceptance", "-o", "json", environment=environment)
    assert (again.returncode, json.loads(again.stdout)) == (0, report)
    assert "it ran before, to its end" in again.stderr


@pytest.mark.timeout(300)
def test_ctrl_c_while_the_cdk_deploys_takes_the_stage_down(
    fresh_aws: EmbeddedAws, clean_environment: dict[str, str], tmp_path: Path
) -> None:
    environment = {**clean_environment, **environment_of(fresh_aws.endpoint)}
    with Terminal([TRAINYARD, "acceptance"], environment=environment, folder=tmp_path) as terminal:
        terminal.wait_until_shown("cdk deploy 'dev/", timeout_seconds=120)
        for _ in range(3000):  # often: when the first stack is there, and nothing is in it yet
            if stacks(fresh_aws):
                break
            time.sleep(0.02)
        assert stacks(fresh_aws)
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.wait(timeout_seconds=120) == 130
    assert stacks(fresh_aws) == []
    [state_file] = tmp_path.glob(".trainyard/acceptance/*.json")
    steps = {step["name"]: step for step in json.loads(state_file.read_text())["steps"]}
    assert (steps["preflight"]["outcome"], steps["deploy"]["outcome"]) == ("not proven here", "not reached")
    assert not any(step["undo_due"] for step in steps.values())


def test_a_limit_below_the_worst_case_and_a_stage_of_somebody_else_are_refused(
    trainyard: Trainyard, deployed_aws: EmbeddedAws
) -> None:
    before, environment = stacks(deployed_aws), environment_of(deployed_aws.endpoint)
    refused = trainyard("acceptance", "--keep", "--max-usd", "3", environment=environment)
    assert refused.returncode == 2
    assert re.search(r"error: it may cost [\d.]+ USD, and --max-usd allows 3.00 USD: nothing was begun", refused.stderr)
    refused = trainyard("acceptance", "--yes", environment=environment)
    assert refused.returncode == 3
    assert "stage 'dev' is there already" in refused.stderr
    assert stacks(deployed_aws) == before
