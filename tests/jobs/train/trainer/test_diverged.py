"""A training whose weights are no finite numbers does not end as a success."""

from types import SimpleNamespace

import pytest
import torch

from jobs.contract.errors import TrainyardError
from jobs.train.trainer.training import _check_finite


def test_a_model_that_diverged_is_refused_with_the_step_where_its_loss_did() -> None:
    history = [{"step": 5, "loss": 0.7}, {"step": 10, "loss": float("nan")}, {"step": 15, "loss": float("nan")}]
    trainer = SimpleNamespace(model=torch.nn.Linear(2, 2), state=SimpleNamespace(global_step=36, log_history=history))
    _check_finite(trainer)
    torch.nn.init.constant_(trainer.model.bias, float("inf"))
    with pytest.raises(TrainyardError, match=r"after step 36 .* NaN or infinite; the first loss .* at step 10\nNext"):
        _check_finite(trainer)
