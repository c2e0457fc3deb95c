"""Push the model of each save to the Hugging Face Hub while the training continues (`each_save` of `push_to_hub`).

Rank 0 links the model's files before the checkpoint is deleted, and a thread adds the tokenizer and the card. A process
pushes the folder, so that it takes no time from the training and can be stopped at once:

python -m jobs.container.hub_saves FOLDER RUN REPOSITORY STEP PARENT_PID
"""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from jobs.container import hub
from jobs.container.rank import die_with_parent
from jobs.core.errors import TrainyardError
from jobs.core.locations import S3Location

log = logging.getLogger("trainyard")

_POLL_SECONDS = 0.2

_MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
"""Files of a checkpoint that belong to the model. The others are the Trainer's."""


class SavePushes:
    """Pushes saves in order, one at a time. While a push runs, only the newest save waits.

    A failed push is logged once, and later saves are still tried: the push of the final model decides. No push runs
    while the attempt is asked to stop, because its last save needs the network.
    """

    def __init__(
        self,
        repository: str,
        *,
        run: S3Location,
        scratch: Path,
        complete: Callable[[Path, int], None],
        stops: Callable[[], bool],
    ) -> None:
        """`complete` adds to a folder what belongs to the model of a step. `stops` is called by another thread."""
        self._repository = repository
        self._run = run
        self._scratch = scratch
        self._complete = complete
        self._stops = stops
        self._lock = threading.Lock()
        self._waiting: tuple[int, Path] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._has_failed = False

    def saved(self, step: int, checkpoint: Path) -> None:
        """Push the model of a checkpoint as soon as no other push runs. Its folder may be deleted afterwards."""
        folder = self._scratch / f"push-{step}"
        try:
            folder.mkdir()
            for pattern in _MODEL_FILES:
                for path in checkpoint.glob(pattern):
                    os.link(path, folder / path.name)
        except OSError as error:
            self._failed(step, error)
            return
        with self._lock:
            self._discard_waiting()
            self._waiting = step, folder
            if self._thread is None:
                self._thread = threading.Thread(target=self._push_waiting, name="push of saves", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the push that runs and forget the save that waits, so that no older model follows the final one."""
        with self._lock:
            self._is_closed = True
            self._discard_waiting()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _discard_waiting(self) -> None:
        if self._waiting is not None:
            shutil.rmtree(self._waiting[1], ignore_errors=True)
            self._waiting = None

    def _push_waiting(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None:
                    self._thread = None
                    return
                step, folder = self._waiting
                self._waiting = None
            try:
                self._push(step, folder)
            except Exception as error:  # noqa: BLE001 - no error of a push may fail the run
                self._failed(step, error)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _push(self, step: int, folder: Path) -> None:
        if self._is_over():
            return
        self._complete(folder, step)
        command = [sys.executable, "-m", __name__, str(folder), str(self._run), self._repository]
        process = subprocess.Popen(
            [*command, str(step), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        errors: str | None = None
        while errors is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, errors = process.communicate(timeout=_POLL_SECONDS)
            if errors is None and self._is_over():
                process.kill()
                process.communicate()
                log.info("hub: the push of step %s was stopped", step)
                return
        if process.returncode:
            raise TrainyardError(errors.strip().rpartition("\n")[2] or f"exit code {process.returncode}")
        log.info("hub: pushed step %s to %s", step, self._repository)

    def _is_over(self) -> bool:
        return self._is_closed or self._stops()

    def _failed(self, step: int, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning(
                "warning: the model of step %s was not pushed to %s: %s. Later saves are tried without a warning, and "
                "the final model is pushed at the end",
                step,
                self._repository,
                error,
            )


def main() -> None:
    folder, run, repository, step, parent = sys.argv[1:]
    die_with_parent(int(parent))
    try:
        hub.upload(
            Path(folder), run=S3Location.parse(run), repository=repository, repository_type="model", step=int(step)
        )
    except Exception as error:  # noqa: BLE001 - the parent logs it
        sys.exit(hub.first_line(error))


if __name__ == "__main__":
    main()
