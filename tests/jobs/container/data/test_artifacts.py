"""Artifacts on S3: made once, resumed shard by shard, and verified when read."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.aws import s3 as object_store
from jobs.container.data.artifacts import Builder, identity_of, open_artifact
from jobs.core.errors import NotFoundError, UsageError
from jobs.core.locations import S3Location

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

SHARDS = {"shard-00000.txt": b"one\n", "shard-00001.txt": b"two\nthree\n", "more/shard-00002.txt": b""}


class Workshop:
    """Runs that make the same artifact, which no other test makes."""

    def __init__(self, s3: "S3Client", folder: Path) -> None:
        self.s3 = s3
        self.folder = folder

    def run(self, name: str) -> S3Location:
        return S3Location("runs", f"research/{self.folder.name}-{name}-20260102-030405-0a1b/")

    def builder(self, name: str = "first", **options: Any) -> Builder:
        options = {"test": str(self.folder), **options}
        return Builder(
            self.s3, self.run(name), kind="corpus", version=1, options=options, inputs={"data": {"bytes": 3}}
        )

    def put(self, builder: Builder, *names: str) -> None:
        for name in names:
            path = self.folder / "made" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(SHARDS[name])
            builder.put_file(path, name, counts={"lines": SHARDS[name].count(b"\n")})

    def make(self, name: str = "first", **options: Any) -> Builder:
        builder = self.builder(name, **options)
        self.put(builder, *SHARDS)
        builder.finish({"made": name})
        return builder

    def open(self, location: object, *, kind: str = "corpus") -> Any:
        return open_artifact(str(location), kind=kind, s3=lambda: self.s3, scratch=self.folder / "scratch")


@pytest.fixture
def workshop(s3: "S3Client", tmp_path: Path) -> Workshop:
    return Workshop(s3, tmp_path)


def test_artifact_is_read_by_its_run_or_its_folder(workshop: Workshop) -> None:
    builder = workshop.make(note="für Menschen")
    content = object_store.read(workshop.s3, builder.location / "manifest.json") or b""
    assert "für Menschen" in content.decode(), "people read it as well"
    for location in (workshop.run("first"), builder.location, str(builder.location).rstrip("/")):
        artifact = workshop.open(location)
        assert artifact.manifest.fingerprint == builder.fingerprint
        assert artifact.manifest.count("lines") == 3
        assert artifact.manifest.total_bytes == 14
        folder = artifact.download()
        assert {name: (folder / name).read_bytes() for name in SHARDS} == SHARDS


def test_second_run_reuses_the_artifact(workshop: Workshop) -> None:
    made = workshop.make()
    found = workshop.builder("second").existing()
    assert found is not None
    assert found.provenance == {"run": str(workshop.run("first")), "made": "first"}
    assert workshop.open(workshop.run("second")).location == str(made.location)
    # AND other options make another artifact
    other = workshop.builder("third", vocabulary=10)
    assert (other.existing(), other.done_shards()) == (None, {})
    assert object_store.read(workshop.s3, workshop.run("third") / "artifact.json") is None


def test_restarted_job_makes_only_missing_shards(workshop: Workshop) -> None:
    # GIVEN an interrupted job: one shard is done, one has no record, one is missing
    interrupted = workshop.builder()
    workshop.put(interrupted, "shard-00000.txt")
    object_store.write(workshop.s3, interrupted.location / "shard-00001.txt", b"two\n")
    # THEN readers do not find the artifact, and the next attempt knows what is done
    with pytest.raises(NotFoundError, match=r"has neither manifest\.json nor artifact\.json"):
        workshop.open(interrupted.location)
    again = workshop.builder()
    assert again.existing() is None
    done = again.done_shards()
    assert list(done) == ["shard-00000.txt"]
    assert done["shard-00000.txt"].counts == {"lines": 1}
    workshop.put(again, *(set(SHARDS) - set(done)))
    manifest = again.finish({})
    assert set(manifest.files) == set(SHARDS)
    assert workshop.open(workshop.run("first")).path("shard-00001.txt").read_bytes() == b"two\nthree\n"


def test_local_artifact_is_read(workshop: Workshop, tmp_path: Path) -> None:
    builder = workshop.make()
    local = tmp_path / "local"
    names = list(object_store.sizes(workshop.s3, builder.location))
    object_store.download_all(workshop.s3, builder.location, names, local)
    assert workshop.open(local).path("shard-00000.txt") == local / "shard-00000.txt"
    # A downloaded run folder still points to S3.
    fetched = tmp_path / "fetched"
    object_store.download(workshop.s3, workshop.run("first") / "artifact.json", fetched / "artifact.json")
    assert workshop.open(fetched).location == str(builder.location)
    (local / "shard-00000.txt").write_bytes(b"One\n")
    artifact = workshop.open(local)
    assert artifact.path("shard-00001.txt").read_bytes() == b"two\nthree\n"
    with pytest.raises(UsageError, match=r"the sha256 of shard-00000\.txt differs from its manifest"):
        artifact.download()
    with pytest.raises(UsageError, match="has no file 'shard-9'"):
        artifact.path("shard-9")


def test_missing_or_truncated_file_is_refused_and_remade(workshop: Workshop) -> None:
    builder = workshop.make()
    object_store.write(workshop.s3, builder.location / "shard-00001.txt", b"two\n")
    with pytest.raises(UsageError, match=r"is damaged: shard-00001\.txt has 4 bytes instead of 10"):
        workshop.open(builder.location)
    object_store.delete_all(workshop.s3, builder.location, ["shard-00001.txt"])
    with pytest.raises(UsageError, match=r"is damaged: shard-00001\.txt is missing"):
        workshop.open(workshop.run("first"))
    again = workshop.builder("second")
    assert again.existing() is None
    assert set(again.done_shards()) == set(SHARDS) - {"shard-00001.txt"}
    workshop.put(again, "shard-00001.txt")
    again.finish({})
    assert workshop.open(workshop.run("first")).download()


def test_other_kind_of_artifact_is_refused(workshop: Workshop) -> None:
    builder = workshop.make()
    for location in (workshop.run("first"), builder.location):
        with pytest.raises(UsageError, match="is a 'corpus', not a 'tokenizer'"):
            workshop.open(location, kind="tokenizer")
    with pytest.raises(NotFoundError, match="is not a 'corpus': it has neither"):
        workshop.open(workshop.run("nobody"))
    with pytest.raises(UsageError, match="only `trainyard submit` can resolve"):
        workshop.open("run://prepare-corpus")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": {}}, "its fingerprint does not match its options and inputs"),
        ({"files": {"../x": {"bytes": 1, "sha256": "0" * 64}}}, "its manifest.json cannot be read"),
    ],
)
def test_mismatched_manifest_is_refused(workshop: Workshop, change: dict[str, Any], message: str) -> None:
    builder = workshop.make()
    place = builder.location / "manifest.json"
    manifest = json.loads(object_store.read(workshop.s3, place) or b"")
    object_store.write(workshop.s3, place, json.dumps({**manifest, **change}).encode())
    with pytest.raises(UsageError, match=message):
        workshop.open(builder.location)


def test_empty_artifact_and_reserved_names_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    builder = workshop.builder()
    with pytest.raises(UsageError, match="'corpus' has no files"):
        builder.finish({})
    (tmp_path / "x").write_bytes(b"")
    for name in ("manifest.json", "done/x", "../x", "a//x"):
        with pytest.raises(UsageError, match="cannot be the name of an artifact's file"):
            builder.put_file(tmp_path / "x", name)


@pytest.mark.parametrize("is_remote", [False, True])
def test_identity_of_an_input_follows_its_content(s3: "S3Client", tmp_path: Path, *, is_remote: bool) -> None:
    place = f"s3://data/{tmp_path.name}" if is_remote else str(tmp_path)

    def put(name: str, content: bytes) -> None:
        if is_remote:
            object_store.write(s3, S3Location.parse(f"{place}/{name}"), content)
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)

    def identity(name: str) -> dict[str, Any]:
        return identity_of(f"{place}/{name}", s3=lambda: s3)

    for name in ("a.txt", "a.txt.bak", "folder/b.txt"):
        put(name, b"content")
    assert set(identity("a.txt")) == {"bytes", "etag" if is_remote else "sha256"}
    before = identity("folder")
    assert before == identity("folder/") == {"b.txt": identity("a.txt")}
    put("folder/b.txt", b"CONTENT")
    assert identity("folder") != before
    with pytest.raises(NotFoundError, match="does not exist"):
        identity("fold")
