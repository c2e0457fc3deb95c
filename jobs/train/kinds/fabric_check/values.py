"""Values by which a result tells what went wrong: whose part is missing, or whose it is in place of another's.

All of them are whole numbers of at most 256, which bfloat16 holds exactly, so results are compared bit by bit.
`members` are the ranks of a group, in its order.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LARGEST = 127
_ADDENDS = 256
"""Ones that are added up; more of them bfloat16 could not count."""


def contribution(rank: int, members: Sequence[int], count: int, dtype: "torch.dtype") -> "torch.Tensor":
    """What `rank` gives to an all-reduce of `count` values, a multiple of the members: rows of one value for each.

    In even rows each place belongs to one rank, and the others add nothing to it; in odd rows all add one.
    """
    import torch

    index = members.index(rank)
    values = torch.zeros(count // len(members), len(members), dtype=dtype)
    values[0::2, index] = _row_values(len(values), dtype)[0::2]
    values[1::2] = float(index < _ADDENDS)
    return values.view(-1)


def wrong_sum(result: "torch.Tensor", members: Sequence[int]) -> str | None:
    """What is wrong with the sum of all contributions; None where it is right."""
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
    """What `rank` sends in a broadcast or an all-gather; no two of 127 ranks have one value in the same place."""
    import torch

    return ((torch.arange(count, dtype=torch.int32) % 97 + rank) % _LARGEST + 1).to(dtype)


def wrong_values(result: "torch.Tensor", sender: int, members: Sequence[int]) -> str | None:
    """What is wrong with what `sender` was to send; None where it is right."""
    right = result == own_values(sender, len(result), result.dtype)
    if bool(right.all()):
        return None
    for rank in members:
        if bool((result == own_values(rank, len(result), result.dtype)).all()):
            return f"in place of rank {sender}'s values there are rank {rank}'s"
    return f"rank {sender}'s values are damaged ({int((~right).sum())} of {len(result)})"


def wrong_gathering(result: "torch.Tensor", members: Sequence[int]) -> str | None:
    """What is wrong with the values of all ranks, one rank's after the other's; None where they are right."""
    parts = result.view(len(members), -1)
    faults = [wrong_values(part, rank, members) for part, rank in zip(parts, members, strict=True)]
    return _together([fault for fault in faults if fault]) or None


def _row_values(rows: int, dtype: "torch.dtype") -> "torch.Tensor":
    import torch

    return (torch.arange(rows, dtype=torch.int32) % _LARGEST + 1).to(dtype)


def _together(faults: Sequence[str], *, shown: int = 4) -> str:
    more = f", and {len(faults) - shown} more" if len(faults) > shown else ""
    return ", ".join(faults[:shown]) + more
