"""Scripts with the library as points of a sweep: a point that is behind stops at its rung, and succeeds."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.spec.sweep import Comparison, MemberOf, RungValue
from tests.support.container.launching import Run
from tests.support.container.scripts import WARM, script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

LOOP = """
import torch.distributed as dist
import trainyard

dist.init_process_group("gloo")
run = trainyard.Run(save_every_steps=50)
step = run.restore()
while step < 400 and not run.should_stop():
    step += 1
    run.step(step)
    run.log(step, loss=1.0)
    if step % 10 == 0:
        run.log(step, eval_loss=1 / step)
    if run.should_save():
        run.save(step)
(trainyard.output() / f"rank-{dist.get_rank()}.txt").write_text(str(step))
"""

TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
import trainyard

data = [{"input_ids": torch.arange(5, 13), "labels": torch.tensor(row % 2)} for row in range(8)]
model = BertForSequenceClassification(
    BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
)
trainer = Trainer(
    model,
    TrainingArguments(
        "out", max_steps=40, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True,
        eval_strategy="steps", eval_steps=6, save_strategy="no",
    ),
    train_dataset=data,
    eval_dataset=data,
    callbacks=[trainyard.Callback(checkpoint_every_steps=None)],
)
trainer.train(resume_from_checkpoint=trainyard.checkpoint())
(trainyard.output() / "rank-0.txt").write_text(str(trainer.state.global_step))
"""


@pytest.mark.parametrize(
    ("script", "ranks", "rung", "step"), [(LOOP, 2, 25, 30), (TRAINER, 1, 10, 12)], ids=["loop", "trainer"]
)
def test_a_halved_point_saves_and_stops_at_once_when_retried(
    *, script: str, ranks: int, rung: int, step: int, run: Run, s3: "S3Client", tmp_path: Path
) -> None:
    # GIVEN two better points of the sweep
    comparison = Comparison(from_step=rung, factor=3, metric="eval_loss", smaller_is_better=True)
    sweep = f"sweep-of-{run.location.key.strip('/').rpartition('/')[2]}"
    for number in (1, 3):
        place = f"research/{sweep}/halving/{rung}/values/{number}.json"
        s3.put_object(Bucket="runs", Key=place, Body=RungValue.of(step, 1e-6).model_dump_json().encode())
    run.write("member-of.json", MemberOf(sweep=sweep, number=2).model_dump_json().encode())
    flags = script_flags(s3, write_files(tmp_path / "code", {"train.py": script}), "train.py")
    options = [f"--halving={comparison.model_dump_json()}"]

    # WHEN the point reaches its rung, and when it is retried as if it had been lost afterwards
    for attempt in (1, 2):
        launched = run.attempt(*flags, nproc=ranks, options=options, attempt=attempt, **WARM)

        # THEN it succeeds at the step of its evaluation, and saves that step
        assert f"halving: ranked 3 of 3 at step {step}; the point stops\n" in launched.output
        assert [run.read(f"output/rank-{rank}.txt") for rank in range(ranks)] == [str(step).encode()] * ranks
        assert run.complete_checkpoints() == [step]
        receipt = run.receipt()
        assert receipt.stopped_early
        assert receipt.halving is not None
        assert (receipt.halving.rung, receipt.halving.step, receipt.halving.rank) == (rung, step, 3)
        assert receipt.result["eval_loss"] == pytest.approx(receipt.halving.value)
    assert run.recorded_attempt(2).resumed_from_step == run.recorded_attempt(2).last_step == step
