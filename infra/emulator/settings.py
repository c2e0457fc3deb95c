"""Read waiting times, in seconds, from the server's environment. Tests shorten them."""

import os

from infra.emulator.errors import ConfigurationError

STOP_TIMEOUT_VARIABLE = "TRAINYARD_STOP_TIMEOUT_SECONDS"
"""Seconds between SIGTERM and SIGKILL; the ECS agent's ECS_CONTAINER_STOP_TIMEOUT."""
MINIMUM_TIMEOUT_VARIABLE = "TRAINYARD_MINIMUM_TIMEOUT_SECONDS"
"""The shortest attemptDurationSeconds that Batch accepts."""
FUNCTION_RETRY_VARIABLE = "TRAINYARD_FUNCTION_RETRY_SECONDS"
"""Seconds before the first retry of an asynchronous invocation. The second retry waits twice as long."""


def check_all() -> None:
    """Raise ConfigurationError if any of the variables is not a number."""
    stop_timeout_seconds()
    minimum_timeout_seconds()
    function_retry_seconds()


def stop_timeout_seconds() -> float:
    """Return how long a container may run after SIGTERM. Default: 30, as on the ECS agent."""
    return _number(STOP_TIMEOUT_VARIABLE, 30)


def minimum_timeout_seconds() -> float:
    """Return the smallest attemptDurationSeconds. Default: 60, as on AWS."""
    return _number(MINIMUM_TIMEOUT_VARIABLE, 60)


def function_retry_seconds() -> float:
    """Return the delay before the first retry of a failed asynchronous invocation. Default: 60."""
    return _number(FUNCTION_RETRY_VARIABLE, 60)


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number < float("inf"):
        raise ConfigurationError(
            f"{variable}={text} is not a number of 0 or more", next_step=f"unset {variable}, or set it to {default:g}"
        )
    return number
