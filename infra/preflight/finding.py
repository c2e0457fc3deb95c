"""The answer of a check: ok, a problem, or unknown."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "problem", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A row of the preflight's answer."""

    check: str
    verdict: Verdict
    text: str
    next_step: str = ""
    """Command or edit that gets the user further; empty where it is ok."""


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, verdict="ok", text=text)


def problem(check: str, text: str, next_step: str) -> Finding:
    return Finding(check=check, verdict="problem", text=text, next_step=next_step)


def unknown(check: str, text: str, next_step: str) -> Finding:
    return Finding(check=check, verdict="unknown", text=text, next_step=next_step)
