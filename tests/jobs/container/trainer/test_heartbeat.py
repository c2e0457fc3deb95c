"""Which activities of a rank may be slow: the start, a save, and batches that may wait for a graph."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jobs.container.channel import read_heartbeats
from jobs.container.rank import Rank
from jobs.container.trainer.heartbeat import Heartbeats, busy
from jobs.core.locations import S3Location
from tests.jobs.container.saving.test_metrics import rank_of


@pytest.mark.parametrize("compiles", [False, True])
def test_batches_may_be_slow_at_the_start_and_when_compiling(tmp_path: Path, *, compiles: bool) -> None:
    heartbeats = Heartbeats(rank_of(0, tmp_path, S3Location("runs", "team/run/")), compiles=compiles)
    slow = []
    for step, width in enumerate([64] * 12 + [96], start=1):
        heartbeats.batch("training", {"input_ids": torch.zeros(1, width)})
        slow.append(read_heartbeats(tmp_path)[0].slow)
        heartbeats.on_step_end(None, SimpleNamespace(global_step=step), None)
    assert slow == ([True] * 10 + [False] * 2 + [True] if compiles else [True] + [False] * 12)
    heartbeats.saving()
    assert read_heartbeats(tmp_path)[0].slow


def test_busy_extends_the_limit_with_and_without_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_of(0, tmp_path, S3Location("runs", "team/run/"))
    Heartbeats(rank, compiles=False)
    busy(600)
    found = read_heartbeats(tmp_path)[0]
    assert (found.doing, found.paced, found.patience_seconds) == ("busy", True, 600)
    monkeypatch.setattr(Heartbeats, "newest", None)
    monkeypatch.setattr(Rank, "from_environment", lambda: rank)
    busy(60)
    found = read_heartbeats(tmp_path)[0]
    assert (found.doing, found.paced, found.patience_seconds) == ("busy", False, 60)
