"""Can the modules of an image be imported, all in one process as in a job? Takes their names."""

import importlib
import json
import sys
import time
from pathlib import Path


def complaint(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a module raises is what is told
        return f"import {module}: {type(error).__name__}: {error}".replace("\n", " ")
    return None


def compiled_anew(since: float) -> int:
    """How many of PyTorch's modules were compiled for this import: each container would do so before its first step."""
    found = 0
    for name, module in list(sys.modules.items()):
        cached = getattr(module, "__cached__", None)
        if isinstance(cached, str) and name.partition(".")[0] == "torch":
            path = Path(cached)
            found += not path.exists() or path.stat().st_mtime >= since
    return found


if __name__ == "__main__":
    modules: list[str] = json.loads(sys.argv[1])
    begun = time.time()
    importlib.import_module("torch")
    if number := compiled_anew(begun):
        sys.exit(f"{number} modules of PyTorch were compiled anew; images/shared/install-packages leaves them compiled")
    if complaints := [told for told in map(complaint, modules) if told]:
        sys.exit("; ".join(complaints))
    print(", ".join(modules))
