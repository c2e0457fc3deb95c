"""Symbolic links of folders stored on S3: which are stored, and that none restored from S3 leads outside."""

import os
from pathlib import Path

import pytest

from jobs.core.folder_listing import contents, make_links, shown_name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    root = tmp_path / "root"
    (root / "step-1/deep").mkdir(parents=True)
    (root / "step-1/deep/w").write_text("1")
    return root


@pytest.mark.parametrize(
    ("name", "target", "kept"),
    [
        ("latest", "step-1", "step-1"),
        ("latest", "{root}/step-1", "step-1"),
        ("latest", "./step-1/../step-1/deep/w", "step-1/deep/w"),
        ("step-1/best", "deep/../../step-1/deep/w", "deep/w"),
        ("latest", "nothing", None),
        ("step-1/deep/up", "../..", None),
        ("latest", "../outside/secret", None),
        ("latest", "../root/step-1/../../outside", None),
        ("latest", "/etc/hostname", None),
    ],
)
def test_inner_links_are_stored_and_restored(
    name: str, target: str, kept: str | None, root: Path, tmp_path: Path
) -> None:
    (root / name).symlink_to(target.format(root=root))
    found = contents(root)
    assert found.links.get(name) == kept
    assert set(found.files) == {"step-1/deep/w"}, "links are not followed"
    if kept is None:
        assert list(found.left_out) == [name]
        return
    again = tmp_path / "again"
    (again / "step-1/deep").mkdir(parents=True)
    (again / "step-1/deep/w").write_text("1")
    assert make_links(again, found.links) == {}
    assert os.path.realpath(again / name) == os.path.realpath(root / name).replace("/root/", "/again/")


@pytest.mark.parametrize(
    "links",
    [
        {"a": "/etc/hostname"},
        {"a": "../outside/secret"},
        {"step-1/a": "../../outside/secret"},
        {"../a": "step-1"},
        {"step-1/deep/up": "../..", "a": "step-1/deep/up/../outside"},
        {"x": "step-1", "x/deep/a": "../../../outside"},
        {"step-1": "../outside", "step-1/secret2": "secret"},
        {"a": "a\0b"},
        {"a": "b", "b": "a"},
        {"step-1": "step-2"},
    ],
)
def test_listed_link_cannot_lead_outside_or_replace_a_file(links: dict[str, str], root: Path, tmp_path: Path) -> None:
    refused = make_links(root, links)
    assert refused
    assert (root / "step-1/deep/w").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "root"]
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["secret"]
    for path in root.rglob("*"):
        assert os.path.realpath(path).startswith(f"{root}/"), path


def test_links_to_links_are_created_in_any_order(root: Path) -> None:
    assert make_links(root, {"a": "b", "b": "c", "c": "step-1"}) == {}
    assert (root / "a/deep/w").read_text() == "1"
    assert make_links(root, {"a": "b", "b": "c", "c": "step-1"}) == {}, "existing links are replaced"


def test_shown_name_has_only_printable_text() -> None:
    assert shown_name(os.fsdecode(b"caf\xe9\x1b[2J\n.txt")) == r"caf\xe9\x1b[2J\n.txt"
    assert len(shown_name("x" * 4000)) < 1100
