"""Puts a page together: template, styles, script, charts, and Vega, which draws them, in one file."""

import contextlib
import functools
import os
import secrets
import tempfile
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jobs.contract.display import printable
from jobs.report.charts import CONFIG

_FOLDER = Path(__file__).parent


def render(template: str, *, charts: Mapping[str, Any], now: datetime, live: bool = False, **context: Any) -> str:
    """Return the page that a template makes of the context. `charts`: those it has a place for, by the place's id.

    `live`: the page asks where it came from for newer content now and then.
    """
    from markupsafe import Markup

    page: str = (
        _environment()
        .get_template(template)
        .render(
            **context,
            charts={"config": CONFIG, "charts": charts},
            live=live,
            made_at=f"{now:%Y-%m-%d %H:%M} UTC",
            nonce=secrets.token_urlsafe(16),
            style=Markup(_own("style.css")),  # noqa: S704 - ours
            script=Markup(_own("page.js")),  # noqa: S704 - ours
            vega=Markup(_vega()),  # noqa: S704 - the library's
        )
    )
    return page


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        # No character that turns the direction of writing, or steers something, whoever wrote the text.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": True}
    return environment


@functools.cache
def _own(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, as the package vl-convert-python brings them."""
    import vl_convert

    # It takes a second to make, and is the same until another version of the package is installed.
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    kept = folder / f"vega-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return kept.read_text(encoding="utf-8")
    script = (
        vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed")
        .replace("</script", r"<\/script")
        .replace("<!--", r"<\!--")
    )
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as part:
            part.write(script)
        Path(part.name).replace(kept)
    return script
