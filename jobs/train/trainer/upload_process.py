"""Upload a checkpoint from a process of its own, so that the training keeps its interpreter and its core.

boto3 and what it sends are Python, and a thread with them takes Python's lock from the training at every turn. So the
thread that has written a checkpoint starts a process, which reads each file once, hashes and sends it, and gives way to
whatever else needs the processor. It is a fresh one, without PyTorch: whoever holds an accelerator must not be forked.

A small checkpoint is uploaded by the thread itself, for starting a process takes half a second of a core.
"""

import contextlib
import functools
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
from jobs.aws import s3 as object_store
from jobs.contract.errors import TrainyardError
from jobs.contract.locations import S3Location
from jobs.train import stored_checkpoints
from jobs.train.rank import die_with_parent

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

LEAST_BYTES = 64 << 20
"""The size from which on a checkpoint is worth a process."""

_NICE = 10
"""Its niceness, of 19 at most: beside a training on every core it still gets a tenth of one (sched(7))."""

_ROOT = str(Path(jobs.__file__).parents[1])

# Neither `-m` nor a path: they would put a folder first on the path, where files may be named as Python's own modules.
_PROGRAM = f"""
import sys
sys.path = [*(place for place in sys.path if place), {_ROOT!r}]
from jobs.train.trainer.upload_process import main
main()
"""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """One checkpoint, and whose it is."""

    parent: int
    folder: Path
    remote: S3Location
    run: S3Location
    attempt: int | None
    tag: object_store.Tag


def upload(
    s3: "S3Client",
    folder: Path,
    remote: S3Location,
    *,
    run: S3Location,
    attempt: int | None,
    tag: object_store.Tag,
) -> dict[str, Any]:
    """Upload the files of a checkpoint, and return size and hash of each, as the manifest has them.

    Before each file it is asked which attempt of the run is the newest. Raises what stored_checkpoints.upload does.
    """
    if sum((folder / name).stat().st_size for name in object_store.files_below(folder)) < LEAST_BYTES:
        check = functools.partial(stored_checkpoints.check_newest, s3, run, attempt)
        return stored_checkpoints.upload(s3, folder, remote, tag=tag, check=check)
    return _uploaded(
        _Request(parent=os.getpid(), folder=folder, remote=remote, run=run, attempt=attempt, tag=tag),
    )


def _uploaded(request: _Request) -> dict[str, Any]:
    with _signals_held_back():
        process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(pickle.dumps(request))
            process.stdin.close()
        while True:
            try:
                answer = pickle.load(process.stdout)  # noqa: S301 - of our own process
            except EOFError:
                break
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, dict):
                return answer
            log.log(*answer)
    raise TrainyardError(
        f"the process that uploads it ended with {process.returncode} and said no more",
        next_step="look for its last words in the log of this attempt, and whether memory was short",
    )


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Have what is started in the block hear of no SIGTERM and no Ctrl-C: a rank that saves at one needs it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main() -> None:
    """Be that process: read a request, upload, and answer with lines of the log, and the files or an error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints goes where the rank's own lines go
    try:
        request: _Request = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the rank
    except EOFError:  # which has ended
        return
    die_with_parent(request.parent)
    os.nice(_NICE)

    def answer(content: Any) -> None:
        answers.write(pickle.dumps(content))
        answers.flush()

    class Answering(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            answer((record.levelno, "%s", record.getMessage()))

    log.addHandler(Answering())
    log.setLevel(logging.INFO)
    try:
        s3 = object_store.connect()
        check = functools.partial(stored_checkpoints.check_newest, s3, request.run, request.attempt)
        answer(stored_checkpoints.upload(s3, request.folder, request.remote, tag=request.tag, check=check))
    except TrainyardError as error:
        answer(error)
    answers.close()
    os._exit(0)  # the threads of boto3 have nothing left to do
