"""Are the packages of an image those of its lock files and its release? Takes {name: version}; tells what differs.

A version that ends in `.*` is the beginning of one.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version


def found(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def fits(name: str, expected: str) -> bool:
    installed = found(name)
    if expected.endswith(".*"):
        return installed is not None and installed.startswith(expected[:-1])
    # A release says 2.6.0 where Habana's build is 2.6.0+hpu…
    return installed is not None and expected in (installed, installed.split("+")[0])


if __name__ == "__main__":
    wanted: dict[str, str] = json.loads(sys.argv[1])
    wrong = [
        f"{name} is {found(name) or 'missing'}, not {expected}"
        for name, expected in wanted.items()
        if not fits(name, expected)
    ]
    if wrong:
        sys.exit("; ".join(wrong))
    print(f"{len(wanted)} packages as locked")
