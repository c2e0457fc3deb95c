"""What a folder holds besides the bytes of its files: symbolic links inside it, and when each part was last changed.

S3 has neither, so both are kept as JSON beside the files. What comes from S3 is not trusted: no link is made that leads
out of its folder.
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
    """When each file and folder was last changed, in nanoseconds since the epoch."""


class Contents(NamedTuple):
    """What was found in a folder. All names are relative to it."""

    files: dict[str, os.stat_result]
    folders: dict[str, os.stat_result]
    links: dict[str, str]
    left_out: dict[str, str]
    """Why each of the rest cannot be kept."""


def contents(root: Path, *, part: Path | None = None, skipped: Callable[[str], bool] = lambda _: False) -> Contents:
    """List the folder `root`, or only the file or folder `part` of it. Links are not followed.

    Folders whose relative name is `skipped` are not listed.
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
        except FileNotFoundError:  # removed since it was listed
            continue
        except OSError as error:
            found.left_out[name] = error.strerror or str(error)
    return found


def inner_target(root: Path, link: Path) -> str | None:
    """Return what a link points to, relative to its folder; None unless that exists inside `root`.

    A link to a folder that contains the link counts as leading nowhere.
    """
    if not link.exists():
        return None
    top, folder, leads_to = root.resolve(), link.parent.resolve(), link.resolve()
    target = folder / link.readlink()
    pointed = target.resolve() if target.name == ".." else target.parent.resolve() / target.name
    is_inside = top in leads_to.parents and top in pointed.parents
    return os.path.relpath(pointed, folder) if is_inside and leads_to not in (folder, *folder.parents) else None


def listing_of(links: Mapping[str, str], times: Mapping[str, int]) -> Listing:
    """Return the listing of a folder, without names that JSON cannot hold, since they are not UTF-8."""
    return Listing(
        links={name: target for name, target in links.items() if _is_text(name + target)},
        times={name: time_ns for name, time_ns in times.items() if _is_text(name)},
    )


def make_links(root: Path, links: Mapping[str, str]) -> dict[str, str]:
    """Make those of the links that stay inside `root` and whose target exists. Return why each of the rest was not.

    A link that is there already is replaced, a file or a folder is not.
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
                refused[name] = "there is something else of that name"
            elif not _has_folder(path) or not os.path.lexists(path.parent / target):
                continue  # it may be a link that is yet to be made
            else:
                path.unlink(missing_ok=True)
                path.symlink_to(target)
                if inner_target(root, path) is None:
                    path.unlink()
                    refused[name] = "it leads out of its folder"
            del waiting[name]
            made = True
    return refused | dict.fromkeys(waiting, "what it points to is not there")


def set_times(root: Path, times: Mapping[str, int], *, folders: bool) -> None:
    """Set when the files below `root` were last changed, or the `folders`: the oldest first, so that ctime agrees."""
    for name, time_ns in sorted(times.items(), key=lambda item: item[1]):
        path = root / name
        if stays_below(name) and path.is_dir() == folders and not path.is_symlink():
            with contextlib.suppress(OSError, OverflowError):  # it is not there, or no time of this file system
                os.utime(path, ns=(time_ns, time_ns))


def _has_folder(path: Path) -> bool:
    """Make the folder of a file: one that held nothing but links is not there. Return False where a file is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        return False
    return True


def _stays_inside(name: str, target: str) -> bool:
    """Return whether a link's name and target, as they were read, can only mean something inside the folder."""
    parts = target.split("/")
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return (
        stays_below(name) and "\0" not in name + target and up <= name.count("/") and stays_below("/".join(parts[up:]))
    )


def shown_name(name: str) -> str:
    """Return a file's name for a message, with escapes for bytes that are not UTF-8 and for control characters."""
    text = os.fsencode(name).decode(errors="backslashreplace")
    return shortened(printable(text).replace("\n", "\\n"))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
