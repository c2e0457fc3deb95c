"""Lambda of the embedded AWS: moto's API over functions that really run, as processes of this machine.

`function` is a function, `invocation` one run of it, `asynchronous` what follows a run that nobody waits for,
`environment` a process that serves runs, `bootstrap` the program inside it, `cloudformation` the types of resources.
"""

from infra.emulator.functions import cloudformation
from infra.emulator.functions.asynchronous import check_settings, invoke_later, shutdown
from infra.emulator.functions.environment import NoSuchEnvironmentError
from infra.emulator.functions.environment import find as find_environment
from infra.emulator.functions.function import Function, find, install

__all__ = [
    "Function",
    "NoSuchEnvironmentError",
    "check_settings",
    "cloudformation",
    "find",
    "find_environment",
    "install",
    "invoke_later",
    "shutdown",
]
