r"""Fine-tune a pretrained encoder with Ray Train's TorchTrainer, on a Ray that this process starts and ends.

    python -m jobs.train.launch --instance-type=… --nproc-per-node=1 finetune-ray \
        --model=s3://…/minilm --train-data=s3://…/train.jsonl --eval-data=s3://…/eval.jsonl --num-workers=2

A worker does what a rank of the launcher does (jobs.train.kinds.finetune_classification); the difference is who starts
it, who connects it to its peers, and who is told of its checkpoints.
"""

import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.contract.errors import ConfigurationError, TrainyardError, UsageError
from jobs.contract.words import result_label
from jobs.kinds.finetune_ray import FinetuneRay
from jobs.train import accelerator as accelerators
from jobs.train.accelerator import Accelerator, of_rank
from jobs.train.kinds.finetune_ray.cluster import error_file, local_ray, worker_resources
from jobs.train.rank import Rank, ResumeLaterError, run

log = logging.getLogger("trainyard")

_UNUSED_CALLBACKS = ("PlacementGroupCleanerCallback", "DatasetsCallback")
"""The first frees what a trainer leaves in its cluster, by asking a dashboard; the other hands out Ray's own data."""


def check(arguments: FinetuneRay, world_size: int) -> None:
    """Check the arguments before anything starts. Raises TrainyardError on what cannot work."""
    arguments.check(world_size)
    if world_size != 1:
        raise UsageError(f"Ray starts its workers itself; {world_size} ranks cannot", next_step="--nproc-per-node=1")
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError(
            "Ray is not installed here", next_step="run it in an image 'ray' (…-ray), or: pip install '.[ray]'"
        )


def start_ray_and_train(rank: Rank, arguments: FinetuneRay) -> None:
    """Start Ray and train until the workers have ended.

    Raises TrainyardError where they fail, ResumeLaterError where they were stopped.
    """
    accelerator = of_rank(os.environ)
    workers = _workers(accelerator, arguments)
    arguments.batch_of_rank(workers)
    log.info("ray: %s workers over %s", workers, accelerator.backend)
    with local_ray(accelerator, workers=workers, scratch=rank.scratch):
        # Ray's own handler would end Ray politely, which takes too long. With this process the kernel ends all of them.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        reason = _train(rank, arguments, accelerator, workers)
    if reason is not None:
        raise ResumeLaterError(reason)


def _train(rank: Rank, arguments: FinetuneRay, accelerator: Accelerator, workers: int) -> str | None:
    """Train, and return why the workers have stopped before the end, if they did."""
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    from jobs.train.kinds.finetune_ray.process_group import LoopbackConfig
    from jobs.train.kinds.finetune_ray.worker import CHECKPOINTS_FOLDER, train_loop

    class LeanTrainer(TorchTrainer):  # type: ignore[misc]  # Ray has no types
        """A TorchTrainer without processes of Ray's that have nothing to do here: each of them loads torch."""

        def _create_default_callbacks(self) -> list[Any]:
            callbacks: list[Any] = super()._create_default_callbacks()
            return [callback for callback in callbacks if type(callback).__name__ not in _UNUSED_CALLBACKS]

    trainer = LeanTrainer(
        train_loop,
        train_loop_config={"arguments": arguments.model_dump(mode="json")},
        torch_config=LoopbackConfig(backend=accelerator.backend),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=accelerator.name == "cuda",
            resources_per_worker=worker_resources(accelerator),
        ),
        run_config=RunConfig(
            name=CHECKPOINTS_FOLDER,
            storage_path=str(rank.scratch),
            # Batch's retry is the restart, on a node that is known to live.
            failure_config=FailureConfig(max_failures=0),
            logging_config=LoggingConfig(log_level="CRITICAL"),  # a worker tells of its failure itself
        ),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        raise failure(rank.scratch, error) from error
    if result.checkpoint is not None:
        log.info("ray: %s", reported(result.metrics, Path(result.checkpoint.path).name))
    reason: str | None = result.return_value
    return reason


def reported(metrics: Mapping[str, Any], checkpoint: str) -> str:
    """Return the last report of the workers as a line, as Ray's own result has it."""
    values = ", ".join(f"{result_label(name)} {value:.4g}" for name, value in metrics.items())
    return f"last report with {checkpoint}: {values}"


def failure(scratch: Path, error: Any) -> TrainyardError:
    """Return the cause of Ray's error: a worker that was killed, for it broke its peers; else the first that failed."""
    files = {worker: error_file(scratch, worker) for worker in sorted(getattr(error, "worker_failures", {}))}
    killed = [str(worker) for worker, file in files.items() if not file.exists()]
    if killed:
        return TrainyardError(
            f"worker {', '.join(killed)} of Ray was killed, most often for want of memory",
            next_step="lower max_batch_size_per_rank",
        )
    if files:
        return TrainyardError(min(files.values(), key=lambda file: file.stat().st_mtime_ns).read_text())
    return TrainyardError(f"Ray Train failed: {' '.join(str(error).split())}")


def _workers(accelerator: Accelerator, arguments: FinetuneRay) -> int:
    """Return the number of workers: as asked for, else one a card; on a CPU one for each 24 cores.

    The launcher starts ranks by the same rule.
    """
    cards = accelerators.choose(accelerator.name, nproc_per_node=arguments.num_workers or 1).devices
    if arguments.num_workers is not None:
        return arguments.num_workers
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return cards or max(1, cores // 24)


if __name__ == "__main__":
    run(start_ray_and_train, FinetuneRay)
