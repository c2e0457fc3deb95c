"""Lambda of the embedded AWS: moto's API over functions that really run, as processes of this machine.

`function` is a function, `invocation` one run of it, `asynchronous` what follows a run that nobody waits for,
`bootstrap` the program inside its process, `cloudformation` the types of resources.
"""

from infra.emulator.functions import cloudformation
from infra.emulator.functions.asynchronous import check_settings, invoke_later, shutdown
from infra.emulator.functions.function import Function, find, install
from infra.emulator.functions.invocation import InvocationError, note_result, note_started, work_of

__all__ = [
    "Function",
    "InvocationError",
    "check_settings",
    "cloudformation",
    "find",
    "install",
    "invoke_later",
    "note_result",
    "note_started",
    "shutdown",
    "work_of",
]
