"""The job kinds by name: what jobs.spec.kinds has, one module a kind.

A new kind is a module there (its arguments and its row), an entrypoint under jobs/container and a ready spec under
jobs/specs; its job definitions follow from the row. Entrypoints are named as strings, so that nothing here imports
torch; a test resolves them.
"""

import importlib
import pkgutil

from jobs.core.errors import UsageError, did_you_mean
from jobs.spec import kinds
from jobs.spec.arguments import JobKind

_ROWS: list[JobKind] = [
    importlib.import_module(f"{kinds.__name__}.{module.name}").KIND for module in pkgutil.iter_modules(kinds.__path__)
]

CATALOG = {row.name: row for row in sorted(_ROWS, key=lambda row: row.name)}


def job_kind(name: str) -> JobKind:
    """The kind called `name`. Raises UsageError with the closest name if there is none."""
    try:
        return CATALOG[name]
    except KeyError:
        raise UsageError(f"job kind '{name}' not found{did_you_mean(name, CATALOG)}") from None
