"""Addresses of services, as the environment names them: one that no request could be sent to is refused at once."""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from jobs.core.errors import ConfigurationError

_VARIABLE = "AWS_ENDPOINT_URL"
"""The variable for every service; one for a service alone goes on with `_` and its name."""

_HOST = re.compile(r"((?!-)[a-z0-9-]{1,63}(?<!-)\.)*(?!-)[a-z0-9-]{1,63}(?<!-)\.?|[0-9a-f:.]+")


def check_endpoints(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError if a variable of the environment names an endpoint that is no HTTP address."""
    for name, value in environment.items():
        if value and (name == _VARIABLE or name.startswith(f"{_VARIABLE}_")):
            check_endpoint(value, source=name, otherwise=', or for the emulator: eval "$(trainyard local env)"')


def check_endpoint(url: str, *, source: str, otherwise: str = "") -> None:
    """Raise ConfigurationError if `url` is no HTTP address.

    `source` says where it is set; `otherwise` ends the next step.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:  # an open bracket, a port beyond 65535
        is_address = False
    if not is_address or not _HOST.fullmatch(parts.hostname or ""):
        raise ConfigurationError(
            f"{source}={url} is not an HTTP address; it should look like http://localhost:4566",
            next_step=f"correct or unset {source}{otherwise}",
        )


_LOGIN = re.compile(r"""\b([a-z][a-z0-9+.-]*://)([^/\s@'"?#]+)@([\w.-]*)""", re.IGNORECASE)

_PLACEHOLDER = re.compile(r"\$?\{[\w.-]+\}|\$\w+")
"""A variable that something else fills in: `${NAME}` in pip's requirements, `{parameters.name}` in a command."""


def login_in(text: str) -> str | None:
    """Return the first address in a text that has a password or a token, without it; None if there is none."""
    for found in _LOGIN.finditer(text):
        scheme, login, host = found.groups()
        user, has_password, password = login.partition(":")
        # A token for HTTP is often the user's name. For other protocols a name alone opens nothing: ssh://git@…
        secret = password if has_password else user if "http" in scheme.lower() else ""
        if secret and not _PLACEHOLDER.fullmatch(secret):
            return f"{scheme}…@{host}"
    return None


def without_logins(text: str) -> str:
    """Return the text with `…` for each login in an address."""
    return _LOGIN.sub(r"\1…@\3", text)
