"""Collect the results of a fabric-check on rank 0, log them, compare them with the minimum, and write fabric.json.

Bandwidths are bus bandwidths, as in NVIDIA's nccl-tests (doc/PERFORMANCE.md there): the load on each rank's connection.
They can be compared between collectives and numbers of ranks, and with the hardware's specification. The size of a
message is the size of one rank's result.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, computed_field

from jobs.aws import s3 as object_store
from jobs.container.channel import RankStatus
from jobs.container.rank import Rank
from jobs.container.saving.manifest import check_newest
from jobs.core.errors import TrainyardError
from jobs.core.run import FABRIC
from jobs.spec.kinds.fabric_check import FabricCheck

log = logging.getLogger("trainyard")

Phase = Literal["within nodes", "across nodes", "all ranks"]

Collective = Literal["all-reduce", "broadcast", "all-gather"]

SLOW = 0.5
"""A node is slow below this fraction of the other nodes' median bandwidth."""

JUDGED_BYTES = 1_000_000
"""Smaller messages are not compared, because their time is mostly latency."""


class Measurement(BaseModel):
    """The time of one collective for one message size in one group of ranks."""

    phase: Phase
    group: str
    ranks: int
    collective: Collective
    message_bytes: int
    microseconds: float
    """The time of the slowest rank."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bus_gigabytes_per_second(self) -> float:
        share = (self.ranks - 1) / self.ranks
        factor = {"all-reduce": 2 * share, "broadcast": 1.0 if self.ranks > 1 else 0.0, "all-gather": share}
        return self.message_bytes / self.microseconds / 1e3 * factor[self.collective]


class FabricReport(BaseModel):
    """The content of fabric.json."""

    accelerator: str
    backend: str
    world_size: int
    nnodes: int
    dtypes: list[str]
    """The data types that were checked. Times are for float32."""
    providers: list[str] = []
    """The libfabric provider with which each node reaches the others. Empty if the backend does not need libfabric."""
    measurements: list[Measurement] = []
    wrong: list[str] = []
    """Wrong results."""
    slow: list[str] = []
    """Nodes that are slower than the others, and bandwidths below the minimum."""

    def largest(self, phase: Phase) -> list[Measurement]:
        """Return the all-reduce of the largest message in each group of a phase."""
        found = [item for item in self.measurements if item.phase == phase and item.collective == "all-reduce"]
        size = max((item.message_bytes for item in found), default=0)
        return [item for item in found if item.message_bytes == size]

    def summary(self) -> dict[str, Any]:
        """Return the values for the receipt: the slowest group's all-reduce of each phase."""
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


class Found(BaseModel):
    """The results of one rank in one phase, sent to rank 0."""

    measurements: list[Measurement] = []
    wrong: list[str] = []


def collect(rank: Rank, report: FabricReport, phase: str, found: Found) -> None:
    """Add the results of all ranks in a phase to rank 0's report, and log them."""
    rank.store.set(f"fabric/found/{phase}/{rank.rank}", found.model_dump_json())
    if not rank.is_first:
        return
    results = [
        Found.model_validate_json(rank.store.get(f"fabric/found/{phase}/{peer}")) for peer in range(rank.world_size)
    ]
    slowest: dict[tuple[str, str, int], Measurement] = {}
    for item in (item for result in results for item in result.measurements):
        key = item.group, item.collective, item.message_bytes
        slowest[key] = max(slowest.get(key, item), item, key=lambda one: one.microseconds)
    report.measurements.extend(slowest.values())
    seen: dict[str, list[int]] = {}
    for peer, result in enumerate(results):
        for fault in result.wrong:
            seen.setdefault(fault, []).append(peer)
    report.wrong.extend(f"{fault}; seen by {_ranks(peers)}" for fault, peers in seen.items())
    if slowest:
        log.info("fabric: %s", phase)
        for line in table(slowest.values()):
            log.info("  %s", line)


def _ranks(numbers: Sequence[int], *, shown: int = 8) -> str:
    more = f" and {len(numbers) - shown} more" if len(numbers) > shown else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:shown]))}{more}"


