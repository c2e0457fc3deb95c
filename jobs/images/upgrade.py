"""Add releases with today's packages and make them the defaults: `trainyard images lock --upgrade`.

Gaudi's releases are Habana's, with versions that a person looks up. A release of another root image has the newest
Hugging Face libraries that fit its PyTorch and its Python. The laptop trains with the packages of `cpu`, so the other
images get the same libraries, each with its own PyTorch.
"""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from jobs.core.errors import TrainyardError
from jobs.core.images import Release, image, release, releases
from jobs.images.lock import IMAGES, TORCH_CPU_INDEX, locked, resolve

LIBRARIES = ("accelerate", "datasets", "tensorboard", "tokenizers", "torch", "transformers")
"""The packages that a release is chosen for. pyproject.toml has a pin of each."""

FIRST = "cpu"
"""The image whose packages the laptop has."""

_TRAINYARD = (sys.executable, "-c", "from jobs.cli import main; main()")


@dataclass(frozen=True)
class Upgrade:
    """The default release of a root image, and the one that follows."""

    before: Release
    after: Release
    versions: Mapping[str, tuple[str, str]]
    """The versions of each of LIBRARIES, before and after."""

    @property
    def changes(self) -> bool:
        return any(before != after for before, after in self.versions.values())


def newest(*, today: date, torch_index: str = TORCH_CPU_INDEX) -> list[Upgrade]:
    """Return the newest packages for each root image but Gaudi's. Raises TrainyardError if no index answers."""
    roots = sorted((root for root, own in IMAGES.items() if own.torch != "base"), key=lambda root: root != FIRST)
    found: list[Upgrade] = []
    for root in roots:
        row = release(of=root)
        same = (
            [f"{name}=={after}" for name, (_, after) in found[0].versions.items() if name != "torch"] if found else []
        )
        pins = resolve([*LIBRARIES, *same], row.python, index=torch_index if IMAGES[root].torch == "cpu" else None)
        now = locked(image(root), row)
        versions = {name: (_public(now[name]), _public(pins[name])) for name in LIBRARIES}
        after = replace(
            row,
            name=_name(root, today),
            pytorch=versions["torch"][1],
            transformers=versions["transformers"][1],
            accelerate=versions["accelerate"][1],
        )
        found.append(Upgrade(before=row, after=after, versions=versions))
    return found


def write(upgrades: Sequence[Upgrade], root: Path) -> None:
    """Write the releases that change anything to releases.toml, the Dockerfiles' defaults, and pyproject.toml's pins.

    `root`: the repository.
    """
    changed = [upgrade for upgrade in upgrades if upgrade.changes]
    rows = root / "images" / "releases.toml"
    text = rows.read_text()
    for upgrade in changed:
        text = _with_row(text, upgrade)
        for path in (root / "images").glob("*/Dockerfile"):
            default = f"ARG RELEASE={upgrade.before.name}\n"
            path.write_text(path.read_text().replace(default, f"ARG RELEASE={upgrade.after.name}\n"))
    rows.write_text(text)
    for name, (before, after) in next(
        (upgrade.versions for upgrade in changed if upgrade.after.image == FIRST), {}
    ).items():
        _replace_pin(root / "pyproject.toml", name, before, after)
    _forget_pins(root / "requirements.txt", [name for name in LIBRARIES if name != "torch"])


def run_steps(root: Path, upgrades: Sequence[Upgrade], *, torch_index: str) -> None:
    """Pin the laptop's packages, lock the new releases, and write their table in images/README.md.

    Each step is a separate process, because this one has read the files before they changed. Raises TrainyardError if
    a step fails; the steps can be repeated.
    """
    names = [upgrade.after.name for upgrade in upgrades if upgrade.changes]
    locks = [[*_TRAINYARD, "images", "lock", "all", name, "--torch-index", torch_index] for name in names]
    for step in [["make", "pins"], *locks]:
        done = subprocess.run(step, cwd=root, check=False, stdout=sys.stderr)
        if done.returncode:
            raise TrainyardError(
                f"{' '.join(step)} failed with exit code {done.returncode}", next_step="correct the error and repeat it"
            )
    table = subprocess.run(
        [sys.executable, "-m", "jobs.core.images", "--table"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    page = root / "images" / "README.md"
    begin, end = "<!-- releases -->\n", "<!-- /releases -->"
    text = page.read_text()
    before, rest = text.split(begin)
    page.write_text(f"{before}{begin}{table.strip()}\n{end}{rest.split(end)[1]}")


def _name(root: str, today: date) -> str:
    """Return a name for a release of this month that no release has."""
    month = f"{root}-{today:%Y.%m}"
    names = [month, *(f"{month}.{number}" for number in range(2, 100))]
    return next(name for name in names if name not in releases())


def _public(version: str) -> str:
    """Return a version without the name of its build: 2.13.0 for 2.13.0+cpu."""
    return version.partition("+")[0]


def _with_row(text: str, upgrade: Upgrade) -> str:
    """Return releases.toml with the new row before the old one, and the new default. Comments stay at the new row."""
    before, after = upgrade.before, upgrade.after
    heading = f'[releases."{before.name}"]\n'
    start, _, rest = text.partition(heading)
    own, blank, others = rest.partition("\n\n")
    row = own
    for name in ("pytorch", "transformers", "accelerate"):
        row = re.sub(rf'^{name} = ".*"', f'{name} = "{getattr(after, name)}"', row, flags=re.MULTILINE)
    own = re.sub(r'^why = ".*"', f'why = "the packages before {after.name}"', own, flags=re.MULTILINE)
    start = start.replace(f'\n{after.image} = "{before.name}"\n', f'\n{after.image} = "{after.name}"\n')
    return f'{start}[releases."{after.name}"]\n{row}\n\n{heading}{own}{blank}{others}'


def _replace_pin(path: Path, name: str, before: str, after: str) -> None:
    path.write_text(path.read_text().replace(f'"{name}=={before}"', f'"{name}=={after}"'))


def _forget_pins(path: Path, names: Sequence[str]) -> None:
    """Remove these packages from the pins. torch's line stays: its hashes come from several indexes."""
    gone = tuple(f"{name}==" for name in names)
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith(gone)))
