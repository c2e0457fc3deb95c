"""Lambda of the embedded AWS: moto's API over functions that really run, as processes of this machine.

`function` is a function, `environment` a process that serves it, and `bootstrap` the program in it. `invocation` is
one run, and `asynchronous` runs what nobody waits for. `service` holds the operations of the API that lead there,
`cloudformation` the types of resources.
"""

from infra.emulator.functions import cloudformation
from infra.emulator.functions.asynchronous import check_settings, invoke_later, shutdown
from infra.emulator.functions.environment import NoSuchEnvironmentError
from infra.emulator.functions.environment import find as find_environment
from infra.emulator.functions.function import Function
from infra.emulator.functions.service import find, install

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
