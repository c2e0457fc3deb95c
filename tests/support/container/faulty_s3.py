"""A proxy between jobs and their S3, which adds latency, injects S3's errors, or removes a permission."""

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Literal, get_args

import pytest

from jobs.aws import s3 as object_store
from tests.support.jobs.proxies import Answer, Proxy

Fault = Literal[
    "InternalError", "SlowDown", "AccessDenied", "slow", "cut on the way", "cut before the answer", "cut in the answer"
]
"""The first three are S3's errors. `slow` delays the response by a second or two. The others close the connection
during the request, after S3 has processed it, or during the response."""

_STATUS = {"InternalError": 500, "SlowDown": 503, "AccessDenied": 403}


class FaultyS3(Proxy):
    """Forwards requests to `upstream` after `latency_seconds`. A `fraction` of them fails.

    The seed, the request and its number of repetitions decide which ones fail, so that the order of threads does not
    matter. `counts` has the number of requests by fault, including "none".
    """

    def __init__(self, upstream: str, *, fraction: float = 0.0, seed: int = 1, latency_seconds: float = 0.0) -> None:
        self.counts: Counter[str] = Counter()
        self.denies: Callable[[str, str], bool] = lambda _method, _path: False
        """Returns whether a request is denied, by method and path."""
        self.breaks: Callable[[str, str], Fault | None] = lambda _method, _path: None
        """Returns the fault of a request, if it must have one, by method and path."""
        self._fraction = fraction
        self._seed = seed
        self._latency_seconds = latency_seconds
        self._seen: Counter[str] = Counter()
        super().__init__(upstream)

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        time.sleep(self._latency_seconds)
        length = int(request.headers.get("Content-Length", 0))
        fault, chance = self._drawn(request)
        if fault == "cut on the way":
            request.rfile.read(length // 2)
            self._cut(request)
            return
        body = request.rfile.read(length)
        if len(body) < length:
            request.close_connection = True  # the client was killed; S3 stores no incomplete object either
            return
        if fault == "slow":
            time.sleep(chance.uniform(1, 2))
        if self.denies(request.command, request.path):
            self._answer(request, *_error("AccessDenied"))
        elif fault in _STATUS:
            self._answer(request, *_error(fault))
        else:
            answer = self._pass_on(*self.message(request, body))
            if fault == "cut before the answer":
                self._cut(request)
            else:
                self._answer(request, *answer, cut=fault == "cut in the answer")

    def _drawn(self, request: BaseHTTPRequestHandler) -> tuple[Fault | None, random.Random]:
        # Each multipart upload has a new id, which would draw different faults each time.
        asked = f"{request.command} {re.sub('research/[^/]+|uploadId=[^&]+', '', request.path)}"
        with self._lock:
            self._seen[asked] += 1
            chance = random.Random(f"{self._seed} {asked} {self._seen[asked]}")
            fault = self.breaks(request.command, request.path)
            if fault is None and chance.random() < self._fraction:
                fault = chance.choice(get_args(Fault))
            self.counts[fault or "none"] += 1
        return fault, chance


def try_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the pauses of this process before it retries a request."""
    monkeypatch.setattr(object_store, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))


def _error(code: str) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>injected</Message></Error>'
    return _STATUS[code], {"Content-Type": "application/xml"}, text.encode()
