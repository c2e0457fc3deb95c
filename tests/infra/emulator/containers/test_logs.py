"""Log streams: live, in order, and split as CloudWatch requires."""

import time
from pathlib import Path
from typing import Any

import pytest

from infra.emulator.containers.logs import MAX_EVENT_BYTES, LineSplitter
from tests.support.emulator.batch_calls import Batch, container_of


def split(*chunks: bytes) -> list[str]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.flush()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ((b"one\ntwo\n",), ["one", "two"]),
        ((b"on", b"e\ntw", b"o"), ["one", "two"]),
        ((b"one\r\ntwo\r\n",), ["one", "two"]),
        ((b"10%\r", b"50%\r", b"100%\n"), ["10%", "50%", "100%"]),
        ((b"\n\n \n",), [" "]),
        (("gr\u00fc".encode()[:-1], "\u00fc".encode()[1:] + b"n\n"), ["gr\u00fcn"]),
        ((b"\xff\n",), ["\ufffd"]),
        ((b"",), []),
    ],
)
def test_output_is_split_into_lines(chunks: tuple[bytes, ...], lines: list[str]) -> None:
    assert split(*chunks) == lines


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_long_line_is_split_between_characters(end: bytes) -> None:
    line = "\u20ac" * 200_000  # three bytes each, which does not divide the limit
    parts = split(line.encode() + end)
    assert "".join(parts) == line
    assert len(parts) == 3
    assert all(len(part.encode()) <= MAX_EVENT_BYTES for part in parts)
    # A line without end does not accumulate.
    splitter = LineSplitter()
    assert len([part for _ in range(100) for part in splitter.feed(b"x" * 10_000)]) == 3


def test_lines_appear_while_the_job_runs(batch: Batch, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"""
import os, time
print('first')
while not os.path.exists('{gate}'): time.sleep(0.02)
for number in range(9999): print(number, 'x' * 100)
"""
    before = time.time() * 1000
    job_id = batch.submit(batch.definition("python", "-c", script), batch.queue())
    running = batch.wait_for_line(job_id, "first")
    assert running["status"] == "RUNNING"
    assert batch.output(running) == ["first"]
    gate.touch()
    job = batch.wait_for_end(job_id)
    events = batch.aws.client("logs").get_log_events(
        logGroupName="/aws/batch/job", logStreamName=container_of(job)["logStreamName"], startFromHead=True, limit=10000
    )["events"]
    assert [event["message"].split()[0] for event in events] == ["first", *map(str, range(9999))]
    times = [event["timestamp"] for event in events]
    assert before - 1 <= times[0] <= times[-1] <= time.time() * 1000
    assert times[0] <= job["stoppedAt"]


def test_log_group_and_prefix_of_the_definition(batch: Batch) -> None:
    def logging_to(group: str) -> dict[str, Any]:
        options = {"awslogs-group": group, "awslogs-stream-prefix": "team/kind"}
        container = {"logConfiguration": {"logDriver": "awslogs", "options": options}}
        return batch.wait_for_end(batch.submit(batch.definition("echo", "hello", container=container), batch.queue()))

    batch.aws.client("logs").create_log_group(logGroupName="/of/the/definition")
    job = logging_to("/of/the/definition")
    (task,) = job["attempts"][0]["taskProperties"]
    assert container_of(job)["logStreamName"] == f"team/kind/main/{task['taskArn'].rsplit('/', 1)[-1]}"
    assert batch.lines(container_of(job)["logStreamName"], "/of/the/definition") == ["hello"]
    failed = logging_to("/no/such/group")
    assert failed["statusReason"] == "Task failed to start"
    assert "The specified log group does not exist." in container_of(failed["attempts"][0])["reason"]
