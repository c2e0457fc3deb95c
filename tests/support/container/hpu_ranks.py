"""Ranks of an HPU branch on a CPU, without the launcher, which would look for HPUs."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.container.launching import PATIENCE_SECONDS, Run

REPOSITORY = Path(__file__).parents[3]


def described(python: Path, module: str, home: Path, **variables: str) -> str:
    """Return the description that `module` prints of its branch, in a minimal environment."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    done = run_python(python, {**kept, "HOME": str(home), **variables}, "-m", module, "describe")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(
    run: Run,
    module: str,
    command: Sequence[str],
    python: Path,
    folder: Path,
    *,
    nproc: int,
    **variables: str,
) -> str:
    """Run one attempt of `module`'s ranks, which must succeed. Returns their output.

    `command` is the kind of job and its arguments. A script runs in `folder`.
    """
    for name in ("home", "scratch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    environment = {
        **run.environment,
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder),
        "TRAINYARD_RUN_URI": str(run.location),
        "TRAINYARD_SCRATCH": str(folder / "scratch"),
        "TRAINYARD_OUTPUT": str(folder / "output"),
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    where = folder if command[0] == "script" else REPOSITORY
    start = ("-m", "tests.support.container.forked_ranks", str(nproc))
    ended = run_python(python, environment, *start, module, *command, folder=where)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def run_python(
    python: Path, environment: Mapping[str, str], *arguments: str, folder: Path = REPOSITORY
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(python), *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
