"""What counts as a complete checkpoint, and what happens to those that are none, or change while they are taken."""

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.aws import s3 as object_store
from jobs.contract.errors import UsageError
from jobs.contract.locations import S3Location
from jobs.train.channel import RankStatus
from jobs.train.script import complete
from jobs.train.script.checkpoints import ScriptCheckpoints
from jobs.train.script.complete import CompleteCheckpoints, Script
from jobs.train.stored_checkpoints import SupersededError
from tests.support.train.s3_server import s3_client

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

NEWER = [f"step-{step}/{name}" for step in (1, 2, 3, 4) for name in ("checkpoints/last/model", "manifest.json")]
"""What a newer attempt has left of its own, under the numbers of an older one's."""


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompleteCheckpoints]:
    monkeypatch.setattr(complete, "QUIET_SECONDS", 0.0)
    looks = CompleteCheckpoints(tmp_path, ranks=2)
    yield looks
    looks.close()


def found(looks: CompleteCheckpoints, script: Script = "lives") -> list[str]:
    return [path.name for path, _ in looks.find(script)]


def put(path: Path, text: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_folder_counts_once_it_is_renamed_or_marked(looks: CompleteCheckpoints, tmp_path: Path) -> None:
    put(tmp_path / "written-in-place/model")
    put(tmp_path / "being-written.tmp/model")
    put(tmp_path / "marked/model")
    assert found(looks) == found(looks, "done") == []
    (tmp_path / "being-written.tmp").rename(tmp_path / "renamed")
    put(tmp_path / "marked/.complete")
    assert sorted(found(looks)) == ["marked", "renamed"]
    # What comes into it later makes it another one, of which nobody has said that it is whole.
    put(tmp_path / "renamed/more")
    assert found(looks) == ["marked"]


def test_a_trainers_folder_counts_with_its_state_and_that_of_each_rank(
    looks: CompleteCheckpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-5"
    put(folder / "model.safetensors")
    put(folder / "rng_state_0.pth")
    put(folder / "trainer_state.json", '{"global_step": ')
    assert found(looks) == []
    put(folder / "trainer_state.json", '{"global_step": 5}')
    assert found(looks) == [], "of the other rank"
    put(folder / "rng_state_1.pth")
    assert found(looks, "ended") == ["checkpoint-5"], "whatever became of the script"


def test_a_file_counts_once_it_is_closed_and_the_script_lives(looks: CompleteCheckpoints, tmp_path: Path) -> None:
    with (tmp_path / "ckpt.pt").open("w") as file:
        file.write("half")
        file.flush()
        assert found(looks) == found(looks, "done") == []
    assert found(looks, "ended") == [], "its writer may have been killed"
    assert found(looks) == ["ckpt.pt"]


@pytest.fixture
def script(s3: "S3Client", tmp_path: Path, request: pytest.FixtureRequest) -> ScriptCheckpoints:
    return one(s3, tmp_path, tmp_path.name)


def one(
    s3: "S3Client", folder: Path, run: str, *, attempt: int | None = None, **arguments: object
) -> ScriptCheckpoints:
    roots = {"checkpoints": folder / "mine", "output": folder / "out"}
    for root in roots.values():
        root.mkdir(parents=True)
    return ScriptCheckpoints(
        s3,
        S3Location("runs", f"research/{run}/"),
        folder,
        roots=roots,
        arguments={"code": "a", **arguments},
        world_size=1,
        ranks_here=1,
        attempt=attempt,
    )


def save(folder: Path, text: str) -> Path:
    put(folder.with_suffix(".tmp") / "model", text)
    if folder.exists():
        shutil.rmtree(folder)
    return folder.with_suffix(".tmp").rename(folder)


def test_what_the_script_keeps_is_kept_and_is_there_again(
    script: ScriptCheckpoints, s3: "S3Client", tmp_path: Path
) -> None:
    run = tmp_path.name
    for step in (1, 2, 3, 4):
        save(tmp_path / "mine/last", f"last {step}")
        save(tmp_path / "mine/best", "best") if step == 1 else None
        put(tmp_path / f"out/checkpoint-{step * 10}/trainer_state.json")
        shutil.rmtree(tmp_path / f"out/checkpoint-{step * 10 - 10}", ignore_errors=True)
        assert script.take("lives")
    assert not script.take("lives"), "nothing has changed"
    assert RankStatus.read(tmp_path).last_step >= 40

    again = one(s3, tmp_path / "again", run)
    again.restore(allow_changes=False)
    restored = tmp_path / "again"
    assert sorted(path.name for path in (restored / "mine").iterdir()) == ["best", "last"]
    assert (restored / "mine/last/model").read_text() == "last 4"
    assert [path.name for path in (restored / "out").iterdir()] == ["checkpoint-40"]
    assert not again.take("lives"), "it is on S3 already"

    with pytest.raises(UsageError, match='code "a" -> "b"'):
        one(s3, tmp_path / "other", run, code="b").restore(allow_changes=False)
    assert one(s3, tmp_path / "meant", run, code="b").restore(allow_changes=True)


def test_one_that_changes_or_goes_while_it_is_taken_is_not_taken(
    script: ScriptCheckpoints, s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path / "mine/before", "whole")
    assert script.take("lives")
    changing, going = save(tmp_path / "mine/changing", "one"), save(tmp_path / "mine/going", "two")
    upload_all = object_store.upload_all

    def upload(*arguments: Any, **options: Any) -> Any:
        sent = upload_all(*arguments, **options)
        put(changing / "model", "other")
        if going.exists():
            going.rename(tmp_path / "elsewhere")
        return sent

    monkeypatch.setattr(object_store, "upload_all", upload)
    script.take("lives")
    keys = [item["Key"] for item in s3.list_objects_v2(Bucket="runs", Prefix=f"research/{tmp_path.name}/")["Contents"]]
    manifests = [key for key in keys if key.endswith("manifest.json")]
    entries = set()
    for key in manifests:
        manifest = json.loads(s3.get_object(Bucket="runs", Key=key)["Body"].read())
        entries |= set(manifest["files"])
    assert "checkpoints/before/model" in entries
    assert "checkpoints/changing/model" not in entries
    assert before.exists()
    assert not list((tmp_path / "staging").iterdir())


def test_an_attempt_takes_nothing_once_a_newer_one_has_begun(
    s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = one(s3, tmp_path, tmp_path.name, attempt=1)
    save(tmp_path / "mine/first", "1")
    assert older.take("lives")
    s3.put_object(Bucket="runs", Key=f"research/{tmp_path.name}/attempts/2.json", Body=b"{}")
    save(tmp_path / "mine/second", "2")
    with pytest.raises(SupersededError, match="attempt 2 of this run has begun"):
        older.take("lives")


def test_an_attempt_that_stands_still_while_it_takes_one_changes_nothing_of_a_newer_ones(
    s3_endpoint: str, s3: "S3Client", tmp_path: Path
) -> None:
    moments = 0
    for moment in itertools.count(1):
        with s3_client(s3_endpoint) as own:
            run = S3Location("runs", f"research/{tmp_path.name}/{moment}/")
            older = one(own, tmp_path / str(moment), f"{tmp_path.name}/{moment}", attempt=1)
            for number in (1, 2):
                save(tmp_path / f"{moment}/mine/last", str(number))
                assert older.take("lives")
            save(tmp_path / f"{moment}/mine/last", "3")
            questions = itertools.count(1)

            def stand_still(
                moment: int = moment, run: S3Location = run, number: "itertools.count[int]" = questions, **_: object
            ) -> None:
                """Before one of the older's questions to S3 a newer one begins, takes its own of the same, and ends."""
                if next(number) == moment:
                    object_store.write(s3, run / "attempts/2.json", b"{}")
                    object_store.delete_all(s3, run / "checkpoints", object_store.sizes(s3, run / "checkpoints"))
                    for name in NEWER:
                        object_store.write(s3, run / "checkpoints" / name, b"the newer one's")

            own.meta.events.register("before-call.s3.ListObjectsV2", stand_still)
            with contextlib.suppress(SupersededError):
                older.take("lives")
            if next(questions) <= moment:
                break  # it has fewer
            moments += 1
            checkpoints = run / "checkpoints"
            left = {name: object_store.read(s3, checkpoints / name) for name in object_store.sizes(s3, checkpoints)}
            assert left == dict.fromkeys(NEWER, b"the newer one's"), f"moment {moment}"
    assert moments > 3
