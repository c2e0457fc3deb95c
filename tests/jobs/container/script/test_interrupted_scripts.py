"""Scripts with the library, interrupted and resumed: a Trainer with its callback, and a custom loop."""

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.container.launching import PATIENCE_SECONDS, NewRun, Run
from tests.support.container.metadata_service import MetadataService
from tests.support.container.scripts import WARM, script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

TRAINER = """
import os
import time
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers import default_data_collator, set_seed
import trainyard

set_seed(7)
chance = torch.Generator().manual_seed(1)
data = [
    {"input_ids": torch.randint(5, 50, (8,), generator=chance), "labels": torch.randint(0, 2, (), generator=chance)}
    for _ in range(96)
]
model = BertForSequenceClassification(
    BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
)
trainer = Trainer(
    model,
    TrainingArguments(
        "out", max_steps=60, per_device_train_batch_size=4, logging_steps=7, report_to=[], use_cpu=True,
        disable_tqdm=True, eval_strategy="steps", eval_steps=10, save_strategy="steps", save_steps=10,
        load_best_model_at_end=True, learning_rate=1e-2,
    ),
    train_dataset=data,
    eval_dataset=data[:16],
    data_collator=lambda rows: time.sleep(0.05) or default_data_collator(rows),  # or it ends before it is killed
    callbacks=[trainyard.Callback(checkpoint_every_steps=4)],
)
trainer.train(resume_from_checkpoint=trainyard.checkpoint())
print("best", trainer.state.best_model_checkpoint, flush=True)
trainer.save_model(str(trainyard.output() / "model"))
"""

STOPS_EARLY = TRAINER.replace(
    "callbacks=[", "callbacks=[transformers.EarlyStoppingCallback(4, early_stopping_threshold=100.0), "
).replace("import torch\n", "import torch\nimport transformers\n")

LOOP = """
import os
import time
import torch
import torch.distributed as dist
import trainyard

dist.init_process_group("gloo")
torch.manual_seed(3)
layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = trainyard.Run(total_steps=400, samples_per_step=8, save_every_steps=50)
step = run.restore(model=model, optimizer=optimizer)
assert (run.state is None) == (step == 0)
torch.manual_seed(dist.get_rank()) if step == 0 else None
while step < 400 and not run.should_stop():
    loss = model(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    time.sleep(float(os.environ.get("STEP_SECONDS", "0.005")))  # or it ends before SIGTERM comes
    run.step(step)
    if step % 10 == 0:
        run.log(step, loss=loss)
    if run.should_save():
        run.save(step, model=model, optimizer=optimizer)
if step == 400 and dist.get_rank() == 0:
    torch.save(model.state_dict(), trainyard.output() / "model.pt")
"""


EAGER = (
    "import sys; from jobs.container import launch; from jobs.container.saving import interruption; "
    "interruption.POLL_SECONDS = 0.2; sys.exit(launch.main())"
)
"""A launcher that looks for a notice more often than EC2 recommends, because these trainings take seconds."""


def assert_same(run: Run, whole: Run, model: str) -> None:
    assert run.read(model) == whole.read(model)
    assert run.curve() == whole.curve()


@pytest.mark.every_release
def test_an_interrupted_trainer_ends_as_if_uninterrupted(new_run: NewRun, s3: "S3Client", tmp_path: Path) -> None:
    flags = script_flags(s3, write_files(tmp_path / "code", {"train.py": STOPS_EARLY}), "train.py")
    whole = new_run()
    uninterrupted = whole.attempt(*flags, nproc=2, **WARM)
    assert whole.recorded_attempt(1).last_step == 50  # at the fourth evaluation that is not better by 100
    run = new_run()

    # WHEN SIGTERM arrives
    first = run.start(*flags, nproc=2, **WARM)
    first.wait_for_line("[progress] 14/60")
    assert first.kill(signal.SIGTERM) == 75
    # THEN a step is saved, and the script stops after its training
    record = run.recorded_attempt(1)
    assert record.reason == f"SIGTERM; saved step {record.last_step}", first.output
    assert 0 < record.saving_seconds < (record.last_seen_at - record.started_at).total_seconds()
    assert run.complete_checkpoints()[-1] == record.last_step
    assert "best" not in first.output

    # WHEN the node is lost after further checkpoints
    second = run.start(*flags, nproc=2, attempt=2, **WARM)
    second.wait_for_line("[progress] 35/60")
    second.kill()
    run.wait_until_gone()
    # THEN the last attempt resumes from the newest checkpoint, and ends as if uninterrupted
    third = run.attempt(*flags, nproc=2, attempt=3, **WARM)
    assert any("start: resumed from checkpoint step-" in line for line in third.lines)
    [best] = [line.rpartition("-")[2] for line in uninterrupted.lines if line.startswith("best")]
    assert [line.rpartition("-")[2] for line in third.lines if line.startswith("best")] == [best]
    assert_same(run, whole, "output/model/model.safetensors")
    assert run.receipt().result["eval_loss"] == whole.receipt().result["eval_loss"]
    assert int(best) in run.complete_checkpoints()
    assert not run.keys("output/checkpoint")

    # WHEN Batch takes that attempt for lost at its end, in the middle of an epoch
    again = run.attempt(*flags, nproc=2, attempt=4, **WARM)
    # THEN the next attempt does not train, and the script finds the same model loaded
    assert "start: resumed from checkpoint step-50\n" in again.lines
    assert [line.rpartition("-")[2] for line in again.lines if line.startswith("best")] == [best]
    assert_same(run, whole, "output/model/model.safetensors")
    assert run.receipt().result["eval_loss"] == whole.receipt().result["eval_loss"]


