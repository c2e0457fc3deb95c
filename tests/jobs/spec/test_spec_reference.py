"""The tables of a spec's keys, and the page that holds them."""

import subprocess
import sys
from pathlib import Path

from jobs.spec.catalog import CATALOG

ROOT = Path(__file__).parents[3]


def _printed() -> str:
    command = [sys.executable, "-m", "jobs.spec.spec_reference"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_page_holds_what_the_module_prints() -> None:
    held = (ROOT / "jobs/docs/spec.md").read_text().partition("<!-- keys -->")[2].partition("<!-- /keys -->")[0]
    assert held.strip() == _printed().strip(), "python -m jobs.spec.spec_reference, into jobs/docs/spec.md"


def test_each_kind_has_its_own_keys_and_of_the_recipe_only_what_it_has_otherwise() -> None:
    sections = _printed().split("**`arguments` of `")[1:]
    by_kind = {name: rows for name, _, rows in (section.partition("`: ") for section in sections)}
    assert list(by_kind) == list(CATALOG)
    assert "- `train_data`: " in by_kind["finetune-classification"]
    assert "learning_rate" not in by_kind["finetune-classification"]
    assert "- `learning_rate` (`0.0001`; > 0): " in by_kind["pretrain-mlm"]
    assert "- `data` (*needed*): " in by_kind["pretrain-mlm"]
