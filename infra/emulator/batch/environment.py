"""The environment variables of a job's containers.

Source: AWS Batch user guide, "Job environment variables", "Array jobs" and "Environment variables" of multi-node
parallel jobs; that AWS_BATCH_JOB_ID carries the child's suffix (`#1`, `:1`) is seen in many public job scripts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
"""The embedded AWS takes any; on AWS a job's role has some of its own."""

LOOPBACK = "127.0.0.1"
"""The address of every node: all run on this machine."""


@dataclass(frozen=True, kw_only=True)
class ArrayPosition:
    """Which child of an array job it is."""

    index: int
    size: int


@dataclass(frozen=True, kw_only=True)
class NodePosition:
    """Which node of a multi-node job it is."""

    index: int
    count: int
    main_index: int


def container_environment(
    *,
    own: Mapping[str, str],
    endpoint: str,
    region: str,
    job_id: str,
    attempt: int,
    queue: str,
    compute_environment: str,
    array: ArrayPosition | None,
    node: NodePosition | None,
) -> dict[str, str]:
    """All of them: `own` (of definition and submission), what an instance role and its SDK find, and Batch's."""
    variables = {
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_ENDPOINT_URL": endpoint,
        # There is no instance metadata service here, and asking for it takes seconds to fail.
        "AWS_EC2_METADATA_DISABLED": "true",
        **CREDENTIALS,
        **own,
        "AWS_BATCH_JOB_ID": job_id,
        "AWS_BATCH_JOB_ATTEMPT": str(attempt),
        "AWS_BATCH_JQ_NAME": queue,
        "AWS_BATCH_CE_NAME": compute_environment,
    }
    if array is not None:
        variables["AWS_BATCH_JOB_ARRAY_INDEX"] = str(array.index)
        variables["AWS_BATCH_JOB_ARRAY_SIZE"] = str(array.size)
    if node is not None:
        variables["AWS_BATCH_JOB_NODE_INDEX"] = str(node.index)
        variables["AWS_BATCH_JOB_NUM_NODES"] = str(node.count)
        variables["AWS_BATCH_JOB_MAIN_NODE_INDEX"] = str(node.main_index)
        if node.index != node.main_index:  # absent on the main node
            variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = LOOPBACK
    return variables
