"""EventBridge of the emulator: moto's API in front of matching and delivery of this package.

`emit` is what the other services of the emulator call; clients call PutEvents, or POST /trainyard/events. Rules
with a schedule are kept and never run.
"""

from infra.emulator.events.delivery import emit, has_rules, install, shutdown, undelivered

__all__ = ["emit", "has_rules", "install", "shutdown", "undelivered"]
