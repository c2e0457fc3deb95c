"""Tied weights must stay tied when a model moves to a card; otherwise the training does not begin."""

import types
from pathlib import Path

import pytest
import torch
import transformers

from jobs.container.trainer.trainer import Options, check_tied_weights, trainer_class
from jobs.core.errors import TrainyardError

META = torch.device("meta")
"""A device type that every machine has and for which PyTorch makes new parameters, as for an HPU."""


def masked_model() -> transformers.PreTrainedModel:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
    )


def test_separated_tied_weights_are_refused() -> None:
    model = masked_model()
    check_tied_weights(model)
    model.to(META)
    with pytest.raises(TrainyardError, match="the model's decoder does not share the weights"):
        check_tied_weights(types.SimpleNamespace(module=model))


def test_model_without_tied_weights_is_accepted() -> None:
    check_tied_weights(transformers.BertModel(masked_model().config))
    config = transformers.BertConfig(**{**masked_model().config.to_dict(), "tie_word_embeddings": False})
    check_tied_weights(transformers.BertForMaskedLM(config))
    check_tied_weights(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("is_script", [False, True])
def test_training_with_separated_weights_ends_before_a_step(tmp_path: Path, *, is_script: bool) -> None:
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
    if is_script:  # a script may intend it
        assert trainer.train().global_step == 1
        return
    with pytest.raises(TrainyardError, match="the model's decoder does not share the weights"):
        trainer.train()
    assert trainer.state.global_step == 0
