"""JupyterLab and TensorBoard on the instance, for as long as somebody works in them.

    python -m jobs.container.launch --instance-type=… --nproc-per-node=1 notebook --idle-timeout-hours=2

Its folder is saved to the run, every few seconds and at the end, and is there again in the next attempt; where it
listens, and its token, are in the run's notebook.json. The job ends well when JupyterLab is shut down from its menu, or
when nobody has worked in it for the idle timeout.
"""

import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.batch_job import attempt_number, job_id
from jobs.container.data import sources
from jobs.container.kinds.notebook.jupyter import JupyterLab, check_installed
from jobs.container.rank import Rank, one_line, run
from jobs.container.saving.manifest import SupersededError, check_newest
from jobs.container.saving.saved_folder import SavedFolder
from jobs.container.store import LOOPBACK
from jobs.core.errors import TrainyardError
from jobs.core.records import NotebookServer
from jobs.core.run import NOTEBOOK, NOTEBOOK_SERVER
from jobs.core.words import counted
from jobs.spec.kinds.notebook import Notebook

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

ROUND_SECONDS = 10.0
"""The time between two looks at what has changed: the most work that is lost with an instance that ends unannounced."""


class Interrupted(BaseException):
    """SIGTERM arrived. No Exception, which botocore would take for a broken line."""


def serve(rank: Rank, arguments: Notebook) -> None:
    """Run JupyterLab until it is shut down, nobody works in it any more, or SIGTERM arrives.

    Raises ConfigurationError where this image has no JupyterLab, TrainyardError where it fails.
    """
    check_installed()
    signal.signal(signal.SIGTERM, _interrupt)
    s3 = object_store.connect()
    folder = rank.scratch / "notebook"
    folder.mkdir()

    def check_may_write() -> None:
        check_newest(s3, rank.run, rank.attempt)

    saved = SavedFolder(s3, folder, rank.run / NOTEBOOK.rstrip("/"), check_may_write=check_may_write)
    code = 0
    try:
        _fill(s3, saved, folder, arguments)
        with JupyterLab(
            folder, settings=rank.scratch / "jupyter", tensorboard_logdir=arguments.tensorboard_logdir
        ) as lab:
            try:
                check_may_write()
                _announce(s3, rank, lab)
                code = _until_the_end(lab, saved, idle_timeout=timedelta(hours=arguments.idle_timeout_hours))
            finally:
                # What is left must be done, and before JupyterLab has ended: the grace time may run.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                check_may_write()  # the files, and the address that people connect to, are a newer attempt's
                saved.save()
                object_store.delete_all(s3, rank.run, [NOTEBOOK_SERVER])
    except Interrupted:
        # Ends as SIGTERM ends any process, by which the launcher knows that the job is to be resumed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    if code:
        raise TrainyardError(f"JupyterLab ended with exit code {code}", next_step="see what it logged above")


def _fill(s3: "S3Client", saved: SavedFolder, folder: Path, arguments: Notebook) -> None:
    """Fill the folder with what an earlier attempt has saved; without one, with what the arguments name."""
    restored = saved.restore()
    saved.restore_links()
    if restored:
        log.info("notebook: restored %s that an earlier attempt had saved", counted(restored, "file"))
    elif arguments.files is not None:
        sources.copy_folder(arguments.files, folder, s3=lambda: s3)
        log.info("notebook: begins with the files of %s", arguments.files)


def _announce(s3: "S3Client", rank: Rank, lab: JupyterLab) -> None:
    """Write how it is reached to where `trainyard connect` looks; a team's runs are read by its own people only."""
    server = NotebookServer(job_id=job_id(), attempt=attempt_number(), port=lab.port, token=lab.token)
    object_store.write(s3, rank.run / NOTEBOOK_SERVER, server.model_dump_json(indent=2).encode())
    run_id = rank.run.key.strip("/").rpartition("/")[2]
    log.info("notebook: JupyterLab answers on %s:%s; next: trainyard connect %s", LOOPBACK, lab.port, run_id)


def _until_the_end(lab: JupyterLab, saved: SavedFolder, *, idle_timeout: timedelta) -> int:
    """Save what changes until the end. Returns JupyterLab's exit code; 0 where nobody works in it any more."""
    # When somebody worked is told by that there is news of it, not by its time: a clock may be set meanwhile.
    seen, worked = None, time.monotonic()
    while True:
        code = lab.wait(min(ROUND_SECONDS, idle_timeout.total_seconds() / 4))
        if code is not None:
            log.info("notebook: JupyterLab was shut down")
            return code
        now = time.monotonic()
        try:
            if saved.save():
                worked = now
            if (activity := lab.last_activity()) != seen:
                seen, worked = activity, now
        except SupersededError:
            raise
        except Exception as error:  # noqa: BLE001 - the next round may have more luck
            log.warning("warning: notebook: %s", one_line(error))
        if now - worked >= idle_timeout.total_seconds():
            log.info("notebook: nobody has worked in it for %s: it ends", idle_timeout)
            return 0


def _interrupt(number: int, _: Any) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Interrupted


if __name__ == "__main__":
    run(serve, Notebook)
