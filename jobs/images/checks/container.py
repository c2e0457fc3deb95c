"""A container of an image that is tested, and what of this tool is handed into it.

It has no network, no capability and no way to more rights, and the init process that a job definition asks for: what
passes here needs none of them. The scripts of inside/ are copied into the container, so an engine on another machine
gets them too.
"""

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from requests.exceptions import ConnectionError as RequestConnectionError
from requests.exceptions import ReadTimeout

from jobs.images.checks.check import CheckFailedError, Subject

INSIDE = Path(__file__).parent / "inside"
FOLDER = "/tmp/trainyard-images-test"  # noqa: S108 - in a container of our own
"""Where the scripts lie in the container."""

TIMEOUT_SECONDS = 120
SHARED_MEMORY = "1g"
"""Size of /dev/shm, where PyTorch's data loaders hand over batches."""

_LAST_LINES = 15


def run(
    subject: Subject, command: Sequence[str] | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS, **options: Any
) -> str:
    """Return the output of `command` (None: the image's own).

    Raises CheckFailedError where it does not end well in time.
    """
    with started(subject, command, **options) as container:
        code = exit_code(container, timeout_seconds=timeout_seconds)
        output = output_of(container)
    if code:
        raise CheckFailedError("\n".join(output.splitlines()[-_LAST_LINES:]) or f"it ended with exit code {code}")
    return output


def run_script(
    subject: Subject,
    script: str,
    argument: object = None,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **options: Any,
) -> str:
    """Return the output of a script of inside/, which gets `argument` as JSON. Raises as `run` does."""
    command = ["python", f"{FOLDER}/{script}", json.dumps(argument)]
    return run(subject, command, timeout_seconds=timeout_seconds, **options)


def last_line(output: str) -> str:
    lines = output.splitlines()
    return lines[-1] if lines else ""


@contextmanager
def started(subject: Subject, command: Sequence[str] | None = None, **options: Any) -> Iterator[Any]:
    """Run `command` in a container until the end of the block. `options` are those of docker's SDK."""
    defaults: Mapping[str, Any] = {
        "init": True,
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "shm_size": SHARED_MEMORY,
    }
    container = subject.client.containers.create(
        subject.name, list(command) if command else None, **{**defaults, **options}
    )
    try:
        container.put_archive("/", _scripts())
        container.start()
        yield container
    finally:
        container.remove(force=True, v=True)


def exit_code(container: Any, *, timeout_seconds: float) -> int:
    """Wait for the end of a container's process and return its exit code.

    Raises CheckFailedError where it still runs after so long.
    """
    try:
        return int(container.wait(timeout=timeout_seconds)["StatusCode"])
    except (ReadTimeout, RequestConnectionError):
        tail = "\n".join(output_of(container).splitlines()[-_LAST_LINES:])
        raise CheckFailedError(f"{tail}\nit still ran after {timeout_seconds:.0f} s".lstrip()) from None


def output_of(container: Any) -> str:
    text: bytes = container.logs()
    return text.decode(errors="replace")


def _scripts() -> bytes:
    """Return the scripts of inside/ as a tar archive, readable by whatever user the image has."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        folder = tarfile.TarInfo(FOLDER.removeprefix("/"))
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        for path in sorted(INSIDE.glob("*.py")):
            content = path.read_bytes()
            entry = tarfile.TarInfo(f"{folder.name}/{path.name}")
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()
