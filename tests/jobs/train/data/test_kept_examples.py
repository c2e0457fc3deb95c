"""Tokenized examples that are kept on S3: the same as those that are made anew, and never used where they are not."""

import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported from C++

from jobs.contract.locations import S3Location
from jobs.contract.run import CACHE_TAG
from jobs.kinds.finetune_classification import FinetuneClassification
from jobs.train.data import kept_examples
from jobs.train.data.kept_examples import KeptExamples, fetched_or_made
from jobs.train.data.labelled_buckets import in_batches
from jobs.train.data.labelled_tokens import Prepared
from jobs.train.kinds import finetune_classification
from jobs.train.rank import Rank
from tests.support.train.reviews import reviews, write_jsonl

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


class Team:
    """Attempts of one team, each with a scratch folder of its own."""

    def __init__(self, s3: "S3Client", model: Path, folder: Path) -> None:
        self.s3 = s3
        self.name = f"team-{uuid.uuid4().hex}"
        self.model = shutil.copytree(model, folder / "model")
        self.table = write_jsonl(folder / "train.jsonl", reviews(188, seed=1))
        self.folder = folder
        self.made = 0

    def arguments(self, **others: Any) -> FinetuneClassification:
        values = {"model": str(self.model), "train_data": str(self.table), "max_length": 16, **others}
        return FinetuneClassification.model_validate(values)

    def rank(self, node: int = 0, nnodes: int = 1) -> Rank:
        scratch = self.folder / uuid.uuid4().hex
        scratch.mkdir()
        return Rank(
            rank=node,
            local_rank=0,
            world_size=nnodes,
            local_world_size=1,
            node=node,
            nnodes=nnodes,
            run=S3Location("runs", f"{self.name}/{uuid.uuid4().hex}/"),
            scratch=scratch,
        )

    def kept(self, rank: Rank, **others: Any) -> KeptExamples:
        return KeptExamples(self.s3, rank, self.arguments(**others), self.model)

    def make(self, rank: Rank, **others: Any) -> Prepared:
        self.made += 1
        return finetune_classification._tokenized(rank, self.arguments(**others), self.model, self.s3)

    def examples(self, rank: Rank | None = None, **others: Any) -> Prepared:
        rank = rank or self.rank()
        return fetched_or_made(rank, self.kept(rank, **others), lambda: self.make(rank, **others))

    def stored(self) -> list[str]:
        found = self.s3.list_objects_v2(Bucket="runs", Prefix=f"{self.name}/artifacts/").get("Contents", [])
        return [item["Key"] for item in found]

    def key(self, name: str) -> str:
        return next(key for key in self.stored() if key.endswith(f"/{name}"))

    def read(self, name: str) -> bytes:
        return self.s3.get_object(Bucket="runs", Key=self.key(name))["Body"].read()

    def write(self, name: str, content: bytes) -> None:
        self.s3.put_object(Bucket="runs", Key=self.key(name), Body=content)