def conclude(rank: Rank, arguments: FabricCheck, report: FabricReport) -> None:
    """Save the report to the run. Raises TrainyardError if a result is wrong or too slow."""
    too_slow = below_minimum(
        report,
        arguments.minimum_bus_gigabytes_per_second,
        arguments.minimum_bus_gigabytes_per_second_across_nodes,
    )
    behind = slow_nodes(report)
    report.slow = [*too_slow, *behind]
    _save(rank, report)
    for line in behind:
        log.warning("warning: fabric: %s", line)
    for line in report.wrong:
        log.error("fabric: wrong: %s", line)
    if report.wrong:
        more = f" (and {len(report.wrong) - 1} more, in {rank.run / FABRIC})" if len(report.wrong) > 1 else ""
        raise TrainyardError(
            f"a result was wrong: {report.wrong[0]}{more}",
            next_step="run the check again; if the same rank is named, stop using its card or its node",
        )
    if too_slow:
        suspects = f"; {'; '.join(behind)}" if behind else ""
        raise TrainyardError(
            f"{'; '.join(too_slow)}{suspects}", next_step=f"compare with the other nodes in {rank.run / FABRIC}"
        )
    log.info("result: %s", ", ".join(f"{name} {value:.4g}" for name, value in report.summary().items()))


def _save(rank: Rank, report: FabricReport) -> None:
    """Write fabric.json, and the result for the run's receipt."""
    s3 = object_store.connect()
    check_newest(s3, rank.run, rank.attempt)
    object_store.write(s3, rank.run / FABRIC, (report.model_dump_json(indent=2) + "\n").encode())
    last_step = RankStatus.read(rank.scratch).last_step
    RankStatus(last_step=last_step, result=report.summary()).write(rank.scratch)


def slow_nodes(report: FabricReport) -> list[str]:
    """Return a message for each node that is much slower than the others."""
    largest = [item for item in report.largest("within nodes") if item.message_bytes >= JUDGED_BYTES]
    speeds = {item.group: item.bus_gigabytes_per_second for item in largest}
    found = []
    for name, speed in speeds.items():
        others = [other for peer, other in speeds.items() if peer != name]
        if others and speed < SLOW * median(others):
            typical = f"the others' median is {median(others):.3g} GB/s"
            found.append(f"{name} is slow: its all-reduce reaches {speed:.3g} GB/s, {typical}")
    return found


def below_minimum(report: FabricReport, minimum: float | None, minimum_across_nodes: float | None) -> list[str]:
    """Return a message for each bandwidth below the minimum of the job's arguments."""
    limits: list[tuple[Phase, float | None]] = [("within nodes", minimum), ("across nodes", minimum_across_nodes)]
    return [
        f"all-reduce of {size(item.message_bytes)}, {item.group}: {item.bus_gigabytes_per_second:.3g} GB/s of bus "
        f"bandwidth, less than the minimum of {limit:g}"
        for phase, limit in limits
        if limit is not None
        for item in report.largest(phase)
        if item.ranks > 1 and item.bus_gigabytes_per_second < limit
    ]


def table(measurements: Iterable[Measurement]) -> Iterator[str]:
    """Yield lines for the log: the slowest group for each collective and size, sorted by both."""
    slowest: dict[tuple[str, int], Measurement] = {}
    for item in measurements:
        key = item.collective, item.message_bytes
        slowest[key] = max(slowest.get(key, item), item, key=lambda one: one.microseconds)
    yield f"{'collective':<12}{'message':>10}{'time':>14}{'bus':>14}  slowest group"
    for _, item in sorted(slowest.items()):
        yield (
            f"{item.collective:<12}{size(item.message_bytes):>10}{item.microseconds:>11.1f} us"
            f"{item.bus_gigabytes_per_second:>9.3g} GB/s  {item.group}"
        )


def size(count: int) -> str:
    """Format a number of bytes, such as 64 B, 4 KiB or 1.5 MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.4g} {unit}"
    return f"{count} B"
