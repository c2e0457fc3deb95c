"""Prices that AWS has said, kept on this machine, so that a plan a minute later need not ask again.

They lie in `~/.cache/trainyard/prices.json` (or below XDG_CACHE_HOME): by region, type and market, with the moment of
the answer. A file that cannot be read or written is no error: AWS is asked.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jobs.contract.prices import Quote


def quote(key: str, ask: Callable[[], Quote | None], fresh_seconds: float) -> Quote | None:
    """Return the kept quote where it is no older than `fresh_seconds`, and else what `ask` returns.

    A kept one says in its source when AWS was asked. None is not kept.
    """
    kept = _read().get(key) or {}
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        if 0 <= time.time() - kept["at"] < fresh_seconds:
            said = Quote(**kept["quote"])
            at = datetime.fromtimestamp(kept["at"], timezone.utc)
            return replace(said, source=f"{said.source}, asked at {at:%H:%M} UTC")
    found = ask()
    if found is not None:
        _write({**_read(), key: {"at": time.time(), "quote": asdict(found)}})
    return found


def _path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard" / "prices.json"


def _read() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(_path().read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _write(content: dict[str, Any]) -> None:
    path = _path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as part:
            json.dump(content, part)
        Path(part.name).replace(path)
