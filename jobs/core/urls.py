"""URLs: endpoints that the environment configures, and logins inside URLs.

Invalid endpoints are rejected before any request is sent. Logins are never stored with a run or printed.
"""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from jobs.core.errors import ConfigurationError

_VARIABLE = "AWS_ENDPOINT_URL"
"""The variable for all services. A variable for one service appends `_` and the service's name."""

_HOST = re.compile(r"((?!-)[a-z0-9-]{1,63}(?<!-)\.)*(?!-)[a-z0-9-]{1,63}(?<!-)\.?|[0-9a-f:.]+")


def check_endpoints(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError if an environment variable sets an endpoint that is not an HTTP URL."""
    for name, value in environment.items():
        if value and (name == _VARIABLE or name.startswith(f"{_VARIABLE}_")):
            check_endpoint(value, source=name, otherwise=', or for the emulator: eval "$(trainyard local env)"')


def check_endpoint(url: str, *, source: str, otherwise: str = "") -> None:
    """Raise ConfigurationError if `url` is not an HTTP URL.

    `source` names where the URL is set; `otherwise` is appended to the next step.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:  # an unclosed bracket, a port above 65535
        is_address = False
    if not is_address or not _HOST.fullmatch(parts.hostname or ""):
        raise ConfigurationError(
            f"{source}={url} is not an HTTP URL; it should look like http://localhost:4566",
            next_step=f"correct or unset {source}{otherwise}",
        )


_LOGIN = re.compile(r"""\b([a-z][a-z0-9+.-]*://)([^/\s@'"?#]+)@([\w.-]*)""", re.IGNORECASE)

_PLACEHOLDER = re.compile(r"\$?\{[\w.-]+\}|\$\w+")
"""A variable that is filled in later: `${NAME}` in pip's requirements, `{parameters.name}` in a command."""


def login_in(text: str) -> str | None:
    """Return the first URL in `text` with a password or token, its login replaced by `…`; None if there is none."""
    for found in _LOGIN.finditer(text):
        scheme, login, host = found.groups()
        user, has_password, password = login.partition(":")
        # An HTTP token is often passed as the user name. In other protocols a user name alone is no secret: ssh://git@…
        secret = password if has_password else user if "http" in scheme.lower() else ""
        if secret and not _PLACEHOLDER.fullmatch(secret):
            return f"{scheme}…@{host}"
    return None


def without_logins(text: str) -> str:
    """Return the text with `…` in place of each login in a URL."""
    return _LOGIN.sub(r"\1…@\3", text)
