"""What runs in each worker of Ray Train: the fine-tuning of the other ranks, with Ray told of every checkpoint."""

import contextlib
import faulthandler
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray.train
from pydantic import ValidationError
from ray.train import CheckpointUploadMode
from transformers import TrainerCallback

from jobs.contract.errors import TrainyardError
from jobs.kinds.finetune_ray import FinetuneRay
from jobs.train.channel import RankStatus
from jobs.train.kinds.finetune_classification import finetune
from jobs.train.kinds.finetune_ray.cluster import error_file
from jobs.train.rank import Rank, ResumeLaterError, one_line
from jobs.train.trainer.checkpoint import CheckpointUploads
from jobs.train.trainer.metrics import LOGGED

CHECKPOINTS_FOLDER = "checkpoints"
"""The folder in scratch where the Trainer writes, which is Ray's storage too, so that nothing is copied."""

_CHECKPOINT = "checkpoint-"
"""The part before the step in the names of the Trainer's folders."""


def train_loop(config: dict[str, Any]) -> str | None:
    """Fine-tune as a rank does, and return why the training has stopped before its end, if it did.

    Ray has made the process group and set what torchrun would set, so a worker is a rank like any other. The last
    report has the final metrics, those of the evaluation among them.
    """
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING, force=True)
    logging.getLogger("trainyard").setLevel(logging.INFO)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # TextIO does not declare it
    faulthandler.register(signal.SIGUSR1)  # the launcher asks where a rank hangs; Ray trains in a thread of its own
    rank = Rank.from_environment()
    arguments = FinetuneRay.model_validate(config["arguments"])
    with _failure_told(rank):
        try:
            finetune(rank, arguments, observers=lambda uploads: [Reports(rank, uploads)])
        except ResumeLaterError as interruption:
            return str(interruption)
        _report_result(rank)
    return None


class Reports(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Reports each checkpoint to Ray, with the metrics of its step. Ray counts it once it is complete on S3."""

    def __init__(self, rank: Rank, uploads: CheckpointUploads) -> None:
        self._rank = rank
        self._uploads = uploads

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        name = f"{_CHECKPOINT}{state.global_step}"
        complete = self._uploads.under_way()

        def upload(checkpoint: Any, _name: str) -> Any:
            with _failure_told(self._rank):
                complete()
            return checkpoint

        logged: dict[str, Any] = next((entry for entry in reversed(state.log_history) if "loss" in entry), {})
        metrics = {"step": state.global_step, **{key: logged[key] for key in LOGGED if key in logged}}
        # The files of all ranks lie in one folder, which the first reports for all; each has to call.
        checkpoint = (
            ray.train.Checkpoint.from_directory(str(Path(args.output_dir) / name)) if args.process_index == 0 else None
        )
        ray.train.report(
            metrics,
            checkpoint=checkpoint,
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=upload,
            delete_local_checkpoint_after_upload=False,  # ours does
        )


def _report_result(rank: Rank) -> None:
    """Report to Ray what the run's receipt will have as its result, with the last checkpoint: Ray keeps no metrics
    without one.
    """
    status = RankStatus.read(rank.scratch)  # which the first rank has written, before any rank came here
    name = f"{_CHECKPOINT}{status.last_step}"
    folder = rank.scratch / CHECKPOINTS_FOLDER / name
    ray.train.report(
        {"step": status.last_step, **status.result},
        checkpoint=ray.train.Checkpoint.from_directory(str(folder)) if rank.is_first else None,
        checkpoint_dir_name=name,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it is on S3 already
    )


@contextlib.contextmanager
def _failure_told(rank: Rank) -> Iterator[None]:
    """Turn what is raised in the block into one line for the driver, and into an error that passes through pickle."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, as something that can be pickled
        if isinstance(error, TrainyardError | ValidationError):
            message = one_line(error)
        else:
            traceback.print_exc()
            message = f"worker {rank.rank}: {type(error).__name__}: {error}"
        part = rank.scratch / f".ray-error-{rank.rank}-{threading.get_ident()}"
        part.write_text(message)
        part.replace(error_file(rank.scratch, rank.rank))
        raise RuntimeError(message) from None
