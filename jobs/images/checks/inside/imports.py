"""Can the modules of an image be imported, all in one process as in a job? Takes their names."""

import importlib
import json
import sys


def complaint(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a module raises is what is told
        return f"import {module}: {type(error).__name__}: {error}".replace("\n", " ")
    return None


if __name__ == "__main__":
    modules: list[str] = json.loads(sys.argv[1])
    if complaints := [told for told in map(complaint, modules) if told]:
        sys.exit("; ".join(complaints))
    print(", ".join(modules))
