"""Puts a page together: template, styles, script, charts, and Vega, which draws them, in one file."""

import functools
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jobs.core.words import printable
from jobs.report import vega
from jobs.report.charts import template as chart_template

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
            charts={"config": chart_template("config"), "charts": _printable(charts)},
            live=live,
            made_at=f"{now:%Y-%m-%d %H:%M} UTC",
            nonce=secrets.token_urlsafe(16),
            style=Markup(_own("style.css")),  # noqa: S704 - ours
            script=Markup(_own("page.js")),  # noqa: S704 - ours
            vega=Markup(vega.script()),  # noqa: S704 - the library's
        )
    )
    return page


def _printable(value: Any) -> Any:
    """Return what a chart is made of with `printable` texts: finalize below does not see into it."""
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
        # No character that turns the direction of writing, or steers something, whoever wrote the text.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": True}
    return environment


@functools.cache
def _own(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
