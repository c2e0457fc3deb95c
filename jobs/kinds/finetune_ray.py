"""finetune-ray: the fine-tuning of finetune-classification, its ranks started by Ray Train."""

from typing import ClassVar

from pydantic import Field

from jobs.contract.job_kind import JobKind
from jobs.kinds.finetune_classification import FinetuneClassification


class FinetuneRay(FinetuneClassification):
    """Fine-tune a pretrained encoder with Ray Train, one worker a card, on a Ray of the node's own."""

    FREE: ClassVar[frozenset[str]] = FinetuneClassification.FREE | {"num_workers"}  # a checkpoint knows its ranks

    num_workers: int | None = Field(default=None, ge=1)
    """Workers, each with a card of its own; without it, as many as the node has cards."""

    def check(self, *_: int) -> None:
        """The global batch divides over Ray's workers, not over the one process that starts them."""
        if self.num_workers is not None:
            super().check(self.num_workers)


KIND = JobKind(
    name="finetune-ray",
    summary="the same, on workers of Ray Train",
    entrypoint="jobs.train.kinds.finetune_ray.entrypoint",
    arguments=FinetuneRay,
    accelerated=True,
    timeout_hours=12,
    one_process=True,
    image="ray",
)
