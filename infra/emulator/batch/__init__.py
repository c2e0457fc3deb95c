"""Batch in the emulator: moto's API with a job engine that follows AWS's documentation.

The server calls `install` once before it starts, and `shutdown` once when it stops. The README of infra/emulator lists
what the emulator does not prove.
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

__all__ = ["exec_target", "install", "instance_metadata", "job_counts", "reclaim", "shutdown"]


def install(executor_name: str, *, credentials: Credentials, registry: str | None = None) -> None:
    """Replace moto's Batch.

    `executor_name` is `process`, or `docker`, which needs a Docker engine. Jobs get `credentials`. `registry` is host
    and port of the container registry to use for ECR.

    Raises ConfigurationError if the executor cannot work on this machine.
    """
    BatchBackend.credentials = credentials
    BatchBackend.executor = _make_executor(executor_name, registry)
    batch_backends.clear()
    batch_backends.backend = BatchBackend
    for path in (*urls.url_paths, "{0}/v1/getjobqueuesnapshot$"):
        urls.url_paths[path] = BatchResponse.dispatch


def shutdown() -> None:
    """Kill all jobs with all their processes; return when they are gone."""
    for backend in _backends():
        backend.scheduler.shutdown()


def job_counts() -> dict[str, int]:
    """Count the jobs in each state, without the nodes of multi-node jobs. States without jobs are left out."""
    counts: Counter[str] = Counter()
    for backend in _backends():
        with backend.scheduler.lock:
            counts.update(job.status.value for job in backend.scheduler.jobs.values() if job.node is None)
    return dict(counts)


def reclaim(job_id: str) -> bool:
    """Reclaim the instance of a job, or of a node `<id>#<index>`. Returns False if it is not running."""
    found = _find(job_id)
    return found is not None and found[0].scheduler.reclaim(found[1])


def exec_target(job_id: str) -> Mapping[str, Any] | None:
    """Return how to run a command in the container of a job, child or node. None if not running or not allowed."""
    found = _find(job_id)
    return found[0].scheduler.exec_target(found[1]) if found else None


def instance_metadata(instance_id: str) -> Mapping[str, str] | None:
    """Return what the metadata service of an instance answers, by path; None if no job runs on it."""
    found = (backend.scheduler.metadata(instance_id) for backend in _backends())
    return next((answers for answers in found if answers is not None), None)


def _find(job_id: str) -> tuple[BatchBackend, Job] | None:
    for backend in _backends():
        job = backend.scheduler.jobs.get(job_id)
        if job is not None:
            return backend, job
    return None


def _make_executor(name: str, registry: str | None) -> Executor:
    if name == "docker":
        # Load the Docker SDK only if it is needed.
        from infra.emulator.containers.docker_executor import DockerExecutor  # noqa: PLC0415

        return DockerExecutor(registry=registry)
    return ProcessExecutor()


def _backends() -> Iterator[BatchBackend]:
    for regions in list(batch_backends.values()):
        yield from list(regions.values())
