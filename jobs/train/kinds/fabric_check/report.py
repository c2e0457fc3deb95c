"""What a fabric-check found, as fabric.json holds it, and as its log shows it.

Bandwidths are defined as NVIDIA's nccl-tests define them (doc/PERFORMANCE.md there): a message is what one rank has in
the end, the algorithm bandwidth is its bytes by the time, and the bus bandwidth is what each rank's connection carries
for it, which may be compared between collectives and numbers of ranks, and with what the hardware can do.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel

Phase = Literal["within nodes", "across nodes", "all ranks"]

Collective = Literal["all-reduce", "broadcast", "all-gather"]

SLOW = 0.5
"""Below this share of what the others reach, a node or a rank is called slow."""

JUDGED_BYTES = 1_000_000
"""Nobody is called slow by a smaller message, whose time is mostly latency."""


class Measurement(BaseModel):
    """One collective, message size and group of ranks."""

    phase: Phase
    group: str
    ranks: int
    collective: Collective
    message_bytes: int
    microseconds: float
    """Of the slowest rank."""

    @property
    def algorithm_gigabytes_per_second(self) -> float:
        return self.message_bytes / self.microseconds / 1e3

    @property
    def bus_gigabytes_per_second(self) -> float:
        share = (self.ranks - 1) / self.ranks
        factor = {"all-reduce": 2 * share, "broadcast": 1.0 if self.ranks > 1 else 0.0, "all-gather": share}
        return self.algorithm_gigabytes_per_second * factor[self.collective]


class Link(BaseModel):
    """What two ranks sent each other at the same time; the bandwidth is that of one direction."""

    ranks: tuple[int, int]
    nodes: tuple[int, int]
    message_bytes: int
    gigabytes_per_second: float


class FabricReport(BaseModel):
    """All of it."""

    accelerator: str
    backend: str
    world_size: int
    nnodes: int
    dtypes: list[str]
    """In which values were checked; times are float32's."""
    measurements: list[Measurement] = []
    links: list[Link] = []
    wrong: list[str] = []
    """Results that were not what they had to be."""
    slow: list[str] = []
    """Nodes and ranks that fall behind the others, and bandwidths below the minimum."""

    def largest(self, phase: Phase) -> list[Measurement]:
        """All-reduce of the largest message in each group of a phase."""
        found = [item for item in self.measurements if item.phase == phase and item.collective == "all-reduce"]
        size = max((item.message_bytes for item in found), default=0)
        return [item for item in found if item.message_bytes == size]

    def summary(self) -> dict[str, Any]:
        """What the receipt holds: the slowest group's all-reduce of each phase."""
        values: dict[str, Any] = {"wrong_results": len(self.wrong)}
        for phase in dict.fromkeys(item.phase for item in self.measurements):
            found = [item for item in self.measurements if item.phase == phase and item.collective == "all-reduce"]
            smallest = min(item.message_bytes for item in found)
            name = phase.replace(" ", "_")
            slowest = min(item.bus_gigabytes_per_second for item in self.largest(phase))
            latency = max(item.microseconds for item in found if item.message_bytes == smallest)
            values[f"{name}_bus_gigabytes_per_second"] = round(slowest, 3)
            values[f"{name}_latency_microseconds"] = round(latency, 1)
        return values


def laggards(report: FabricReport) -> list[str]:
    """Nodes and ranks that are slower than the others by far."""
    largest = [item for item in report.largest("within nodes") if item.message_bytes >= JUDGED_BYTES]
    nodes = {item.group: item.bus_gigabytes_per_second for item in largest}
    return [
        *_behind(nodes, "all-reduce"),
        *_behind(_best_links(report, same_node=True), "fastest connection within its node"),
        *_behind(_best_links(report, same_node=False), "fastest connection to another node"),
    ]


def below_minimum(report: FabricReport, minimum: float | None, minimum_across_nodes: float | None) -> list[str]:
    """Bandwidths that the job's arguments do not accept."""
    limits: list[tuple[Phase, float | None]] = [("within nodes", minimum), ("across nodes", minimum_across_nodes)]
    return [
        f"all-reduce of {size(item.message_bytes)}, {item.group}: {item.bus_gigabytes_per_second:.3g} GB/s of bus "
        f"bandwidth, less than the {limit:g} asked for"
        for phase, limit in limits
        if limit is not None
        for item in report.largest(phase)
        if item.ranks > 1 and item.bus_gigabytes_per_second < limit
    ]


def table(measurements: Sequence[Measurement]) -> Iterable[str]:
    """Lines for the log: of each collective and size the slowest group."""
    yield f"{'collective':<12}{'message':>10}{'time':>14}{'algorithm':>14}{'bus':>14}  slowest group"
    for slowest in slowest_groups(measurements):
        yield (
            f"{slowest.collective:<12}{size(slowest.message_bytes):>10}{slowest.microseconds:>11.1f} us"
            f"{slowest.algorithm_gigabytes_per_second:>9.3g} GB/s{slowest.bus_gigabytes_per_second:>9.3g} GB/s"
            f"  {slowest.group}"
        )


def slowest_groups(measurements: Iterable[Measurement]) -> list[Measurement]:
    """One for each collective and message size, in that order."""
    slowest: dict[tuple[str, int], Measurement] = {}
    for item in measurements:
        key = item.collective, item.message_bytes
        if key not in slowest or slowest[key].microseconds < item.microseconds:
            slowest[key] = item
    return [slowest[key] for key in sorted(slowest)]


def size(count: int) -> str:
    """64 B, 4 KiB, 1.5 MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.4g} {unit}"
    return f"{count} B"


def _best_links(report: FabricReport, *, same_node: bool) -> dict[str, float]:
    """The fastest connection of each rank: one slow connection is not a slow rank, a slow best one is.

    A rank with one partner is left out, since nothing tells which of the two is slow.
    """
    speeds: dict[str, list[float]] = {}
    for link in report.links:
        if (link.nodes[0] == link.nodes[1]) == same_node and link.message_bytes >= JUDGED_BYTES:
            for rank, node in zip(link.ranks, link.nodes, strict=True):
                speeds.setdefault(f"rank {rank} (node {node})", []).append(link.gigabytes_per_second)
    return {name: max(several) for name, several in speeds.items() if len(several) > 1}


def _behind(speeds: Mapping[str, float], what: str) -> list[str]:
    found = []
    for name, speed in speeds.items():
        others = [other for peer, other in speeds.items() if peer != name]
        if others and speed < SLOW * median(others):
            found.append(f"{name} is slow: its {what} reaches {speed:.3g} GB/s, the others' {median(others):.3g} GB/s")
    return found
