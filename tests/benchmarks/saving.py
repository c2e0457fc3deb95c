"""Measure how long a checkpoint of BERT-base stops the training, and how long until the checkpoint is complete.

python -m tests.benchmarks.saving             BERT-base with AdamW in fp32: 1.3 GB per checkpoint
python -m tests.benchmarks.saving --saves 5   more checkpoints

One process trains on tiny batches and saves every few steps, in four ways:

    Trainer     the plain Trainer of transformers, which writes to local disk
    uploaded    the same, and a process uploads the files, with checksums, to an S3 server on this machine
    async_save  torch.distributed.checkpoint.async_save of the same model and optimizer, to local disk
    meanwhile   like the entrypoints (container/saving/snapshot.py): a thread writes a copy, then uploads it

A stall is the time from the end of a step to the start of the next. "Steps lose" is the extra time of the steps until
the checkpoint is complete, because writing and checksums use the same cores. The S3 server uses them too, at the
lowest priority; in reality it is on other machines. The training uses OMP_NUM_THREADS cores. Default: 1.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported from C++
from torch.distributed.checkpoint.state_dict_saver import async_save
from transformers import BertConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from jobs.aws import s3 as object_store
from jobs.container.channel import LOOPBACK, serve_store
from jobs.container.models.masked_bert import masked_lm
from jobs.container.rank import Rank
from jobs.container.saving.manifest import Retention, Throughput
from jobs.container.saving.metrics import RunMetrics
from jobs.container.saving.snapshot import BackgroundSave
from jobs.container.saving.upload import CheckpointUploads
from jobs.container.trainer.trainer import Options, trainer_class
from jobs.spec.kinds.pretrain_mlm import PretrainMlm
from tests.support.benchmarks.launched import launcher
from tests.support.container.launching import Run

LENGTH = 16
TITLES = ("Trainer", "uploaded", "async_save", "meanwhile")
EVERY_STEPS = 8
MOST_OF_PLAIN = 0.7
"""Limit of a save's stall and lost time, as a share of the plain Trainer's stall."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.saving", description=__doc__)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12, help="fewer layers make a smaller checkpoint (default: 12)")
    parser.add_argument("--cuda", action="store_true", help="on a GPU")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = BertConfig(num_hidden_layers=options.layers)
    megabytes = 3 * 4 * sum(each.numel() for each in masked_lm("bert")(config).parameters()) / 1e6
    print(f"{megabytes:.0f} MB, {os.cpu_count()} cores", flush=True)
    steps = EVERY_STEPS * options.saves
    watches = {}
    for title in TITLES:
        with tempfile.TemporaryDirectory() as name, launcher(Path(name)) as new_run:
            for server in psutil.Process().children():
                server.nice(19)
            uploads = _uploads(new_run(), Path(name)) if title in {"uploaded", "meanwhile"} else None
            writes = Writes() if title == "async_save" else None
            watch = watches[title] = Watch(uploads or writes)
            base = _saving_asynchronously(writes) if writes else Trainer
            background_save = None
            if title == "meanwhile" and uploads:
                background_save = BackgroundSave(new_run().location, uploads)
            trainer = trainer_class(base)(
                model=masked_lm("bert")(config),
                args=TrainingArguments(
                    output_dir=f"{name}/checkpoints",
                    max_steps=steps,
                    per_device_train_batch_size=1,
                    save_steps=EVERY_STEPS,
                    save_total_limit=1 if title == "Trainer" else None,
                    use_cpu=not options.cuda,
                    disable_tqdm=True,
                    report_to=[],
                ),
                train_dataset=Sequences(steps),
                callbacks=[uploads, watch] if uploads else [watch],
                options=Options(background_save=background_save),
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            watch.wait()
    for title, watch in watches.items():
        print(
            f"{title:<11} stalls for {statistics.median(watch.stalls):.2f} s "
            f"({', '.join(f'{seconds:.2f}' for seconds in watch.stalls)})   complete after "
            f"{statistics.median(watch.complete):.1f} s   steps lose {watch.lost():.1f} s meanwhile"
        )
    plain, *_, meanwhile = (statistics.median(watch.stalls) for watch in watches.values())
    lost = watches["meanwhile"].lost()
    print(f"ratio of stalls: x{plain / meanwhile:.1f}")
    print(f"ratio including lost time: x{plain / (meanwhile + lost):.1f}")
    if meanwhile + lost > MOST_OF_PLAIN * plain:
        print(f"stall and lost time exceed {MOST_OF_PLAIN:.0%} of the plain Trainer's {plain:.2f} s")
        return 1
    return 0


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences with a few masked positions, like the entrypoint's."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1000, 30_000, (LENGTH,), generator=torch.Generator().manual_seed(number))
        masked = torch.tensor([3, 7])
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "masked_positions": masked,
            "labels": ids[masked],
        }


