"""The test of an image: all checks, one a row, in the order in which they are made in real containers of it.

    trainyard images test cpu           cpu and all that is built on it

A check passes, fails with what it found, or is left out with the reason: what needs a card is never called good on a
machine without one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jobs.contract.image_hierarchy import Image
from jobs.images.checks import configuration, files, packages, processes
from jobs.images.checks.check import Check, CheckFailedError, LeftOut, Subject


def _is_notebook(image: Image) -> bool:
    return image.folder == "notebook"


def _is_root(image: Image) -> bool:
    return image.parent is None


def _is_child(image: Image) -> bool:
    return not _is_root(image)


def _is_cpu(image: Image) -> bool:
    return image.name == "cpu"


def _has_cards(image: Image) -> bool:
    return image.root in configuration.CARDS_VARIABLE


def _has_accelerator(image: Image) -> bool:
    return image.name in processes.ACCELERATORS


CHECKS = (
    Check(
        name="labels",
        shows="revision, release and versions in its labels are those it was built for",
        run=configuration.labels,
    ),
    Check(
        name="user",
        shows="it runs as the user that its Dockerfile names",
        run=configuration.user,
    ),
    Check(
        name="command",
        shows="without an entrypoint, and its own command is the launcher's help",
        run=processes.command,
    ),
    Check(
        name="environment",
        shows="no variable and no step of its history looks like a secret",
        run=configuration.environment,
    ),
    Check(
        name="cards",
        shows="a container of it asks its accelerator's runtime for all cards",
        run=configuration.cards,
        concerns=_has_cards,
    ),
    Check(
        name="secrets",
        shows="no file holds credentials or a private key",
        run=files.secrets,
    ),
    Check(
        name="world-writable",
        shows="nobody but its owner may write a file of it",
        run=files.world_writable,
    ),
    Check(
        name="ownership",
        shows="a job may change its home, not its code or packages",
        run=files.owned_by_root,
    ),
    Check(
        name="leftovers",
        shows="no cache of pip, no package lists, nothing in /tmp",
        run=files.leftovers,
    ),
    Check(
        name="build tools",
        shows="no compiler but the one that torch.compile needs on a GPU, and no build tool",
        run=files.build_tools,
    ),
    Check(
        name="versions",
        shows="its packages have the versions of the lock and of the release's row",
        run=packages.versions,
    ),
    Check(
        name="pip check",
        shows="its packages fit together",
        run=packages.fit,
    ),
    Check(
        name="imports",
        shows="what a job imports can be imported, and so can every entrypoint",
        run=packages.imports,
    ),
    Check(
        name="SIGTERM",
        shows="the init process hands SIGTERM to the launcher, which asks to be resumed",
        run=processes.sigterm,
    ),
    Check(
        name="two ranks",
        shows="two ranks train a model together over gloo, without a network",
        run=processes.two_ranks,
        concerns=_is_root,
    ),
    Check(
        name="accelerator",
        shows="two ranks train a model together on its accelerator",
        run=processes.on_its_accelerator,
        concerns=_has_accelerator,
    ),
    Check(
        name="scratch",
        shows="its user can write to the instance's own disks, where a job definition puts them",
        run=processes.scratch,
        concerns=_has_accelerator,
    ),
    Check(
        name="libfabric",
        shows="what HCCL, or NCCL over EFA, reaches other nodes with can be loaded, and finds a provider",
        run=processes.libfabric,
        concerns=_has_accelerator,
    ),
    Check(
        name="notebook",
        shows="JupyterLab and TensorBoard answer to their token alone, on loopback alone, and a cell runs",
        run=processes.notebook,
        concerns=_is_notebook,
    ),
    Check(
        name="size",
        shows=f"at most {configuration.TORCH_RATIO} x its torch wheel unpacked over its base",
        run=configuration.size_of_root,
        concerns=_is_cpu,
    ),
    Check(
        name="size",
        shows=f"at most {configuration.CHILD_LIMIT_BYTES // 10**6} MB over its base",
        run=configuration.size_of_child,
        concerns=_is_child,
    ),
)

Outcome = Literal["ok", "failed", "left out"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one check of one image ended."""

    image: Image
    check: Check
    outcome: Outcome
    found: str
    """What it found, in one line."""
    output: str
    """The output of the container, where the check failed."""
    seconds: float


def run_checks(subject: Subject, *, begins: Callable[[Check], None], ends: Callable[[Result], None]) -> list[Result]:
    """Run the checks one after the other and return all results; `begins` and `ends` are told of each.

    Raises docker's errors.
    """
    results = []
    for check in CHECKS:
        if check.concerns(subject.image):
            begins(check)
            results.append(_result(check, subject))
            ends(results[-1])
    return results


def _result(check: Check, subject: Subject) -> Result:
    began = time.monotonic()
    outcome: Outcome = "ok"
    output = ""
    try:
        found = check.run(subject)
    except LeftOut as reason:
        outcome, found = "left out", str(reason)
    except CheckFailedError as failure:
        *lines, found = str(failure).splitlines()
        outcome, output = "failed", "\n".join(lines)
    return Result(
        image=subject.image,
        check=check,
        outcome=outcome,
        found=found,
        output=output,
        seconds=time.monotonic() - began,
    )
