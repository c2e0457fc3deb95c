"""Errors that whoever starts the emulator can act on: the program prints one and ends with its exit code."""

import logging
import traceback
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any


class EmulatorError(Exception):
    """Says what is wrong and what to do about it; printed without a traceback."""

    def __init__(self, message: str, *, next_step: str | None = None, exit_code: int = 1) -> None:
        """`next_step` is the command or edit that gets the user further; it is printed on a line of its own."""
        super().__init__(f"{message}\nNext: {next_step}" if next_step else message)
        self.exit_code = exit_code


class ConfigurationError(EmulatorError):
    """A setting of the server is wrong, or something that it needs is not there."""

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step, exit_code=3)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerError:
    """One failure: which operation, and the error's last words; the traceback is in the log."""

    path: str
    operation: str
    error: str


_errors: list[ServerError] = []
_lock = Lock()


def record_error(path: str, operation: str, error: str) -> None:
    """Put an answer of 500 on record; whatever explains it must already be in the log."""
    with _lock:
        _errors.append(ServerError(path=path, operation=operation, error=error))
    logger.error("500 %s %s: %s", path, operation, error)


def record_exception(path: str, operation: str, error: BaseException) -> None:
    """Put an exception on record, with its traceback in the log."""
    logger.error("".join(traceback.format_exception(error)).rstrip())
    record_error(path, operation, f"{type(error).__name__}: {error}")


def recorded_errors() -> list[dict[str, Any]]:
    """Return all that is on record, the oldest first."""
    with _lock:
        return [asdict(error) for error in _errors]
