"""Render a page as one HTML file: template, styles, scripts, charts, and Vega, which draws them."""

import contextlib
import functools
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import unescape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jobs.core.words import printable
from jobs.report.charts import template as chart_template

_FOLDER = Path(__file__).parent

REFRESH_SECONDS = 5
"""Seconds after which a live page of a run asks for newer content."""


@dataclass(frozen=True)
class Tile:
    """One of the key figures at the top of a page."""

    label: str
    value: str
    beside: str = ""


def vega_script() -> str:
    """Return Vega as one script. It takes 1.5 s to build, so it is cached until vl-convert-python changes version."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    cached = folder / f"vega-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return cached.read_text(encoding="utf-8")
    import vl_convert

    script: str = (
        vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed")
        .replace("</script", r"<\/script")
        .replace("<!--", r"<\!--")
    )
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as part:
            part.write(script)
        Path(part.name).replace(cached)
    return script


def render(
    template: str,
    *,
    charts: Mapping[str, Any],
    now: datetime,
    live: bool = False,
    refresh_seconds: int = REFRESH_SECONDS,
    home: str = "",
    scripts: Sequence[str] = ("page.js",),
    **context: Any,
) -> str:
    """Return the page of a template. `charts` maps the ids of elements in the page to charts.

    A `live` page asks its server for newer content every `refresh_seconds`. `home`: address of the page of all runs,
    if the page is served together with it. `scripts`: files of this folder.
    """
    from markupsafe import Markup

    page: str = (
        _environment()
        .get_template(template)
        .render(
            **context,
            charts={"config": chart_template("config"), "charts": _printable(charts)},
            live=live,
            refresh_seconds=refresh_seconds,
            home=home,
            made_at=f"{now:%Y-%m-%d %H:%M} UTC",
            nonce=secrets.token_urlsafe(16),
            style=Markup(_own_file("style.css")),  # noqa: S704 - ours
            script=Markup("\n".join(map(_own_file, scripts))),  # noqa: S704 - ours
            vega=Markup(vega_script()) if charts else "",  # noqa: S704 - the library's
        )
    )
    return page


def security_policy(page: str) -> str:
    """Return the policy that a rendered page declares, for a server that also sends it as a header."""
    declared = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    return unescape(declared[1]) if declared else "default-src 'none'"


def _printable(value: Any) -> Any:
    """Make all strings of a chart `printable`, because `finalize` below does not reach into it."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, (list, tuple)) else value


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        # Remove characters that change the writing direction or control the page, because logs and data are untrusted.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": True}
    return environment


@functools.cache
def _own_file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
