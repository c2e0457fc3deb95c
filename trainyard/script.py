"""Functions for any training script: its inputs, output, result and checkpoint, and announcements of long pauses."""

import json
import math
import os
import sys
from pathlib import Path
from typing import SupportsFloat

RESULT_BYTES = 16_384
"""Maximum size of a run's result in bytes. Each receipt and each list of runs contains the whole result."""


def is_here() -> bool:
    """Return whether the platform has started this process as a rank.

    Example:
        if trainyard.is_here():
            args.num_workers = 0
    """
    return all(name in os.environ for name in ("TRAINYARD_RUN_URI", "TRAINYARD_SCRATCH")) and _rank() is not None


def _rank() -> str | None:
    """Return this process's rank, as set by torchrun and the like, Open MPI, MPICH or the platform."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "TRAINYARD_RANK")
    return next((os.environ[name] for name in names if name in os.environ), None)


def busy(seconds: float) -> None:
    """Announce that the next activity, such as an evaluation or a download, may take this long and is not a hang.

    The announcement holds until the next step of a Trainer with `trainyard.Callback` or of a `trainyard.Run`. In other
    scripts it holds for `seconds` from now.

    Example:
        trainyard.busy(seconds=3600)
        scores = evaluate(model, test_set)
    """
    if is_here():
        from jobs.container.trainer.heartbeat import busy

        busy(seconds)


def checkpoint() -> str | None:
    """Return the folder of the checkpoint from which this run resumes, or None in a new run. All ranks call it.

    Example:
        trainer.train(resume_from_checkpoint=trainyard.checkpoint())
    """
    if not is_here():
        return None
    from jobs.container.trainer.script_trainer import checkpoint as restored

    return restored()


def output(default: str | Path = "output") -> Path:
    """Return the folder whose files are kept with the run. Outside the platform, create and return `default`.

    Example:
        torch.save(embeddings, trainyard.output() / "embeddings.pt")
    """
    folder = Path(os.environ.get("TRAINYARD_OUTPUT") or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def input_path(name: str, default: str | Path | None = None) -> str:
    """Return the path or location of the spec's input `name`, or `default` if there is no such input.

    Raises KeyError if there is no such input and no default.

    Example:
        reviews = pandas.read_csv(trainyard.input_path("reviews", default="reviews.csv"))
    """
    variable = f"TRAINYARD_INPUT_{name.upper().replace('-', '_')}"
    found = os.environ.get(variable, None if default is None else str(default))
    if found is None:
        raise KeyError(f"{variable} is not set: the spec has no input '{name}'")
    return found


def result(**values: SupportsFloat | str) -> None:
    """Add values to the run's result, which receipts, reports and comparisons show beside its metrics.

    A repeated name keeps its newest value. Only rank 0's values count. Outside the platform it does nothing. Always
    raises ValueError if all values together exceed RESULT_BYTES as JSON.

    Example:
        trainyard.result(accuracy=0.93, split="test")
    """
    given = {name: _plain(value) for name, value in values.items()}
    _check_size(given)
    if not is_here() or _rank() != "0":
        return
    from jobs.container.channel import add_result, read_result

    scratch = Path(os.environ["TRAINYARD_SCRATCH"])
    _check_size({**read_result(scratch), **given})
    add_result(scratch, given)


def _check_size(values: dict[str, float | str | None]) -> None:
    size_bytes = len(json.dumps(values).encode())
    if size_bytes > RESULT_BYTES:
        largest = max(values, key=lambda name: len(json.dumps(values[name])))
        raise ValueError(
            f"trainyard.result takes at most {RESULT_BYTES} bytes of JSON in all; these values have {size_bytes}, most "
            f"of them in '{largest[:100]}'. Next: write long texts and tables to a file below trainyard.output()"
        )


def _plain(value: SupportsFloat | str) -> float | str | None:
    """Return a JSON value: strings, booleans and integers unchanged, other numbers as float, None if not finite."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= sys.float_info.max else None  # JSON readers cannot parse larger integers
    number = number_of(value)
    return number if math.isfinite(number) else None


def number_of(value: SupportsFloat) -> float:
    """Return a value as a float, even if it is a tensor that requires gradients."""
    detached = getattr(value, "detach", None)
    return float(detached() if detached else value)
