"""Count how many planted faults the tests find: two hundred changed lines, one at a time, across the product.

python -m tests.benchmarks.planted_faults                      all of planted_faults.json
python -m tests.benchmarks.planted_faults jobs/cli jobs/aws    only the faults in these folders

It changes and restores lines of the checkout that it runs in, so run it in a separate clone. For each fault it runs
the test file that mirrors the changed file, then test files that import it, then the rest of their folder, until a test
fails. A fault that needs longer than `--seconds` counts as not found. A line that no longer exists is skipped and
counted. The exit code is 1 if more than a tenth was not found.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.infra.synthesis import ROOT

FAULTS = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Fault:
    """A line of the product and its wrong replacement, both without indentation."""

    file: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        return ROOT / self.file

    def planted(self, text: str) -> str | None:
        """Return the file's text with the fault, or None unless the line occurs exactly once."""
        lines = text.splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.strip() == self.old]
        if len(places) != 1:
            return None
        lines[places[0]] = lines[places[0]].replace(self.old, self.new)
        return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.planted_faults", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("folders", nargs="*", default=[""], help="only faults in these folders or files (default: all)")
    parser.add_argument("--seconds", type=float, default=240, help="time limit for one fault (default: 240)")
    options = parser.parse_args()
    if subprocess.run(["git", "diff", "--quiet"], cwd=ROOT, check=False).returncode:
        parser.error("this checkout has uncommitted changes. Next: run it in a separate clone")
    ends: Counter[str] = Counter()
    faults = [Fault(**item) for item in json.loads(FAULTS.read_text())]
    for fault in [fault for fault in faults if fault.file.startswith(tuple(options.folders))]:
        end = _end(fault, options.seconds)
        ends[end] += 1
        print(f"{end:<10} {fault.file}: {fault.new}", flush=True)
    tried = sum(ends.values()) - ends["skipped"]
    found = tried - ends["not found"]
    print(f"{found} of {tried} found; {dict(ends)}")
    return int(found < 0.9 * tried)


def _end(fault: Fault, seconds: float) -> str:
    """Return which tests found the fault ("mirror", "importers" or "folder"), or "not found" or "skipped"."""
    text = fault.path.read_text() if fault.path.exists() else ""
    planted = fault.planted(text)
    if planted is None:
        return "skipped"
    fault.path.write_text(planted)
    try:
        for name, files in _tests(fault.file):
            if files and _fails(files, seconds):
                return name
    finally:
        fault.path.write_text(text)
    return "not found"


def _fails(files: list[str], seconds: float) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode in (1, 2)  # 2: a test file cannot be imported


def _tests(file: str) -> Iterator[tuple[str, list[str]]]:
    """Yield test files in three disjoint groups, nearest first."""
    changed = Path(file)
    folder = Path("tests", changed.parent)
    near = [path for path in (folder / f"test_{changed.stem}.py",) if (ROOT / path).exists()]
    yield "mirror", [str(path) for path in near]
    importers = [path for path in _importing(changed.with_suffix("")) if path not in near]
    yield "importers", [str(path) for path in importers]
    rest = sorted(path.relative_to(ROOT) for path in (ROOT / folder).glob("test_*.py"))
    yield "folder", [str(path) for path in rest if path not in near and path not in importers]


def _importing(module: Path) -> list[Path]:
    """Return the test files that import a module."""
    wanted = ".".join(module.parts)
    return [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if wanted in _imports(ast.parse(path.read_text()))
    ]


def _imports(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return names


if __name__ == "__main__":
    sys.exit(main())
