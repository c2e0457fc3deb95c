"""The test of an image: each check that concerns it, in real containers of it.

    trainyard images test cpu           cpu and all that is built on it

A check passes, fails with what it found, or is left out with the reason: what needs a card is never called good on a
machine without one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jobs.contract.image_hierarchy import Image
from jobs.images.checks.check import Check, CheckFailedError, LeftOut, Subject
from jobs.images.checks.table import CHECKS

Outcome = Literal["ok", "failed", "left out"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one check of one image ended."""

    image: Image
    check: Check
    outcome: Outcome
    found: str
    """In one line."""
    output: str
    """Of the container, where the check failed."""
    seconds: float


def run_checks(subject: Subject, *, begins: Callable[[Check], None], ends: Callable[[Result], None]) -> list[Result]:
    """All results, one check after the other; `begins` and `ends` are told of each. Raises docker's errors."""
    results = []
    for check in CHECKS:
        if check.concerns(subject.image):
            begins(check)
            results.append(_result(check, subject))
            ends(results[-1])
    return results


def _result(check: Check, subject: Subject) -> Result:
    began = time.monotonic()
    outcome: Outcome = "ok"
    output = ""
    try:
        found = check.run(subject)
    except LeftOut as reason:
        outcome, found = "left out", str(reason)
    except CheckFailedError as failure:
        *lines, found = str(failure).splitlines()
        outcome, output = "failed", "\n".join(lines)
    return Result(
        image=subject.image,
        check=check,
        outcome=outcome,
        found=found,
        output=output,
        seconds=time.monotonic() - began,
    )
