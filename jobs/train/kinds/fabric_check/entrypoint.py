r"""Check and measure what connects the ranks of a job: within each node, across nodes, and all together.

    python -m jobs.train.launch --instance-type=… --nproc-per-node=8 fabric-check --largest-message-bytes=134217728

Every result is compared with what it must be, in values that tell whose part of it is wrong; then it is timed. What was
found goes to rank 0 over the launcher's store, never over what is being checked.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from jobs.contract.log_lines import Progress
from jobs.contract.words import counted
from jobs.kinds.fabric_check import FabricCheck
from jobs.train import libfabric
from jobs.train.accelerator import Accelerator, of_rank
from jobs.train.channel import RankStatus
from jobs.train.kinds.fabric_check import probe, topology
from jobs.train.kinds.fabric_check.barrier import Barrier
from jobs.train.kinds.fabric_check.report import Collective, FabricReport, Found, Measurement, collect, conclude, size
from jobs.train.kinds.fabric_check.topology import Group
from jobs.train.rank import Rank, run

if TYPE_CHECKING:
    import torch

log = logging.getLogger("trainyard")

_COLLECTIVES: tuple[Collective, ...] = ("all-reduce", "broadcast", "all-gather")

_BEHIND_OURS = timedelta(seconds=60)
"""The backend's own timeout comes later than the barrier's, which can say who is missing."""


def check(arguments: FabricCheck, world_size: int) -> None:
    """Check the arguments before any rank starts. Raises UsageError on what cannot work."""
    arguments.check(world_size)


def check_fabric(rank: Rank, arguments: FabricCheck) -> None:
    """Check and measure what connects the ranks; all of them call it.

    Raises TrainyardError where a result is wrong, or slower than the arguments accept.
    """
    import torch.distributed as dist

    accelerator = of_rank(os.environ)
    barrier = Barrier(rank, timeout_seconds=arguments.peer_timeout_seconds)
    barrier.all_here()
    providers = _providers(rank, accelerator, barrier)
    device = accelerator.device(rank.local_rank)
    everyone = range(rank.world_size)
    with barrier.step(f"connecting all ranks over {accelerator.backend}", everyone):
        dist.init_process_group(
            accelerator.backend, timeout=timedelta(seconds=arguments.peer_timeout_seconds) + _BEHIND_OURS
        )
        groups = list(topology.groups(rank))
        dtypes = _dtypes(accelerator)
    report = _begin_report(rank, accelerator, dtypes, providers)
    bench = _Bench(rank, arguments, accelerator, barrier, device=device, dtypes=dtypes, phases=len(groups))
    for group in groups:
        collect(rank, barrier, report, group.phase, bench.measure(group))
    if rank.is_first:
        conclude(rank, arguments, report)
    rank.once("finished", lambda: True)


def _dtypes(accelerator: Accelerator) -> "list[torch.dtype]":
    """Return the types in which values are checked: those that trainings send, where the backend has them."""
    import torch
    import torch.distributed as dist

    if accelerator.backend == "gloo":
        try:
            dist.all_reduce(torch.ones(1, dtype=torch.bfloat16))
        except RuntimeError:  # an older PyTorch; every rank has the same
            return [torch.float32]
    return [torch.float32, torch.bfloat16]


class _Bench:
    """Measures collectives of growing messages in one group after the other."""

    def __init__(
        self,
        rank: Rank,
        arguments: FabricCheck,
        accelerator: Accelerator,
        barrier: Barrier,
        *,
        device: "torch.device",
        dtypes: "Sequence[torch.dtype]",
        phases: int,
    ) -> None:
        self._rank = rank
        self._arguments = arguments
        self._accelerator = accelerator
        self._barrier = barrier
        self._device = device
        self._dtypes = dtypes
        self._sizes = list(_message_sizes(arguments))
        self._total = phases * len(self._sizes)
        self._done = 0

    def measure(self, group: Group) -> Found:
        found = Found()
        for message_bytes in self._sizes:
            for collective in _COLLECTIVES:
                what = f"{collective} of {size(message_bytes)}, {group.name}"
                with self._barrier.step(what, group.ranks):
                    for dtype in self._dtypes:
                        count = _count(message_bytes, dtype.itemsize, group)
                        for fault in self._faults(collective, group, count, dtype):
                            found.wrong.append(f"{what}, {_name(dtype)}: {fault}")
                    found.measurements.append(self._time(collective, group, _count(message_bytes, 4, group)))
            self._done += 1
            if self._rank.is_first:
                last = found.measurements[-len(_COLLECTIVES)]
                note = f"{group.name}, {size(message_bytes)}: {last.bus_gigabytes_per_second:.3g} GB/s"
                print(Progress(self._done, self._total, note), flush=True)
                RankStatus(last_step=self._done).write(self._rank.scratch)
        return found

    def _faults(self, collective: Collective, group: Group, count: int, dtype: "torch.dtype") -> Iterator[str]:
        import torch
        import torch.distributed as dist

        members, me = group.ranks, self._rank.rank
        if collective == "all-reduce":
            tensor = probe.contribution(me, members, count, dtype).to(self._device)
            dist.all_reduce(tensor, group=group.handle)
            faults = [probe.wrong_sum(self._on_host(tensor), members)]
        elif collective == "broadcast":
            # Every rank sends once, the first one every size.
            senders = members if count == _count(self._sizes[0], dtype.itemsize, group) else members[:1]
            faults = []
            for sender in senders:
                tensor = probe.own_values(sender, count, dtype) if me == sender else torch.zeros(count, dtype=dtype)
                tensor = tensor.to(self._device)
                dist.broadcast(tensor, sender, group=group.handle)
                faults.append(probe.wrong_values(self._on_host(tensor), sender, members))
        else:
            whole = torch.zeros(count, dtype=dtype, device=self._device)
            part = probe.own_values(me, count // len(members), dtype).to(self._device)
            _all_gather(whole, part, group)
            faults = [probe.wrong_gathering(self._on_host(whole), members)]
        yield from (fault for fault in faults if fault)

    def _time(self, collective: Collective, group: Group, count: int) -> Measurement:
        import torch
        import torch.distributed as dist

        whole = torch.zeros(count, device=self._device)
        part = torch.zeros(count // len(group.ranks), device=self._device)
        operations: dict[Collective, Callable[[], object]] = {
            "all-reduce": lambda: dist.all_reduce(whole, group=group.handle),
            "broadcast": lambda: dist.broadcast(whole, group.ranks[0], group=group.handle),
            "all-gather": lambda: _all_gather(whole, part, group),
        }
        seconds = probe.repeat(
            operations[collective],
            self._rank,
            self._accelerator,
            seconds=self._arguments.seconds_per_measurement,
            first=group.ranks[0],
            name=f"{group.phase}/{group.name}/{collective}/{count}",
        )
        return Measurement(
            phase=group.phase,
            group=group.name,
            ranks=len(group.ranks),
            collective=collective,
            message_bytes=count * 4,
            microseconds=seconds * 1e6,
        )

    def _on_host(self, tensor: "torch.Tensor") -> "torch.Tensor":
        self._accelerator.synchronize()
        return tensor.cpu()


def _message_sizes(arguments: FabricCheck) -> Iterator[int]:
    message_bytes = arguments.smallest_message_bytes
    while message_bytes < arguments.largest_message_bytes:
        yield message_bytes
        message_bytes *= arguments.growth
    yield arguments.largest_message_bytes


def _count(message_bytes: int, bytes_each: int, group: Group) -> int:
    """Return the number of values of a message, of which each rank has the same share."""
    return -(-message_bytes // bytes_each // len(group.ranks)) * len(group.ranks)


def _all_gather(whole: "torch.Tensor", part: "torch.Tensor", group: Group) -> None:
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    gather(whole, part, group=group.handle)


def _providers(rank: Rank, accelerator: Accelerator, barrier: Barrier) -> list[str]:
    """Return the provider of libfabric that each node's cards take to the others'; none where nothing needs libfabric.

    Raises ConfigurationError where a node lacks the libraries, before the backend would fail or take a slower way.
    """
    library = libfabric.load(accelerator.name) if rank.nnodes > 1 else None
    if library is None:
        return []
    found = libfabric.providers(library)
    rank.store.set(f"fabric/provider/{rank.node}", libfabric.taken(found))
    if rank.is_first:
        log.info("fabric: libfabric on node 0 has %s", ", ".join(found))
    with barrier.step("the providers of all nodes", range(rank.world_size)):
        return [rank.store.get(f"fabric/provider/{node}").decode() for node in range(rank.nnodes)]


def _begin_report(
    rank: Rank, accelerator: Accelerator, dtypes: "Sequence[torch.dtype]", providers: list[str]
) -> FabricReport:
    """Return a report in which nothing is found yet; rank 0 logs what will be checked."""
    report = FabricReport(
        accelerator=accelerator.name,
        backend=accelerator.backend,
        world_size=rank.world_size,
        nnodes=rank.nnodes,
        dtypes=[_name(dtype) for dtype in dtypes],
        providers=providers,
    )
    if rank.is_first:
        log.info(
            "fabric: %s on %s over %s, values checked in %s",
            counted(report.world_size, "rank"),
            counted(report.nnodes, "node"),
            report.backend,
            " and ".join(report.dtypes),
        )
    for provider in dict.fromkeys(providers) if rank.is_first else ():
        nodes = [str(node) for node, taken in enumerate(providers) if taken == provider]
        log.info("fabric: %s is taken to other nodes on nodes %s", provider, ", ".join(nodes))
    if rank.is_first and report.world_size == 1:
        log.info("fabric: one rank is connected to nothing; only its own collectives are checked")
    return report


def _name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    run(check_fabric, FabricCheck)
