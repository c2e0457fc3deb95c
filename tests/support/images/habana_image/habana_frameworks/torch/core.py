"""What accelerate, optimum-habana and DeepSpeed import of Habana's bridge as soon as they see it."""

from habana_frameworks.torch import hpu

__all__ = ["hpu", "mark_step"]


def mark_step() -> None:
    """Where the bridge would run the graph that it has recorded."""
