"""AWS Batch of the emulator: moto's API with a job engine that follows AWS's documentation.

The server calls `install` once before it starts, and `shutdown` once at its end; the README of infra/emulator says what
behaves as on AWS and what is not proven.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from moto.batch import urls
from moto.batch.models import batch_backends

from infra.emulator.batch.backend import BatchBackend
from infra.emulator.batch.job import Job
from infra.emulator.batch.responses import BatchResponse
from infra.emulator.containers import Executor
from infra.emulator.containers.process_executor import ProcessExecutor
from infra.emulator.credentials import Credentials

__all__ = ["entrance", "install", "job_counts", "reclaim", "shutdown"]


def install(executor_name: str, *, credentials: Credentials, registry: str | None = None) -> None:
    """Put this Batch in moto's place. `executor_name`: `process`, or `docker`, which needs a Docker engine.

    `credentials`: what jobs get; `registry`: host and port of the one that containers' images in ECR are pulled from.

    Raises ConfigurationError where the executor cannot work here.
    """
    BatchBackend.credentials = credentials
    BatchBackend.executor = _make_executor(executor_name, registry)
    batch_backends.clear()
    batch_backends.backend = BatchBackend
    for path in (*urls.url_paths, "{0}/v1/getjobqueuesnapshot$"):
        urls.url_paths[path] = BatchResponse.dispatch


def shutdown() -> None:
    """Kill all jobs with all their descendants; returns when they are gone."""
    for backend in _backends():
        backend.scheduler.shutdown()


def job_counts() -> dict[str, int]:
    """Count the jobs in each state, where there are any; the nodes of multi-node jobs are not counted."""
    counts: Counter[str] = Counter()
    for backend in _backends():
        with backend.scheduler.lock:
            counts.update(job.status.value for job in backend.scheduler.jobs.values() if job.node is None)
    return dict(counts)


def reclaim(job_id: str) -> bool:
    """Take the instance away that a job, or a node `<id>#<index>`, runs on. False where no such job runs."""
    found = _find(job_id)
    return found is not None and found[0].scheduler.reclaim(found[1])


def entrance(job_id: str) -> Mapping[str, Any] | None:
    """Return what the container of a job, a child or a node is entered by; None where none runs that may be."""
    found = _find(job_id)
    return found[0].scheduler.entrance(found[1]) if found else None


def _find(job_id: str) -> tuple[BatchBackend, Job] | None:
    """Return a job with the backend that has it."""
    for backend in _backends():
        job = backend.scheduler.jobs.get(job_id)
        if job is not None:
            return backend, job
    return None


def _make_executor(name: str, registry: str | None) -> Executor:
    if name == "docker":
        # The Docker SDK is loaded by those who ask for it only.
        from infra.emulator.containers.docker_executor import DockerExecutor  # noqa: PLC0415

        return DockerExecutor(registry=registry)
    return ProcessExecutor()


def _backends() -> Iterator[BatchBackend]:
    for regions in list(batch_backends.values()):
        yield from list(regions.values())
