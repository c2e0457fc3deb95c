"""ListJobs: which jobs, in which order, page by page. Source: the API reference of ListJobs.

Of its filters this knows the two that the command line uses.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from moto.batch.exceptions import ClientException

from infra.emulator.batch.job import Job, Status

_FILTERS = ("JOB_NAME", "AFTER_CREATED_AT")

ItemT = TypeVar("ItemT")


def select_jobs(jobs: Iterable[Job], request: Mapping[str, Any]) -> list[Job]:
    """Return the jobs of a queue, of an array or of a multi-node job that `jobStatus` or `filters` leave.

    Raises ClientException on a status or a filter that is not known.
    """
    status = request.get("jobStatus")
    if status is not None and status not in Status.__members__:
        raise ClientException(f"Job status {status} is not one of {' | '.join(Status.__members__)}")
    filters = request.get("filters") or []
    if not filters or request.get("jobQueue") is None:  # filters do not apply to children and nodes
        wanted = Status(status or "RUNNING")
        return [job for job in jobs if job.status is wanted]
    if len(filters) > 1:
        raise ClientException("Only one filter can be used at a time")
    [item] = filters
    if item.get("name") not in _FILTERS:
        raise ClientException(f"the emulator knows the filters {' and '.join(_FILTERS)}, not {item.get('name')}")
    # Beside a filter, jobStatus counts for nothing.
    return [job for job in jobs if any(_matches(job, item["name"], value) for value in item.get("values") or ())]


def page(items: Sequence[ItemT], request: Mapping[str, Any], *, most: int) -> tuple[list[ItemT], str | None]:
    """The page that `maxResults` and `nextToken` ask for, and the token of the next one.

    Raises ClientException on a token that is none of ours. `items` may grow at its front meanwhile without a page
    showing an item twice: a token counts what is left, from the end.
    """
    size = min(request.get("maxResults") or most, most)
    start = 0
    token = request.get("nextToken")
    if token is not None:
        try:
            left = int(base64.urlsafe_b64decode(token.encode()))
        except (ValueError, binascii.Error):
            raise ClientException("nextToken is invalid") from None
        start = max(0, len(items) - left)
    rest = len(items) - start - size
    following = base64.urlsafe_b64encode(str(rest).encode()).decode() if rest > 0 else None
    return list(items[start : start + size]), following


def _matches(job: Job, name: str, value: str) -> bool:
    if name == "JOB_NAME":
        own, wanted = job.submission.name.lower(), value.lower()
        return own.startswith(wanted[:-1]) if wanted.endswith("*") else own == wanted
    try:
        return job.created_at > int(value)
    except ValueError:
        raise ClientException(f"Filter {name}: {value} is no number of milliseconds") from None
