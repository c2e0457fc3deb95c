"""Imports infra/settings.py for the programs that need it, so that a slip in that file ends in a message.

Such a program calls `load_or_exit` before it imports anything of infra: nearly all of it imports the settings.
"""

import importlib
import importlib.util
import re
import sys
import traceback
from dataclasses import __file__ as dataclasses_file
from dataclasses import fields
from types import FrameType

from jobs.contract.errors import ConfigurationError, did_you_mean

_NAME = "infra/settings.py"
_UNKNOWN_FIELD = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def load() -> None:
    """Raises ConfigurationError where Python cannot read the file, or stops at one of its lines."""
    try:
        importlib.import_module("infra.settings")
    except Exception as error:
        mistake = _mistake(error)
        if mistake is None:
            raise
        raise ConfigurationError(f"{_NAME}: {mistake}") from None


def load_or_exit() -> None:
    """The same for a program that starts: prints the mistake to stderr and ends with the exit code of settings."""
    try:
        load()
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def _mistake(error: Exception) -> str | None:
    """What the file has to be cured of; None where the error arose elsewhere, which is no mistake of its author."""
    spec = importlib.util.find_spec("infra.settings")
    path = spec and spec.origin
    if isinstance(error, SyntaxError):
        return f"{error.msg} (line {error.lineno})" if error.filename == path else None
    # dataclasses.replace() calls a row's class on the file's behalf.
    calls = [call for call in traceback.walk_tb(error.__traceback__) if call[0].f_code.co_filename != dataclasses_file]
    frame, line = calls[-1]
    if frame.f_code.co_filename != path:
        return None
    return f"{_unknown_field(error, frame) or f'{type(error).__name__}: {error}'} (line {line})"


def _unknown_field(error: Exception, frame: FrameType) -> str | None:
    found = _UNKNOWN_FIELD.search(str(error))
    row = frame.f_globals.get(found[1]) if found else None
    if not found or row is None:
        return None
    return f"{found[1]} has no field '{found[2]}'{did_you_mean(found[2], (field.name for field in fields(row)))}"
