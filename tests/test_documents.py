"""The commands and specs that the pages show are ones that the command line takes.

Here they are read, not run: `make demo` and the tests of each part run what they say.
"""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from jobs.cli.app import app
from jobs.contract.spec import parse_spec

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("images/**/*.md"), *ROOT.glob("infra/**/*.md"), *ROOT.glob("jobs/**/*.md")]
)
CASES = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Return the words of each line of a block that calls what this repository installs."""
    found = [line.strip().removeprefix("$ ") for block in blocks(page, "(?:sh)?") for line in block.splitlines()]
    inline = re.findall(r"`(trainyard [a-z][^`…]*)`", page.read_text())
    lines = [line for line in found if re.match(r"(trainyard|make|python -m) [a-z]", line)]
    return [shlex.split(line, comments=True) for line in (*lines, *inline)]


def read_by_command_line(words: list[str]) -> None:
    """Parse the words as `trainyard` would. Raises click's UsageError, or SystemExit, where it would refuse them."""
    command, context = get_command(app), None
    while True:
        context = command.make_context(command.name or "trainyard", words, parent=context)
        if not hasattr(command, "commands"):
            return
        words = [*context._protected_args, *context.args]
        if not words:
            return
        command = command.commands[words[0]]
        words = words[1:]


@CASES
def test_each_command_of_a_page_is_one_that_there_is(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, *words in commands(page):
        if program == "make":
            assert words[0] in targets, words
        elif program == "python":
            assert importlib.util.find_spec(words[1]), words
        else:
            try:
                read_by_command_line(words[: words.index("|")] if "|" in words else words)
            except Exception as error:  # noqa: BLE001 - whatever it is, the page is wrong
                # A sentence may name a command without its arguments.
                if type(error).__name__ != "MissingParameter":
                    pytest.fail(f"trainyard {shlex.join(words)}: {error!r}")


@CASES
def test_each_spec_of_a_page_is_valid(page: Path) -> None:
    for block in blocks(page, "yaml"):
        for document in yaml.safe_load_all(block):
            if isinstance(document, dict) and {"name", "job", "arguments"} <= document.keys():
                parse_spec(document, origin=str(page))
