"""Go on from the newest complete checkpoint of a run, as if the run had not been interrupted.

`newest_complete` finds, downloads and verifies it. The rest restores what a Trainer by itself does not: the losses
between two log lines, the settings of this attempt, and the state of ranks of which there is another number now.
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
from jobs.container.saving.stored_checkpoints import Decisive, IncompleteError, Manifest, Throughput, fetch, listing
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
    """The number of ranks that have made it."""
    changed: dict[str, tuple[Any, Any]]
    """Arguments that are no longer those of the checkpoint: its value, and the one of this attempt."""


def newest_complete(rank: "Rank", s3: "S3Client", arguments: Decisive) -> Resume | None:
    """Return the newest checkpoint that is complete and intact, on every node; None if there is none.

    All ranks call it. Raises UsageError if it was made with other arguments, and that was not asked for.
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
            "checkpoint step-%s was made by %s and goes on on %s: the steps have the same examples, random "
            "numbers (dropout) become others",
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
    """Return what `newest_complete` does, ready for this number of ranks."""
    found = newest_complete(rank, s3, recipe)
    if found is not None:
        folder, (per_rank, _) = found.folder, recipe.batch_of_rank(rank.world_size)
        rank.once_per_node("resume/batch", lambda: with_batch_of_rank(folder, per_rank))
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
        """Return the step of the newest complete and intact checkpoint, which then lies in its local folder."""
        for step in sorted(listing(self._s3, self._remote), reverse=True):
            try:
                manifest = self.fetch(step)
            except IncompleteError as error:
                log.warning("warning: checkpoint step-%s is skipped: %s", step, error)
                continue
            manifest.check_arguments(arguments, allow_changes=allow_changes)
            return step
        return None

    def fetch_again(self, step: int) -> bool:
        """Download a checkpoint that another node has found intact.

        Raises NodeFailedError where it is not what arrives here, the second time too.
        """
        try:
            self.fetch(step)
        except IncompleteError as error:
            log.warning("warning: checkpoint step-%s is fetched again: %s", step, error)
            try:
                self.fetch(step)
            except IncompleteError as again:
                raise NodeFailedError(f"checkpoint step-{step} did not arrive as it is, twice: {again}") from again
        return True


def with_batch_of_rank(folder: Path, per_rank: int) -> None:
    """Let a downloaded checkpoint be resumed with other batches of a rank than it was made with.

    A Trainer takes their size from it, and would come to another global batch.
    """
    path = folder / _STATE
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "train_batch_size": per_rank}))


def seed_of_rank(seed: int, step: int, rank: int) -> int:
    """Return the seed of a rank's random numbers from a step on that another number of ranks has saved.

    Model, optimizer, schedule and position go on as they were, and the steps have the same examples (determinism.py).
    The random numbers belong to single ranks, so they do not go on: each rank starts with new ones.
    """
    sequence = np.random.SeedSequence([seed, step, rank])
    return int(sequence.generate_state(1)[0])


@contextlib.contextmanager
def kept_settings(trainer: Any) -> Iterator[None]:
    """Take from the optimizer and the scheduler that the block loads how far they are, and nothing else.

    They were saved with the learning rate and the weight decay of their time, and would go on with those.
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
    """Keeps in a checkpoint between two log lines the losses that the Trainer has summed up for the next line.

    The Trainer logs the mean loss of the steps since the line before, and does not save their sum itself. So the first
    line after a resume would be the mean of fewer steps, and the curve another one than that of an uninterrupted run.
    """

    def __init__(self, rank: "Rank", resume: Resume | None) -> None:
        """`resume` is the checkpoint that the attempt goes on from."""
        self._name = _loss_file(rank.rank)
        self._kept = _kept_losses(rank, resume) if resume else None
        self._sum: Any = None

    def with_kept(self, trainer: Any, loss: Any) -> Any:
        """Return the loss of a step, to which that of the first step adds what the checkpoint kept."""
        if self._kept is not None:
            trainer._globalstep_last_logged = self._kept["logged_step"]  # noqa: SLF001 - it has no other setter
            loss, self._kept = loss + self._kept["sum"], None
        return loss

    def forget(self) -> None:
        """Add nothing to the first step: the training does not resume from the checkpoint."""
        self._kept = None

    def note(self, losses: Any) -> None:
        """Remember the sum of the losses that were not logged yet."""
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
    """Return the rank's own; on another number of ranks the mean of all, for the Trainer logs a mean over the ranks."""
    which: int | str = rank.rank if resume.world_size == rank.world_size else "*"
    kept = [json.loads(path.read_bytes()) for path in sorted(resume.folder.glob(_loss_file(which)))]
    return {**kept[0], "sum": statistics.fmean(each["sum"] for each in kept)} if kept else None
