"""Train an encoder to give texts that belong together similar vectors, with sentence-transformers.

    python train.py MODEL pairs.jsonl     # lines with `anchor` and `positive`, such as a question and its answer

For each anchor, the positives of the other pairs in its batch are wrong answers, so larger batches teach more. A
column `negative` adds a wrong answer per pair. A tenth of the pairs is held out; the result has the share of held-out
anchors whose positive is the most similar one (accuracy), and the mean reciprocal rank, before and after.
"""

import argparse

import datasets
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

import trainyard

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("pairs")
parser.add_argument("--epochs", type=float, default=1)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--learning-rate", type=float, default=2e-5)
given = parser.parse_args()

rows = datasets.Dataset.from_json(given.pairs)
columns = [name for name in ("anchor", "positive", "negative") if name in rows.column_names]
parts = rows.select_columns(columns).train_test_split(test_size=0.1, seed=42)
held_out = parts["test"]

# Pairs may share an anchor or a positive.
anchors = {text: f"a{number}" for number, text in enumerate(dict.fromkeys(held_out["anchor"]))}
positives = {text: f"p{number}" for number, text in enumerate(dict.fromkeys(held_out["positive"]))}
relevant: dict[str, set[str]] = {number: set() for number in anchors.values()}
for anchor, positive in zip(held_out["anchor"], held_out["positive"], strict=True):
    relevant[anchors[anchor]].add(positives[positive])
retrieval = InformationRetrievalEvaluator(
    {number: text for text, number in anchors.items()},
    {number: text for text, number in positives.items()},
    relevant,
    accuracy_at_k=[1],
    mrr_at_k=[10],
    precision_recall_at_k=[1],
    ndcg_at_k=[10],
    map_at_k=[10],
    name="held_out",
)


def measured(prefix: str) -> dict[str, float]:
    """Return how well the model finds the positive of each held-out anchor among those of all."""
    found = retrieval(model)
    names = {"accuracy": "accuracy@1", "mrr": "mrr@10"}
    return {f"{prefix}{name}": found[f"held_out_cosine_{key}"] for name, key in names.items()}


model = SentenceTransformer(given.model, trust_remote_code=False)
before = measured("base_")  # a resumed attempt loads its checkpoint below
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "checkpoints",
        num_train_epochs=given.epochs,
        per_device_train_batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        warmup_steps=0.1,
        batch_sampler="no_duplicates",
        logging_steps=10,
        report_to=[],
    ),
    train_dataset=parts["train"],
    loss=MultipleNegativesRankingLoss(model),
    callbacks=[trainyard.Callback()],
)
trainer.train(resume_from_checkpoint=trainyard.checkpoint())
if trainer.is_world_process_zero():
    model.save_pretrained(str(trainyard.output() / "model"))
    trainyard.result(**before, **measured(""), held_out_pairs=len(held_out))
