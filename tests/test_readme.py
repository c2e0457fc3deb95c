"""The README's facts, held to what they are facts of."""

import re
from pathlib import Path

import pytest

from jobs.releases import release, releases

README = Path(__file__).parent.parent / "README.md"


def test_the_table_of_releases_is_that_of_the_rows() -> None:
    rows = {
        row.name: [
            f"**{row.name}** (default)" if row.name == release().name else row.name,
            ", ".join(str(generation) for generation in row.gaudi),
            row.os.replace("ubuntu", "Ubuntu "),
            *(row.python, row.pytorch, row.optimum_habana, row.transformers),
        ]
        for row in releases().values()
    }
    lines = [line for line in README.read_text().splitlines() if re.match(r"\| \**\d", line)]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == list(rows.values())


def test_it_fits_a_newcomers_patience() -> None:
    assert len(README.read_text().splitlines()) < 200


@pytest.mark.parametrize("path", ["README.md", "infra/README.md", "infra/emulator/README.md"])
def test_links_lead_somewhere(path: str) -> None:
    page = README.parent / path
    text = page.read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text)
    assert targets or path.endswith("emulator/README.md")
    assert [target for target, _ in targets if target and not (page.parent / target).exists()] == []
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.splitlines()}
    assert [anchor for target, anchor in targets if anchor and not target and anchor not in headings] == []
