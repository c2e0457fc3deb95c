"""What the ranks of a fabric-check found: brought together on rank 0, written under the run, judged."""

import json
import logging
from collections.abc import Sequence

from pydantic import BaseModel

from jobs.aws import s3 as object_store
from jobs.contract.errors import TrainyardError
from jobs.contract.run import FABRIC
from jobs.kinds.fabric_check import FabricCheck
from jobs.train.attempts import RankStatus
from jobs.train.kinds.fabric_check.barrier import RollCall
from jobs.train.kinds.fabric_check.report import (
    FabricReport,
    Link,
    Measurement,
    below_minimum,
    laggards,
    slowest_groups,
    table,
)
from jobs.train.rank import Rank

log = logging.getLogger("trainyard")


class Found(BaseModel):
    """What one rank found in one phase, on its way to rank 0."""

    measurements: list[Measurement] = []
    links: list[Link] = []
    wrong: list[str] = []


def collect(rank: Rank, roll_call: RollCall, report: FabricReport, phase: str, found: Found) -> None:
    """Adds to rank 0's report what all ranks found, and logs it."""
    rank.store.set(f"fabric/found/{phase}/{rank.rank}", found.model_dump_json())
    with roll_call.step(f"the results of {phase}", range(rank.world_size)):
        if not rank.is_first:
            return
        everyones = [
            Found.model_validate_json(rank.store.get(f"fabric/found/{phase}/{peer}")) for peer in range(rank.world_size)
        ]
    slowest: dict[tuple[str, str, int], Measurement] = {}
    for item in (item for one in everyones for item in one.measurements):
        key = item.group, item.collective, item.message_bytes
        slowest[key] = max(slowest.get(key, item), item, key=lambda one: one.microseconds)
    report.measurements.extend(slowest.values())
    report.links.extend(link for one in everyones for link in one.links)
    seen: dict[str, list[int]] = {}
    for peer, one in enumerate(everyones):
        for fault in one.wrong:
            seen.setdefault(fault, []).append(peer)
    report.wrong.extend(f"{fault}; seen by {_ranks(peers)}" for fault, peers in seen.items())
    if slowest:
        log.info("fabric: %s", phase)
        for line in table(list(slowest.values())):
            log.info("  %s", line)


def _ranks(numbers: Sequence[int], *, shown: int = 8) -> str:
    more = f" and {len(numbers) - shown} more" if len(numbers) > shown else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:shown]))}{more}"


def conclude(rank: Rank, arguments: FabricCheck, report: FabricReport) -> None:
    """Everything under the run, then the verdict."""
    from jobs.train.trainer.metrics import MetricsFiles

    too_slow = below_minimum(
        report,
        arguments.minimum_bus_gigabytes_per_second,
        arguments.minimum_bus_gigabytes_per_second_across_nodes,
    )
    behind = laggards(report)
    report.slow = [*too_slow, *behind]
    s3 = object_store.connect()
    metrics = MetricsFiles(rank, s3, 0)
    for phase in dict.fromkeys(item.phase for item in report.measurements):
        for message in slowest_groups(item for item in report.measurements if item.phase == phase):
            name = f"{message.collective.replace('-', '')}_{phase.replace(' ', '_')}"
            measured = {
                f"{name}_microseconds": message.microseconds,
                f"{name}_bus_gigabytes_per_second": message.bus_gigabytes_per_second,
                f"{name}_algorithm_gigabytes_per_second": message.algorithm_gigabytes_per_second,
            }
            metrics.write(message.message_bytes, measured)
    metrics.close()
    content = report.model_dump(mode="json")
    for row, item in zip(content["measurements"], report.measurements, strict=True):
        row["algorithm_gigabytes_per_second"] = item.algorithm_gigabytes_per_second
        row["bus_gigabytes_per_second"] = item.bus_gigabytes_per_second
    object_store.write(s3, rank.run / FABRIC, (json.dumps(content, indent=2) + "\n").encode())
    summary = report.summary()
    RankStatus(last_step=RankStatus.read(rank.scratch).last_step, result=summary).write(rank.scratch)
    for line in behind:
        log.warning("warning: fabric: %s", line)
    for line in report.wrong:
        log.error("fabric: wrong: %s", line)
    if report.wrong:
        more = f" (and {len(report.wrong) - 1} more, in {rank.run / FABRIC})" if len(report.wrong) > 1 else ""
        raise TrainyardError(
            f"a result was wrong: {report.wrong[0]}{more}",
            next_step="run it again; if the same rank is named, take its card or its node out of use",
        )
    if too_slow:
        suspects = f"; {'; '.join(behind)}" if behind else ""
        raise TrainyardError(
            f"{'; '.join(too_slow)}{suspects}", next_step=f"compare with other nodes' in {rank.run / FABRIC}"
        )
    log.info("result: %s", ", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
