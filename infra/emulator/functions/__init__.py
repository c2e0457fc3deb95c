"""Lambda of the emulator: moto's API over functions that really run, as processes of this machine.

`function` is a function, `invocation` runs it, in a process of `host`; `service` holds the operations of the API.
"""

from infra.emulator.functions.invocation import check_settings, invoke_later, shutdown
from infra.emulator.functions.service import find, install

__all__ = ["check_settings", "find", "install", "invoke_later", "shutdown"]
