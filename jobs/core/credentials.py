"""Logins in the addresses that a text names: they are not to be kept with a run or printed."""

import re

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
