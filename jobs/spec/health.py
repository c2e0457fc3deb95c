"""The check of a node's health before a job's first step: how long it takes, and what the node has to reach."""

from pydantic import Field

from jobs.core.instance_types import InstanceType
from jobs.spec.arguments import Strict

HEALTH_SECONDS = 10.0
"""The check measures for so long on instances with accelerators, unless a spec says otherwise. The start of its
processes comes on top."""

MATMUL_FLOOR = 0.5
"""Share of a card's published peak below which it is not healthy: a large multiplication reaches more on a sound one,
and a card that is hot, or whose clock is held down, reaches less."""

LINK_FLOOR = 0.1
"""Share of the published speed of the links between a node's cards below which those are not healthy: what goes over
the host's memory instead stays below it."""

BAD_NODE_FILE = ".trainyard-bad-node"
"""Name of the file that a job leaves on its /scratch where its node failed the check: the host then shuts down
(infra/compute/boot/bad_node.sh)."""


class Health(Strict):
    """The check of each node before the first step."""

    seconds: float | None = Field(default=None, ge=0, le=600)
    """Seconds to measure multiplications and all-reduces; 0 disables it. Default: 10 on HPUs and GPUs, else 0."""
    min_teraflops: float | None = Field(default=None, ge=0)
    """Matrix multiplication of each card, at least, in TFLOP/s. Default: half of its published peak, or of the node's
    median card."""
    min_gigabytes_per_second: float | None = Field(default=None, ge=0)
    """Bus bandwidth of an all-reduce among the node's cards, at least, in GB/s. Default: a tenth of the links'
    published speed."""

    def seconds_on(self, accelerator: str, *, on_instance: bool) -> float:
        """Return the time to measure for; 0: there is no check."""
        if self.seconds is not None:
            return self.seconds
        return HEALTH_SECONDS if on_instance and accelerator != "cpu" else 0.0

    def with_floors_of(self, row: InstanceType, accelerator: str) -> "Health":
        """Return the check with what an instance type has to reach, where the spec does not say."""
        if accelerator != row.accelerator:
            return self  # a laptop stands in for the instance
        update: dict[str, float] = {}
        if self.min_teraflops is None and row.card_teraflops is not None:
            update["min_teraflops"] = MATMUL_FLOOR * row.card_teraflops
        if self.min_gigabytes_per_second is None and row.link_gigabytes_per_second is not None:
            update["min_gigabytes_per_second"] = LINK_FLOOR * row.link_gigabytes_per_second
        return self.model_copy(update=update)
