"""The ready spec of a fabric-check as users submit it, on the embedded AWS."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from jobs.cli.spec_file import READY_SPECS
from tests.jobs.cli.conftest import Trainyard


def test_the_ready_spec_checks_this_machine(
    trainyard: Trainyard, deployed_environment: Mapping[str, str], tmp_path: Path
) -> None:
    quick = ("arguments.largest_message_bytes=4096", "arguments.seconds_per_measurement=0.02")
    settings = [part for setting in quick for part in ("--set", setting)]
    finished = trainyard("submit", READY_SPECS / "fabric-check.yaml", *settings, environment=deployed_environment)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    assert re.search(r"\n  all-reduce +4 KiB +[\d.]+ us +[\d.e-]+ GB/s +[\d.e-]+ GB/s  node 0\n", finished.stdout)

    run_id = finished.stdout.splitlines()[0]
    receipt = json.loads(trainyard("receipt", run_id, "-o", "json", environment=deployed_environment).stdout)
    assert receipt["state"] == "succeeded"
    assert receipt["result"]["wrong_results"] == 0
    assert receipt["result"]["within_nodes_bus_gigabytes_per_second"] > 0
    assert receipt["result"]["within_nodes_latency_microseconds"] > 0
    assert trainyard("fetch", run_id, environment=deployed_environment).returncode == 0
    folder = tmp_path / "runs" / run_id
    report = json.loads((folder / "fabric.json").read_text())
    assert {item["collective"] for item in report["measurements"]} == {"all-reduce", "broadcast", "all-gather"}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {64, 512, 4096}
    assert all(row["allreduce_within_nodes_microseconds"] > 0 for row in rows if "allreduce" in str(row))
    assert list((folder / "tensorboard").iterdir())
