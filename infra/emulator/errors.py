"""Define errors that the program prints before it exits, and record errors of the running server.

The server records every 500 response, and every unexpected exception behind CloudFormation. /trainyard/health returns
them as `server_errors`; tests fail if there are any.
"""

import logging
import traceback
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any


class EmulatorError(Exception):
    """An error that the user can fix: what is wrong, and what to do next. Printed without a traceback."""

    def __init__(self, message: str, *, next_step: str | None = None, exit_code: int = 1) -> None:
        """`next_step` is the command or edit that fixes it; printed on a separate line."""
        super().__init__(f"{message}\nNext: {next_step}" if next_step else message)
        self.exit_code = exit_code


class ConfigurationError(EmulatorError):
    """A setting of the server is wrong, or something that it needs is missing. Exit code 3."""

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        super().__init__(message, next_step=next_step, exit_code=3)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerError:
    """One failed operation; the traceback is in the log."""

    path: str
    operation: str
    error: str


_errors: list[ServerError] = []
_lock = Lock()


def record_error(path: str, operation: str, error: str) -> None:
    """Record and log a 500 response. Callers log its cause first."""
    with _lock:
        _errors.append(ServerError(path=path, operation=operation, error=error))
    logger.error("500 %s %s: %s", path, operation, error)


def record_exception(path: str, operation: str, error: BaseException) -> None:
    """Record an exception, and log its traceback."""
    logger.error("".join(traceback.format_exception(error)).rstrip())
    record_error(path, operation, f"{type(error).__name__}: {error}")


def recorded_errors() -> list[dict[str, Any]]:
    """Return all recorded errors, oldest first."""
    with _lock:
        return [asdict(error) for error in _errors]
