"""The service quotas of AWS Batch, and the few waiting times that a server may be started with.

Source of every constant: the AWS Batch user guide ("Service quotas", "Array jobs", "Automated job retries", "Job
timeouts") and the API reference of SubmitJob and CreateJobQueue.
"""

import os

from jobs.errors import ConfigurationError

MAX_JOB_DEFINITION_BYTES = 24 * 1024
MAX_SUBMIT_BYTES = 30 * 1024
MAX_OVERRIDES_CHARACTERS = 8192
"""Amazon ECS takes no longer container overrides; Batch accepts such a job, which then fails when it is placed."""
MAX_ATTEMPTS = 10
MAX_EVALUATE_ON_EXIT = 5
MAX_DEPENDENCIES = 20
MIN_ARRAY_SIZE = 2
MAX_ARRAY_SIZE = 10_000
MAX_QUEUE_ENVIRONMENTS = 3
MAX_CONTAINERS = 10
MAX_DESCRIBED = 100
"""Jobs that one DescribeJobs takes, and results that one filtered page of ListJobs or of DescribeJobDefinitions has."""
MAX_LISTED = 1000

STOP_TIMEOUT_VARIABLE = "TRAINYARD_STOP_TIMEOUT_SECONDS"
"""Server's environment: seconds between SIGTERM and SIGKILL, the ECS agent's ECS_CONTAINER_STOP_TIMEOUT."""
MINIMUM_TIMEOUT_VARIABLE = "TRAINYARD_MINIMUM_TIMEOUT_SECONDS"
"""Server's environment: the shortest attemptDurationSeconds that is accepted; tests lower it."""


def stop_timeout_seconds() -> float:
    """Seconds a container has after SIGTERM, where its own stopTimeout says nothing: the ECS agent's default is 30."""
    return _seconds(STOP_TIMEOUT_VARIABLE, 30)


def minimum_timeout_seconds() -> float:
    """The least attemptDurationSeconds: 60 on AWS."""
    return _seconds(MINIMUM_TIMEOUT_VARIABLE, 60)


def check_settings() -> None:
    """Raises ConfigurationError where one of the two variables is no number of seconds."""
    stop_timeout_seconds()
    minimum_timeout_seconds()


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < float("inf"):
        raise ConfigurationError(
            f"{variable}={text} is no number of seconds", next_step=f"unset {variable}, or set it to {default:g}"
        )
    return seconds