@pytest.fixture
def team(s3: "S3Client", tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Team:
    monkeypatch.setattr(kept_examples, "KEEP_SECONDS", 0.0)
    return Team(s3, tiny_bert, tmp_path)


def test_what_is_fetched_trains_as_what_is_made_to_the_bit(team: Team) -> None:
    made = team.examples().bucketed(4, max_length=16)
    fetched = team.examples().bucketed(4, max_length=16)

    assert team.made == 1
    assert made.model_dump(exclude={"folder"}) == fetched.model_dump(exclude={"folder"})
    assert [*made.evaluation_texts()] == [*fetched.evaluation_texts()]
    for part in ("train", "evaluation"):
        one, other = getattr(made, part), getattr(fetched, part)
        places = in_batches(one.buckets, 16, np.random.default_rng(3))
        again = in_batches(other.buckets, 16, np.random.default_rng(3))
        assert places.tolist() == again.tolist()
        for start in range(0, len(places), 16):
            _assert_same(one.__getitems__(places[start : start + 16]), other.__getitems__(again[start : start + 16]))


def test_they_expire_as_checkpoints_do_and_belong_to_no_run(team: Team) -> None:
    team.examples()
    assert team.stored()
    for key in team.stored():
        tags = team.s3.get_object_tagging(Bucket="runs", Key=key)["TagSet"]
        assert [(tag["Key"], tag["Value"]) for tag in tags] == [CACHE_TAG]
        assert key.startswith(f"{team.name}/artifacts/examples-")


def test_arguments_of_the_recipe_take_the_same_examples_and_those_of_the_data_make_others(team: Team) -> None:
    recipes: list[dict[str, Any]] = [{}, {"learning_rate": 0.1}, {"global_batch_size": 8}, {"length_buckets": 2}]
    for same in recipes:
        team.examples(**same)
        assert team.made == 1
    others: list[dict[str, Any]] = [{"max_length": 12}, {"seed": 7}, {"eval_fraction": 0.3}, {"on_bad_rows": "skip"}]
    for number, other in enumerate(others, start=2):
        team.examples(**other)
        assert team.made == number


def test_another_table_tokenizer_or_package_makes_other_examples(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    team.examples()
    write_jsonl(team.table, reviews(188, seed=9))
    team.examples()
    assert team.made == 2
    (team.model / "tokenizer_config.json").write_bytes((team.model / "tokenizer_config.json").read_bytes() + b"\n")
    team.examples()
    assert team.made == 3
    monkeypatch.setattr(kept_examples, "versions_of", lambda _: {"tokenizers": "99.0"})
    team.examples()
    assert team.made == 4
    monkeypatch.setattr(kept_examples, "_code", lambda: "changed")
    team.examples()
    assert team.made == 5


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("name", "spoilt", "told"),
    [
        ("train.input_ids.npy", _flipped, "another sha256"),
        ("train.lengths.npy", lambda content: content[:-3], "its manifest says"),
        ("examples.json", _flipped, "another sha256"),
        ("manifest.json", lambda content: content[:100], "manifest.json cannot be read"),
        ("manifest.json", lambda content: content.replace(b'"seed": 42', b'"seed": 43'), "its fingerprint is not that"),
    ],
)
def test_what_is_damaged_is_told_and_made_again(
    team: Team, caplog: pytest.LogCaptureFixture, name: str, spoilt: Callable[[bytes], bytes], told: str
) -> None:
    expected = team.examples()
    before = team.read(name)
    assert spoilt(before) != before
    team.write(name, spoilt(before))

    again = team.examples()

    assert team.made == 2
    assert told in caplog.text
    assert "the tables are read and tokenized again" in caplog.text
    one, other = (found.bucketed(1, max_length=16).train for found in (again, expected))
    _assert_same(one.__getitems__([0]), other.__getitems__([0]))
    team.examples()
    assert team.made == 2, "what was made again is kept"


def test_other_examples_under_their_name_are_not_taken(team: Team, caplog: pytest.LogCaptureFixture) -> None:
    team.examples(max_length=9)
    theirs = {key.rpartition("/")[2]: key for key in team.stored()}
    team.examples()
    ours = next(key for key in team.stored() if key not in theirs.values()).rpartition("/")[0]
    for name, key in theirs.items():
        team.s3.copy_object(Bucket="runs", Key=f"{ours}/{name}", CopySource={"Bucket": "runs", "Key": key})
    assert max(team.examples().train.lengths) > 9
    assert team.made == 3
    assert "holds other examples" in caplog.text


def test_a_table_that_changes_while_it_is_read_is_not_kept(team: Team) -> None:
    rank = team.rank()

    def make() -> Prepared:
        prepared = team.make(rank)
        write_jsonl(team.table, reviews(188, seed=9))
        return prepared

    fetched_or_made(rank, team.kept(rank), make)
    assert not team.stored()


def test_what_is_made_in_no_time_is_not_kept(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_examples, "KEEP_SECONDS", 1000.0)
    team.examples()
    assert not team.stored()


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_of_two_nodes_the_main_one_makes_them_and_the_other_fetches(
    team: Team, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(kept_examples, "KEEP_SECONDS", seconds)
    ranks = [team.rank(node, nnodes=2) for node in range(2)]
    store = HashStore()
    for rank in ranks:
        vars(rank)["store"] = store
    with ThreadPoolExecutor(2) as pool:
        second, first = (pool.submit(team.examples, rank) for rank in reversed(ranks))
    assert team.made == 1
    one, other = (found.result().bucketed(1, max_length=16).train for found in (first, second))
    _assert_same(one.__getitems__([0]), other.__getitems__([0]))


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.dtype == other[name].dtype
        assert values.tolist() == other[name].tolist()
