"""fabric-check: check that ranks communicate correctly and fast. Run this job first in a new environment."""

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.spec.arguments import Arguments, JobKind


class FabricCheck(Arguments):
    """Check the results of all-reduce, broadcast and all-gather between all ranks, and measure their speed."""

    smallest_message_bytes: int = Field(default=64, ge=4)
    """Smallest message size, in bytes. Its time is reported as the latency."""
    largest_message_bytes: int = Field(default=128 * 1024 * 1024, ge=4)
    """Largest message size, in bytes. Its bandwidth is compared with the minimum."""
    growth: int = Field(default=8, ge=2)
    """Factor between consecutive message sizes."""
    seconds_per_measurement: float = Field(default=0.5, gt=0, le=60)
    """Seconds to measure one message size of one collective. A message that takes longer is sent once."""
    minimum_bus_gigabytes_per_second: float | None = Field(default=None, gt=0)
    """Minimum bus bandwidth of an all-reduce of the largest message within a node, in GB/s. Default: no minimum. The
    job fails below it."""
    minimum_bus_gigabytes_per_second_across_nodes: float | None = Field(default=None, gt=0)
    """Minimum bus bandwidth of the same all-reduce between one card of each node, in GB/s. Default: no minimum."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.smallest_message_bytes > self.largest_message_bytes:
            raise ValueError("'smallest_message_bytes' is larger than 'largest_message_bytes'")
        return self


KIND = JobKind(
    name="fabric-check",
    summary="check and measure the connections between ranks",
    entrypoint="jobs.container.kinds.fabric_check",
    arguments=FabricCheck,
    accelerated=True,
    timeout_hours=1,
)
