"""A recipe as arguments of a Trainer of transformers."""

from typing import TYPE_CHECKING, Any

from jobs.spec.recipe import Recipe

if TYPE_CHECKING:
    from jobs.container.rank import Rank


def training_arguments(recipe: Recipe, rank: "Rank") -> dict[str, Any]:
    """Return the arguments of a Trainer that follow from the recipe, for one of its ranks."""
    per_rank, accumulation = recipe.batch_of_rank(rank.world_size)
    saves_by_itself = recipe.checkpoint_every_steps != "auto"
    return {
        "output_dir": str(rank.scratch / "checkpoints"),
        "seed": recipe.seed,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": recipe.lr_scheduler_type,
        "warmup_ratio": recipe.warmup_ratio,
        "weight_decay": recipe.weight_decay,
        # BERT's (google-research/bert, optimization.py) and optimum-habana's default. PyTorch's is 1e-8: an accelerator
        # with that default would train by another recipe.
        "adam_epsilon": 1e-6,
        "per_device_train_batch_size": per_rank,
        "gradient_accumulation_steps": accumulation,
        "per_device_eval_batch_size": recipe.eval_batch_size,
        "logging_steps": recipe.log_every_steps,
        "save_strategy": "steps" if saves_by_itself else "no",
        **({"save_steps": recipe.checkpoint_every_steps} if saves_by_itself else {}),
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "report_to": [],  # trackers.py has those of the recipe, which can end no training
        "run_name": rank.run.key.strip("/").rpartition("/")[2],
        # The Trainer would log the mean of the other steps in place of a loss that is no number; optimum-habana's does
        # not. To find one, the host would wait at each step until the device has done it, and only then begin the next.
        "logging_nan_inf_filter": False,
    }
