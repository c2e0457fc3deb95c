"""The README's facts, held to what they are facts of."""

import re
from pathlib import Path

import pytest

from jobs.contract.releases import release

README = Path(__file__).parent.parent / "README.md"


def test_it_names_the_default_release() -> None:
    assert f"a row ({release().name} where it says nothing" in " ".join(README.read_text().split())


def test_it_fits_a_newcomers_patience() -> None:
    assert len(README.read_text().splitlines()) < 200


@pytest.mark.parametrize(
    "path", ["README.md", "images/README.md", "infra/README.md", "infra/emulator/README.md", "jobs/README.md"]
)
def test_links_lead_somewhere(path: str) -> None:
    page = README.parent / path
    text = page.read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text)
    assert targets or path.endswith("emulator/README.md")
    assert [target for target, _ in targets if target and not (page.parent / target).exists()] == []
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.splitlines()}
    assert [anchor for target, anchor in targets if anchor and not target and anchor not in headings] == []
