"""The evaluation at an epoch's end that the last attempt missed."""

from types import SimpleNamespace
from typing import Any

import pytest

from jobs.container.trainer.script_trainer import _Parts


@pytest.mark.parametrize(
    ("changes", "is_made_up"),
    [
        ({"epoch": 1.0}, True),
        ({"epoch": 2.0}, True),
        ({"epoch": 1.5}, False),
        ({"epoch": 1.5, "max_steps": 12}, True),
        ({"epoch": 1.0, "eval_delay": 2}, False),
        ({"epoch": 1.0, "eval_strategy": "steps"}, False),
        ({"epoch": 1.0, "log_history": [{"step": 12, "eval_loss": 0.5}]}, False),
        ({"epoch": 1.0, "log_history": [{"step": 12, "loss": 0.5}]}, True),
    ],
)
def test_missed_evaluation_is_made_by_the_next_attempt(changes: dict[str, Any], *, is_made_up: bool) -> None:
    given = {"max_steps": 36, "log_history": [], "eval_delay": 0, "eval_strategy": "epoch", **changes}
    made: list[dict[str, float]] = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(**given),
        state=SimpleNamespace(global_step=12, **given),
        control=SimpleNamespace(should_training_stop=False),
        _evaluate=lambda *_: {"eval_loss": 0.25},
    )
    parts: Any = SimpleNamespace(_trainer=trainer, _note_best=made.append)
    _Parts._evaluate_missed(parts)
    assert made == [{"eval_loss": 0.25}] * is_made_up
