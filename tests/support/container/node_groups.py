"""The nodes of a node group, each started like the child of an array job of AWS Batch."""

from typing import Any

from tests.support.container.launching import Launched, Run

JOB = "8d2f"
"""The id of the array job."""


def child(
    run: Run, index: int, *flags: str, attempt: int, options: tuple[str, ...] = (), job: str = JOB, **env: Any
) -> Launched:
    """Start the launcher of one child of an array job with two children, as AWS Batch does."""
    return run.start(
        *flags,
        attempt=attempt,
        options=["--rendezvous-min-nnodes=1", *options],
        AWS_BATCH_JOB_ID=f"{job}:{index}",
        AWS_BATCH_JOB_ARRAY_INDEX=str(index),
        AWS_BATCH_JOB_ARRAY_SIZE="2",
        **env,
    )
