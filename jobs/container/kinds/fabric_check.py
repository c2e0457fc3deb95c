r"""Check and measure the connections between the ranks of a job: within nodes, across nodes, and all together.

    python -m jobs.container.launch --instance-type=… --nproc-per-node=8 fabric-check --largest-message-bytes=134217728

Every collective is checked with values that reveal which rank's part is wrong, and is then timed. The results go to
rank 0 over the launcher's store, not over the connections under test. Each collective starts with a heartbeat, so the
launcher ends a check that hangs and names the ranks that are behind.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs.container import libfabric
from jobs.container.accelerator import Accelerator, of_rank
from jobs.container.channel import Heartbeat, HeartbeatFile, RankStatus
from jobs.container.kinds.fabric_report import (
    Collective,
    FabricReport,
    Found,
    Measurement,
    Phase,
    collect,
    conclude,
    size,
)
from jobs.container.rank import Rank, run
from jobs.core.output import Progress
from jobs.core.words import counted
from jobs.spec.kinds.fabric_check import FabricCheck

if TYPE_CHECKING:
    import torch

log = logging.getLogger("trainyard")

_COLLECTIVES: tuple[Collective, ...] = ("all-reduce", "broadcast", "all-gather")

_LARGEST = 127
_ADDENDS = 256
"""Maximum number of ones in a sum: above it, bfloat16 does not count exactly."""

_MOST_REPETITIONS = 1000


def check_fabric(rank: Rank, arguments: FabricCheck) -> None:
    """Check and measure the connections between ranks. Called on all ranks.

    Raises TrainyardError if a result is wrong, or slower than the arguments accept.
    """
    import torch.distributed as dist

    accelerator = of_rank(os.environ)
    heartbeats = _Heartbeats(rank)
    heartbeats.write(f"connecting all ranks over {accelerator.backend}", slow=True)
    providers = preferred_providers(rank, accelerator)
    device = accelerator.device(rank.local_rank)
    dist.init_process_group(accelerator.backend)
    dtypes = _dtypes(accelerator)
    report = _begin_report(rank, accelerator, dtypes, providers)
    groups = list(_groups(rank))
    bench = _Bench(rank, arguments, accelerator, heartbeats, device=device, dtypes=dtypes, phases=len(groups))
    for group in groups:
        collect(rank, report, group.phase, bench.measure(group))
    heartbeats.write("ending", step=bench.done, paced=False)
    if rank.is_first:
        conclude(rank, arguments, report)
    rank.once("finished", lambda: True)


class _Heartbeats:
    """Writes the rank's heartbeats, one at the start of each collective."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._file = HeartbeatFile(rank.scratch, rank.local_rank)
        self._number = 0

    def write(self, doing: str, *, step: int = 0, slow: bool = False, paced: bool = True) -> None:
        self._number += 1
        heartbeat = Heartbeat(
            rank=self._rank.rank,
            node=self._rank.node,
            pid=os.getpid(),
            number=self._number,
            place=self._number,
            step=step,
            doing=doing,
            slow=slow,
            paced=paced,
        )
        self._file.write(heartbeat)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that run a collective together."""

    phase: Phase
    name: str
    ranks: Sequence[int]
    handle: Any
    """The process group of torch.distributed, or None for all ranks."""


def _groups(rank: Rank) -> Iterator[Group]:
    """Create all groups in the same order on all ranks, and yield the groups of this rank."""
    import torch.distributed as dist

    size_of_node, nnodes = rank.local_world_size, rank.nnodes
    everyone = range(rank.world_size)
    if nnodes == 1:
        yield Group(phase="within nodes", name="node 0", ranks=everyone, handle=None)
        return
    if size_of_node == 1:
        yield Group(phase="across nodes", name="all nodes", ranks=everyone, handle=None)
        return
    nodes = [range(node * size_of_node, (node + 1) * size_of_node) for node in range(nnodes)]
    cards = [everyone[card::size_of_node] for card in range(size_of_node)]
    handles = {ranks: dist.new_group(list(ranks)) for ranks in (*nodes, *cards)}
    own_node, own_cards = nodes[rank.node], cards[rank.local_rank]
    yield Group(phase="within nodes", name=f"node {rank.node}", ranks=own_node, handle=handles[own_node])
    name = f"card {rank.local_rank} of every node"
    yield Group(phase="across nodes", name=name, ranks=own_cards, handle=handles[own_cards])
    yield Group(phase="all ranks", name="all ranks", ranks=everyone, handle=None)


def _dtypes(accelerator: Accelerator) -> "list[torch.dtype]":
    """Return the data types to check: those that training sends, if the backend supports them."""
    import torch
    import torch.distributed as dist

    if accelerator.backend == "gloo":
        try:
            dist.all_reduce(torch.ones(1, dtype=torch.bfloat16))
        except RuntimeError:  # an older PyTorch, the same on every rank
            return [torch.float32]
    return [torch.float32, torch.bfloat16]


class _Bench:
    """Measures collectives with growing messages, one group at a time."""

    def __init__(
        self,
        rank: Rank,
        arguments: FabricCheck,
        accelerator: Accelerator,
        heartbeats: _Heartbeats,
        *,
        device: "torch.device",
        dtypes: "Sequence[torch.dtype]",
        phases: int,
    ) -> None:
        self._rank = rank
        self._accelerator = accelerator
        self._heartbeats = heartbeats
        self._device = device
        self._dtypes = dtypes
        self._seconds = arguments.seconds_per_measurement
        self._sizes = list(_message_sizes(arguments))
        self._total = phases * len(self._sizes)
        self.done = 0

    def measure(self, group: Group) -> Found:
        found = Found()
        for message_bytes in self._sizes:
            for collective in _COLLECTIVES:
                what = f"{collective} of {size(message_bytes)}, {group.name}"
                self._heartbeats.write(what, step=self.done)
                for dtype in self._dtypes:
                    count = _count(message_bytes, dtype.itemsize, group)
                    for fault in self._faults(collective, group, count, dtype):
                        found.wrong.append(f"{what}, {_name(dtype)}: {fault}")
                found.measurements.append(self._time(collective, group, _count(message_bytes, 4, group)))
            self.done += 1
            if self._rank.is_first:
                last = found.measurements[-len(_COLLECTIVES)]
                note = f"{group.name}, {size(message_bytes)}: {last.bus_gigabytes_per_second:.3g} GB/s"
                print(Progress(self.done, self._total, note), flush=True)
                RankStatus(last_step=self.done).write(self._rank.scratch)
        return found

    def _faults(self, collective: Collective, group: Group, count: int, dtype: "torch.dtype") -> Iterator[str]:
        import torch
        import torch.distributed as dist

        members, me = group.ranks, self._rank.rank
        if collective == "all-reduce":
            tensor = contribution(me, members, count, dtype).to(self._device)
            dist.all_reduce(tensor, group=group.handle)
            faults = [wrong_sum(self._on_host(tensor), members)]
        elif collective == "broadcast":
            # Every rank broadcasts the smallest message, but only the first rank broadcasts all sizes.
            senders = members if count == _count(self._sizes[0], dtype.itemsize, group) else members[:1]
            faults = []
            for sender in senders:
                tensor = own_values(sender, count, dtype) if me == sender else torch.zeros(count, dtype=dtype)
                tensor = tensor.to(self._device)
                dist.broadcast(tensor, sender, group=group.handle)
                faults.append(wrong_values(self._on_host(tensor), sender, members))
        else:
            whole = torch.zeros(count, dtype=dtype, device=self._device)
            part = own_values(me, count // len(members), dtype).to(self._device)
            _all_gather(whole, part, group)
            faults = [wrong_gathering(self._on_host(whole), members)]
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
        name = f"{group.phase}/{group.name}/{collective}/{count}"
        return Measurement(
            phase=group.phase,
            group=group.name,
            ranks=len(group.ranks),
            collective=collective,
            message_bytes=count * 4,
            microseconds=self._mean_seconds(operations[collective], first=group.ranks[0], name=name) * 1e6,
        )

    def _mean_seconds(self, operation: Callable[[], object], *, first: int, name: str) -> float:
        """Return the mean time of a collective. The rank `first` decides how often it is repeated."""
        self._timed(operation, 2)  # the first call connects the group, or compiles the shape
        estimate = max(self._timed(operation, 1), 1e-7)
        if self._rank.rank == first:
            times = max(1, min(_MOST_REPETITIONS, round(self._seconds / estimate)))
            self._rank.store.set(f"fabric/{name}", str(times))
        times = int(self._rank.store.get(f"fabric/{name}"))
        self._timed(operation, 1)  # so that all ranks start together
        return self._timed(operation, times) / times

    def _timed(self, operation: Callable[[], object], times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            operation()
        self._accelerator.synchronize()
        return time.perf_counter() - started

    def _on_host(self, tensor: "torch.Tensor") -> "torch.Tensor":
        self._accelerator.synchronize()
        return tensor.cpu()


def own_values(rank: int, count: int, dtype: "torch.dtype") -> "torch.Tensor":
    """Return the values that only `rank` sends. No two of 127 ranks have the same value at the same position.

    All values are whole numbers up to 256, which bfloat16 represents exactly, so results are compared bit by bit.
    """
    import torch

    return ((torch.arange(count, dtype=torch.int32) % 97 + rank) % _LARGEST + 1).to(dtype)


def contribution(rank: int, members: Sequence[int], count: int, dtype: "torch.dtype") -> "torch.Tensor":
    """Return the input of `rank` to an all-reduce of `count` values, an even number for each member of its group.

    In the first half, each member fills only its own part. In the second half, all members add one.
    """
    import torch

    index = members.index(rank)
    halves = torch.zeros(2, count // 2, dtype=dtype)
    own = halves[0].view(len(members), -1)[index]
    own.copy_(own_values(rank, len(own), dtype))
    halves[1] = float(index < _ADDENDS)
    return halves.view(-1)


def wrong_sum(result: "torch.Tensor", members: Sequence[int]) -> str | None:
    """Return what is wrong with the sum of all contributions, or None."""
    own, shared = result.view(2, -1)
    wrong = int((shared != min(len(members), _ADDENDS)).sum())
    return wrong_gathering(own, members) or (f"the sum over all ranks is wrong ({wrong} values)" if wrong else None)


def wrong_gathering(result: "torch.Tensor", members: Sequence[int]) -> str | None:
    """Return what is wrong with the concatenated values of all ranks, or None."""
    parts = result.view(len(members), -1)
    faults = [wrong_values(part, rank, members) for part, rank in zip(parts, members, strict=True)]
    return ", ".join(fault for fault in faults if fault) or None


def wrong_values(result: "torch.Tensor", sender: int, members: Sequence[int]) -> str | None:
    """Return what is wrong with the values received from `sender`, or None."""
    right = result == own_values(sender, len(result), result.dtype)
    if bool(right.all()):
        return None
    if not bool(result.any()):
        return f"rank {sender}'s values are missing"
    for rank in members:
        if bool((result == own_values(rank, len(result), result.dtype)).all()):
            return f"rank {rank}'s values instead of rank {sender}'s"
    return f"rank {sender}'s values are damaged ({int((~right).sum())} of {len(result)})"


def _message_sizes(arguments: FabricCheck) -> Iterator[int]:
    message_bytes = arguments.smallest_message_bytes
    while message_bytes < arguments.largest_message_bytes:
        yield message_bytes
        message_bytes *= arguments.growth
    yield arguments.largest_message_bytes


def _count(message_bytes: int, bytes_each: int, group: Group) -> int:
    """Return the number of values of a message, an even number for each rank."""
    share = 2 * len(group.ranks)
    return -(-message_bytes // bytes_each // share) * share


def _all_gather(whole: "torch.Tensor", part: "torch.Tensor", group: Group) -> None:
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    gather(whole, part, group=group.handle)


def preferred_providers(rank: Rank, accelerator: Accelerator) -> list[str]:
    """Return the libfabric provider with which each node reaches the others. Empty if libfabric is not needed.

    Raises ConfigurationError if a node lacks the libraries, before the backend fails or uses a slower connection.
    """
    library = libfabric.load(accelerator.name) if rank.nnodes > 1 else None
    if library is None:
        return []
    found = libfabric.providers(library)
    rank.store.set(f"fabric/provider/{rank.node}", libfabric.preferred_provider(found))
    if rank.is_first:
        log.info("fabric: libfabric on node 0 has the providers %s", ", ".join(found))
    return [rank.store.get(f"fabric/provider/{node}").decode() for node in range(rank.nnodes)]


def _begin_report(
    rank: Rank, accelerator: Accelerator, dtypes: "Sequence[torch.dtype]", providers: list[str]
) -> FabricReport:
    """Return an empty report. Rank 0 logs what will be checked."""
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
        log.info("fabric: nodes %s reach other nodes over %s", ", ".join(nodes), provider)
    return report


def _name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    run(check_fabric, FabricCheck)
