import json
from datetime import datetime, timezone

import pytest

from jobs.core.records import (
    CardUse,
    Receipt,
    UnreadableError,
    line_with_step,
    parse_record,
    read_attempt,
    read_json_lines,
    read_record,
)

NOON = datetime(2026, 11, 21, 12, 0, 5, tzinfo=timezone.utc)


WRITTEN = {
    "number": 1,
    "started_at": NOON.isoformat(),
    "last_seen_at": NOON.isoformat(),
    "instance_type": "dl1.24xlarge",
    "accelerator": "hpu",
    "nnodes": 1,
    "world_size": 8,
}


def test_unknown_fields_are_ignored_at_every_level() -> None:
    cards = {"utilization_percent": 1.0, "memory_percent": 2.0, "mean_utilization_percent": 3.0, "idle_seconds": 4.0}
    written = {**WRITTEN, "ran_with": {"torch": "2.9"}, "cards": {**cards, "warp": 9}, "flux_capacitor": True}
    found = read_attempt(json.dumps(written).encode(), place="s3://runs/a/attempts/1.json")
    assert found is not None
    assert (found.cards, found.ran_with) == (CardUse(**cards), {"torch": "2.9"})
    assert read_attempt(found.model_dump_json().encode(), place="") == found


def test_attempt_on_an_unknown_instance_type_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    unknown = json.dumps({**WRITTEN, "instance_type": "dl9.48xlarge"}).encode()
    assert read_attempt(unknown, place="s3://runs/attempts/9.json") is None
    assert caplog.messages == [
        "warning: s3://runs/attempts/9.json cannot be read and is skipped; totals do not include this attempt"
    ]


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"number": 1, "job', b"[" * 100_000])
def test_damaged_record_is_skipped_with_a_printable_warning(
    content: bytes, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    place = f"s3://runs/\x1b[31m{request.node.name}.json"
    assert read_record(Receipt, content, place=place) is None
    [warning] = caplog.messages
    assert warning.endswith("cannot be read and is skipped")
    assert "runs/\\x1b[31m" in warning
    with pytest.raises(UnreadableError, match="cannot be read"):
        parse_record(Receipt, content, place=place)


def test_infinite_numbers_are_skipped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        '{"step": 1, "loss": 0.5, "tokens": ' + 400 * "9" + "}",
        '{"step": 2, "loss": 1e999, "tokens": 7}',
        '{"step": true, "loss": 0.5}',
        '{"step": ' + 400 * "9" + ', "loss": 0.5}',
        '{"step": 3, "tokens": ' + 9000 * "9" + "}",  # more digits than Python accepts
    ]
    found = read_json_lines("\n".join(lines).encode(), place="metrics.jsonl", accept=line_with_step)
    assert found == [{"step": 1, "loss": 0.5, "tokens": None}, {"step": 2, "loss": None, "tokens": 7}]
    assert caplog.text.count("metrics.jsonl: skipped values of tokens that are not finite numbers") == 1
    assert "metrics.jsonl: skipped 3 lines that cannot be read, the first at line 3" in caplog.text
