"""What the Hugging Face hub says of a model or a data set before a job that reads it is submitted.

No more than its metadata and two small files of a model are asked for, with a short patience: where the hub does not
answer, the plan says so, and the job's container, which has the team's token, finds out.
"""

import http
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Literal
from urllib.parse import quote

from jobs.core.errors import NotFoundError, TrainyardError
from jobs.core.locations import hub_parts
from jobs.core.urls import check_endpoint
from jobs.data_checks.model_files import READ_BEFORE, faults

TIMEOUT_SECONDS = 5.0

_MAX_BYTES = 4 << 20

_NOT_UNDERSTOOD = "the hub's answer cannot be read"


def model_faults(
    location: str,
    *,
    max_length: int | None,
    pytorch: str | None,
    classifies: bool = False,
    note: Callable[[str], None],
) -> Iterator[TrainyardError]:
    """Yield all that is wrong with a model of the hub, as far as the hub says; `note` is told where it says nothing."""
    name, options = hub_parts(location)
    revision = options.get("revision", "main")
    try:
        names = [
            item["rfilename"] for item in _json(f"api/models/{name}/revision/{quote(revision, safe='')}")["siblings"]
        ]
        contents = {}
        for file in READ_BEFORE:
            if file in names and (content := _get(f"{name}/resolve/{quote(revision, safe='')}/{file}")) is not None:
                contents[file] = content
    except _NotThereError:
        yield _missing(location, "model")
        return
    except _SilentError as silent:
        note(f"{location} was not looked at: {silent}")
        return
    yield from faults(location, names, contents, max_length=max_length, pytorch=pytorch, classifies=classifies)


def repository_faults(
    location: str, sort: Literal["model", "dataset"], *, note: Callable[[str], None]
) -> Iterator[TrainyardError]:
    """Yield what is wrong with a repository of the hub: that there is none of the name.

    `note` is told where the hub says nothing.
    """
    name, options = hub_parts(location)
    try:
        _json(f"api/{sort}s/{name}/revision/{quote(options.get('revision', 'main'), safe='')}")
    except _NotThereError:
        yield _missing(location, "data set" if sort == "dataset" else sort)
    except _SilentError as silent:
        note(f"{location} was not looked at: {silent}")


class _NotThereError(Exception):
    """The hub says that there is no such thing."""


class _SilentError(Exception):
    """The hub says nothing, or not to us; the message is why."""


def _missing(location: str, what: str) -> TrainyardError:
    return NotFoundError(
        f"{location}: the hub knows no such {what}",
        next_step="check the name, and the revision if there is one",
    )


def _json(path: str) -> Any:
    content = _get(path)
    try:
        answer = json.loads(content or b"")
    except ValueError:
        raise _SilentError(_NOT_UNDERSTOOD) from None
    if not isinstance(answer, dict):
        raise _SilentError(_NOT_UNDERSTOOD)
    return answer


def _get(path: str) -> bytes | None:
    """Return what lies at a path of the hub.

    Raises _NotThereError where it says that it has no such repository or revision. To whoever shows no token it says
    401 of names that are not there, as of private ones: that is no answer.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        raise _SilentError("HF_HUB_OFFLINE is set")
    token = os.environ.get("HF_TOKEN")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    check_endpoint(endpoint, source="HF_ENDPOINT")
    request = urllib.request.Request(  # noqa: S310 - the address is the hub's
        f"{endpoint}/{path}", headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310
            content: bytes = answer.read(_MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.NOT_FOUND:
            raise _NotThereError(error.headers.get("X-Error-Message") or error.reason) from None
        raise _SilentError(f"the hub answered {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException):
        raise _SilentError("the hub did not answer") from None
    return content if len(content) <= _MAX_BYTES else None
