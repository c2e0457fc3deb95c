"""The lists of a spec's keys, and the page that contains them."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from jobs.spec.catalog import CATALOG
from jobs.spec.spec import spec_json_schema

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


def test_editors_complete_and_check_the_ready_specs() -> None:
    folder = ROOT / "jobs/specs"
    schema = json.loads((folder / "schema.json").read_text())
    assert schema == spec_json_schema(), "run: trainyard schema > jobs/specs/schema.json"
    files = sorted(folder.glob("*.yaml"))
    assert len(files) > 20
    for file in files:
        assert file.read_text().startswith("# yaml-language-server: $schema=schema.json\n"), file.name
        for document in yaml.safe_load_all(file.read_text()):
            jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError, match="batch_size"):
        jsonschema.validate({**document, "batch_size": 32}, schema)
