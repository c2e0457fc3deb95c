"""Every command of `trainyard` with hostile arguments: in this process as its script runs it, and as processes."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from jobs.cli.app import app
from tests.support.fuzz import hostile
from tests.support.fuzz.findings import Nonsense, Round, draw_each
from tests.support.fuzz.specs import EXIT_CODES, reported
from tests.support.jobs.terminal import TRAINYARD

_REFUSED = {
    "acceptance": ("--max-usd", "-1"),
    "demo": ("--executor", "nothing"),
    "local up": ("--port", "65536"),
    "images build": ("--release", "0.0.0"),
    "images test": ("--release", "0.0.0"),
    "images push": ("--release", "0.0.0"),
    "images sbom": ("--release", "0.0.0"),
    "submit": ("--dry-run",),
    "resume": ("--dry-run",),
}
"""What every call of a command gets that would start something, spend something or take minutes."""

_SYNTHESISES = "--idle"
"""The option of `costs` that counts a stage's cost from its templates: it takes ten seconds to make them, each time."""

Command = tuple[str, ...]


def fuzz(round_: Round, folder: Path, *, count: int, number: int, every_as_process: int = 0) -> None:
    """Give `count` command lines to the commands, in turn; every so many of them to a process as well.

    The environment of this process says which AWS they talk to.
    """
    commands = dict(_commands())

    def look_at(line: Command) -> None:
        round_.look(line, lambda: _in_process(line))
        if every_as_process and round_.tried % every_as_process == 0:
            # The operating system takes no NUL, and one argument of 128 KiB at most.
            shell = tuple(word.replace("\0", "") for word in line)
            round_.look((*shell, "as a process"), lambda: _as_process(shell, folder))

    # Each command gets its share, however many options others have.
    for turn, (name, parameters) in enumerate(commands.items()):
        share = count // len(commands) + (turn < count % len(commands))
        if share:
            draw_each(_lines(name, parameters, round_.canary, folder), look_at, count=share, number=number + turn)


def _in_process(line: Command) -> bool:
    code, stdout = reported(lambda arguments: app(list(arguments), standalone_mode=False), line)
    if code == 0 and {"-o", "json"} <= set(line) and stdout:
        json.loads(stdout)
    return code == 0


def _as_process(line: Command, folder: Path) -> bool:
    done = subprocess.run(
        [
            os.fsencode(TRAINYARD),
            *(word.encode("utf-8", "surrogateescape" if _is_bytes(word) else "replace") for word in line),
        ],
        cwd=folder,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if b"Traceback" in done.stderr:
        raise RuntimeError(done.stderr.decode(errors="replace"))
    if done.returncode not in EXIT_CODES:
        raise Nonsense(f"exit code {done.returncode}")
    return done.returncode == 0


def _is_bytes(word: str) -> bool:
    return all(not "\ud800" <= character <= "\udfff" or "\udc80" <= character <= "\udcff" for character in word)


def _commands() -> Iterator[tuple[str, list[Any]]]:
    """Yield each command's name, `images build`, with its parameters."""
    group = typer.main.get_command(app)
    for name, command in sorted(vars(group)["commands"].items()):
        below: Mapping[str, Any] = vars(command).get("commands", {})
        if not below:
            yield name, command.params
        for inner, inner_command in sorted(below.items()):
            yield f"{name} {inner}", inner_command.params


@st.composite
def _lines(draw: DrawFn, name: str, parameters: list[Any], canary: Path, folder: Path) -> Command:
    texts = _texts(canary, folder)
    words: list[str] = []
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            words += draw(st.lists(texts, min_size=1, max_size=1 if parameter.nargs == 1 else 3))
        elif draw(st.integers(0, 3)) == 0 and _SYNTHESISES not in parameter.opts:
            option = draw(st.sampled_from(parameter.opts))
            words += [option] if parameter.is_flag else [option, draw(texts)]
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        extra = draw(st.sampled_from(("--profile", "--region", "--stage", "--nonsense", "-o", "--", "-x")) | texts)
        words.insert(draw(st.integers(0, len(words))), extra)
        if extra.startswith("--") and draw(st.booleans()):
            words.insert(words.index(extra) + 1, draw(texts))
    # First and last: a `--port` that was drawn must not take the refused one's place, nor a `--` make it an argument.
    refused = _REFUSED.get(name, ())
    return (*name.split(), *refused, *words, *refused)


def _texts(canary: Path, folder: Path) -> SearchStrategy[str]:
    missing = folder / "missing" / "file"
    plain = (
        "json",
        "table",
        "1",
        "0.5",
        "7d",
        "research",
        "reviews",
        "cpu",
        "gaudi-notebook",
        str(folder),
        str(missing),
    )
    return (
        st.sampled_from([*hostile.texts(canary), *hostile.snippets(canary)])
        | st.sampled_from(plain)
        | st.text(max_size=30)
    )
