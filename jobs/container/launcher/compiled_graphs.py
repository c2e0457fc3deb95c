"""Keep on S3 what torch.compile and Triton have compiled, so that the next attempt of a run need not compile it again.

    s3://…/<run>/compiled/<fingerprint>.tar.gz

The ranks of a node compile into one folder. While they train, a thread of the main node's launcher uploads what is new;
every node unpacks it before its ranks start. The fingerprint covers what PyTorch's own keys do not: the image, and the
machine for which C++ is compiled. The files are code that ranks execute, so only the run's own folder is read, which
only jobs of its team may write. A failure is a warning, because a run needs no cache.

PyTorch's portable archives (torch.compiler.save_cache_artifacts) need a call in each script, and lack the shared
objects: a CPU compiles all C++ again.
"""

import contextlib
import gzip
import hashlib
import json
import logging
import re
import shutil
import stat
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from typing_extensions import Self

from jobs.aws import s3 as object_store
from jobs.container.rank import one_line
from jobs.container.saving.manifest import SupersededError, check_newest
from jobs.core.errors import NotFoundError
from jobs.core.locations import S3Location
from jobs.core.run import CACHE_TAG, COMPILED
from jobs.core.words import counted, size

log = logging.getLogger("trainyard")

LOOK_SECONDS = 5.0

MAX_BYTES = 2 * 1024**3
"""Maximum size of the files in an archive, before compression."""

_REST = 20
"""After a save, the next one waits at least this many times as long as the save took."""

_CPU_INFO = Path("/proc/cpuinfo")


def folder_of(scratch: Path) -> Path:
    return scratch / "compiled"


def variables(scratch: Path) -> dict[str, str]:
    """Return the variables that make PyTorch and Triton compile into the folder.

    TRITON_HOME is for a script's own Triton kernels. Inductor has a folder for Triton's files in its own folder.
    """
    folder = folder_of(scratch)
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_HOME": str(folder)}


def fingerprint(versions: Mapping[str, str], *, instance_type: str) -> str:
    """Return the hash of everything that decides whether compiled files may be used: packages, image and machine.

    C++ is compiled for the very CPU (-march=native), of which an instance type may have several.
    """
    with contextlib.suppress(OSError):
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", _CPU_INFO.read_text(), re.MULTILINE)
        versions = {**versions, "cpu": found[1] if found else ""}
    content = json.dumps({"versions": dict(versions), "instance": instance_type}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


class CompiledGraphs:
    """The compiled files of one node. A context manager around its ranks."""

    def __init__(
        self,
        run: S3Location,
        folder: Path,
        fingerprint: str,
        *,
        attempt: int | None,
        saves: bool,
        is_stopping: Callable[[], bool],
    ) -> None:
        """With `saves`, this node uploads new files. While `is_stopping` returns true, the last checkpoint goes first,
        and nothing is uploaded.
        """
        self._s3 = object_store.connect()
        self._run = run
        self._folder = folder
        self._place = run / f"{COMPILED}{fingerprint}.tar.gz"
        self._archive = folder.with_suffix(".tar.gz")
        self._attempt = attempt
        self._is_stopping = is_stopping
        self._saved: dict[str, int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="compiled-graphs", daemon=True) if saves else None

    def __enter__(self) -> Self:
        self._restore()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _restore(self) -> None:
        unpacked = self._folder.with_suffix(".unpacked")
        try:
            object_store.download(self._s3, self._place, self._archive)
            self._saved = _unpack(self._archive, unpacked)
            unpacked.rename(self._folder)
        except NotFoundError:
            return
        except Exception as error:  # noqa: BLE001 - the ranks compile again
            log.warning(
                "warning: compiled graphs of earlier attempts are not used: %s: %s", self._place, one_line(error)
            )
            shutil.rmtree(unpacked, ignore_errors=True)
            return
        log.info("restored: %s of compiled graphs", counted(len(self._saved), "file"))

    def _keep(self) -> None:
        pause = LOOK_SECONDS
        while not self._closed.wait(pause):
            started = time.monotonic()
            try:
                self._save()
            except SupersededError:  # the rest of the launcher reports it
                return
            except Exception as error:  # noqa: BLE001 - the run does not need them
                if not self._closed.is_set():  # otherwise the attempt's folder is being removed
                    log.warning("warning: compiled graphs are no longer saved: %s", one_line(error))
                return
            pause = max(LOOK_SECONDS, _REST * (time.monotonic() - started))

    def _save(self) -> None:
        files = _complete_files(self._folder)
        if not files.keys() - self._saved.keys() or self._is_stopping():
            return
        if (total := sum(files.values())) > MAX_BYTES:
            raise ValueError(f"they have {size(total)}, more than {size(MAX_BYTES)}")
        with tarfile.open(self._archive, "w:gz", compresslevel=1) as packed:
            for name in sorted(files):
                packed.add(self._folder / name, arcname=name, recursive=False)
        if self._is_stopping():
            return
        check_newest(self._s3, self._run, self._attempt)
        sent = object_store.upload(self._s3, self._archive, self._place, tag=CACHE_TAG)
        log.info("saved: %s of compiled graphs, %s", counted(len(files), "file"), size(sent.bytes))
        self._saved = files


def _complete_files(folder: Path) -> dict[str, int]:
    """Return the sizes of the files that no compiler is still writing: those unchanged for some seconds."""
    found = {}
    before = time.time() - LOOK_SECONDS
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            state = path.lstat()
            if stat.S_ISREG(state.st_mode) and state.st_mtime < before:
                found[path.relative_to(folder).as_posix()] = state.st_size
    return found


def _unpack(archive: Path, folder: Path) -> dict[str, int]:
    """Unpack an archive of plain files, and return their sizes. Raises an error if it is damaged or has anything else.

    Not with tarfile's filters, which older releases of Python 3.10 lack.
    """
    found: dict[str, int] = {}
    with gzip.open(archive) as stream, tarfile.open(fileobj=stream) as packed:
        for entry in packed:
            path = PurePosixPath(entry.name)
            content = packed.extractfile(entry) if entry.isreg() else None
            if content is None or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"it contains {entry.name!r}, which is not a file of the folder")
            found[entry.name] = entry.size
            if sum(found.values()) > MAX_BYTES:
                raise ValueError(f"its files have more than {size(MAX_BYTES)}")
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                shutil.copyfileobj(content, file)
            target.chmod(0o700 if entry.mode & 0o100 else 0o600)
        while stream.read(1 << 20):  # up to the checksum of the content
            pass
    archive.unlink()
    return found
