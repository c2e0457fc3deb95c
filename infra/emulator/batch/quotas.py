"""The service quotas of AWS Batch that this project can meet, and the waiting times that a server is started with.

Source: the AWS Batch user guide ("Service quotas", "Array jobs", "Automated job retries", "Job timeouts").
"""

from infra.emulator.settings import number_setting

MAX_JOB_DEFINITION_BYTES = 24 * 1024
MAX_SUBMIT_BYTES = 30 * 1024
MAX_OVERRIDES_CHARACTERS = 8192
"""Amazon ECS takes no longer container overrides; Batch accepts such a job, which then fails when it is placed."""
MAX_ATTEMPTS = 10
MAX_EVALUATE_ON_EXIT = 5
MAX_DEPENDENCIES = 20
ARRAY_SIZES = range(2, 10_000 + 1)
MAX_DESCRIBED = 100
"""Jobs that one DescribeJobs takes, and results that one filtered page of ListJobs or of DescribeJobDefinitions has."""
MAX_LISTED = 1000

STOP_TIMEOUT_VARIABLE = "TRAINYARD_STOP_TIMEOUT_SECONDS"
"""Server's environment: seconds between SIGTERM and SIGKILL, the ECS agent's ECS_CONTAINER_STOP_TIMEOUT."""
MINIMUM_TIMEOUT_VARIABLE = "TRAINYARD_MINIMUM_TIMEOUT_SECONDS"
"""Server's environment: the shortest attemptDurationSeconds that is accepted; tests lower it."""


def stop_timeout_seconds() -> float:
    """Return the seconds that a container has after SIGTERM: the ECS agent's default is 30."""
    return number_setting(STOP_TIMEOUT_VARIABLE, 30)


def minimum_timeout_seconds() -> float:
    """Return the least attemptDurationSeconds: 60 on AWS."""
    return number_setting(MINIMUM_TIMEOUT_VARIABLE, 60)


def check_settings() -> None:
    """Raise ConfigurationError if one of the variables is no number."""
    stop_timeout_seconds()
    minimum_timeout_seconds()
