"""The parts of Habana's bridge that accelerate, optimum-habana and DeepSpeed import if it is installed."""

from habana_frameworks.torch import hpu

__all__ = ["hpu", "mark_step"]


def mark_step() -> None:
    """Do nothing. The real bridge would run the recorded graph."""
