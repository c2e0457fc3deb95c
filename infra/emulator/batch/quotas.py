"""The service quotas of AWS Batch, and the few waiting times that a server may be started with.

Source of every constant: the AWS Batch user guide ("Service quotas", "Array jobs", "Automated job retries", "Job
timeouts") and the API reference of SubmitJob and CreateJobQueue.
"""

from infra.emulator.settings import number_setting

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
TIME_LIMIT_SCALE_VARIABLE = "TRAINYARD_TIME_LIMIT_SCALE"
"""Server's environment: what maxTimeSeconds of jobStateTimeLimitActions is multiplied with; tests lower it."""

TIME_LIMIT_SECONDS = range(600, 86_400 + 1)
TIME_LIMIT_REASONS = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
)


def stop_timeout_seconds() -> float:
    """Seconds a container has after SIGTERM, where its own stopTimeout says nothing: the ECS agent's default is 30."""
    return number_setting(STOP_TIMEOUT_VARIABLE, 30)


def minimum_timeout_seconds() -> float:
    """The least attemptDurationSeconds: 60 on AWS."""
    return number_setting(MINIMUM_TIMEOUT_VARIABLE, 60)


def time_limit_scale() -> float:
    """1 on AWS."""
    return number_setting(TIME_LIMIT_SCALE_VARIABLE, 1)


def check_settings() -> None:
    """Raise ConfigurationError where one of the variables is no number."""
    time_limit_scale()
    stop_timeout_seconds()
    minimum_timeout_seconds()
