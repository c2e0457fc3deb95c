"""Find metrics in the events of TensorBoard, in JSON and in the lines of a log."""

import ast
import json
import math
import os
import re
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from jobs.container.script.metric_lines import NO_METRIC, STEPS, Report
from jobs.core.records import is_step

READ_BYTES = 4_000_000
"""Bytes that are read of a growing file in one look."""

_RECORD_BYTES = 100_000
"""Longer records of TensorBoard are skipped: images, histograms, graphs."""

_NUMPY = re.compile(r"np\.(?:float|int)\d+\(([^()]*)\)")
"""A number as NumPy prints it in a dict."""


@dataclass
class Followed:
    """How much of a file has been read."""

    offset: int = 0
    version: tuple[int, int] = (0, 0)
    """Its time in nanoseconds and its size when it was read last."""
    is_skipped: bool = False
    is_useful: bool = False
    """Whether JSON lines had a metric."""
    is_lines: bool = False
    """Whether a metrics.json has JSON lines."""


def event_reports(file: BinaryIO, followed: Followed) -> Iterator[Report]:
    """Yield the scalars of TensorBoard's events after what has been read of a file."""
    for event in _events(file, followed):
        scalars = ((_name_of_tag(value.tag), _scalar(value)) for value in event.summary.value)
        values = {name: value for name, value in scalars if value is not ...}
        at = event.wall_time if 0 < event.wall_time <= time.time() + 60 else time.time()
        named = {name: value for name, value in values.items() if name not in NO_METRIC}
        yield Report(named, event.step, at, values.get("epoch"))


def _events(file: BinaryIO, followed: Followed) -> Iterator[Any]:
    """Yield the complete events of TensorBoard after what has been read of a file."""
    from tensorboard.compat.proto import event_pb2  # slow, and most scripts have no events

    file.seek(0, os.SEEK_END)
    end = file.tell()
    last = followed.offset + READ_BYTES
    while followed.offset < min(end, last):
        file.seek(followed.offset)
        head = file.read(12)
        # TFRecord: the length in 8 bytes, its checksum in 4, the content, and its checksum in 4
        length = struct.unpack_from("<Q", head)[0] if len(head) == 12 else end
        if followed.offset + length + 16 > end:
            return
        followed.offset += length + 16
        if length <= _RECORD_BYTES:
            try:
                yield event_pb2.Event.FromString(file.read(length))
            except Exception:  # noqa: BLE001 - protobuf's error; the file is damaged
                followed.is_skipped = True
                return


def _scalar(value: Any) -> Any:
    """Return a summary's number, or ... if it has none."""
    if value.HasField("simple_value"):
        return _finite(value.simple_value)
    if value.HasField("tensor") and not value.tensor.tensor_shape.dim:
        from tensorboard.util.tensor_util import make_ndarray

        found = make_ndarray(value.tensor)
        if found.size == 1 and found.dtype.kind in "fiu":
            return _finite(float(found))
    return ...


def _name_of_tag(tag: str) -> str:
    """Return the metric of a tag of TensorBoard: `loss` for train/loss, `eval_loss` for eval/loss."""
    return _name(tag.removeprefix("train/"))


def _name(text: str) -> str:
    """Return a text as a metric's name."""
    return re.sub(r"[^\w.@%+-]+", "_", text).strip("_")[:80]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def number_of(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def json_of(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def report_of(found: Any, at: float) -> Report | None:
    """Return the numbers of a JSON object as a report, or None if it has none."""
    if not isinstance(found, dict):
        return None
    known = (found.get(name) for name in STEPS)
    steps = (step for step in known if isinstance(step, int) and is_step(step) and step >= 0)
    numbers = dict(_numbers(found))
    epoch = numbers.get("epoch")
    values = {name: value for name, value in numbers.items() if name and name not in NO_METRIC}
    return Report(values, next(steps, None), at, epoch) if values else None


def _numbers(found: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of a mapping, and those of mappings in it as `outer_inner`."""
    for key, value in found.items():
        name = _name(f"{prefix}{key}")
        if isinstance(value, Mapping) and depth < 2:
            yield from _numbers(value, f"{name}_", depth + 1)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value if abs(value) <= sys.float_info.max else None


def printed_report(line: str, at: float) -> Report | None:
    """Return the metrics of a log line that is a dict: a Trainer's, with an epoch or a step, or floats only."""
    text = _NUMPY.sub(r"\1", line.strip())
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = json_of(text.encode())
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        return None
    if not found.keys() & {*STEPS} and not all(isinstance(value, float) for value in found.values()):
        return None
    # Transformers 5 prints numbers as texts.
    numbers = {key: number_of(value) if isinstance(value, str) else value for key, value in found.items()}
    return report_of(numbers, at)
