"""fabric-check: whether the ranks of a job reach each other, right and fast; the first job of a new environment."""

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.spec.arguments import Arguments, JobKind


class FabricCheck(Arguments):
    """Check what all-reduce, broadcast and all-gather deliver between all ranks, and measure how fast."""

    smallest_message_bytes: int = Field(default=64, ge=4)
    """First size of a message. Its time is the latency."""
    largest_message_bytes: int = Field(default=128 * 1024 * 1024, ge=4)
    """Last size of a message. Its bandwidth is compared with the minimum."""
    growth: int = Field(default=8, ge=2)
    """Factor from one size to the next."""
    seconds_per_measurement: float = Field(default=0.5, gt=0, le=60)
    """Seconds for one size of one collective. A message that takes longer is sent once."""
    minimum_bus_gigabytes_per_second: float | None = Field(default=None, gt=0)
    """Least bus bandwidth of an all-reduce of the largest message within a node. Below it the job fails."""
    minimum_bus_gigabytes_per_second_across_nodes: float | None = Field(default=None, gt=0)
    """The same among cards of several nodes, one a node."""

    @model_validator(mode="after")
    def _sizes_in_order(self) -> Self:
        if self.smallest_message_bytes > self.largest_message_bytes:
            raise ValueError("'smallest_message_bytes' is more than 'largest_message_bytes'")
        return self


KIND = JobKind(
    name="fabric-check",
    summary="check and measure what connects the ranks",
    entrypoint="jobs.container.kinds.fabric_check.entrypoint",
    arguments=FabricCheck,
    accelerated=True,
    timeout_hours=1,
)
