"""The README's facts, held to what they are facts of."""

import re
from pathlib import Path

import pytest

from jobs.contract.acceptance import STEPS
from jobs.contract.releases import release

README = Path(__file__).parent.parent / "README.md"
JOBS_PAGES = README.parent / "jobs/docs"
INFRA_PAGES = README.parent / "infra/docs"
IMAGES_PAGES = README.parent / "images/docs"


def headings(page: Path) -> set[str]:
    lines = page.read_text().splitlines()
    return {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in lines if line.startswith("#")
    }


def test_it_names_the_default_release() -> None:
    assert f"a row ({release().name} where it says nothing" in " ".join(README.read_text().split())


def test_its_table_of_what_is_proven_names_each_step_of_the_acceptance_and_no_other() -> None:
    section = README.read_text().partition("## What is proven here, and what is not\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[3] for line in section.splitlines() if line.startswith("|")]
    assert {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)} == set(STEPS)


def test_it_fits_a_newcomers_patience() -> None:
    assert len(README.read_text().splitlines()) < 150


@pytest.mark.parametrize(
    "path",
    [
        *("README.md", "images/README.md", "infra/README.md", "infra/emulator/README.md", "jobs/README.md"),
        *(
            str(page.relative_to(README.parent))
            for page in sorted([*JOBS_PAGES.glob("*.md"), *INFRA_PAGES.glob("*.md"), *IMAGES_PAGES.glob("*.md")])
        ),
    ],
)
def test_links_lead_somewhere(path: str) -> None:
    page = README.parent / path
    text = page.read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text)
    assert [target for target, _ in targets if target and not (page.parent / target).exists()] == []
    for target, anchor in targets:
        there = page.parent / target if target else page
        assert not anchor or anchor in headings(there), f"{target}#{anchor}"


@pytest.mark.parametrize("pages", [JOBS_PAGES, INFRA_PAGES, IMAGES_PAGES], ids=["jobs", "infra", "images"])
def test_each_page_of_a_folder_is_in_its_table(pages: Path) -> None:
    table = (pages.parent / "README.md").read_text()
    assert [page.name for page in pages.glob("*.md") if f"](docs/{page.name}" not in table] == []


def test_the_page_of_commands_has_each_of_them() -> None:
    from typer.main import get_command

    from jobs.cli.app import app

    page = (JOBS_PAGES / "commands.md").read_text()
    assert [name for name in get_command(app).commands if f"`trainyard {name}" not in page] == []  # type: ignore[attr-defined]
