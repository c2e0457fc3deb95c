"""What went wrong inside the server: every answer of 500, and every crash of a model behind CloudFormation.

Read at /trainyard/health as `server_errors`; tests fail on any.
"""

import logging
import traceback
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerError:
    """One failure: which operation, and the error's last words; the traceback is in the log."""

    path: str
    operation: str
    error: str


_errors: list[ServerError] = []
_lock = Lock()


def record(path: str, operation: str, error: str) -> None:
    """Put an answer of 500 on record; whatever explains it must already be in the log."""
    with _lock:
        _errors.append(ServerError(path=path, operation=operation, error=error))
    logger.error("500 %s %s: %s", path, operation, error)


def record_exception(path: str, operation: str, error: BaseException) -> None:
    """Put an exception on record, with its traceback in the log."""
    logger.error("".join(traceback.format_exception(error)).rstrip())
    record(path, operation, f"{type(error).__name__}: {error}")


def recorded() -> list[dict[str, Any]]:
    """Return all that is on record, the oldest first."""
    with _lock:
        return [asdict(error) for error in _errors]
