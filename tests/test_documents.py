"""Check commands, specs and links of the pages. They are parsed, not run: `make demo` and other tests run them."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml
from typer.main import get_command

from jobs.cli.app import app
from jobs.spec.spec import parse_spec

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for part in ("images", "infra", "jobs", "skills") for page in ROOT.glob(f"{part}/**/*.md")),
    ]
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of this repository, in code blocks and in running text."""
    lines = [line.strip().removeprefix("$ ") for block in blocks(page, "(?:sh)?") for line in block.splitlines()]
    lines = [line for line in lines if re.match(r"(trainyard|make|python -m) [a-z]", line)]
    for line in [*lines, *re.findall(r"`(trainyard [a-z][^`…]*)`", page.read_text())]:
        words = shlex.split(line, comments=True)
        end = next((place for place, word in enumerate(words) if word in ("|", ">")), None)
        yield words[:end]


def error_of(words: list[str], targets: list[str]) -> str:
    """Return the error with which the program would refuse a command, or an empty string."""
    program, *rest = words
    if program == "make":
        return "" if rest[0] in targets else "no such target"
    if program == "python":
        return "" if importlib.util.find_spec(rest[1]) else "no such module"
    command, context = get_command(app), None
    try:
        while True:
            context = command.make_context(command.name or "trainyard", rest, parent=context)
            rest = [*context._protected_args, *context.args] if hasattr(command, "commands") else []
            if not rest:
                return ""
            command, rest = vars(command)["commands"][rest[0]], rest[1:]
    except Exception as error:  # noqa: BLE001 - any error means that the page is wrong
        # Running text may name a command without its arguments.
        return "" if type(error).__name__ == "MissingParameter" else repr(error)


def headings(page: Path) -> set[str]:
    lines = (line.lstrip("# ").lower() for line in page.read_text().splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", line).replace(" ", "-") for line in lines}


def test_commands_of_pages_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = [(page.name, words, error_of(words, targets)) for page in PAGES for words in commands(page)]
    assert len(found) > 100
    assert [each for each in found if each[-1]] == []


def test_specs_of_pages_are_valid() -> None:
    found = 0
    for page in PAGES:
        for document in (each for block in blocks(page, "yaml") for each in yaml.safe_load_all(block)):
            if isinstance(document, dict) and {"name", "job", "arguments"} <= document.keys():
                parse_spec(document, origin=str(page))
                found += 1
    assert found > 5


def test_links_of_pages_have_a_target() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
            linked = page.parent / target if target else page
            if not linked.exists() or (anchor and anchor not in headings(linked)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []
