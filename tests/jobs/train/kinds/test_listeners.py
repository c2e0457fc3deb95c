"""Every kind of job is launched by a test that looks for sockets which others could connect to."""

import ast
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest

from jobs.contract.catalog import CATALOG
from tests.support.train.launching import Run

TESTS = Path(__file__).parents[3]

ANOTHER_WAY = {"notebook": "jobs/client/test_notebook.py"}
"""Kinds that Batch starts in their test, which looks itself; the others are `Run`s, all of which are watched."""

EXPOSED = "import socket, time; listening = socket.create_server(('0.0.0.0', 0)); time.sleep(1)"


@cache
def launched_kinds() -> frozenset[str]:
    """Return the kinds that a test starts as a `Run`, on one node."""
    return frozenset(
        kind for path in (TESTS / "jobs/train").rglob("test_*.py") for kind in _kinds_in(ast.parse(path.read_text()))
    )


def _kinds_in(module: ast.Module) -> list[str]:
    constants = {
        target.id: statement.value.value
        for statement in module.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for call in ast.walk(module):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr not in ("start", "attempt"):
            continue
        for keyword in call.keywords:
            if keyword.arg == "kind" and isinstance(keyword.value, ast.Constant):
                found.append(keyword.value.value)
            if keyword.arg == "kind" and isinstance(keyword.value, ast.Name) and keyword.value.id in constants:
                found.append(constants[keyword.value.id])
        if {keyword.arg for keyword in call.keywords} & {"nproc", "attempt", "expect"} and not any(
            keyword.arg == "kind" for keyword in call.keywords
        ):
            found.append("finetune-classification")  # what a Run starts where nothing is said
    return [str(kind) for kind in found]


@pytest.mark.parametrize("kind", sorted(CATALOG))
def test_the_listeners_of_every_kind_are_looked_at(kind: str) -> None:
    if kind in ANOTHER_WAY:
        assert "CONN_LISTEN" in (TESTS / ANOTHER_WAY[kind]).read_text()
        assert kind not in launched_kinds()
    else:
        assert kind in launched_kinds()


def test_a_socket_that_is_open_for_a_moment_fails_the_run(run: Run) -> None:
    launched = run.start(program=("-c", EXPOSED))
    with pytest.raises(AssertionError, match=r"0\.0\.0\.0"):
        launched.wait()


@pytest.mark.parametrize("has_ranks", [False, True])
def test_ranks_that_run_without_a_listener_to_be_seen_fail_the_run(run: Run, *, has_ranks: bool) -> None:
    rank = "import os, subprocess; subprocess.run(['sleep', '1.5'], env={**os.environ, 'RANK': '0'})"
    launched = run.start(program=("-c", rank if has_ranks else rank.replace("RANK", "NONE")))
    with pytest.raises(AssertionError, match="no listening socket was seen") if has_ranks else nullcontext():
        assert launched.wait() == 0
