"""Trains a tiny BERT with the trainer that jobs have on Gaudi, on a CPU: run inside an image by test_gaudi_image.py."""

import json
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from jobs.train.accelerator import Accelerator

STEPS = 30
LENGTH = 16
VOCABULARY = 64

torch.manual_seed(0)
# The class of a sequence is whether its first token lies in the upper half of the vocabulary.
tokens = torch.randint(1, VOCABULARY, (64, LENGTH))
examples = [{"input_ids": row, "labels": int(row[0] >= VOCABULARY // 2)} for row in tokens]
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)

hpu = Accelerator(name="hpu", devices=0, reason="a test")
asked: dict[str, Any] = {
    **hpu.training_arguments(),
    # What a machine without an HPU forces it to.
    "use_habana": False,
    "use_lazy_mode": False,
    "use_hpu_graphs_for_inference": False,
    "use_cpu": True,
    "output_dir": "/tmp/trained",
    "max_steps": STEPS,
    "per_device_train_batch_size": 16,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
trainer = hpu.trainer_class()(
    model=model,
    args=hpu.training_arguments_class()(**asked),
    train_dataset=examples,
    **hpu.trainer_arguments(),
)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(json.dumps({"trainer": type(trainer).__name__, "losses": losses}))
