"""Weights that a model has in two places stay one on the way to a card, and a training whose are two does not begin."""

import types
from pathlib import Path

import pytest
import torch
import transformers

from jobs.container.trainer import tied_weights
from jobs.container.trainer.trainer import Options, trainer_class
from jobs.core.errors import TrainyardError

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


@pytest.mark.parametrize("is_script", [False, True])
def test_a_training_whose_weights_have_come_apart_ends_before_its_first_step(
    tmp_path: Path, *, is_script: bool
) -> None:
    model = masked_model()
    decoder = model.get_output_embeddings()
    decoder.weight = torch.nn.Parameter(decoder.weight.detach().clone())
    trainer = trainer_class(transformers.Trainer)(
        model=model,
        args=transformers.TrainingArguments(
            str(tmp_path), max_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True
        ),
        train_dataset=[{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 4,
        options=Options(checks_ties=not is_script),
    )
    if is_script:  # which may mean it
        assert trainer.train().global_step == 1
        return
    with pytest.raises(TrainyardError, match="the model's decoder has weights of its own"):
        trainer.train()
    assert trainer.state.global_step == 0
