"""Weights that a model has in two places stay one on the way to a card, and a training whose are two does not begin."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.trainer  # before `_without_datasets`, which is undone for the tests that follow
from transformers.utils import import_utils

from jobs.contract.errors import TrainyardError
from jobs.train.accelerator import Accelerator
from jobs.train.trainer import tied_weights
from jobs.train.trainer.trainer import Options, trainer_class

META = torch.device("meta")
"""A kind of device that every machine has, and to which PyTorch makes new parameters, as it does to an HPU."""


def masked_model() -> transformers.PreTrainedModel:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
    )


def test_what_a_move_has_parted_is_refused() -> None:
    model = masked_model()
    tied_weights.check(model)
    model.to(META)
    with pytest.raises(TrainyardError, match="the model's decoder has weights of its own"):
        tied_weights.check(types.SimpleNamespace(module=model))


def test_a_model_without_a_decoder_or_with_one_of_its_own_is_left_alone() -> None:
    tied_weights.check(transformers.BertModel(masked_model().config))
    config = transformers.BertConfig(**{**masked_model().config.to_dict(), "tie_word_embeddings": False})
    tied_weights.check(transformers.BertForMaskedLM(config))
    tied_weights.check(torch.nn.Linear(1, 1))


class Masked(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Four sequences of four tokens, of which all are asked for."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 4)
        return {"input_ids": tokens, "labels": tokens}


def test_a_training_whose_weights_have_come_apart_ends_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_utils, "_datasets_available", import_utils._datasets_available)
    cpu = Accelerator(name="cpu", devices=0, reason="asked for")

    def trainer(model: Any, options: Options) -> Any:
        arguments = {"output_dir": str(tmp_path), "max_steps": 2, "report_to": [], "disable_tqdm": True}
        return trainer_class(cpu.trainer_class())(
            model=model,
            args=cpu.training_arguments_class()(
                **arguments, remove_unused_columns=False, save_strategy="no", **cpu.training_arguments(alone=True)
            ),
            train_dataset=Masked(),
            options=options,
        )

    def apart() -> transformers.PreTrainedModel:
        model = masked_model()
        decoder = model.get_output_embeddings()
        decoder.weight = torch.nn.Parameter(decoder.weight.detach().clone())
        return model

    refused = trainer(apart(), Options())
    with pytest.raises(TrainyardError, match="the model's decoder has weights of its own"):
        refused.train()
    assert refused.state.global_step == 0
    # One that is tied, and a script's own that is meant so, are trained
    for model, options in ((masked_model(), Options()), (apart(), Options(checks_ties=False))):
        assert trainer(model, options).train().global_step == 2
