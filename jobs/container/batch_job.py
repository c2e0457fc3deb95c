"""What AWS Batch tells a container about its own job."""

import os
import re
from collections.abc import Mapping


def attempt_number(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this attempt of the Batch job; the first one is 1."""
    return int(environment.get("AWS_BATCH_JOB_ATTEMPT", "1"))


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of the Batch job, without the number of the node or child; None outside Batch."""
    return re.split("[#:]", environment.get("AWS_BATCH_JOB_ID", ""))[0] or None
