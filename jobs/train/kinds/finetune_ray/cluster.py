"""A Ray of this node's own: for loopback only, without dashboard or usage statistics, gone when the job ends."""

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from jobs.contract.errors import TrainyardError
from jobs.train.accelerator import Accelerator

log = logging.getLogger("trainyard")

OBJECT_STORE_BYTES = 100_000_000
"""Workers exchange tensors over their backend, so Ray's store holds settings and results: near the least it takes."""

_OTHER_ACTORS = 2
"""The CPUs that Ray's accounts keep for its own actors beside the workers; with none left they would wait for ever."""

_SOCKET_PATH_BYTES = 40
"""The longest path of Ray's folder: that of a Unix socket has at most 107 bytes (unix(7)), and Ray adds over 60."""

_START_SECONDS = 600
"""How long Ray waits for processes of its own to start, as on a machine that is busy."""

_TRIES = 3
"""A node whose agents take more than 15 s to start ends itself, and no setting changes that (ray-project/ray issue
65983). They are quicker once Python has compiled what they import."""

_TORCHRUNS = ("TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "ROLE_")
"""Beginnings of what torchrun sets for the process that starts Ray; its workers would take them for theirs. GROUP_RANK
stays: it is the node's."""


def worker_resources(accelerator: Accelerator) -> dict[str, float]:
    """Return what a worker needs, in Ray's names for resources."""
    cards = {"hpu": {"HPU": 1.0}, "cuda": {"GPU": 1.0}, "cpu": {}}
    return {"CPU": 1.0, **cards[accelerator.name]}


def error_file(scratch: Path, worker: int) -> Path:
    """Return the file in which a worker says, in one line, why it failed. One that was killed leaves none."""
    return scratch / f"ray-error-{worker}"


@contextlib.contextmanager
def local_ray(accelerator: Accelerator, *, workers: int, scratch: Path) -> Iterator[None]:
    """Run a Ray for `workers` workers, each with a card of its own. Raises TrainyardError where it does not start."""
    with _environment(_settings(workers, scratch)):
        import ray

        folder = _folder(scratch)
        try:
            _start(folder, accelerator, workers)
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _settings(workers: int, scratch: Path) -> dict[str, str | None]:
    """Return the settings that Ray's processes find in their environment; None: a variable that they must not find."""
    settings: dict[str, str | None] = {name: None for name in os.environ if name.startswith(_TORCHRUNS)}
    settings |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would take 127.0.0.1 for the address that others reach this node by; so it stays what it says.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # For clusters that outlive a job, or lose nodes while they train; it would be a process more.
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        # Nobody asks for them.
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        # A Python for each CPU before anything is to run in it.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_agent_register_timeout_ms": str(_START_SECONDS * 1000),
        "RAY_worker_register_timeout_seconds": str(_START_SECONDS),
        "RAY_gcs_server_port_wait_time_s": str(_START_SECONDS),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_START_SECONDS),
        # Between two looks at the workers, each of which takes in one report; Ray's own is 2.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        # Workers' lines go to our own log, one by one and as they are.
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray would name each worker's card in a HABANA_VISIBLE_MODULES of its own. Habana's software looks up the local
        # rank in that list, which must be the same one in all processes: the second worker would find no card.
        "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES": "1",
        # Only this job's processes may talk to it; otherwise Ray would leave a token of its own in the home folder.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "OMP_NUM_THREADS": str(max(1, int(os.environ.get("OMP_NUM_THREADS", "1")) // workers)),
    }
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        # A dozen processes would compile all that they import, each anew.
        settings |= {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": str(scratch / "bytecode")}
    return settings


def _folder(scratch: Path) -> Path:
    """Make the folder for Ray's sockets and logs: in the scratch folder, with which it goes, if its path is short
    enough.
    """
    folder = scratch / "ray"
    if len(os.fsencode(folder)) <= _SOCKET_PATH_BYTES:
        folder.mkdir()
        return folder
    return Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))


def _start(folder: Path, accelerator: Accelerator, workers: int) -> None:
    for _ in range(_TRIES):
        failure = _started(folder, accelerator, workers)
        if failure is None:
            return
        log.warning("warning: Ray did not start: %s", " ".join(str(failure).split()))
    raise TrainyardError(
        f"Ray did not start, tried {_TRIES} times", next_step="see whether the node has memory and processor time left"
    )


def _started(folder: Path, accelerator: Accelerator, workers: int) -> Exception | None:
    """Start Ray once. Returns why it did not start; None: it did."""
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=workers + _OTHER_ACTORS,
            num_gpus=workers if accelerator.name == "cuda" else 0,
            # Ray may not find the cards by itself (ray-project/ray issue 45302).
            resources={"HPU": workers} if accelerator.name == "hpu" else None,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
            # A container's /dev/shm may be smaller than Ray would like.
            _plasma_directory=str(folder),
            configure_logging=False,
        )
    except Exception as error:  # noqa: BLE001 - Ray raises no class of its own
        ray.shutdown()
        return error
    return None


@contextlib.contextmanager
def _environment(settings: Mapping[str, str | None]) -> Iterator[None]:
    """Set the environment of this process, which all of Ray's inherit, for the block."""
    before = {name: os.environ.get(name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
