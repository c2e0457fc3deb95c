"""Probes: messages whose result shows what went wrong.

A wrong result shows whose part is missing, or whose part took its place. All values are whole numbers of at most 256,
which bfloat16 holds exactly, so results are compared bit by bit. `members` are the ranks of a group, in its order.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jobs.train.accelerator import Accelerator
from jobs.train.rank import Rank

if TYPE_CHECKING:
    import torch

_LARGEST = 127
_ADDENDS = 256
"""The most ones that are added up; more of them bfloat16 could not count."""


def repeat(
    operation: Callable[[], object],
    rank: Rank,
    accelerator: Accelerator,
    *,
    seconds: float,
    first: int,
    name: str,
    at_most: int = 1000,
) -> float:
    """Return the seconds that `operation`, which several ranks do together, takes: a mean over about `seconds`.

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


def contribution(rank: int, members: Sequence[int], count: int, dtype: "torch.dtype") -> "torch.Tensor":
    """Return what `rank` gives to an all-reduce of `count` values, a multiple of the members: rows of one for each.

    In even rows each place belongs to one rank, and the others add nothing to it; in odd rows all add one.
    """
    import torch

    index = members.index(rank)
    values = torch.zeros(count // len(members), len(members), dtype=dtype)
    values[0::2, index] = _row_values(len(values), dtype)[0::2]
    values[1::2] = float(index < _ADDENDS)
    return values.view(-1)


def wrong_sum(result: "torch.Tensor", members: Sequence[int]) -> str | None:
    """Say what is wrong with the sum of all contributions; None where it is right."""
    rows = result.view(-1, len(members))
    owned, shared = rows[0::2], rows[1::2]
    expected, addends = _row_values(len(rows), result.dtype)[0::2], min(len(members), _ADDENDS)
    if bool((owned == expected[:, None]).all()) and bool((shared == addends).all()):
        return None
    faults = []
    for index, rank in enumerate(members):
        wrong = owned[:, index] != expected
        if not bool(wrong.any()):
            continue
        found, right = owned[wrong, index], expected[wrong]
        what = "is damaged"
        if bool((found == 0).all()):
            what = "is missing"
        elif bool((found == 2 * right).all()):
            what = "is counted twice"
        faults.append(f"rank {rank}'s part {what} ({len(found)} of {len(expected)} values)")
    return _together(faults) or f"what all ranks add up to is wrong ({int((shared != addends).sum())} values)"


def own_values(rank: int, count: int, dtype: "torch.dtype") -> "torch.Tensor":
    """Return what `rank` sends alone; no two of 127 ranks have one value in the same place."""
    import torch

    return ((torch.arange(count, dtype=torch.int32) % 97 + rank) % _LARGEST + 1).to(dtype)


def wrong_values(result: "torch.Tensor", sender: int, members: Sequence[int]) -> str | None:
    """Say what is wrong with what `sender` was to send; None where it is right."""
    right = result == own_values(sender, len(result), result.dtype)
    if bool(right.all()):
        return None
    for rank in members:
        if bool((result == own_values(rank, len(result), result.dtype)).all()):
            return f"in place of rank {sender}'s values there are rank {rank}'s"
    return f"rank {sender}'s values are damaged ({int((~right).sum())} of {len(result)})"


def wrong_gathering(result: "torch.Tensor", members: Sequence[int]) -> str | None:
    """Say what is wrong with the values of all ranks, one rank's after the other's; None where they are right."""
    parts = result.view(len(members), -1)
    faults = [wrong_values(part, rank, members) for part, rank in zip(parts, members, strict=True)]
    return _together([fault for fault in faults if fault]) or None


def _row_values(rows: int, dtype: "torch.dtype") -> "torch.Tensor":
    import torch

    return (torch.arange(rows, dtype=torch.int32) % _LARGEST + 1).to(dtype)


def _together(faults: Sequence[str], *, shown: int = 4) -> str:
    more = f", and {len(faults) - shown} more" if len(faults) > shown else ""
    return ", ".join(faults[:shown]) + more
