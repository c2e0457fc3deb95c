"""The map in the docstring of jobs.train.launch names all that is there, and who imports whom."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from jobs.train import launch

HERE = Path(launch.__file__).parent
MAP = str(launch.__doc__)


def rooms() -> list[str]:
    return [path.parent.name for path in HERE.glob("*/__init__.py")]


def imported_by(room: str) -> Iterator[str]:
    """Yield the modules and rooms of jobs.train that a room imports."""
    for path in (HERE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "jobs.train":
                yield from (name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("jobs.train."):
                yield str(node.module).split(".")[2]


def test_all_that_runs_in_the_container_is_on_the_map() -> None:
    modules = [path.name for folder in (HERE, HERE / "launcher") for path in folder.glob("[!_]*.py")]
    assert [name for name in (*modules, *(f"{room}/" for room in rooms())) if name not in MAP] == []


def test_a_room_imports_no_other_room_than_the_map_says() -> None:
    named = {
        room: re.findall(r"\w+", columns)
        for room, columns in re.findall(r"^      (\w+)/ {2,}((?:\w+(?:, )?)*)", MAP, re.M)
    }
    assert sorted(named) == sorted(rooms())
    wrong = {room: {*imported_by(room)} & {*rooms()} - {room, *named[room]} for room in rooms()}
    assert {room: found for room, found in wrong.items() if found} == {}
