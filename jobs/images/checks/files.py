"""Checks of an image's files: what must not lie there, and what its user must not be able to write."""

import functools
import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from jobs.images.checks import container
from jobs.images.checks.check import CheckFailedError, LeftOut, Subject
from jobs.images.checks.configuration import stated_user
from jobs.images.lock import contents

_SHOWN = 5
"""Paths that a message names."""

_C_COMPILER = frozenset({"as", "cc", "gcc", "ld"})
"""Programs that Debian's gcc brings."""


def world_writable(subject: Subject) -> str:
    _none(subject, "world_writable", "everybody may write")
    return "none outside the shared folders for temporary files"


def owned_by_root(subject: Subject) -> str:
    """Check that a job's code may change its home, and nothing else of the image."""
    number, home = stated_user(subject)
    if number == 0:
        raise LeftOut(f"{subject.image.root} runs as root, which owns all there is; its Dockerfile says why")
    _none(subject, "writable", f"the job's user owns what lies outside {home}")
    return f"user {number} owns nothing outside {home}"


def secrets(subject: Subject) -> str:
    _none(subject, "secrets", "looks like a secret")
    return "no credentials, no private key"


def leftovers(subject: Subject) -> str:
    _none(subject, "leftovers", "left behind by the build")
    return "no pip cache, no package lists, empty /tmp"


def build_tools(subject: Subject) -> str:
    if contents(subject.image).torch == "base":
        raise LeftOut("Habana's base brings its compilers with it")
    if contents(subject.image).torch == "default":
        _none(subject, "build_tools", "nothing but C is compiled in it", but=_C_COMPILER)
        if not _walk(subject)["build_tools"]:
            raise CheckFailedError("it has no C compiler, which torch.compile needs on a GPU")
        return "a C compiler, which torch.compile needs on a GPU, and no other build tool"
    _none(subject, "build_tools", "nothing is built in it")
    return "no compiler, no build tool, no git"


def _none(subject: Subject, kind: str, reason: str, *, but: frozenset[str] = frozenset()) -> None:
    """Raise CheckFailedError where paths of a kind are there that are not called one of `but`."""
    found: Sequence[str] = [path for path in _walk(subject)[kind] if PurePosixPath(path).name not in but]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckFailedError(f"{reason}: {', '.join(found[:_SHOWN])}{more}")


@functools.lru_cache(maxsize=1)  # one walk for all checks of an image
def _walk(subject: Subject) -> dict[str, Any]:
    number, home = stated_user(subject)
    output = container.run_script(
        subject,
        "file_tree.py",
        {"user": number, "home": home},
        # As root, with the right to read whatever the modes say: nothing is overlooked.
        user="0:0",
        cap_add=["DAC_READ_SEARCH"],
        # What is looked at must not be changed by the look.
        environment={"PYTHONDONTWRITEBYTECODE": "1"},
    )
    found: dict[str, Any] = json.loads(container.last_line(output))
    return found
