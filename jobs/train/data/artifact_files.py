"""The files of an artifact one after the other: the next one is fetched while one is used, and none is kept."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jobs.contract.locations import S3
from jobs.train.data.artifacts import OpenArtifact


def each_file(artifact: OpenArtifact, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Each name with its file, here and verified. What was downloaded is gone when the next one is asked for.

    Raises UsageError where a file is not what the manifest says, NotFoundError where it is gone.
    """
    waiting = list(names)
    with ThreadPoolExecutor(1, thread_name_prefix="fetch") as pool:
        coming = [pool.submit(artifact.path, name) for name in waiting[:1]]
        for number, name in enumerate(waiting):
            path = coming.pop().result()
            coming += [pool.submit(artifact.path, following) for following in waiting[number + 1 : number + 2]]
            try:
                yield name, path
            finally:
                if artifact.location.startswith(S3):
                    path.unlink(missing_ok=True)
