"""Learn to distinguish good reviews from bad ones by their words: an example of a custom script, for any machine.

    python train.py reviews.csv                           # columns `text` and `label` (0 or 1)

The lines with `run` are for the platform: they let an interrupted run continue at its last step. On a machine without
the platform they have no effect.
"""

import csv
import sys
import zlib
from pathlib import Path

import torch

import trainyard

WORDS, EPOCHS, BATCH = 2**14, 20, 32


def words_of(text: str) -> torch.Tensor:
    """Return the hashed words of a text as ids."""
    return torch.tensor([zlib.crc32(word.encode()) % WORDS for word in text.lower().split()] or [0])


torch.manual_seed(1)
with Path(sys.argv[1]).open(newline="", encoding="utf-8") as file:
    rows = [(words_of(row["text"]), float(row["label"])) for row in csv.DictReader(file)]
train, held_out = rows[len(rows) // 10 :], rows[: len(rows) // 10]

model = torch.nn.EmbeddingBag(WORDS, 1, mode="mean")
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
steps = EPOCHS * (len(train) // BATCH)

run = trainyard.Run(total_steps=steps, samples_per_step=BATCH)
step = run.restore(model=model, optimizer=optimizer)
while step < steps and not run.should_stop():
    batch = [train[place] for place in torch.randint(len(train), (BATCH,)).tolist()]
    starts = torch.tensor([0, *(len(text) for text, _ in batch[:-1])]).cumsum(0)
    scores = model(torch.cat([text for text, _ in batch]), starts)[:, 0]
    labels = torch.tensor([label for _, label in batch])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    run.step(step)
    if step % 10 == 0:
        run.log(step, loss=loss)
    if run.should_save():
        run.save(step, model=model, optimizer=optimizer)

if step == steps:
    with torch.no_grad():
        right = sum((model(text[None]).item() > 0) == (label > 0.5) for text, label in held_out)
    run.log(step, eval_accuracy=right / max(1, len(held_out)))
    torch.save(model.state_dict(), trainyard.output() / "model.pt")
    print(f"{right} of {len(held_out)} held-out reviews are classified correctly")
