"""Run every command of `trainyard` with hostile arguments, in this process and as separate processes."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from jobs.cli.app import app
from tests.support.fuzz import hostile
from tests.support.fuzz.findings import Nonsense, Round, draw_each
from tests.support.fuzz.specs import EXIT_CODES, reported
from tests.support.jobs.terminal import TRAINYARD

_REFUSED = {
    "acceptance": ("--max-usd", "-1"),
    "demo": ("--executor", "nothing"),
    "local up": ("--port", "65536"),
    "images": ("--release", "0.0.0"),
    "submit": ("--dry-run",),
    "resume": ("--dry-run",),
}
"""Extra arguments for commands that would otherwise start something, spend money or take minutes."""

AS_PROCESS = 20
"""Every 20th command line also runs as a process."""

Command = tuple[str, ...]


def fuzz(round_: Round, folder: Path, *, count: int, number: int) -> None:
    """Run `count` command lines, spread over all commands. They use the AWS that this process's environment names."""
    commands = dict(_commands())

    def look_at(line: Command) -> None:
        round_.look(line, lambda: _in_process(line))
        if round_.tried % AS_PROCESS == 0:
            shell = tuple(word.replace("\0", "") for word in line)  # the operating system accepts no NUL
            round_.look((*shell, "as a process"), lambda: _as_process(shell, folder))

    for turn, (name, parameters) in enumerate(commands.items()):
        if share := count // len(commands) + (turn < count % len(commands)):
            draw_each(_lines(name, parameters, round_.canary, folder), look_at, count=share, number=number + turn)


def _in_process(line: Command) -> bool:
    code, stdout = reported(lambda arguments: app(list(arguments), standalone_mode=False), line)
    if code == 0 and {"-o", "json"} <= set(line) and stdout:
        json.loads(stdout)
    return code == 0


def _as_process(line: Command, folder: Path) -> bool:
    words = [os.fsencode(TRAINYARD), *(word.encode("utf-8", "replace") for word in line)]
    done = subprocess.run(words, cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if b"Traceback" in done.stderr:
        raise RuntimeError(done.stderr.decode(errors="replace"))
    if done.returncode not in EXIT_CODES:
        raise Nonsense(f"exit code {done.returncode}")
    return done.returncode == 0


def _commands() -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each command, such as `images build`, and its parameters."""
    for name, command in sorted(vars(typer.main.get_command(app))["commands"].items()):
        below: Mapping[str, Any] = vars(command).get("commands", {})
        if not below:
            yield name, command.params
        for inner, inner_command in sorted(below.items()):
            yield f"{name} {inner}", inner_command.params


@st.composite
def _lines(draw: DrawFn, name: str, parameters: list[Any], canary: Path, folder: Path) -> Command:
    plain = ("json", "table", "1", "0.5", "7d", "research", "reviews", "cpu", str(folder), str(folder / "missing/file"))
    texts = (
        st.sampled_from([*hostile.texts(canary), *hostile.snippets(canary)])
        | st.sampled_from(plain)
        | st.text(max_size=30)
    )
    words: list[str] = []
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            words += draw(st.lists(texts, min_size=1, max_size=1 if parameter.nargs == 1 else 3))
        elif draw(st.integers(0, 3)) == 0:
            option = draw(st.sampled_from(parameter.opts))
            words += [option] if parameter.is_flag else [option, draw(texts)]
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        extra = draw(st.sampled_from(("--profile", "--region", "--stage", "--nonsense", "-o", "--", "-x")) | texts)
        words.insert(draw(st.integers(0, len(words))), extra)
    # Add them at both ends: a drawn `--port` must not override them, nor a drawn `--` turn them into arguments.
    refused = _REFUSED.get(name) or _REFUSED.get(name.partition(" ")[0], ())
    return (*name.split(), *refused, *words, *refused)
