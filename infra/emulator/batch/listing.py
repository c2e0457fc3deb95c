"""ListJobs: which jobs, in which order, page by page. Source: the API reference of ListJobs."""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from moto.batch.exceptions import ClientException

from infra.emulator.batch.job import Job, Status

_FILTERS = ("JOB_NAME", "JOB_DEFINITION", "BEFORE_CREATED_AT", "AFTER_CREATED_AT", "SHARE_IDENTIFIER")

ItemT = TypeVar("ItemT")


def select_jobs(jobs: Iterable[Job], request: Mapping[str, Any]) -> list[Job]:
    """Return the jobs of a queue, of an array or of a multi-node job that `jobStatus` or `filters` leave.

    Raises ClientException on a status or a filter that Batch does not know.
    """
    status = request.get("jobStatus")
    if status is not None and status not in Status.__members__:
        raise ClientException(f"Job status {status} is not one of {' | '.join(Status.__members__)}")
    filters = request.get("filters") or []
    of_queue = request.get("jobQueue") is not None
    if filters and of_queue:  # filters do not apply to the children of an array or of a multi-node job
        if len(filters) > 1:
            raise ClientException("Only one filter can be used at a time")
        return _filter(jobs, filters[0], status)
    wanted = Status(status or "RUNNING")
    return [job for job in jobs if job.status is wanted]


def page(items: Sequence[ItemT], request: Mapping[str, Any], *, most: int) -> tuple[list[ItemT], str | None]:
    """The page that `maxResults` and `nextToken` ask for, and the token of the next one.

    Raises ClientException on a token that is none of ours. `items` may grow at its front meanwhile without a page
    showing an item twice: a token counts what is left, from the end.
    """
    size = request.get("maxResults") or most
    if size < 1:
        raise ClientException("maxResults must be at least 1")
    size = min(size, most)
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


def _filter(jobs: Iterable[Job], item: Mapping[str, Any], status: str | None) -> list[Job]:
    name = str(item.get("name"))
    if name not in _FILTERS:
        raise ClientException(f"Filter {name} is not one of {' | '.join(_FILTERS)}")
    found = [job for job in jobs if any(_matches(job, name, value) for value in item.get("values") or ())]
    if status is None or name != "SHARE_IDENTIFIER":
        return found  # with any other filter, jobStatus counts for nothing
    return [job for job in found if job.status is Status(status)]


def _matches(job: Job, name: str, value: str) -> bool:
    definition = job.submission.definition
    if name == "JOB_NAME":
        return _prefix_or_equal(job.submission.name.lower(), value.lower())
    if name == "JOB_DEFINITION":
        return definition.arn == value if value.startswith("arn:") else _prefix_or_equal(definition.name, value)
    if name == "SHARE_IDENTIFIER":
        return job.submission.share_identifier == value
    try:
        moment = int(value)
    except ValueError:
        raise ClientException(f"Filter {name}: {value} is no number of milliseconds") from None
    return job.created_at < moment if name == "BEFORE_CREATED_AT" else job.created_at > moment


def _prefix_or_equal(text: str, pattern: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern
