"""The job kinds by name, collected from the modules of jobs.spec.kinds.

To add a kind, add a module there (arguments and `KIND`), an entrypoint under jobs/container and a spec under
jobs/specs; the job definitions follow from `KIND`. Entrypoints are strings, so that nothing here imports torch; a test
imports them.
"""

import importlib
import pkgutil

from jobs.core.errors import UsageError, did_you_mean
from jobs.spec import kinds
from jobs.spec.arguments import JobKind

_ROWS: list[JobKind] = [
    importlib.import_module(f"{kinds.__name__}.{module.name}").KIND for module in pkgutil.iter_modules(kinds.__path__)
]

_OTHER_NAMES = {
    "bert": "pretrain-mlm",
    "classify": "finetune-classification",
    "fine-tune": "finetune-classification",
    "predict": "evaluate",
    **dict.fromkeys(("custom", "python", "torchrun", "train", "training"), "script"),
    **dict.fromkeys(("dpo", "llm", "lora", "sft", "sft-lora"), "script"),
}
"""What people call kinds whose names are not similar."""

CATALOG = {row.name: row for row in sorted(_ROWS, key=lambda row: row.name)}


def job_kind(name: str) -> JobKind:
    """Return the kind called `name`. Raises UsageError with the closest name if there is none."""
    try:
        return CATALOG[name]
    except KeyError:
        meant = CATALOG.get(_OTHER_NAMES.get(name.lower(), ""))
        hint = f"; did you mean '{meant.name}' ({meant.summary})?" if meant else did_you_mean(name, CATALOG)
        raise UsageError(f"job kind '{name}' not found{hint}") from None
