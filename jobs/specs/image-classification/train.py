"""Train a vision transformer, or another model for pictures, to classify pictures.

    python train.py MODEL PICTURES     # a folder of pictures for each class: PICTURES/cat/1.jpg, PICTURES/dog/2.png

A tenth of the pictures is held out. Half of the training pictures are mirrored. It needs no torchvision.
"""

import argparse

import datasets
import numpy as np
import torch
from PIL import ImageOps
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments

import trainyard

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("pictures")
parser.add_argument("--epochs", type=float, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--learning-rate", type=float, default=5e-5)
given = parser.parse_args()

rows = datasets.load_dataset("imagefolder", data_dir=given.pictures, split="train", trust_remote_code=False)
names = rows.features["label"].names
parts = rows.train_test_split(test_size=0.1, seed=42, stratify_by_column="label")
processor = AutoImageProcessor.from_pretrained(given.model, trust_remote_code=False)


def prepared(batch: dict[str, list], *, mirror: bool = False) -> dict[str, object]:
    """Return pictures as the model takes them. Called when a batch is read."""
    pictures = [picture.convert("RGB") for picture in batch["image"]]
    if mirror:
        pictures = [ImageOps.mirror(picture) if torch.rand(()) < 0.5 else picture for picture in pictures]
    return {**processor(pictures, return_tensors="pt"), "labels": batch["label"]}


model = AutoModelForImageClassification.from_pretrained(
    given.model,
    trust_remote_code=False,
    num_labels=len(names),
    id2label=dict(enumerate(names)),
    label2id={name: number for number, name in enumerate(names)},
    ignore_mismatched_sizes=True,  # the head for the classes that it was trained on
)
trainer = Trainer(
    model,
    TrainingArguments(
        "checkpoints",
        num_train_epochs=given.epochs,
        per_device_train_batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        remove_unused_columns=False,
        logging_steps=10,
        report_to=[],
    ),
    train_dataset=parts["train"].with_transform(lambda batch: prepared(batch, mirror=True)),
    eval_dataset=parts["test"].with_transform(prepared),
    compute_metrics=lambda found: {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))},
    callbacks=[trainyard.Callback()],
)
trainer.train(resume_from_checkpoint=trainyard.checkpoint())
result = trainer.evaluate()
trainer.save_model(str(trainyard.output() / "model"))
if trainer.is_world_process_zero():
    processor.save_pretrained(trainyard.output() / "model")
    trainyard.result(**{name: result[name] for name in ("eval_accuracy", "eval_loss")}, classes=len(names))
