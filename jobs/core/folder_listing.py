"""The symbolic links and modification times of a folder, which S3 cannot store.

Both are stored as JSON next to the files. Data from S3 is not trusted: a link that would lead out of its folder is
never created.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from jobs.core.locations import stays_below
from jobs.core.words import printable, shortened


class Listing(BaseModel):
    """The links and times of one folder. All names are relative to it."""

    links: dict[str, str] = {}
    """The target of each symbolic link, relative to the link's own folder."""
    times: dict[str, int] = {}
    """Modification time of each file and folder, in nanoseconds since the epoch."""


class Contents(NamedTuple):
    """The contents of a folder. All names are relative to it."""

    files: dict[str, os.stat_result]
    folders: dict[str, os.stat_result]
    links: dict[str, str]
    left_out: dict[str, str]
    """Everything that cannot be stored, with the reason."""


def contents(root: Path, *, part: Path | None = None, skipped: Callable[[str], bool] = lambda _: False) -> Contents:
    """List the folder `root`, or only its file or folder `part`, without following links.

    Folders are omitted if `skipped` returns True for their relative name.
    """
    found = Contents({}, {}, {}, {})
    waiting = [part or root]
    while waiting:
        path = waiting.pop()
        name = os.path.relpath(path, root)
        try:
            state = path.lstat()
            if stat.S_ISDIR(state.st_mode):
                if skipped(name):
                    continue
                waiting += [Path(entry.path) for entry in os.scandir(path)]
                if path != root:
                    found.folders[name] = state
            elif stat.S_ISREG(state.st_mode):
                found.files[name] = state
            elif not stat.S_ISLNK(state.st_mode):
                found.left_out[name] = "neither a file nor a folder"
            elif (target := inner_target(root, path)) is not None:
                found.links[name] = target
            else:
                found.left_out[name] = f"a link to {path.readlink()}"
        except FileNotFoundError:  # deleted since it was listed
            continue
        except OSError as error:
            found.left_out[name] = error.strerror or str(error)
    return found


def inner_target(root: Path, link: Path) -> str | None:
    """Return a link's target relative to the link's folder, or None if the link must not be stored or created.

    The target must exist inside `root`, and must not be a folder that contains the link.
    """
    if not link.exists():
        return None
    top, folder, leads_to = root.resolve(), link.parent.resolve(), link.resolve()
    target = folder / link.readlink()
    pointed = target.resolve() if target.name == ".." else target.parent.resolve() / target.name
    is_inside = top in leads_to.parents and top in pointed.parents
    return os.path.relpath(pointed, folder) if is_inside and leads_to not in (folder, *folder.parents) else None


def listing_of(links: Mapping[str, str], times: Mapping[str, int]) -> Listing:
    """Return the listing of a folder, without names that are not UTF-8, which JSON cannot represent."""
    return Listing(
        links={name: target for name, target in links.items() if _is_text(name + target)},
        times={name: time_ns for name, time_ns in times.items() if _is_text(name)},
    )


def make_links(root: Path, links: Mapping[str, str]) -> dict[str, str]:
    """Create the links that stay inside `root` and whose target exists. Return the other links with the reason.

    Existing links are replaced; existing files and folders are not.
    """
    refused = {name: "it leads out of its folder" for name, target in links.items() if not _stays_inside(name, target)}
    waiting = {name: target for name, target in sorted(links.items()) if name not in refused}
    made = True
    while made:
        made = False
        for name, target in list(waiting.items()):
            path = root / name
            if any(parent.is_symlink() for parent in path.parents if parent != root and root in parent.parents):
                refused[name] = "it is below another link"
            elif path.exists() and not path.is_symlink():
                refused[name] = "a file or folder of that name exists"
            elif not _create_parent(path) or not os.path.lexists(path.parent / target):
                continue  # the target may be a link that is created later
            else:
                path.unlink(missing_ok=True)
                path.symlink_to(target)
                if inner_target(root, path) is None:
                    path.unlink()
                    refused[name] = "it leads out of its folder"
            del waiting[name]
            made = True
    return refused | dict.fromkeys(waiting, "its target does not exist")


def set_times(root: Path, times: Mapping[str, int], *, folders: bool) -> None:
    """Set the modification times of files (or `folders`) below `root`, oldest first, so that ctime has that order."""
    for name, time_ns in sorted(times.items(), key=lambda item: item[1]):
        path = root / name
        if stays_below(name) and path.is_dir() == folders and not path.is_symlink():
            with contextlib.suppress(OSError, OverflowError):  # missing, or a time that the file system cannot store
                os.utime(path, ns=(time_ns, time_ns))


def _create_parent(path: Path) -> bool:
    """Create the parent folder, which is missing if it contains only links. Return False if a file is in the way."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        return False
    return True


def _stays_inside(name: str, target: str) -> bool:
    """Return whether a link's name and target, as stored, can only refer to something inside the folder."""
    parts = target.split("/")
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return (
        stays_below(name) and "\0" not in name + target and up <= name.count("/") and stays_below("/".join(parts[up:]))
    )


def shown_name(name: str) -> str:
    """Return a file name for a message, with escapes for invalid UTF-8 and control characters."""
    text = os.fsencode(name).decode(errors="backslashreplace")
    return shortened(printable(text).replace("\n", "\\n"))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
