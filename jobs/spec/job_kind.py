"""JobKind: what a row of the catalog says of one kind of job. The rows are the modules of jobs.spec.kinds."""

from dataclasses import dataclass

from jobs.spec.arguments import Arguments
from jobs.spec.launcher_options import STOP_IF_IDLE_MINUTES


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """One kind of job: what runs, with which arguments, on what."""

    name: str
    summary: str
    entrypoint: str
    """Module that `python -m` runs in every rank."""
    arguments: type[Arguments]
    accelerated: bool
    """True: runs on the stage's accelerator instances. False: on its CPU instances."""
    timeout_hours: float
    """Wall-clock limit of one attempt where the spec gives none."""
    stop_if_idle_minutes: float = STOP_IF_IDLE_MINUTES
    """A run whose cards do nothing for so long ends, where its spec says nothing of it; 0: never. It holds for what is
    accelerated."""
    one_process: bool = False
    """True: one process on one node, to which all its cards belong. False: one rank a card."""
    image: str | None = None
    """Child under images/ of the instance type's image that it runs in; None: that image itself."""
    makes: str | None = None
    """Kind of the artifact that it leaves for other runs; None: it leaves none."""
