"""`trainyard estimate`: from the stage's own runs, from published figures, and without any figures."""

import json
import re
from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.core.locations import S3Location
from jobs.core.run import new_run_id, run_prefix
from jobs.core.stage import INSTANCE_TYPES, DeployedStage, parameter_path
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.recorded_runs import files_of, three_attempts
from tests.support.jobs.submitting import SPEC

READY_SPECS = Path(__file__).parents[3] / "jobs/specs"


def test_own_runs_are_preferred_to_published_figures(
    aws_trainyard: Trainyard, emulated: Aws, stage: DeployedStage, spec: Path
) -> None:
    unknown = yaml.safe_dump({**SPEC, "arguments": {**SPEC["arguments"], "max_length": 64}})  # type: ignore[dict-item]
    spec.with_name("unknown.yaml").write_text(unknown)
    nothing = aws_trainyard("estimate", "unknown.yaml")
    assert (nothing.returncode, nothing.stdout) == (4, "")
    assert "no figures for 'model' in 'finetune-classification'" in nothing.stderr

    run_id = new_run_id("past", now=datetime.now(timezone.utc))
    run = three_attempts(100, run_id=run_id)
    files = {**files_of(run), "spec.yaml": yaml.safe_dump({**SPEC, "name": "past"}).encode()}
    place = S3Location(stage.run_bucket, run_prefix("research", run_id))
    for name in ("spec.yaml", "receipt.json"):
        emulated.s3.put_object(Bucket=place.bucket, Key=(place / name).key, Body=files[name])

    answer = json.loads(aws_trainyard("estimate", spec, "-o", "json").stdout)
    assert answer["samples"] == 3 * 540, "three epochs of 600 rows, of which a tenth is held out"
    [found] = [each for each in answer["estimates"] if each["place"] == "dl1.24xlarge"]
    last = run.attempts[-1]
    assert last.training_started_at is not None
    start = (last.training_started_at - last.started_at).total_seconds()
    assert found["seconds"] > start + 1620 / 907.3
    assert found["low_usd"] == pytest.approx(found["low_seconds"] / 3600 * 3.93)
    assert f"{run_id}: 907.3 samples/s (1 x dl1.24xlarge)" in found["arithmetic"]

    # The speed with another Trainer is unknown.
    plain = {**SPEC, "name": "plain", "arguments": {**SPEC["arguments"], "hpu_trainer": "transformers"}}  # type: ignore[dict-item]
    of_mrpc = yaml.safe_load((READY_SPECS / "finetune-mrpc-8hpu.yaml").read_text())
    of_mrpc["arguments"]["hpu_trainer"] = "transformers"
    for name, asked in {"plain.yaml": plain, "published.yaml": of_mrpc}.items():
        spec.with_name(name).write_text(yaml.safe_dump(asked))
        nothing = aws_trainyard("estimate", name)
        assert (nothing.returncode, nothing.stdout) == (4, ""), name

    sweep = {"arguments.seed": [1, 2], "arguments.epochs": [1, 3, 4], "parallel": 4}
    spec.with_name("sweep.yaml").write_text(yaml.safe_dump({**SPEC, "max_usd": 100, "sweep": sweep}))
    of_sweep = json.loads(aws_trainyard("estimate", "sweep.yaml", "-o", "json").stdout)
    assert (of_sweep["points"], of_sweep["samples"]) == (6, 2 * (1 + 3 + 4) * 540)
    [together] = [each for each in of_sweep["estimates"] if each["place"] == "dl1.24xlarge"]
    steps = [each * 540 / 907.3 for each in (1, 3, 4)]
    start_and_rest = found["seconds"] - steps[1]
    assert together["usd"] == pytest.approx(6 * found["usd"] + 2 * (sum(steps) - 3 * steps[1]) / 3600 * 3.93)
    # The queue has room for two of the four workers: each runs a point of one, three and four epochs.
    assert together["seconds"] == pytest.approx(3 * start_and_rest + sum(steps))
    shown = aws_trainyard("estimate", "sweep.yaml")
    assert shown.stdout.startswith("probe: 6 points, 2 at a time\n")

    table = aws_trainyard("estimate", READY_SPECS / "finetune-mrpc-8hpu.yaml")
    assert "steps: 3,668 examples (GLUE's mrpc) x 3 epochs = 11,004 samples / 877.2 per second = 13 s" in table.stdout
    assert re.search(r"no figures for \d+ other instance types: no run of this model there", table.stderr)
    heading, row = table.stdout.splitlines()[:2]
    end = heading.index("TIME") + len("TIME")
    assert row[end - 1] != " " == row[end], "figures are aligned right"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("finetune-massive.yaml", "next: give their number: --examples"),
        ("my-script.yaml", "cannot be estimated: only specs of finetune-classification and pretrain-mlm state"),
    ],
)
def test_a_spec_without_a_number_of_samples_is_refused(name: str, message: str, aws_trainyard: Trainyard) -> None:
    refused = aws_trainyard("estimate", READY_SPECS / name)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert message in refused.stderr


def test_without_a_known_speed_the_types_of_a_stage_are_compared_by_price(
    aws_trainyard: Trainyard, emulated: Aws, spec: Path
) -> None:
    # GIVEN a stage of two types, and specs whose time is unknown
    name = parameter_path("dev") + INSTANCE_TYPES
    before = emulated.ssm.get_parameter(Name=name)["Parameter"]["Value"]
    arguments = {**SPEC["arguments"], "max_length": 48}  # type: ignore[dict-item]
    spec.write_text(yaml.safe_dump({**SPEC, "arguments": arguments}))
    emulated.ssm.put_parameter(Name=name, Value="g6e.xlarge g5.xlarge", Overwrite=True)
    try:
        for asked, reason in (
            (spec, "no figures for 'model'"),
            (READY_SPECS / "my-script.yaml", "cannot be estimated"),
        ):
            # THEN a script gets the rows of the table, with the reason on stderr
            found = aws_trainyard("estimate", asked, "-o", "json", expect=0)
            answer = json.loads(found.stdout)
            assert answer["estimates"] == []
            rows = {row["instance_type"]: (row["hours"], row["reason"]) for row in answer["considered"]}
            assert rows == {"g6e.xlarge": (None, "chosen"), "g5.xlarge": (None, "if EC2 has none above")}
            assert reason in found.stderr
    finally:
        emulated.ssm.put_parameter(Name=name, Value=before, Overwrite=True)
