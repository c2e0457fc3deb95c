"""Which checkpoints are complete, and what happens to others and to those that change during their upload."""

import json
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.aws import s3 as object_store
from jobs.container.channel import RankStatus
from jobs.container.saving.manifest import SupersededError
from jobs.container.saving.script_checkpoints import ScriptCheckpoints, ShardedError
from jobs.container.saving.script_complete import CompleteCheckpoints, Script
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


class Looks(CompleteCheckpoints):
    """Watches a folder with a clock that the test sets forward."""

    def age(self, seconds: float) -> None:
        """Let this many seconds pass without a change."""
        for seen in self._seen.values():
            seen.since -= seconds


@pytest.fixture
def looks(tmp_path: Path) -> Iterator[Looks]:
    looks = Looks(tmp_path, ranks=2)
    yield looks
    looks.close()


def found(looks: CompleteCheckpoints, script: Script = "running") -> list[str]:
    return [path.name for path, _ in looks.find(script)]


def put(path: Path, text: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_folder_is_complete_once_renamed_or_marked(looks: Looks, tmp_path: Path) -> None:
    put(tmp_path / "being-written.tmp/model")
    put(tmp_path / "marked/model")
    assert found(looks) == []
    (tmp_path / "being-written.tmp").rename(tmp_path / "renamed")
    put(tmp_path / "marked/.complete")
    assert sorted(found(looks)) == ["marked", "renamed"]
    # A file added later makes it another checkpoint that is not known to be complete. And if a script renames or
    # marks its folders, one that it has not renamed or marked is unfinished.
    put(tmp_path / "renamed/more")
    put(tmp_path / "in-place-1/model")
    put(tmp_path / "in-place-2/model")
    looks.age(60)
    assert found(looks) == found(looks, "ended") == ["marked"]
    assert sorted(found(looks, "done")) == ["in-place-1", "in-place-2", "marked", "renamed"]


def test_folder_written_in_place_is_complete_once_unchanged(looks: Looks, tmp_path: Path) -> None:
    """Accelerate's save_state, peft and DeepSpeed write in place."""
    for name in ("step_1/model", "step_1/optimizer.bin"):
        put(tmp_path / name)
        assert found(looks) == []
        looks.age(9)
        assert found(looks) == found(looks, "ended") == [], "its writer may be pausing"
    looks.age(2)
    assert found(looks) == ["step_1"]


def test_folder_written_in_place_is_complete_once_one_follows(looks: Looks, tmp_path: Path) -> None:
    for name in ("epoch_1/model", "epoch_1/more", "epoch_2/model"):
        assert found(looks) == found(looks, "ended") == []
        put(tmp_path / name)
        time.sleep(0.02)
    assert found(looks) == found(looks, "ended") == ["epoch_1"]
    # A restored checkpoint says nothing about the others: its times come from another clock
    for name in ("epoch_0/model", "epoch_0/more"):
        os.utime(put(tmp_path / name), (time.time() + 3600,) * 2)
    looks.restored(tmp_path / "epoch_0")
    assert found(looks, "ended") == ["epoch_1", "epoch_0"]
    # Nor does one with another kind of name
    time.sleep(0.02)
    put(tmp_path / "best/model")
    assert found(looks, "ended") == ["epoch_1", "epoch_0"]
    assert found(looks, "done") == ["epoch_1", "epoch_2", "best", "epoch_0"]


@pytest.mark.parametrize(
    ("torn", "last"),
    [
        (["model-00001-of-00002.safetensors"], "model-00002-of-00002.safetensors"),
        (["fsdp_0/__0_0.distcp", "fsdp_0/__1_0.distcp"], "fsdp_0/.metadata"),
    ],
)
def test_folder_with_missing_parts_is_never_complete(torn: list[str], last: str, looks: Looks, tmp_path: Path) -> None:
    for name in torn:
        put(tmp_path / "step_1" / name)
    found(looks)
    looks.age(600)
    assert found(looks) == found(looks, "done") == []
    put(tmp_path / "step_1" / last)
    assert found(looks, "done") == ["step_1"]


def test_folder_only_named_like_a_trainers_needs_no_state(looks: Looks, tmp_path: Path) -> None:
    put(tmp_path / "checkpoint-500/model.safetensors")
    found(looks)
    looks.age(11)
    assert found(looks) == ["checkpoint-500"]


def test_trainers_folder_needs_its_state_and_each_ranks(looks: Looks, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    put(folder / "model.safetensors")
    put(folder / "rng_state_0.pth")
    put(folder / "trainer_state.json", '{"global_step": ')
    assert found(looks) == []
    put(folder / "trainer_state.json", '{"global_step": 5}')
    assert found(looks) == [], "the other rank's state is missing"
    put(folder / "rng_state_1.pth")
    assert found(looks, "ended") == ["checkpoint-5"], "however the script ended"


def test_file_is_complete_once_unchanged_or_renamed(looks: Looks, tmp_path: Path) -> None:
    put(tmp_path / "ckpt.pt")
    assert found(looks) == []
    looks.age(11)
    assert found(looks, "ended") == [], "its writer may have been killed"
    assert found(looks) == ["ckpt.pt"]
    put(tmp_path / "other.tmp").rename(tmp_path / "other.pt")
    assert found(looks, "ended") == ["other.pt"]


def test_file_with_its_end_is_complete_at_once(looks: Looks, tmp_path: Path) -> None:
    """As written by torch.save and safetensors: a script that saves every second is never unchanged for long."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("data", "weights")
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})
    whole = len(header).to_bytes(8, "little") + header.encode() + b"1234"
    (tmp_path / "b.safetensors").write_bytes(whole)
    (tmp_path / "half.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-5])
    (tmp_path / "half.safetensors").write_bytes(whole[:-1])
    (tmp_path / "empty.safetensors").touch()
    assert sorted(found(looks, "ended")) == ["a.pt", "b.safetensors"]


@pytest.fixture
def script(s3: "S3Client", tmp_path: Path, request: pytest.FixtureRequest) -> ScriptCheckpoints:
    return one(s3, tmp_path, tmp_path.name)


MADE: list[ScriptCheckpoints] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the inotify instances: a user has few of them (fs.inotify.max_user_instances)."""
    yield
    while MADE:
        MADE.pop().close()


def one(
    s3: "S3Client", folder: Path, run: str, *, attempt: int | None = None, nnodes: int = 1, **arguments: object
) -> ScriptCheckpoints:
    for name in ("checkpoints", "output"):
        (folder / name).mkdir(parents=True)
    made = ScriptCheckpoints(
        s3,
        S3Location("runs", f"research/{run}/"),
        folder,
        folder=folder,
        arguments={"code": "a", **arguments},
        world_size=1,
        ranks_here=1,
        nnodes=nnodes,
        attempt=attempt,
    )
    MADE.append(made)
    return made


def save(folder: Path, text: str) -> Path:
    put(folder.with_suffix(".tmp") / "model", text)
    if folder.exists():
        shutil.rmtree(folder)
    return folder.with_suffix(".tmp").rename(folder)


def test_checkpoints_that_the_script_keeps_are_restored(
    script: ScriptCheckpoints, s3: "S3Client", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path.name
    for step in (1, 2, 3, 4):
        save(tmp_path / "checkpoints/last", f"last {step}")
        save(tmp_path / "checkpoints/best", "best") if step == 1 else None
        put(tmp_path / f"output/checkpoint-{step * 10}/trainer_state.json")
        shutil.rmtree(tmp_path / f"output/checkpoint-{step * 10 - 10}", ignore_errors=True)
        assert script.upload("running")
    assert not script.upload("running"), "nothing has changed"
    status = RankStatus.read(tmp_path)
    assert status.last_step >= 40
    assert (status.restored_step, status.repeats_from_step, status.saved_at is None) == (0, None, False)

    again = one(s3, tmp_path / "again", run)
    again.restore(allow_changes=False)
    status = RankStatus.read(tmp_path / "again")
    assert status.restored_step == status.last_step >= 40
    assert (status.resumed_from_step, status.repeats_from_step, status.saved_at) == (0, None, None)
    restored = tmp_path / "again"
    assert sorted(path.name for path in (restored / "checkpoints").iterdir()) == ["best", "last"]
    assert (restored / "checkpoints/last/model").read_text() == "last 4"
    assert [path.name for path in (restored / "output").iterdir()] == ["checkpoint-40"]
    assert not again.upload("running"), "it is on S3 already"

    with pytest.raises(UsageError, match='code "a" -> "b"'):
        one(s3, tmp_path / "other", run, code="b").restore(allow_changes=False)
    with caplog.at_level("INFO", "trainyard"):
        assert one(s3, tmp_path / "meant", run, code="b").restore(allow_changes=True)
    assert caplog.text.count("as requested: code") == 1


def test_checkpoints_are_restored_in_order_with_times_and_links(
    script: ScriptCheckpoints, s3: "S3Client", tmp_path: Path
) -> None:
    mine = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        folder = save(mine / f"step-{step}", str(step))
        (folder / "deep").mkdir()
        (folder / "deep/same").symlink_to("../model")
        (folder / "base").symlink_to("../step-1/model")
        (folder / "out").symlink_to(tmp_path)
        folder.rename(mine / "x.tmp")
        (mine / "x.tmp").rename(folder)
        os.utime(folder / "model", ns=(0, step * 10**9))
        os.utime(folder, ns=(0, step * 10**9))
        (mine / "last").unlink(missing_ok=True)
        (mine / "last").symlink_to(f"step-{step}")
        assert script.upload("running")
    (mine / "best").symlink_to(mine / "last")
    (mine / "outside").symlink_to("/etc/hostname")
    # The attempt ends before the target of a link is on S3, so the link keeps its previous target
    put(mine / "step-4/model", "torn")
    (mine / "last").unlink()
    (mine / "last").symlink_to("step-4")
    script.upload("ended")

    again = one(s3, tmp_path / "again", tmp_path.name)
    assert again.restore(allow_changes=False) == 3
    restored = tmp_path / "again/checkpoints"
    folders = [restored / f"step-{step}" for step in (1, 2, 3)]
    assert sorted(path.name for path in restored.iterdir()) == ["last", "step-1", "step-2", "step-3"]
    assert (restored / "last").readlink() == Path("step-3")
    for time_of in (os.path.getmtime, os.path.getctime):
        assert sorted(folders, key=time_of) == folders
        assert sorted(folders, key=lambda path: time_of(path / "model")) == folders
    assert [path.stat().st_mtime for path in folders] == [1, 2, 3]
    assert (folders[1] / "deep/same").readlink() == Path("../model")
    assert (folders[1] / "base").read_text() == "1"
    assert not os.path.lexists(folders[1] / "out")
    assert not again.upload("running"), "it is on S3 already"
    # Links that the script did not save are not created
    manifest = S3Location("runs", f"research/{tmp_path.name}/checkpoints/step-3/manifest.json")
    content = json.loads(object_store.read(s3, manifest) or b"")
    content["listing"]["links"] = {"checkpoints/step-3/a": "../../../x", "checkpoints/step-2/b": "model"}
    object_store.write(s3, manifest, json.dumps(content).encode())
    one(s3, tmp_path / "attacked", tmp_path.name).restore(allow_changes=False)
    assert not os.path.lexists(tmp_path / "attacked/checkpoints/step-3/a")
    assert not os.path.lexists(tmp_path / "attacked/checkpoints/step-2/b")


def test_uploaded_folder_that_grows_is_withdrawn(
    script: ScriptCheckpoints, s3: "S3Client", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "checkpoints/epoch_1/model")
    assert not script.upload("running")
    age(script, 11)
    assert script.upload("running")
    # WHEN its writer continues after a pause and is killed
    put(tmp_path / "checkpoints/epoch_1/optimizer")
    assert not script.upload("running")
    assert not script.upload("ended")
    script.warn_of_rest()
    # THEN the partial upload is withdrawn, with warnings
    assert one(s3, tmp_path / "again", tmp_path.name).restore(allow_changes=False) is None
    assert "warning: epoch_1 was uploaded before it was complete, and will be uploaded again" in caplog.messages
    assert caplog.messages[-1].startswith("warning: not uploaded, because it may be incomplete: epoch_1. Next: ")
    assert [line for line in caplog.messages if line.startswith("warning: epoch_1 is written in place, so nothing")]
    # AND if the script ends successfully, the whole folder is uploaded
    assert script.upload("done")
    assert one(s3, tmp_path / "later", tmp_path.name).restore(allow_changes=False)
    assert sorted(path.name for path in (tmp_path / "later/checkpoints/epoch_1").iterdir()) == ["model", "optimizer"]


def test_pointer_file_is_uploaded_after_its_folder(script: ScriptCheckpoints, s3: "S3Client", tmp_path: Path) -> None:
    put(tmp_path / "checkpoints/latest", "global_step10")
    time.sleep(0.02)
    put(tmp_path / "checkpoints/global_step10/model")
    age(script, 11)
    assert not script.upload("running")
    age(script, 11)
    assert script.upload("running")
    one(s3, tmp_path / "again", tmp_path.name).restore(allow_changes=False)
    assert sorted(path.name for path in (tmp_path / "again/checkpoints").iterdir()) == ["global_step10", "latest"]


@pytest.mark.parametrize("name", ["model/__0_0.distcp", "global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_shards_on_several_nodes_are_refused_at_the_first_save(name: str, s3: "S3Client", tmp_path: Path) -> None:
    for nnodes in (1, 2):
        script = one(s3, tmp_path / str(nnodes), tmp_path.name, nnodes=nnodes)
        put(tmp_path / str(nnodes) / "checkpoints/step_1" / name)
        if nnodes == 1:
            script.upload("running")
            continue
        with pytest.raises(ShardedError, match=rf"(?s)step_1/{name} contains only one rank's .*Next: save the full"):
            script.upload("running")


def age(script: ScriptCheckpoints, seconds: float) -> None:
    for watched in script._watched.values():
        for seen in watched._seen.values():
            seen.since -= seconds


@pytest.mark.parametrize(
    ("restored", "saved", "began"),
    [
        (["checkpoint-5", "checkpoint-10"], "checkpoint-15", None),
        (["checkpoint-5", "checkpoint-10"], "checkpoint-10", 5),
        (["epoch_1", "epoch_2"], "epoch_1", 0),
        (["best-0.91"], "best-0.88", None),
    ],
)
def test_script_that_saves_a_restored_step_again_started_over(
    script: ScriptCheckpoints,
    s3: "S3Client",
    tmp_path: Path,
    *,
    restored: list[str],
    saved: str,
    began: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in restored:
        save(tmp_path / "checkpoints" / name, name)
        assert script.upload("running")
    again = one(s3, tmp_path / "again", tmp_path.name)
    again.restore(allow_changes=False)
    save(tmp_path / "again/checkpoints" / saved, "anew")
    with caplog.at_level("WARNING", logger="trainyard"):
        assert again.upload("running")

    assert RankStatus.read(tmp_path / "again").repeats_from_step == began
    assert (f"the script saves {saved} again" in caplog.text) == (began is not None)


def test_checkpoint_that_changes_during_its_upload_is_not_kept(
    script: ScriptCheckpoints, s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "checkpoints/before", "whole")
    assert script.upload("running")
    changing, going = save(tmp_path / "checkpoints/changing", "one"), save(tmp_path / "checkpoints/going", "two")
    upload_all = object_store.upload_all

    def upload(*arguments: Any, **options: Any) -> Any:
        sent = upload_all(*arguments, **options)
        put(changing / "model", "other")
        if going.exists():
            going.rename(tmp_path / "elsewhere")
        return sent

    monkeypatch.setattr(object_store, "upload_all", upload)
    script.upload("running")
    assert not list((tmp_path / "staging").iterdir())
    one(s3, tmp_path / "again", tmp_path.name).restore(allow_changes=False)
    back = tmp_path / "again/checkpoints"
    assert {path.name: (path / "model").read_text() for path in back.iterdir()}.items() <= {
        ("before", "whole"),
        ("going", "two"),
    }


def test_nothing_is_uploaded_after_a_newer_attempt_has_begun(
    s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = one(s3, tmp_path, tmp_path.name, attempt=1)
    save(tmp_path / "checkpoints/first", "1")
    assert older.upload("running")
    s3.put_object(Bucket="runs", Key=f"research/{tmp_path.name}/attempts/2.json", Body=b"{}")
    save(tmp_path / "checkpoints/second", "2")
    with pytest.raises(SupersededError, match="attempt 2 of this run has begun"):
        older.upload("running")
