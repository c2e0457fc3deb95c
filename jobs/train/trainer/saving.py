"""How a Trainer saves while the training goes on: it stands still for a copy in the host's memory, no longer.

What is large, the model and the optimizer's state, is copied at the end of a step (jobs/train/trainer/snapshot.py). A
thread writes the copy to disk, as the Trainer would, and then uploads all that was saved
(jobs/train/trainer/checkpoint.py). One save is under way at a time; the next one waits for it. The rest (scheduler,
random state, counters) is small, and written while the training waits, so the folder holds what it always does.

DeepSpeed writes through its own engine, while the training waits; so does the Trainer where memory is short.
"""

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.contract.errors import TrainyardError
from jobs.contract.locations import S3Location
from jobs.contract.run import CHECKPOINTS

if TYPE_CHECKING:
    from jobs.train.trainer.checkpoint import CheckpointUploads

log = logging.getLogger("trainyard")


def saving_meanwhile(trainer_class: type[Any], run: S3Location, uploads: "CheckpointUploads") -> type[Any]:
    """The Trainer class that does, and says, when the disk is full, what that means for the run."""
    import torch
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

    from jobs.train.trainer import snapshot

    class SavingTrainer(trainer_class):  # type: ignore[misc]  # the class is chosen at run time
        _snapshot: snapshot.Snapshot | None = None
        _has_looked = False
        _copied = False

        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
            if not self._has_looked:  # after the first step: before it the optimizer has no state
                self._has_looked = True
                self._snapshot = self._room()
            return super()._maybe_log_save_evaluate(*args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            uploads.finish()  # the copy that it writes lies where the next one is to lie
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            with _explained_writes(folder, run):
                self._copied = self._copy()
                try:
                    return super()._save_checkpoint(*args, **kwargs)
                finally:
                    self._copied = False

        def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
            if not self._copied:
                super().save_model(output_dir, *args, **kwargs)
            else:
                Path(str(output_dir)).mkdir(parents=True, exist_ok=True)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            if not self._copied:
                super()._save_optimizer_and_scheduler(output_dir)
                return
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer has to be saved too: it will be
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

        def _room(self) -> snapshot.Snapshot | None:
            """For copies; None where the training waits until all is written."""
            if not self.args.should_save or self.is_deepspeed_enabled:
                return None
            state = self._large_state()
            needed, available = snapshot.bytes_of(state), snapshot.available_bytes()
            if available is None or 2 * needed <= available:  # as much again for whatever else needs some
                return snapshot.Snapshot(state)
            log.info(
                "checkpoints: the training waits until they are written: a copy needs %.1f GB of memory, and %.1f GB "
                "are available",
                needed / 1e9,
                available / 1e9,
            )
            return None

        def _large_state(self) -> dict[str, Any]:
            # As variables tied weights are one object, which a detached state does not show.
            return {"model": self.model.state_dict(keep_vars=True), "optimizer": self.optimizer.state_dict()}

        def _copy(self) -> bool:
            """Whether model and optimizer are copied; they are written before the upload of this save then."""
            if self._snapshot is None:
                return False
            copy = self._snapshot.of(self._large_state())

            def write(folder: Path) -> None:
                with _explained_writes(folder, run):
                    self._save(str(folder), state_dict=copy["model"])
                    torch.save(copy["optimizer"], folder / OPTIMIZER_NAME)

            uploads.write_first(write)
            return True

    return SavingTrainer


@contextlib.contextmanager
def _explained_writes(folder: Path, run: S3Location) -> Iterator[None]:
    """`folder` is checkpoint-N, below one that exists in scratch."""
    try:
        yield
    except Exception as error:
        # OSError of Python's own writes, RuntimeError of torch.save, SafetensorError (an Exception) of safetensors.
        if not _is_failed_write(error):
            raise
        scratch = folder.parent.parent
        free = shutil.disk_usage(scratch).free
        raise TrainyardError(
            f"checkpoint {folder.name.replace('checkpoint', 'step')} could not be written to {scratch} "
            f"({free / 1e9:.1f} GB free): {str(error).splitlines()[0]}; the last complete one in {run / CHECKPOINTS} "
            "is untouched",
            next_step="give the instance a larger volume and submit again",
        ) from error


def _is_failed_write(error: Exception) -> bool:
    if isinstance(error, OSError):
        return True
    # "[enforce fail at inline_container.cc:…]": PyTorch's writer of archives, after a write that the system refused.
    parts = ("file write failed", "no space left", "file too large", "pytorchstreamwriter", "inline_container")
    return any(part in str(error).lower() for part in parts)
