"""The table that `trainyard list` shows."""

import io
from datetime import datetime, timezone

import pytest
from rich.console import Console

from jobs.cli.list import ListedRun, show_runs
from jobs.client.job import Job
from tests.support.jobs.recorded_runs import three_attempts


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (160, ["RUN", "STATE", "METRIC", "USD", "TOOK", "ATTEMPT", "TEAM", "QUEUE", "SUBMITTED"]),
        (80, ["RUN", "STATE", "METRIC", "USD", "TOOK"]),
        (50, ["RUN", "STATE"]),
    ],
)
def test_a_narrow_list_leaves_columns_out_and_cuts_nothing(width: int, headings: list[str]) -> None:
    job = Job(
        id="7c1e",
        run_id="finetune-massive-20260131-120000-0a1b",
        state="SUCCEEDED",
        reason="",
        queue="on-demand",
        team="research",
        kind="pretrain-mlm",
        moved="",
        created_at=datetime(2026, 1, 31, 12, tzinfo=timezone.utc),
        started_at=None,
        stopped_at=datetime(2026, 1, 31, 15, 20, tzinfo=timezone.utc),
        attempts=(),
        max_attempts=3,
        log_streams=(),
    )
    console = Console(width=width, file=io.StringIO())
    show_runs([ListedRun(job=job, receipt=three_attempts(200).receipt)], on=console)
    assert isinstance(console.file, io.StringIO)
    heading, row = console.file.getvalue().splitlines()
    assert heading.split() == headings
    assert row.split()[:2] == [job.run_id, "SUCCEEDED"]
    assert ("accuracy 0.874" in row) == ("METRIC" in headings)
