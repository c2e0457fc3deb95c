"""The command, whole, on an embedded AWS of its own: deployed, used, reclaimed, destroyed, and told truly."""

import json
import os
import re
import signal
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jobs.cli.acceptance.runs import CORPUS
from jobs.contract.acceptance import CLAIMS, STEPS
from tests.jobs.cli.conftest import Trainyard
from tests.support.embedded_aws import EmbeddedAws, environment_of
from tests.support.jobs.terminal import TRAINYARD, Terminal

CACHE = Path(__file__).parents[4] / ".trainyard/cache"
"""Where the demo keeps what it downloads: shared by the tests."""

STATE = "dev-123456789012-us-east-1"


def share_cache(folder: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    (folder / ".trainyard").mkdir()
    (folder / ".trainyard/cache").symlink_to(CACHE)


def stacks(aws: EmbeddedAws) -> list[str]:
    found = aws.client("cloudformation").describe_stacks()["Stacks"]
    return [stack["StackName"] for stack in found if stack["StackName"].startswith("trainyard-dev-")]


@pytest.mark.timeout(600)
def test_it_proves_what_the_embedded_aws_can_show_and_nothing_else(
    trainyard: Trainyard, fresh_aws: EmbeddedAws, tmp_path: Path
) -> None:
    share_cache(tmp_path)
    finished = trainyard("acceptance", environment=environment_of(fresh_aws.endpoint), timeout_seconds=580)
    assert finished.returncode == 0, finished.stderr
    page, data = (tmp_path / line for line in finished.stdout.splitlines())
    report: dict[str, Any] = json.loads(data.read_text())

    proven = {claim["claim"] for claim in report["claims"] if claim["outcome"] == "proven"}
    assert proven == {claim.name for claim in CLAIMS if claim.on_embedded}
    others = {claim["outcome"] for claim in report["claims"] if claim["claim"] not in proven}
    assert others == {"not proven here"}
    assert [step["name"] for step in report["steps"]] == list(STEPS)
    assert {step["error"] + step["undo_error"] for step in report["steps"]} == {""}
    evidence = {claim["claim"]: claim["evidence"] for claim in report["claims"]}
    assert re.search(
        r"attempt 2 went on from step \d+ to 32; "
        r"\d+ s passed between attempts 1 and 2, and \d+ s more until a step began$",
        evidence["resumes"],
    )
    assert "tried to read s3://" in evidence["iam"]
    assert "could: the embedded AWS enforces no IAM" in evidence["iam"]
    assert report["spent_usd"] == 0

    # Nothing is left but what is meant to stay, and that is named.
    assert stacks(fresh_aws) == []
    left = fresh_aws.client("resourcegroupstaggingapi").get_resources(
        TagFilters=[{"Key": "trainyard:stage", "Values": ["dev"]}]
    )["ResourceTagMappingList"]
    named = next(claim["ids"] for claim in report["claims"] if claim["claim"] == "gone")
    deleted = {
        one["NatGatewayId"]
        for one in fresh_aws.client("ec2").describe_nat_gateways()["NatGateways"]
        if one["State"] == "deleted"
    }
    listed = {one["ResourceARN"] for one in left if one["ResourceARN"].rpartition("/")[2] not in deleted}
    assert listed == set(named.values())
    assert all(":s3:::" in arn or ":logs:" in arn or ":secretsmanager:" in arn for arn in listed)
    buckets = fresh_aws.client("s3").list_buckets()["Buckets"]
    keys = [
        item["Key"]
        for bucket in buckets
        for item in fresh_aws.client("s3").list_objects_v2(Bucket=bucket["Name"]).get("Contents", [])
    ]
    assert f"product/{CORPUS}" not in keys
    assert fresh_aws.health()["server_errors"] == []

    # The page has each claim, and asks no network for anything.
    html = page.read_text()
    HTMLParser().feed(html)
    assert all(claim.text.replace("'", "&#39;") in html for claim in CLAIMS)
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html

    # Said again, it does nothing and says the same.
    again = trainyard("acceptance", "-o", "json", environment=environment_of(fresh_aws.endpoint))
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == report
    assert "it was run before, to its end" in again.stderr


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
    state = json.loads((tmp_path / f".trainyard/acceptance/{STATE}.json").read_text())
    outcomes = {step["name"]: step["outcome"] for step in state["steps"]}
    assert (outcomes["preflight"], outcomes["deploy"], outcomes["cpu-job"]) == (
        "not proven here",
        "not reached",
        "not reached",
    )
    assert not any(step["undo_due"] for step in state["steps"])


def test_a_limit_below_the_worst_case_is_refused_before_anything(
    trainyard: Trainyard, deployed_aws: EmbeddedAws, tmp_path: Path
) -> None:
    environment = environment_of(deployed_aws.endpoint)
    refused = trainyard("acceptance", "--keep", "--max-usd", "3", environment=environment)
    assert refused.returncode == 2
    assert re.search(r"error: it may cost [\d.]+ USD, and --max-usd allows 3.00 USD: nothing was begun", refused.stderr)
    assert "next: --max-usd " in refused.stderr


def test_a_stage_that_somebody_else_deployed_is_not_touched(trainyard: Trainyard, deployed_aws: EmbeddedAws) -> None:
    before = stacks(deployed_aws)
    refused = trainyard("acceptance", "--yes", environment=environment_of(deployed_aws.endpoint))
    assert refused.returncode == 3
    assert "stage 'dev' is there already" in refused.stderr
    assert "--keep proves what it can on it" in refused.stderr
    assert stacks(deployed_aws) == before
