"""`trainyard images list`: the images on this machine, and what a stage has of them."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text

from jobs.aws.connection import Aws
from jobs.aws.errors import explain
from jobs.cli import tables
from jobs.core import images as hierarchy
from jobs.core.errors import TrainyardError
from jobs.core.git import image_tag, source_revision
from jobs.core.images import release
from jobs.core.words import duration
from jobs.images import engine
from jobs.images.inventory import LocalImage, RemoteImage, local_images, recorded_images, remote_images
from jobs.images.stage_images import StageImages

_NEWEST = 5
"""The number of an image's tags in a stage that the table shows."""

_STATE_STYLES = {"current": "green", "outdated": "yellow"}

AnswerT = TypeVar("AnswerT")


def list_images(aws: Aws, stage: str, *, release_name: str | None, output: str) -> None:
    """Run `trainyard images list`, of the stage's release if no other is named.

    What cannot be asked is named, and the rest shown.
    """
    row = release(release_name)
    unknown: dict[str, str] = {}
    revision = _ask("sources", source_revision, unknown)
    there = _ask("stage", lambda: StageImages.read(aws, stage, release_name), unknown)
    recorded: Mapping[str, str | None] = recorded_images(there) if there else {}
    pushed = (there and _ask("stage", lambda: remote_images(aws, there), unknown)) or {}
    row = release(there.release) if there else row
    local = _ask("engine", lambda: local_images(engine.connect(), row.name, revision=revision), unknown) or {}
    rows = [
        _row(name, local.get(name), recorded, pushed.get(name, ()), revision=revision, unknown=unknown)
        for name in hierarchy.images()
    ]
    if output == "json":
        tag = image_tag(row.name, revision) if revision else None
        tables.print_json({"release": row.name, "tag": tag, "stage": stage, "unknown": unknown, "images": rows})
        return
    console = tables.stderr()
    console.print(f"release {row.name}, revision of the sources {revision or 'not known'}")
    for about, reason in unknown.items():
        console.print(f"{about} not asked: {reason}")
    tables.show(_table(rows, unknown), on=tables.stdout())


def _ask(about: str, question: Callable[[], AnswerT], unknown: dict[str, str]) -> AnswerT | None:
    """Return the answer, or None with the reason in `unknown`."""
    try:
        return question()
    except TrainyardError as error:
        unknown[about] = str(error.args[0])
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        unknown[about] = str(explained.args[0])
    return None


def _row(
    name: str,
    local: LocalImage | None,
    recorded: Mapping[str, str | None],
    pushed: Sequence[RemoteImage],
    *,
    revision: str | None,
    unknown: Mapping[str, str],
) -> dict[str, Any]:
    """Return one image as JSON; None stands for what could not be asked, and for what there is not."""
    uri = recorded.get(name)
    return {
        "image": name,
        "tag": local and local.tag,
        "revision": local and local.revision,
        "id": local and local.id,
        "size_bytes": local and local.size_bytes,
        "created_at": local and local.created_at.isoformat(),
        "is_built": None if "engine" in unknown else local is not None,
        "is_current": local.revision == revision if local and revision else None,
        "in_stage": None if "stage" in unknown else name in recorded,
        "recorded": uri,
        "pushed": [
            {
                "tag": one.tag,
                "digest": one.digest,
                "pushed_at": one.pushed_at.isoformat(),
                "is_recorded": bool(uri) and str(uri).endswith(f"@{one.digest}"),
            }
            for one in pushed
        ],
    }


def _table(rows: Sequence[Mapping[str, Any]], unknown: Mapping[str, str]) -> Table:
    table = tables.columns("IMAGE", "BUILT HERE", "TAG", "SIZE", "AGE", "PUSHED")
    now = datetime.now(timezone.utc)
    for row in rows:
        state = {True: "current", False: "outdated", None: "yes"}[row["is_current"]] if row["is_built"] else "no"
        state = "?" if "engine" in unknown else state
        age = row["created_at"] and duration((now - datetime.fromisoformat(row["created_at"])).total_seconds())
        table.add_row(
            row["image"],
            Text(state, style=_STATE_STYLES.get(state, "")),
            row["tag"] or "",
            tables.megabytes(row["size_bytes"]) if row["size_bytes"] else "",
            age or "",
            _pushed(row, unknown),
        )
    return table


def _pushed(row: Mapping[str, Any], unknown: Mapping[str, str]) -> str:
    """Return a line for each image that was pushed, the newest first; of many the newest and the recorded one."""
    if "stage" in unknown:
        return "?"
    if not row["in_stage"]:
        return "not in this stage"
    lines = []
    if row["recorded"] and not any(one["is_recorded"] for one in row["pushed"]):
        # On an emulator, whose ECR does not see what the registry beside it has.
        repository, _, digest = str(row["recorded"]).partition("@")
        lines = [f"{digest[:19] or repository.rpartition(':')[2]}, recorded"]
    shown = [one for place, one in enumerate(row["pushed"]) if place < _NEWEST or one["is_recorded"]]
    for one in shown:
        recorded = ", recorded" if one["is_recorded"] else ""
        lines.append(f"{one['tag']}, {tables.moment(datetime.fromisoformat(one['pushed_at']))}{recorded}")
    if hidden := len(row["pushed"]) - len(shown):
        lines.append(f"and {hidden} older (-o json)")
    return "\n".join(lines) or "no"
