"""Compiled graphs of a node's HPUs: kept on S3, and there again for the next attempt. Files stand for recipes here."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.contract.locations import S3Location
from jobs.contract.run import CACHE_TAG
from jobs.train.accelerator import CPU, Accelerator
from jobs.train.launcher.recipe_cache import RecipeCache, fingerprint, recipe_cache
from jobs.train.launcher.request import Launch, parse

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

HPU = Accelerator(name="hpu", devices=8, reason="asked for")


def launched(
    *flags: str, model: str = "s3://data/bert", instance: str = "dl1.24xlarge", run: str = "research/one"
) -> Launch:
    job = ["evaluate", f"--model={model}", "--data=s3://data/rows.csv", *flags]
    return parse(
        [f"--instance-type={instance}", "--nproc-per-node=8", *job], {"TRAINYARD_RUN_URI": f"s3://runs/{run}/"}
    )


@pytest.fixture
def place(tmp_path: Path) -> S3Location:
    return S3Location("runs", f"research/recipes/{tmp_path.name}")


def write(folder: Path, name: str, content: str, *, seconds_ago: float = 60) -> None:
    (folder / name).write_text(content)
    written = time.time() - seconds_ago
    os.utime(folder / name, (written, written))


def test_what_one_attempt_has_compiled_the_next_finds(
    s3: "S3Client", place: S3Location, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="trainyard"):
        first, second = tmp_path / "first", tmp_path / "second"
        with RecipeCache(s3, place, first) as cache:
            write(first, "7aa1.recipe", "compiled")
            assert cache.save(settled_seconds=10) == 1
            # WHEN the attempt ends at once, e.g. by kill -9, THEN what was saved is there; what is still being written
            # is left for the next save
            write(first, "b3c2.recipe", "half", seconds_ago=0)
            assert cache.save(settled_seconds=10) == 0
            with RecipeCache(s3, place, tmp_path / "meanwhile"):
                assert [path.name for path in (tmp_path / "meanwhile").iterdir()] == ["7aa1.recipe"]
            (first / "b3c2.recipe").write_text("half and the other half")
        # WHEN the ranks have ended, THEN all is whole and is saved
        with RecipeCache(s3, place, second) as cache:
            found = {path.name: path.read_text() for path in second.iterdir()}
            assert found == {"7aa1.recipe": "compiled", "b3c2.recipe": "half and the other half"}
            assert cache.save(settled_seconds=0) == 0, "it is there already"
    assert any(line.startswith("recipes: 2 compiled before") for line in caplog.messages)
    for name in ("7aa1.recipe", "b3c2.recipe"):
        tags = s3.get_object_tagging(Bucket=place.bucket, Key=(place / name).key)["TagSet"]
        assert [(tag["Key"], tag["Value"]) for tag in tags] == [CACHE_TAG], "it would stay for ever"


def test_without_its_place_a_training_goes_on(s3: "S3Client", tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = S3Location("no-such-bucket", "research/recipes/any")
    with RecipeCache(s3, nowhere, tmp_path / "recipes"):
        write(tmp_path / "recipes", "7aa1.recipe", "compiled")
    read, kept = caplog.messages
    assert read.startswith("warning: compiled graphs of earlier attempts cannot be read: ")
    assert kept.startswith("warning: compiled graphs are not kept for the next attempt: ")


def test_recipes_are_shared_by_runs_that_compile_the_same() -> None:
    same = fingerprint(launched())
    assert fingerprint(launched(run="research/another")) == same
    assert fingerprint(launched(model="s3://data/roberta")) != same
    assert fingerprint(launched(instance="p4d.24xlarge")) != same
    assert fingerprint(launched("--hpu-trainer=transformers")) != same


def test_it_is_for_hpus_whose_image_keeps_no_recipes_of_its_own(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert recipe_cache(launched(), HPU, tmp_path, {}) is not None
    assert recipe_cache(launched(), CPU, tmp_path, {}) is None
    own = {"PT_HPU_RECIPE_CACHE_CONFIG": "/recipes,false,1024"}
    assert recipe_cache(launched(), HPU, tmp_path, own) is None
