"""A run that resumes with other arguments than its checkpoint was made with: never by accident, on request really."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jobs.container.channel import RankStatus
from jobs.container.rank import one_line
from jobs.core.errors import UsageError
from tests.support.container.attempts import Attempts


def test_changed_arguments_are_refused_by_name_and_hold_from_the_checkpoint_on_if_they_were_asked_for(
    attempts: Callable[[], Attempts], caplog: pytest.LogCaptureFixture
) -> None:
    run = attempts()
    with pytest.raises(RuntimeError, match="cut off"):
        run.train(fail_at=9)
    # An interval decides nothing of the result: it may be another one at any time.
    changed: dict[str, Any] = {"learning_rate": 0.0001, "log_every_steps": 6}

    asked, run.rank = run.rank, replace(run.rank, allows_changes=False)
    with pytest.raises(UsageError) as refused:
        run.train(**changed)
    said = r"checkpoint step-\d of this run was made with other arguments\. Next: take back learning_rate 0.01 -> 0"
    assert re.match(said, one_line(refused.value))

    run.rank = asked
    with caplog.at_level("INFO", "trainyard"):
        run.train(**changed)
    assert any(line.endswith(", as asked: learning_rate 0.01 -> 0.0001") for line in caplog.messages)
    # The optimizer and the scheduler of a checkpoint bring its learning rate along.
    rates = {row["step"]: row["learning_rate"] for row in run.curve() if "learning_rate" in row}
    assert rates[4] > 0.001
    assert 0 < rates[12] < 0.0001
    assert RankStatus.read(run.scratch).changed == {"learning_rate": (0.01, 0.0001)}
