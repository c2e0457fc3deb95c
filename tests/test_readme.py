"""The README's facts, held to what they are facts of."""

import re
from pathlib import Path

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


def test_its_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert targets
    assert [target for target in targets if not (README.parent / target).exists()] == []
