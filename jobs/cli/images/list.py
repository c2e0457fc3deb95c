"""`trainyard images list`: the images on this machine, and what a stage has of them."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.table import Table
from rich.text import Text

from jobs.aws.connection import Aws
from jobs.aws.errors import explain
from jobs.cli import tables
from jobs.contract import image_hierarchy as hierarchy
from jobs.contract.errors import TrainyardError
from jobs.contract.releases import release
from jobs.contract.revision import image_tag, source_revision
from jobs.contract.words import duration
from jobs.images import engine
from jobs.images.inventory import LocalImage, RemoteImage, local_images, recorded_images, remote_images
from jobs.images.stage_images import StageImages

_NEWEST = 5
"""The table shows so many of the tags that an image has in a stage."""

_STATE_STYLES = {"current": "green", "outdated": "yellow"}


def list_images(aws: Aws, stage: str, *, release_name: str | None, output: str) -> None:
    """Run `trainyard images list`, of the stage's release where no other is named.

    Whatever can't be asked is named, and the rest shown.
    """
    row = release(release_name)
    there: StageImages | None = None
    unknown: dict[str, str] = {}
    revision: str | None = None
    local: dict[str, LocalImage] = {}
    recorded: dict[str, str | None] = {}
    pushed: dict[str, tuple[RemoteImage, ...]] = {}
    try:
        revision = source_revision()
    except TrainyardError as error:
        unknown["sources"] = str(error.args[0])
    try:
        there = StageImages.read(aws, stage, release_name)
        recorded = dict(recorded_images(there))
        pushed = dict(remote_images(aws, there))
    except TrainyardError as error:
        unknown["stage"] = str(error.args[0])
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        unknown["stage"] = str(explained.args[0])
    row = release(there.release) if there else row
    try:
        local = dict(local_images(engine.connect(), row.name, revision=revision))
    except TrainyardError as error:
        unknown["engine"] = str(error.args[0])
    rows = [
        _list_json(name, local.get(name), recorded, pushed.get(name, ()), revision=revision, unknown=unknown)
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
    tables.show(_list_table(rows, unknown), on=tables.stdout())


def _list_json(
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
        "tag": local.tag if local else None,
        "revision": local.revision if local else None,
        "id": local.id if local else None,
        "size_bytes": local.size_bytes if local else None,
        "created_at": local.created_at.isoformat() if local else None,
        "is_built": None if "engine" in unknown else local is not None,
        "is_current": local.revision == revision if local and revision else None,
        "in_stage": None if "stage" in unknown else name in recorded,
        "recorded": uri,
        "recorded_is_local": (uri in local.digests or uri.endswith(f":{local.tag}")) if local and uri else None,
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


def _list_table(rows: Sequence[Mapping[str, Any]], unknown: Mapping[str, str]) -> Table:
    table = tables.columns("IMAGE", "BUILT HERE", "TAG", "SIZE", "AGE", "PUSHED")
    now = datetime.now(timezone.utc)
    for row in rows:
        age = (now - datetime.fromisoformat(row["created_at"])).total_seconds() if row["created_at"] else None
        table.add_row(
            row["image"],
            _state(row, unknown),
            row["tag"] or "",
            tables.megabytes(row["size_bytes"]) if row["size_bytes"] else "",
            "" if age is None else duration(age),
            _pushed(row, unknown),
        )
    return table


def _state(row: Mapping[str, Any], unknown: Mapping[str, str]) -> Text:
    if "engine" in unknown:
        return Text("?")
    state = {True: "current", False: "outdated", None: "yes"}[row["is_current"]] if row["is_built"] else "no"
    return Text(state, style=_STATE_STYLES.get(state, ""))


def _pushed(row: Mapping[str, Any], unknown: Mapping[str, str]) -> str:
    """Return a line for each image that was pushed, the newest first; of many the newest and the recorded one."""
    if "stage" in unknown:
        return "?"
    if not row["in_stage"]:
        return "not in this stage"
    lines = []
    if row["recorded"] and not any(one["is_recorded"] for one in row["pushed"]):
        # On an embedded AWS, whose ECR does not see what the registry beside it has.
        repository, _, digest = str(row["recorded"]).partition("@")
        lines = [f"{digest[:19] or repository.rpartition(':')[2]}, recorded"]
    shown = [one for place, one in enumerate(row["pushed"]) if place < _NEWEST or one["is_recorded"]]
    lines += [
        f"{one['tag']}, {tables.moment(datetime.fromisoformat(one['pushed_at']))}"
        f"{', recorded' if one['is_recorded'] else ''}"
        for one in shown
    ]
    if hidden := len(row["pushed"]) - len(shown):
        lines.append(f"and {hidden} older (-o json)")
    return "\n".join(lines) or "no"
