"""Let programs with the emulator's credentials use it, and refuse web pages even with the credentials.

Anyone who may use the emulator can run commands as the user who started it. Loopback keeps other machines out, but not
other users of this machine, nor a page in one of its browsers. So a request must

- name this machine in its Host header. Under DNS rebinding, Host is the name of the page's server;
- not come from a page of another origin. Browsers report the origin in Origin and Sec-Fetch-Site, and pages cannot
  change these headers;
- carry the credentials, which are random for each server. Requests to AWS's API are signed with the access key id; the
  server's other paths take the secret access key as a bearer token.

Signatures are not verified. The access key id is a secret here: it has 160 random bits and travels on loopback only.
Anyone who can read it, in the state file or in the environment of a process, can read the secret access key there too.
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
"""Needs no credentials, because the response contains no secret and the request changes nothing."""

METADATA = re.compile(r"/trainyard/instances/([^/]+)/latest/(api/token|meta-data/.+)")
"""Paths of instances' metadata services, which need no credentials on EC2 either, and contain no secret here."""

_HOST = re.compile(r"(?:(?:[a-z0-9_.-]+\.)?localhost|127\.0\.0\.1|\[::1\])(?::\d+)?", re.IGNORECASE)
"""S3 clients may put the bucket first: `bucket.localhost`."""
_SIGNED_WITH = re.compile(r"AWS4-\S+ .*?\bCredential=([^/,\s=]+)/|AWS ([^:\s]+):")
"""A key must not contain `=`. Otherwise, matching a header of repeated `Credential=` would take seconds."""


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused, as an AWS error code and message."""

    code: str
    message: str


class Gate:
    """Checks every request before anything else handles it."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def refusal(self, environ: Mapping[str, Any]) -> Refusal | None:
        """Return why a request is refused, or None to let it pass."""
        host = environ.get("HTTP_HOST", "")
        if not _HOST.fullmatch(host):
            return Refusal("AccessDenied", f"the emulator answers requests for localhost, not for {host!r}")
        if _is_cross_origin(environ, host):
            return Refusal("AccessDenied", "the emulator does not answer web pages")
        path = environ.get("PATH_INFO", "")
        if path == HEALTH_PATH or METADATA.fullmatch(path):
            return None
        if path.startswith(("/trainyard/", "/moto-api")):
            return (
                None
                if self._has_token(environ)
                else Refusal(
                    "AccessDenied", f"{path} needs the server's token: Authorization: Bearer <secret access key>"
                )
            )
        if self._is_known(_access_key_id(environ)):
            return None
        return Refusal("InvalidClientTokenId", f"these are not the emulator's credentials; set them: {NEXT_STEP}")

    def _has_token(self, environ: Mapping[str, Any]) -> bool:
        given = environ.get("HTTP_AUTHORIZATION", "").encode()
        return hmac.compare_digest(given, f"Bearer {self._credentials.secret_access_key}".encode())

    def _is_known(self, access_key_id: str) -> bool:
        is_servers = hmac.compare_digest(access_key_id.encode(), self._credentials.access_key_id.encode())
        return is_servers or access_key_id in _temporary_key_ids


_temporary_key_ids: set[str] = set()
"""Keys that AssumeRole returned."""

_USER_ID = "AIDATRAINYARDEMULATED"
_moto_caller_identity = STSBackend.get_caller_identity


def install() -> None:
    """Make keys of assumed roles hard to guess, and make GetCallerIdentity name the local user.

    Call it before the server starts.
    """
    IAMBackend.create_temp_access_key = _create_temporary_key
    STSBackend.get_caller_identity = _caller_identity
    # moto finds the assumed role by a key of exactly 20 characters; the keys here are longer.
    BaseResponse.access_key_regex = re.compile(r"AWS.*(?P<access_key>(?<![A-Z0-9])[A-Z0-9]{20,}(?![A-Z0-9]))[:/]")


def _create_temporary_key(backend: IAMBackend) -> AccessKey:
    key = AccessKey(user_name=None, prefix="ASIA", account_id=backend.account_id)
    key.access_key_id += random_letters()
    _temporary_key_ids.add(key.access_key_id)
    backend.access_keys[key.access_key_id] = key
    return key


def _caller_identity(backend: STSBackend, access_key_id: str, region: str) -> tuple[str, str, str]:
    """Return user id, ARN and account of the caller. The server's key belongs to an IAM user named like the local user.

    Follows the API reference of GetCallerIdentity; moto returns `user/moto` in the STS namespace.
    """
    if access_key_id in _temporary_key_ids:
        assumed: tuple[str, str, str] = _moto_caller_identity(backend, access_key_id, region)
        return assumed
    return _USER_ID, f"arn:aws:iam::{backend.account_id}:user/{_user_name()}", backend.account_id


def _user_name() -> str:
    """Return the login name, in characters that IAM allows."""
    try:
        return re.sub(r"[^A-Za-z0-9_+=,.@-]", "-", getpass.getuser())[:64] or "local"
    except (KeyError, OSError):  # a user id without a name, for example in a container
        return "local"


def _is_cross_origin(environ: Mapping[str, Any], host: str) -> bool:
    origin = environ.get("HTTP_ORIGIN")
    site = environ.get("HTTP_SEC_FETCH_SITE", "none")
    return (origin is not None and origin.lower() != f"http://{host.lower()}") or site not in ("same-origin", "none")


def _access_key_id(environ: Mapping[str, Any]) -> str:
    """Return the access key id from the Authorization header, or from the query of a presigned URL."""
    signed = _SIGNED_WITH.match(environ.get("HTTP_AUTHORIZATION", ""))
    if signed:
        return str(signed[1] or signed[2])
    query = parse_qs(environ.get("QUERY_STRING", ""))
    scope: list[str] = query.get("X-Amz-Credential") or query.get("AWSAccessKeyId") or [""]
    return scope[0].split("/", 1)[0]
