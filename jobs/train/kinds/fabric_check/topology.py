"""Which ranks of a job do a collective together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.train.kinds.fabric_check.report import Phase
from jobs.train.rank import Rank


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that do a collective together."""

    phase: Phase
    name: str
    ranks: Sequence[int]
    handle: Any
    """The process group of torch.distributed; None: all ranks."""


def groups(rank: Rank) -> Iterator[Group]:
    """Make all groups, in the same order on all ranks. Returns those that this rank belongs to."""
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
