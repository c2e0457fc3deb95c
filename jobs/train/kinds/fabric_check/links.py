"""Pairs of ranks that send each other a message: by them a slow card is told from the others that wait for it."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jobs.train.accelerator import Accelerator
from jobs.train.kinds.fabric_check.barrier import RollCall
from jobs.train.kinds.fabric_check.report import Link
from jobs.train.kinds.fabric_check.values import own_values, wrong_values
from jobs.train.rank import Rank

MESSAGE_BYTES = 4 * 1024 * 1024
"""At most: enough to fill a connection, little enough for many pairs."""

ROUNDS = 32
"""At most. In each one every rank has another partner; 33 ranks meet all others."""


def measure_links(
    rank: Rank, accelerator: Accelerator, roll_call: RollCall, *, device: Any, message_bytes: int, seconds: float
) -> tuple[list[Link], list[str]]:
    """What this rank measured with each partner of a lower number, and what was wrong with what it got."""
    import torch
    import torch.distributed as dist

    count = min(message_bytes, MESSAGE_BYTES) // 4
    sent = own_values(rank.rank, count, torch.float32).to(device)
    links, wrong = [], []
    for number, pairs in enumerate(itertools.islice(rounds(range(rank.world_size)), ROUNDS)):
        partner = next((sum(pair) - rank.rank for pair in pairs if rank.rank in pair), None)
        peers = (rank.rank,) if partner is None else (rank.rank, partner)
        with roll_call.step(f"exchange between ranks {' and '.join(map(str, sorted(peers)))}", peers):
            if partner is None:
                continue
            got = torch.zeros(count, dtype=torch.float32, device=device)

            def exchange(got: Any = got, partner: int = partner) -> None:
                both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, got, partner)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()

            exchange()
            accelerator.synchronize()
            if fault := wrong_values(got.cpu(), partner, range(rank.world_size)):
                wrong.append(f"exchange between ranks {rank.rank} and {partner}: {fault}")
            seconds_each = repeat(
                exchange, rank, accelerator, seconds=seconds, first=min(peers), name=f"links/{number}/{min(peers)}"
            )
        if partner < rank.rank:
            per_node = rank.local_world_size
            links.append(
                Link(
                    ranks=(partner, rank.rank),
                    nodes=(partner // per_node, rank.node),
                    message_bytes=count * 4,
                    gigabytes_per_second=count * 4 / seconds_each / 1e9,
                )
            )
    return links, wrong


def repeat(
    operation: Any, rank: Rank, accelerator: Accelerator, *, seconds: float, first: int, name: str, at_most: int = 1000
) -> float:
    """Seconds that `operation`, which several ranks do together, takes: a mean over about `seconds`.

    The rank `first` decides how often it is repeated.
    """
    for _ in range(2):  # the first of a group connects it, the first of a shape is compiled
        operation()
    accelerator.synchronize()
    started = time.perf_counter()
    operation()
    accelerator.synchronize()
    if rank.rank == first:
        estimate = max(time.perf_counter() - started, 1e-7)
        rank.store.set(f"fabric/{name}", str(max(1, min(at_most, round(seconds / estimate)))))
    times = int(rank.store.get(f"fabric/{name}"))
    operation()  # so that all begin together
    accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        operation()
    accelerator.synchronize()
    return (time.perf_counter() - started) / times


def rounds(players: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Each meets each other once, and in one round all play at the same time (but one, where they are odd)."""
    seats: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    for _ in range(len(seats) - 1):
        halves = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        yield [(one, other) for one, other in halves if one is not None and other is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]
