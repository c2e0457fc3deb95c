"""Alerts for failed jobs and reclaims, metrics of queues, and no alerts for anything else."""

import json
from dataclasses import replace
from typing import Any

import pytest

from infra.observability.functions.batch_jobs import HOME_TAG, SWEEP_TAG, Queue
from infra.observability.functions.report_job import Report, Rules, handler, metrics, report, with_children
from jobs.core.errors import INTERRUPTED_EXIT_CODE
from jobs.core.queues import SPOT_WAITED_TOO_LONG
from jobs.core.retries import DUPLICATE_REASON, EXITED_REASON, MOVED_REASON, RECLAIM_REASON
from jobs.spec.sweep import NO_POINT_LEFT_REASON
from tests.infra.observability.functions.conftest import (
    EXITED,
    OWN_FAULT,
    RECLAIM_ENVIRONMENT,
    RECLAIMED,
    TIMED_OUT,
    Inbox,
    World,
)
from tests.support.waiting import wait_until

NO_FAILURES = (MOVED_REASON, DUPLICATE_REASON, NO_POINT_LEFT_REASON)
RULES = Rules(
    stage="test",
    topic="topic",
    namespace="trainyard/test",
    queues={
        "spot": Queue(label="spot@research", name="spot", on_demand="on-demand"),
        "alone": Queue(label="spot@product", name="spot"),
        "on-demand": Queue(label="on-demand@research", name="on-demand"),
    },
    spot_queues=("spot", "cpu-spot"),
    on_demand_nodes=4,
    reclaims_before_on_demand=2,
    no_failures=NO_FAILURES,
    no_capacity_reason=SPOT_WAITED_TOO_LONG,
    reclaim_reason=RECLAIM_REASON,
    exited_reason=EXITED_REASON,
    interrupted_exit_code=INTERRUPTED_EXIT_CODE,
)
JOB: dict[str, Any] = {"jobName": "tiny", "jobQueue": "spot", "tags": {"trainyard:team": "research"}, "attempts": []}
LOST, TIMEOUT = RECLAIMED["statusReason"], TIMED_OUT["statusReason"]


@pytest.mark.parametrize(
    ("status", "reason", "attempts", "more", "failed"),
    [
        ("FAILED", "Essential container in task exited", [OWN_FAULT], {}, True),
        ("FAILED", LOST, [RECLAIMED], {}, True),
        ("FAILED", LOST, [RECLAIMED, RECLAIMED], {}, False),  # continues On-Demand
        ("FAILED", EXITED_REASON, [EXITED, EXITED], {}, False),  # also continues On-Demand
        ("FAILED", EXITED_REASON, [EXITED], {}, True),
        ("FAILED", EXITED_REASON, [EXITED, EXITED, OWN_FAULT], {}, True),
        ("FAILED", EXITED_REASON, [EXITED, EXITED], {"jobQueue": "on-demand"}, True),
        ("FAILED", TIMEOUT, [RECLAIMED, RECLAIMED, TIMED_OUT], {}, True),
        ("FAILED", SPOT_WAITED_TOO_LONG, [], {"isCancelled": True}, False),  # also continues On-Demand
        ("FAILED", SPOT_WAITED_TOO_LONG, [], {"isCancelled": True, "jobQueue": "alone"}, True),
        ("FAILED", "Canceled by JobStateTimeLimit action due to reason: MISCONFIGURATION:…", [], {}, True),
        ("FAILED", f"{MOVED_REASON} after 2 reclaims: …", [RECLAIMED] * 2, {"isTerminated": True}, False),
        ("FAILED", f"{DUPLICATE_REASON} 1: a lost submission arrived late", [], {"isTerminated": True}, False),
        ("FAILED", "not needed", [], {"isCancelled": True}, False),
        ("FAILED", "not needed", [OWN_FAULT], {"isTerminated": True}, False),
        # A sweep that was reclaimed too often does not continue anywhere.
        ("FAILED", EXITED_REASON, [EXITED, EXITED], {"tags": {SWEEP_TAG: "9"}, "arrayProperties": {"size": 4}}, True),
        ("SUCCEEDED", "", [RECLAIMED], {}, False),
        ("RUNNING", "", [RECLAIMED], {}, False),
    ],
)
def test_what_counts_as_failed(
    *, status: str, reason: str, attempts: list[dict[str, Any]], more: dict[str, Any], failed: bool
) -> None:
    result = report({**JOB, "status": status, "statusReason": reason, "attempts": attempts, **more}, RULES)
    assert (result.failed, bool(result.text)) == (failed, failed)


def test_a_job_that_continues_in_the_fallback_stage_has_not_failed() -> None:
    job = {**JOB, "jobQueue": "alone", "status": "FAILED", "statusReason": SPOT_WAITED_TOO_LONG, "isCancelled": True}
    rules = replace(RULES, fallback=("west", "us-west-2"))
    assert not report(job, rules).failed
    ended = report({**job, "tags": {**JOB["tags"], HOME_TAG: "east/runs"}}, rules)  # it moves only once
    assert ended.failed
    assert ended.text.endswith("Next: trainyard logs tiny --stage east")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"attempts": [RECLAIMED]}, "lost its instance to a Spot reclaim, for the first time; it waits"),
        ({"attempts": [EXITED] * 3}, "lost its instance to a Spot reclaim, for the third time"),
        ({"attempts": [EXITED], "jobQueue": "on-demand"}, ""),
        ({"attempts": [OWN_FAULT]}, ""),
        # If a node is reclaimed, all exit and the first is reported; workers of a sweep are reported separately.
        ({"attempts": [EXITED], "arrayProperties": {"index": 0}}, "lost its instance"),
        ({"attempts": [EXITED], "arrayProperties": {"index": 2}}, ""),
        (
            {"attempts": [EXITED], "arrayProperties": {"index": 2}, "tags": {SWEEP_TAG: "9"}},
            "lost one of its instances",
        ),
    ],
)
def test_a_reclaim_is_reported_once_the_job_waits_again(more: dict[str, Any], text: str) -> None:
    result = report({**JOB, "status": "RUNNABLE", **more}, RULES)
    assert result.reclaimed is bool(text)
    assert text in result.text
    assert bool(result.text) is bool(text)


