"""Load infra/settings.py, so that a slip in that file ends in a message that names its line."""

import importlib
import importlib.util
import re
import traceback
from dataclasses import __file__ as dataclasses_file
from dataclasses import fields
from types import FrameType

from infra.stages.model import Stage
from jobs.core.errors import ConfigurationError, did_you_mean

SETTINGS = "infra.settings"
_UNKNOWN_FIELD = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def load() -> dict[str, Stage]:
    """Return the stages of the settings, unchecked.

    Raises ConfigurationError where Python cannot read the file, or stops at one of its lines.
    """
    try:
        stages: dict[str, Stage] = importlib.import_module(SETTINGS).STAGES
    except Exception as error:
        mistake = _mistake(error)
        if mistake is None:
            raise
        raise ConfigurationError(f"infra/settings.py: {mistake}") from None
    return stages


def _mistake(error: Exception) -> str | None:
    """Say what is wrong with the file; None where the error arose in other code, which its author cannot mend there."""
    spec = importlib.util.find_spec(SETTINGS)
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
