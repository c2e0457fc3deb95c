"""What a script's Trainer does when it resumes: a missed evaluation, and DeepSpeed's parts."""

from types import SimpleNamespace
from typing import Any

import pytest

from jobs.container.trainer.script_trainer import _check_ranks, _Parts
from jobs.core.errors import TrainyardError


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


def test_deepspeed_does_not_resume_on_another_number_of_ranks() -> None:
    resume: Any = SimpleNamespace(step=16, world_size=8)
    for resumed, ranks, has_deepspeed in ((None, 4, True), (resume, 8, True), (resume, 4, False)):
        _check_ranks(SimpleNamespace(is_deepspeed_enabled=has_deepspeed), _rank_of(ranks), resumed)
    reason = r"step-16 has DeepSpeed's parts of 8 ranks, and DeepSpeed cannot resume it on 4\nNext: resume the run on 8"
    with pytest.raises(TrainyardError, match=reason):
        _check_ranks(SimpleNamespace(is_deepspeed_enabled=True), _rank_of(4), resume)


def _rank_of(ranks: int) -> Any:
    return SimpleNamespace(world_size=ranks)
