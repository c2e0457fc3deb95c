"""Where a script finds its inputs and leaves its output and its result, and whether it runs in the platform."""

import json
import math
import os
import sys
from pathlib import Path
from typing import SupportsFloat

RESULT_BYTES = 16_384
"""The most that a run's result may take: each receipt, and each list of runs, has all of it."""


def is_here() -> bool:
    """Return whether this process is a rank that the platform has started."""
    return all(name in os.environ for name in ("TRAINYARD_RUN_URI", "TRAINYARD_SCRATCH")) and _rank() is not None


def _rank() -> str | None:
    """Return this process's rank: of whoever has started it (torchrun and its like, Open MPI, MPICH), else of a process
    that the platform has started alone.
    """
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "TRAINYARD_RANK")
    return next((os.environ[name] for name in names if name in os.environ), None)


def checkpoint() -> str | None:
    """Return the folder of the checkpoint that this run goes on from; None: it begins. All ranks call it.

    For `trainer.train(resume_from_checkpoint=trainyard.checkpoint())`.
    """
    if not is_here():
        return None
    from jobs.container.trainer.attached import checkpoint as restored

    return restored()


def output(default: str | Path = "output") -> Path:
    """Return the folder whose files are kept with the run; `default`, which is made, outside the platform."""
    folder = Path(os.environ.get("TRAINYARD_OUTPUT") or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def input_path(name: str, default: str | Path | None = None) -> str:
    """Return where the input `name` of the spec lies; `default` where there is none. Raises KeyError without one."""
    variable = f"TRAINYARD_INPUT_{name.upper().replace('-', '_')}"
    found = os.environ.get(variable, None if default is None else str(default))
    if found is None:
        raise KeyError(f"{variable} is not set: the spec has no input '{name}'")
    return found


def result(**values: SupportsFloat | str) -> None:
    """Put values into the run's result, beside its metrics: its receipt, reports and comparisons show them.

    A name that is given again has its newest value. Only what rank 0 says counts. Outside the platform it does nothing.
    Raises ValueError, anywhere, if all values together take more than RESULT_BYTES as JSON.
    """
    given = {name: _plain(value) for name, value in values.items()}
    _check_size(given)
    if not is_here() or _rank() != "0":
        return
    from jobs.container.channel import tell_result, told_result

    scratch = Path(os.environ["TRAINYARD_SCRATCH"])
    _check_size({**told_result(scratch), **given})
    tell_result(scratch, given)


def _check_size(values: dict[str, float | str | None]) -> None:
    size_bytes = len(json.dumps(values).encode())
    if size_bytes > RESULT_BYTES:
        largest = max(values, key=lambda name: len(json.dumps(values[name])))
        raise ValueError(
            f"trainyard.result takes {RESULT_BYTES} bytes of JSON in all, and this makes {size_bytes}, most of it in "
            f"'{largest[:100]}'. Next: write long texts and tables into a file below trainyard.output()"
        )


def _plain(value: SupportsFloat | str) -> float | str | None:
    """Return what JSON has: text, a truth or a whole number as it is, any other number as one, None for none at all."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= sys.float_info.max else None  # no reader makes a number of more digits
    number = number_of(value)
    return number if math.isfinite(number) else None


def number_of(value: SupportsFloat) -> float:
    """Return a number, of a tensor in a graph too."""
    detached = getattr(value, "detach", None)
    return float(detached() if detached else value)