EVALUATES_EPOCHS = (
    TRAINER.replace(
        "max_steps=60, per_device_train_batch_size=4, logging_steps=7,",
        "num_train_epochs=3, per_device_train_batch_size=8, logging_steps=7,",
    )
    .replace(
        'eval_strategy="steps", eval_steps=10, save_strategy="steps", save_steps=10,',
        'eval_strategy="epoch", save_strategy="epoch",',
    )
    .replace(
        "trainer.train(",
        """
class HangsOnce(transformers.TrainerCallback):
    def on_prediction_step(self, args, state, control, **_):
        if state.global_step == int(sys.argv[1]) and os.environ.get("AWS_BATCH_JOB_ATTEMPT") == "1":
            print("hangs in the evaluation", flush=True)
            time.sleep(600)

trainer.add_callback(HangsOnce())
trainer.train(""",
    )
    .replace("import os\n", "import os, sys, transformers\n")
)


@pytest.mark.every_release
def test_an_evaluation_missed_by_the_last_attempt_is_made_up(new_run: NewRun, s3: "S3Client", tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"train.py": EVALUATES_EPOCHS})
    whole = new_run()
    uninterrupted = whole.attempt(*script_flags(s3, code, "train.py 0"), **WARM)
    assert [line["step"] for line in whole.metrics() if "eval_loss" in line][:3] == [12, 24, 36]

    for step in (12, 36):  # in the middle of the training, and at its end
        run = new_run()
        # WHEN the node is lost between the save at the end of an epoch and the following evaluation
        first = run.start(*script_flags(s3, code, f"train.py {step}"), **WARM)
        first.wait_for_line("hangs in the evaluation")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while step not in run.complete_checkpoints():
            assert time.monotonic() < deadline, first.output
            time.sleep(0.1)
        first.kill()
        run.wait_until_gone()
        second = run.attempt(*script_flags(s3, code, f"train.py {step}"), attempt=2, **WARM)

        # THEN the next attempt evaluates first, and ends as if uninterrupted
        assert f"start: resumed from checkpoint step-{step}\n" in second.lines
        assert_same(run, whole, "output/model/model.safetensors")
        assert run.receipt().result["eval_loss"] == whole.receipt().result["eval_loss"]
        best = [
            [line.rpartition("-")[2] for line in lines if line.startswith("best")]
            for lines in (uninterrupted.lines, second.lines)
        ]
        assert best[0] == best[1] != []


def test_an_interrupted_custom_loop_ends_as_if_uninterrupted(new_run: NewRun, s3: "S3Client", tmp_path: Path) -> None:
    flags = script_flags(s3, write_files(tmp_path / "code", {"train.py": LOOP}), "train.py")
    whole = new_run()
    whole.attempt(*flags, nproc=2, **WARM)
    run = new_run()

    first = run.start(*flags, nproc=2, **WARM)
    first.wait_for_line("[progress] 110/400")
    assert first.kill(signal.SIGTERM) == 75
    record = run.recorded_attempt(1)
    assert record.reason == f"SIGTERM; saved step {record.last_step}", first.output
    assert 0 < record.saving_seconds < (record.last_seen_at - record.started_at).total_seconds()
    # WHEN EC2 sends a notice during the next attempt
    with MetadataService() as metadata:
        slow = {"STEP_SECONDS": "0.1", **metadata.environment}
        second = run.start(*flags, nproc=2, attempt=2, program=("-c", EAGER), **WARM, **slow)
        second.wait_for_line(f"start: resumed from checkpoint step-{record.last_step}\n")
        second.wait_for_line("loss ")  # it listens from the first step on
        notice = metadata.give_notice(20)
        # THEN both ranks save at once and again in time, before the launcher would end them
        first_save = second.wait_for_line(f"{notice}: saving step ")
        second.process.send_signal(signal.SIGTERM)  # sent by the host at a notice
        assert second.wait() == 75
    early = int(first_save.split("saving step ")[1].removesuffix(", and training on\n"))
    later = run.recorded_attempt(2).last_step
    assert run.recorded_attempt(2).reason == f"{notice}; saved step {later}", second.output
    assert record.last_step < early < early + 10 < later < 400
    for step in (early, later):
        assert any(line.startswith(f"checkpoint: step {step},") for line in second.lines), second.output
    assert run.complete_checkpoints()[-1] == later
    # WHEN the next attempt is lost
    third = run.start(*flags, nproc=2, attempt=3, **WARM)
    third.wait_for_line(f"start: resumed from checkpoint step-{later}\n")
    third.wait_for_line("loss ")
    third.kill()
    run.wait_until_gone()
    # THEN the last attempt resumes from the newest saved step
    fourth = run.attempt(*flags, nproc=2, attempt=4, **WARM)
    [resumed] = [line for line in fourth.lines if line.startswith("start: resumed from checkpoint step-")]
    assert int(resumed.rpartition("-")[2]) >= later

    assert_same(run, whole, "output/model.pt")
    # An attempt after the last step, because its node was lost at the end, has no work and saves the same
    run.attempt(*flags, nproc=2, attempt=5, **WARM)
    assert_same(run, whole, "output/model.pt")
    assert run.receipt().result["loss"] == whole.receipt().result["loss"]
    assert run.tensorboard_losses(tmp_path / "events")
