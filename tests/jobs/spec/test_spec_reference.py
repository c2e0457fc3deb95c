"""The lists of a spec's keys, and the page that contains them."""

import subprocess
import sys
from pathlib import Path

from jobs.spec.catalog import CATALOG

ROOT = Path(__file__).parents[3]


def _printed() -> str:
    command = [sys.executable, "-m", "jobs.spec.spec_reference"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_page_contains_the_printed_lists() -> None:
    page = (ROOT / "jobs/docs/spec.md").read_text().partition("<!-- keys -->")[2].partition("<!-- /keys -->")[0]
    assert page.strip() == _printed().strip(), (
        "copy the output of python -m jobs.spec.spec_reference to jobs/docs/spec.md"
    )


def test_each_kind_lists_its_keys_and_differing_defaults() -> None:
    sections = _printed().split("**`arguments` of `")[1:]
    by_kind = {name: rows for name, _, rows in (section.partition("`: ") for section in sections)}
    assert list(by_kind) == list(CATALOG)
    assert "- `train_data`: " in by_kind["finetune-classification"]
    assert "learning_rate" not in by_kind["finetune-classification"]
    assert "- `learning_rate` (`0.0001`; > 0): " in by_kind["pretrain-mlm"]
    assert "- `data` (*required*): " in by_kind["pretrain-mlm"]
