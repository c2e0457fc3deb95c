"""A container of an image that is tested, and what of this tool is handed into it.

It has no network, no capability and no way to more rights, and the init process that a job definition asks for: what
passes here needs none of them. The scripts of inside/ are copied into the container, so an engine on another machine
gets them too.

The packages of an image are not compiled, and PyTorch takes longer to compile than to import: containers of all images
of a test share what Python has compiled, in a volume. Python looks at the time and size of a module's source before it
takes what is there, and children have their parent's packages.
"""

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
from requests.exceptions import ConnectionError as RequestConnectionError
from requests.exceptions import ReadTimeout

from jobs.images.checks.check import CheckFailedError, Subject

INSIDE = Path(__file__).parent / "inside"
FOLDER = "/tmp/trainyard-images-test"  # noqa: S108 - in a container of our own
"""Where the scripts lie in the container."""

TIMEOUT_SECONDS = 120
SHARED_MEMORY = "1g"
"""Size of /dev/shm, where Ray keeps its objects and PyTorch's data loaders hand over batches."""

_BYTECODE_VARIABLES = ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
"""Where Python puts what it compiles, in an image; and what a container has that must not write any."""

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
def shared_bytecode(client: docker.DockerClient) -> Iterator[str]:
    """Make the volume for what Python compiles in containers of the images of one test; it goes with the block."""
    volume = client.volumes.create(labels={"trainyard.images-test": "bytecode"})
    try:
        yield volume.name
    finally:
        volume.remove()


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
    folder = _bytecode_folder(subject, options.get("environment", {}))
    volumes = [*options.pop("volumes", []), *([f"{subject.bytecode}:{folder}"] if folder else [])]
    container = subject.client.containers.create(
        subject.name, list(command) if command else None, volumes=volumes, **{**defaults, **options}
    )
    try:
        container.put_archive("/", _handed_in(folder))
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


def _bytecode_folder(subject: Subject, environment: Mapping[str, str]) -> str | None:
    """Return where the volume for what Python compiles goes in a container of the image; None where it gets none."""
    prefix, writes_none = _BYTECODE_VARIABLES
    if subject.bytecode is None or writes_none in environment:
        return None
    variables = dict(line.split("=", 1) for line in subject.configuration.get("Env") or ())
    return variables.get(prefix)


def _handed_in(bytecode_folder: str | None) -> bytes:
    """Return the scripts of inside/ as a tar archive, readable by whatever user the image has.

    With them comes the right for that user to write to the volume of `bytecode_folder`.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        _add_folder(tar, FOLDER, 0o755)
        for path in sorted(INSIDE.glob("*.py")):
            content = path.read_bytes()
            entry = tarfile.TarInfo(f"{FOLDER.removeprefix('/')}/{path.name}")
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
        if bytecode_folder:
            _add_folder(tar, bytecode_folder, 0o1777)
    return archive.getvalue()


def _add_folder(tar: tarfile.TarFile, path: str, mode: int) -> None:
    folder = tarfile.TarInfo(path.removeprefix("/"))
    folder.type, folder.mode = tarfile.DIRTYPE, mode
    tar.addfile(folder)
