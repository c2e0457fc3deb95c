"""An S3 as it answers a role of team `research`, which may list, read and write below `research/` only."""

from urllib.parse import parse_qs, urlsplit

from tests.support.jobs.faulty_proxy import FaultyProxy

DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class LimitedRole(FaultyProxy):
    """A proxy before an S3."""

    def _pass_on(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        url = urlsplit(path)
        _, _, key = url.path.lstrip("/").partition("/")
        prefix = key or parse_qs(url.query).get("prefix", [""])[0]
        status, answered, content = super()._pass_on(method, path, headers, body)
        if not prefix.startswith("research/") or (key and status == 404):
            return 403, {"Content-Length": str(len(DENIED))}, DENIED
        return status, answered, content
