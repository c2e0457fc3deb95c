"""Resume a run from its newest complete checkpoint, as if it had not been interrupted.

`newest_complete` finds, downloads and verifies the checkpoint. The rest restores what a Trainer does not: the losses
since the last log line, the settings of this attempt, and the random state if the number of ranks has changed.
"""

import contextlib
import json
import logging
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.container.rank import NodeFailedError
from jobs.container.saving.manifest import Decisive, IncompleteError, Manifest, Throughput, fetch, list_steps
from jobs.core.locations import S3Location
from jobs.core.run import CHECKPOINTS, MANIFEST
from jobs.core.words import counted
from jobs.spec.arguments import changed
from jobs.spec.recipe import Recipe

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")

_STATE = "trainer_state.json"


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A complete checkpoint, downloaded and verified."""

    step: int
    folder: Path
    throughput: Throughput
    world_size: int
    """Number of ranks that wrote it."""
    changed: dict[str, tuple[Any, Any]]
    """Arguments that have changed: the checkpoint's value and this attempt's value."""


def newest_complete(rank: "Rank", s3: "S3Client", arguments: Decisive) -> Resume | None:
    """Return the newest checkpoint that is complete and intact, downloaded on every node, or None if there is none.

    All ranks call it. Raises UsageError if its arguments differ and changes are not allowed.
    """
    store = _Store(s3, rank.run / CHECKPOINTS, rank.scratch / "resume")
    own = arguments.fixed_arguments()
    step = rank.once("resume/step", lambda: store.select(own, allow_changes=rank.allows_changes))
    if step is None:
        return None
    rank.once_per_node("resume/files", lambda: rank.is_first or store.fetch_again(step))
    manifest = Manifest.model_validate_json((store.local(step) / MANIFEST).read_bytes())
    if manifest.world_size != rank.world_size and rank.is_first:
        log.info(
            "checkpoint step-%s was made by %s and continues on %s: the examples of each step stay the same, but "
            "random numbers (dropout) differ",
            step,
            counted(manifest.world_size, "rank"),
            rank.world_size,
        )
    return Resume(
        step=step,
        folder=store.local(step),
        throughput=manifest.throughput,
        world_size=manifest.world_size,
        changed=changed(manifest.arguments, own),
    )


def checkpoint_of_recipe(rank: "Rank", s3: "S3Client", recipe: Recipe) -> Resume | None:
    """Return the result of `newest_complete`, adapted to this number of ranks."""
    found = newest_complete(rank, s3, recipe)
    if found is not None:
        folder, (per_rank, _) = found.folder, recipe.batch_of_rank(rank.world_size)
        rank.once_per_node("resume/batch", lambda: set_batch_of_rank(folder, per_rank))
    return found


class _Store:
    """The checkpoints of a run on S3, and the folder they are downloaded to."""

    def __init__(self, s3: "S3Client", remote: S3Location, folder: Path) -> None:
        self._s3 = s3
        self._remote = remote
        self._folder = folder

    def fetch(self, step: int) -> Manifest:
        return fetch(self._s3, self._remote / f"step-{step}", self.local(step))

    def local(self, step: int) -> Path:
        return self._folder / f"checkpoint-{step}"

    def select(self, arguments: Mapping[str, Any], *, allow_changes: bool) -> int | None:
        """Download the newest complete and intact checkpoint into its local folder, and return its step."""
        for step in sorted(list_steps(self._s3, self._remote), reverse=True):
            try:
                manifest = self.fetch(step)
            except IncompleteError as error:
                log.warning("warning: checkpoint step-%s is skipped: %s", step, error)
                continue
            manifest.check_arguments(arguments, allow_changes=allow_changes)
            return step
        return None

    def fetch_again(self, step: int) -> bool:
        """Download a checkpoint that is intact on another node. Try twice, then raise NodeFailedError."""
        try:
            self.fetch(step)
        except IncompleteError as error:
            log.warning("warning: checkpoint step-%s is downloaded again: %s", step, error)
            try:
                self.fetch(step)
            except IncompleteError as again:
                raise NodeFailedError(f"checkpoint step-{step} arrived damaged twice: {again}") from again
        return True


def set_batch_of_rank(folder: Path, per_rank: int) -> None:
    """Change the batch size per rank in a downloaded checkpoint.

    A Trainer uses the checkpoint's size, so with another number of ranks the global batch would be wrong.
    """
    path = folder / _STATE
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "train_batch_size": per_rank}))


def seed_of_rank(seed: int, step: int, rank: int) -> int:
    """Return a rank's seed for a new run, or for a checkpoint that another number of ranks wrote.

    After such a checkpoint, model, optimizer, schedule and position continue, and the steps have the same examples
    (determinism.py). Only the ranks' random states cannot continue, so each rank starts a new one.
    """
    sequence = np.random.SeedSequence([seed, step, rank])
    return int(sequence.generate_state(1)[0])


@contextlib.contextmanager
def kept_settings(trainer: Any) -> Iterator[None]:
    """Keep this attempt's learning rate and weight decay while the block loads optimizer and scheduler.

    Otherwise the values of the attempt that saved them would be restored along with their progress.
    """
    settings = [
        {name: value for name, value in group.items() if name != "params"} for group in trainer.optimizer.param_groups
    ]
    peaks = list(trainer.lr_scheduler.base_lrs)
    yield
    scheduler = trainer.lr_scheduler
    scheduler.base_lrs = peaks
    shares = [share(scheduler.last_epoch) for share in scheduler.lr_lambdas]
    for group, own, peak, share in zip(trainer.optimizer.param_groups, settings, peaks, shares, strict=True):
        group.update({**own, "lr": peak * share})


class LossSinceLog:
    """Saves the sum of the losses since the Trainer's last log line with each checkpoint.

    The Trainer logs the mean loss of the steps since the last line, but does not save the sum. Without it, the first
    mean after a resume would cover fewer steps, and the loss curve would differ from an uninterrupted run's.
    """

    def __init__(self, rank: "Rank", resume: Resume | None) -> None:
        """`resume` is the checkpoint from which the attempt resumes."""
        self._name = _loss_file(rank.rank)
        self._kept = _kept_losses(rank, resume) if resume else None
        self._sum: Any = None

    def add_restored(self, trainer: Any, loss: Any) -> Any:
        """Return the loss of a step; for the first step, with the restored sum added."""
        if self._kept is not None:
            trainer._globalstep_last_logged = self._kept["logged_step"]  # noqa: SLF001 - there is no other setter
            loss, self._kept = loss + self._kept["sum"], None
        return loss

    def forget(self) -> None:
        """Drop the restored sum, because the training does not resume from the checkpoint."""
        self._kept = None

    def note(self, losses: Any) -> None:
        """Remember the sum of the losses that are not logged yet."""
        self._sum = losses

    def save(self, trainer: Any) -> None:
        """Write the sum into the folder of the checkpoint that the Trainer has just saved."""
        step, logged_step = trainer.state.global_step, trainer._globalstep_last_logged  # noqa: SLF001
        if step > logged_step:
            path = Path(trainer.args.output_dir) / f"checkpoint-{step}" / self._name
            path.write_text(json.dumps({"logged_step": logged_step, "sum": float(self._sum)}))


def _loss_file(rank: int | str) -> str:
    return f"loss-since-log-{rank}.json"


def _kept_losses(rank: "Rank", resume: Resume) -> dict[str, Any] | None:
    """Return this rank's sum, or the mean of all if the number of ranks has changed: the Trainer logs such a mean."""
    which: int | str = rank.rank if resume.world_size == rank.world_size else "*"
    kept = [json.loads(path.read_bytes()) for path in sorted(resume.folder.glob(_loss_file(which)))]
    return {**kept[0], "sum": statistics.fmean(each["sum"] for each in kept)} if kept else None