class Writes:
    """Save with async_save, one save at a time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Duration of the last complete save."""
        self._ended = threading.Event()
        self._ended.set()

    def begin(self, state: dict[str, Any], folder: Path) -> None:
        started = time.monotonic()

        def end(written: Any) -> None:
            self.seconds = time.monotonic() - started
            written.result()
            shutil.rmtree(folder)
            self._ended.set()

        self._ended.clear()
        saving = async_save(state, checkpoint_id=folder)
        assert isinstance(saving, Future), "newer releases return two if they stage asynchronously"
        saving.add_done_callback(end)

    def finish(self) -> None:
        self._ended.wait()


def _saving_asynchronously(writes: Writes) -> type[Any]:
    class AsyncTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
        def train(self, *args: Any, **kwargs: Any) -> Any:
            distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            try:
                return super().train(*args, **kwargs)
            finally:
                writes.finish()
                distributed.destroy_process_group()

        def _save_checkpoint(self, *_: Any, **__: Any) -> None:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            writes.begin(state, Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

    return AsyncTrainer


class Watch(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Time the steps and the gaps between them. It must be the last callback."""

    def __init__(self, uploads: CheckpointUploads | Writes | None) -> None:
        self.stalls: list[float] = []
        self.complete: list[float] = []
        self._uploads = uploads
        self._usual: list[float] = []
        self._meanwhile: list[float] = []
        self._started = self._ended = 0.0
        self._saving = self._under_way = False
        self._before = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.monotonic()
        self._close_stall()

    def on_step_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        (self._meanwhile if self._under_way else self._usual).append(time.monotonic() - self._started)
        self._look()
        self._saving = state.global_step % args.save_steps == 0
        if self._saving:
            self.wait()  # measure saves that need not wait for an earlier save
        self._ended = time.monotonic()

    def on_save(self, *_: Any, **__: Any) -> None:
        self._under_way = self._uploads is not None

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._close_stall()

    def wait(self) -> None:
        if self._uploads is not None:
            self._uploads.finish()
        self._look()

    def lost(self) -> float:
        usual = statistics.median(self._usual)
        return sum(seconds - usual for seconds in self._meanwhile) / len(self.stalls)

    def _close_stall(self) -> None:
        if self._saving:
            self.stalls.append(time.monotonic() - self._ended)
            self._saving = False
            if self._uploads is None:
                self.complete.append(self.stalls[-1])

    def _look(self) -> None:
        if self._uploads is not None and self._uploads.seconds != self._before:
            self._before = self._uploads.seconds
            self.complete.append(self._before)
            self._under_way = False


def _uploads(run: Run, folder: Path) -> CheckpointUploads:
    """Create the uploads like jobs.container.trainer.training, in a job of one rank."""
    store = serve_store(LOOPBACK)
    os.environ |= {**run.environment, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
    rank = Rank(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node=0,
        nnodes=1,
        run=run.location,
        scratch=folder,
    )
    s3 = object_store.connect()
    metrics = RunMetrics(rank, s3, resumed_from_step=0, throughput=Throughput(), samples_per_step=1, warmup_steps=0)
    uploads = CheckpointUploads(rank, s3, PretrainMlm(data="s3://data/none/"), metrics, Retention(newest=1))
    uploads.store_server = store  # type: ignore[attr-defined]  # keeps it alive
    return uploads


if __name__ == "__main__":
    sys.exit(main())
