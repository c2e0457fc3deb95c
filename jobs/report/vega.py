"""Vega, Vega-Lite and Vega-Embed as one script, as the package vl-convert-python has them.

Putting them together takes a second and a half. The script is kept until another version of the package is installed.
"""

import contextlib
import os
import tempfile
from importlib.metadata import version
from pathlib import Path


def script() -> str:
    """Return the script: the kept one, or one that is made now and kept if that is possible."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    kept = folder / f"vega-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return kept.read_text(encoding="utf-8")
    import vl_convert

    made: str = (
        vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed")
        .replace("</script", r"<\/script")
        .replace("<!--", r"<\!--")
    )
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as part:
            part.write(made)
        Path(part.name).replace(kept)
    return made
