"""Who may talk to the emulator: programs that have its credentials, and no web page whatever it has.

Whoever may talk to it runs commands as the user who started it. Loopback keeps other machines out, but neither other
users of this machine nor a page in one of its browsers. So a request must

- name this machine in its Host: under DNS rebinding that is the name of the page's own server;
- come from no page of another origin, which browsers tell in Origin and Sec-Fetch-Site, and pages can't change;
- show the credentials, which are random for each server: AWS's own requests by the access key id that they are signed
  with, the server's own paths by the secret access key as a bearer token.

Signatures are not verified. The access key id is a secret here, of 160 random bits, and travels on loopback only. It is
known to whoever can read the state file or the environment of a process, where the secret access key stands beside it.
"""

import getpass
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from moto.core.responses import BaseResponse
from moto.iam.models import AccessKey, IAMBackend
from moto.sts.models import STSBackend

from infra.emulator.credentials import NEXT_STEP, Credentials, random_letters

HEALTH_PATH = "/trainyard/health"
"""Open to every program of this machine: it tells nothing secret and changes nothing."""

_HOST = re.compile(r"(?:(?:[a-z0-9_.-]+\.)?localhost|127\.0\.0\.1|\[::1\])(?::\d+)?", re.IGNORECASE)
"""S3's clients may put the bucket in front: `bucket.localhost`."""
_SIGNED_WITH = re.compile(r"AWS4-\S+ .*?\bCredential=([^/,\s=]+)/|AWS ([^:\s]+):")
"""No key has an equals sign; with one in it, a header of nothing but `Credential=` would be read for seconds."""


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused, in the form of AWS's errors."""

    code: str
    message: str


class Gate:
    """Decides on every request before anything else sees it."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def refusal(self, environ: Mapping[str, Any]) -> Refusal | None:
        """Say why a request is refused; None where it may pass."""
        host = environ.get("HTTP_HOST", "")
        if not _HOST.fullmatch(host):
            return Refusal("AccessDenied", f"the emulator answers to localhost, not to {host!r}")
        if _is_of_another_page(environ, host):
            return Refusal("AccessDenied", "the emulator does not answer web pages")
        path = environ.get("PATH_INFO", "")
        if path == HEALTH_PATH:
            return None
        if path.startswith(("/trainyard/", "/moto-api")):
            return None if self._has_token(environ) else Refusal("AccessDenied", f"{path} needs the server's token")
        if self._is_known(_access_key_id(environ)):
            return None
        return Refusal("InvalidClientTokenId", f"the emulator has credentials of its own: {NEXT_STEP}")

    def _has_token(self, environ: Mapping[str, Any]) -> bool:
        given = environ.get("HTTP_AUTHORIZATION", "").encode()
        return hmac.compare_digest(given, f"Bearer {self._credentials.secret_access_key}".encode())

    def _is_known(self, access_key_id: str) -> bool:
        own = hmac.compare_digest(access_key_id.encode(), self._credentials.access_key_id.encode())
        return own or access_key_id in _temporary_key_ids


_temporary_key_ids: set[str] = set()
"""What AssumeRole gave to clients that were let in."""

_USER_ID = "AIDATRAINYARDEMULATED"
_moto_caller_identity = STSBackend.get_caller_identity


def install() -> None:
    """Have the keys of assumed roles be as hard to guess as the server's own, and its own key be a user's.

    Call it before the server starts.
    """
    IAMBackend.create_temp_access_key = _create_temporary_key
    STSBackend.get_caller_identity = _caller_identity
    # moto looks for keys of 20 characters, by which it finds the role that was assumed.
    BaseResponse.access_key_regex = re.compile(r"AWS.*(?P<access_key>(?<![A-Z0-9])[A-Z0-9]{20,}(?![A-Z0-9]))[:/]")


def _create_temporary_key(backend: IAMBackend) -> AccessKey:
    key = AccessKey(user_name=None, prefix="ASIA", account_id=backend.account_id)
    key.access_key_id += random_letters()
    _temporary_key_ids.add(key.access_key_id)
    backend.access_keys[key.access_key_id] = key
    return key


def _caller_identity(backend: STSBackend, access_key_id: str, region: str) -> tuple[str, str, str]:
    """Return id, ARN and account of who calls: with the server's own key the IAM user of this machine's user.

    The form is that of the API reference of GetCallerIdentity; moto answers `user/moto`, of STS.
    """
    if access_key_id in _temporary_key_ids:
        assumed: tuple[str, str, str] = _moto_caller_identity(backend, access_key_id, region)
        return assumed
    return _USER_ID, f"arn:aws:iam::{backend.account_id}:user/{_user_name()}", backend.account_id


def _user_name() -> str:
    """Return the login name, in the characters that IAM takes."""
    try:
        return re.sub(r"[^A-Za-z0-9_+=,.@-]", "-", getpass.getuser())[:64] or "local"
    except (KeyError, OSError):  # a user id without a name, in a container for instance
        return "local"


def _is_of_another_page(environ: Mapping[str, Any], host: str) -> bool:
    origin = environ.get("HTTP_ORIGIN")
    site = environ.get("HTTP_SEC_FETCH_SITE", "none")
    return (origin is not None and origin.lower() != f"http://{host.lower()}") or site not in ("same-origin", "none")


def _access_key_id(environ: Mapping[str, Any]) -> str:
    """Return the key that a request names: in its header, or in its address where that was signed beforehand."""
    signed = _SIGNED_WITH.match(environ.get("HTTP_AUTHORIZATION", ""))
    if signed:
        return str(signed[1] or signed[2])
    query = parse_qs(environ.get("QUERY_STRING", ""))
    scope: list[str] = query.get("X-Amz-Credential") or query.get("AWSAccessKeyId") or [""]
    return scope[0].split("/", 1)[0]
