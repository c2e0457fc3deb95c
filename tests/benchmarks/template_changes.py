"""Compare the synthesized templates with those of another revision, to check a change that should not affect them.

python -m tests.benchmarks.template_changes REVISION          print a diff per stack; exits 1 if there is one
python -m tests.benchmarks.template_changes REVISION --brief  print only the numbers of added and removed lines

Each revision synthesizes its own variants: the default stage, everything switched on, and an existing VPC. Metadata and
asset hashes are ignored, because they change with every edit of a comment.
"""

import argparse
import difflib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.support.infra.synthesis import ROOT

VARIANTS = """
import json
from infra.settings import STAGES
from tests.support.infra.synthesis import templates_of
from tests.support.infra.variants import ALL, CUDA, EXISTING_VPC
from dataclasses import replace
cuda = replace(CUDA[0], name="cuda", vpc=EXISTING_VPC.vpc, region=None, max_multinode_nodes=0)
print(json.dumps({k: v for row in (STAGES["dev"], ALL, cuda) for k, v in templates_of(row).items()}))
"""
ASSET_HASH = re.compile(r'[0-9a-f]{64}|(?<="Value": ")[0-9a-f]{12}[a-z0-9-]*(?=")')


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.template_changes", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("revision", help="the git revision to compare with")
    parser.add_argument("--brief", action="store_true", help="print line counts instead of diffs")
    options = parser.parse_args()
    before, after = _templates_at(options.revision), _templates(ROOT)
    changed = 0
    for name in sorted({*before, *after}):
        lines = list(
            difflib.unified_diff(before.get(name, []), after.get(name, []), f"{name} before", name, lineterm="")
        )
        changed += bool(lines)
        gained = sum(line.startswith("+") for line in lines[2:])
        print(f"{name}: +{gained} -{sum(line.startswith('-') for line in lines[2:])}")
        if lines and not options.brief:
            print("\n".join(lines))
    print(f"{changed} of {len({*before, *after})} templates differ")
    return 1 if changed else 0


def _templates_at(revision: str) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, revision], check=True)
        try:
            return _templates(tree)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def _templates(tree: Path) -> dict[str, list[str]]:
    """Synthesize with the tree's code in a separate process, and return each template as lines of YAML."""
    program = [sys.executable, "-c", VARIANTS]
    text = subprocess.run(program, cwd=tree, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found: dict[str, Any] = json.loads(ASSET_HASH.sub("<asset>", text.stdout))
    return {name: yaml.safe_dump(_without_metadata(template)).splitlines() for name, template in found.items()}


def _without_metadata(value: Any) -> Any:
    match value:
        case dict():
            return {
                key: _without_metadata(inner) for key, inner in value.items() if key not in {"Metadata", "CDKMetadata"}
            }
        case list():
            return [_without_metadata(inner) for inner in value]
    return value


if __name__ == "__main__":
    sys.exit(main())