def test_failed_points_of_a_sweep_are_reported_once() -> None:
    sweep = {**JOB, "status": "FAILED", "tags": {"trainyard:team": "research", SWEEP_TAG: "9"}}
    failed = {"status": "FAILED", "statusReason": EXITED_REASON, "attempts": [OWN_FAULT]}
    assert report({**sweep, **failed, "arrayProperties": {"index": 3}}, RULES) == Report()
    result = report({**sweep, **failed, "arrayProperties": {"size": 4}}, RULES)
    assert "tiny of team research (stage test) is a sweep whose points did not all succeed" in result.text
    assert "Next: trainyard sweep tiny --stage test" in result.text
    # Cancelled waiting workers make the parent FAILED, but do not count as a failure.
    parent = {**sweep, "arrayProperties": {"size": 3}, "statusReason": "Array Child Job failed"}
    succeeded: dict[str, Any] = {"status": "SUCCEEDED", "attempts": [{"container": {"exitCode": 0}}]}
    cancelled: dict[str, Any] = {"status": "FAILED", "statusReason": NO_POINT_LEFT_REASON, "attempts": []}
    for children, has_failed in (([succeeded, cancelled, cancelled], False), ([cancelled, failed, succeeded], True)):
        assert report(with_children(parent, children, RULES), RULES).failed is has_failed


def test_metrics_are_per_queue_and_failures_also_in_total() -> None:
    line = metrics(
        "spot@research", [{"status": "RUNNABLE"}, {"status": "RUNNING"}], Report(failed=True), "trainyard/test"
    )
    assert [line[name] for name in ("Queue", "QueueDepth", "Reclaims", "FailedJobs")] == ["spot@research", 1, 0, 1]
    of_queue, of_all = line["_aws"]["CloudWatchMetrics"]
    assert (of_queue["Dimensions"], [metric["Name"] for metric in of_queue["Metrics"]]) == (
        [["Queue"]],
        ["QueueDepth", "Reclaims", "FailedJobs"],
    )
    assert (of_all["Dimensions"], of_all["Metrics"]) == ([[]], [{"Name": "FailedJobs"}])
    assert of_queue["Namespace"] == of_all["Namespace"] == "trainyard/test"


@pytest.fixture
def _environment(world: World, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        **RECLAIM_ENVIRONMENT,
        "STAGE": "test",
        "TOPIC_ARN": inbox.topic,
        "METRIC_NAMESPACE": "trainyard/test",
        "PARAMETER_PATH": world.parameter_path,
        "SPOT_QUEUES": json.dumps(["cpu-spot", "spot"]),
        "NO_FAILURES": json.dumps(NO_FAILURES),
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_environment")
def test_nodes_of_an_array_are_reported_together(
    world: World, inbox: Inbox, capsys: pytest.CaptureFixture[str]
) -> None:

    def logged() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    # GIVEN three nodes, all of which exited when one was reclaimed
    script = f"[ $AWS_BATCH_JOB_ATTEMPT = 1 ] && exit {INTERRUPTED_EXIT_CODE}; sleep 600"
    parent_id = world.submit("sh", "-c", script, arrayProperties={"size": 3})
    children = [f"{parent_id}:{index}" for index in range(3)]
    wait_until(lambda: [world.job(child) for child in children], lambda jobs: all(job["attempts"] for job in jobs))
    # WHEN all wait again (by now they may run, but the event is from before)
    for child in children:
        handler(world.event(child, status="RUNNABLE"), None)
    [message] = inbox.read()
    assert "(stage test) lost its instance to a Spot reclaim, for the first time" in message
    # THEN none of them is counted as waiting, but a job that depends on them is
    for child in children:
        world.reached(child, "RUNNING")
    waiting = world.submit("true", dependsOn=[{"jobId": parent_id}])
    world.reached(waiting, "PENDING")
    handler(world.event(parent_id), None)
    line = logged()
    assert (line["Queue"], line["QueueDepth"], line["Reclaims"]) == ("spot@research", 1, 0)
    # AND their failure is reported once
    world.batch.terminate_job(jobId=children[1], reason="an error")
    for child in (children[0], children[2]):
        world.batch.terminate_job(jobId=child, reason="changed my mind")
    world.reached(parent_id, "FAILED")
    for job_id in (*children, parent_id):
        handler(world.event(job_id), None)
    [message] = inbox.read()
    run = world.job(parent_id)["jobName"]
    assert message.startswith(f"{run} of team research (stage test) failed in attempt 2: ")
    assert message.endswith(f"Next: trainyard logs {run} --stage test")
    assert logged()["FailedJobs"] == 1
    # AND events of another stage's queue are ignored
    handler(world.event(parent_id, jobQueue="arn:aws:batch:us-east-1:123456789012:job-queue/other"), None)
    assert (inbox.read(), capsys.readouterr().out) == ([], "")
