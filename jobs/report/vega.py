"""Vega, Vega-Lite and Vega-Embed as one script, as the package vl-convert-python brings them.

    python -m jobs.report.vega       put it together where this machine has not kept it yet

That takes a second and a half of a processor, and holds Python's lock all the while: `begin` does it in a process of
its own, beside what a command has to import and to fetch. What is kept is the same until another version of the package
is installed.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

_MAKE_SECONDS = 60.0

_making: list["subprocess.Popen[bytes]"] = []


def begin() -> None:
    """Have the script put together, unless it is kept; `script` waits for it."""
    if not _kept().is_file():
        quiet = subprocess.DEVNULL
        _making.append(
            subprocess.Popen([sys.executable, "-P", "-m", __name__], stdin=quiet, stdout=quiet, stderr=quiet)
        )


def script() -> str:
    """Return the script: the kept one, or, where it can be neither read nor written, one that is made here."""
    while _making:
        with contextlib.suppress(subprocess.TimeoutExpired):
            _making.pop().wait(_MAKE_SECONDS)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _kept().read_text(encoding="utf-8")
    return _made()


def _made() -> str:
    """Make the script, and keep it where that is possible."""
    import vl_convert

    made: str = (
        vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed")
        .replace("</script", r"<\/script")
        .replace("<!--", r"<\!--")
    )
    with contextlib.suppress(OSError):
        kept = _kept()
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=kept.parent, delete=False) as part:
            part.write(made)
        Path(part.name).replace(kept)
    return made


def _kept() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
    return folder / f"vega-{version('vl-convert-python')}.js"


if __name__ == "__main__":
    _made()
