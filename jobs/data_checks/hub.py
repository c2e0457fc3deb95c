"""Check that repositories on the Hugging Face hub exist, and that a model there can be used.

Requests only the metadata and two small files of a model, with a short timeout. If the hub does not answer, the plan
has a note; the job's container, which has the team's token, checks again.
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
from jobs.data_checks.model_files import SMALL_FILES, model_errors

_HUB_TIMEOUT_SECONDS = 5.0

_HUB_MAX_BYTES = 4 << 20

_HUB_UNREADABLE = "the hub's answer cannot be read"


def hub_model_errors(
    location: str,
    *,
    max_length: int | None,
    pytorch: str | None,
    classifies: bool = False,
    note: Callable[[str], None],
) -> Iterator[TrainyardError]:
    """Yield the errors in a hub model's metadata and files. `note` gets the reason if the hub does not answer."""
    name, options = hub_parts(location)
    revision = options.get("revision", "main")
    try:
        names = [
            item["rfilename"]
            for item in _hub_json(f"api/models/{name}/revision/{quote(revision, safe='')}")["siblings"]
        ]
        contents = {}
        for file in SMALL_FILES:
            if file in names and (content := _hub_get(f"{name}/resolve/{quote(revision, safe='')}/{file}")) is not None:
                contents[file] = content
    except _NotOnHubError:
        yield _not_on_hub(location, "model")
        return
    except _HubUnavailableError as reason:
        note(f"{location} was not checked: {reason}")
        return
    yield from model_errors(location, names, contents, max_length=max_length, pytorch=pytorch, classifies=classifies)


def hub_repository_errors(
    location: str, kind: Literal["model", "dataset"], *, note: Callable[[str], None]
) -> Iterator[TrainyardError]:
    """Yield an error if the hub has no such repository. `note` gets the reason if the hub does not answer."""
    name, options = hub_parts(location)
    try:
        _hub_json(f"api/{kind}s/{name}/revision/{quote(options.get('revision', 'main'), safe='')}")
    except _NotOnHubError:
        yield _not_on_hub(location, "data set" if kind == "dataset" else kind)
    except _HubUnavailableError as reason:
        note(f"{location} was not checked: {reason}")


class _NotOnHubError(Exception):
    """The hub has no such repository or revision."""


class _HubUnavailableError(Exception):
    """The hub gave no usable answer. The message is the reason."""


def _not_on_hub(location: str, what: str) -> TrainyardError:
    return NotFoundError(
        f"{location}: {what} not found on the hub",
        next_step="check the name, and the revision if there is one",
    )


def _hub_json(path: str) -> Any:
    content = _hub_get(path)
    try:
        answer = json.loads(content or b"")
    except ValueError:
        raise _HubUnavailableError(_HUB_UNREADABLE) from None
    if not isinstance(answer, dict):
        raise _HubUnavailableError(_HUB_UNREADABLE)
    return answer


def _hub_get(path: str) -> bytes | None:
    """Return the content at a path of the hub.

    Raises _NotOnHubError if the hub has no such repository or revision. Without a token, the hub answers 401 for
    missing and for private names alike, which counts as no answer.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        raise _HubUnavailableError("HF_HUB_OFFLINE is set")
    token = os.environ.get("HF_TOKEN")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    check_endpoint(endpoint, source="HF_ENDPOINT")
    request = urllib.request.Request(  # noqa: S310 - the address is the hub's
        f"{endpoint}/{path}", headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_SECONDS) as answer:  # noqa: S310
            content: bytes = answer.read(_HUB_MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.NOT_FOUND:
            raise _NotOnHubError(error.headers.get("X-Error-Message") or error.reason) from None
        raise _HubUnavailableError(f"the hub answered {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException):
        raise _HubUnavailableError("the hub did not answer") from None
    return content if len(content) <= _HUB_MAX_BYTES else None
