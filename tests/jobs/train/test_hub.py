"""Tables and models of the Hugging Face hub, through its real libraries."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jobs.contract.errors import UsageError
from jobs.contract.locations import hub_parts
from jobs.kinds.finetune_classification import FinetuneClassification
from jobs.train.data import labelled_text
from jobs.train.data.labelled_text import Examples
from tests.support.train.hub import save_data_set
from tests.support.train.places import Place


@pytest.mark.parametrize(
    ("location", "name", "options"),
    [
        ("hf://gpt2", "gpt2", {}),
        ("hf://acme/reviews", "acme/reviews", {}),
        ("hf://acme/reviews?config=en&split=test", "acme/reviews", {"config": "en", "split": "test"}),
        (
            "hf://acme/reviews?split=train%5B:9%25%5D&revision=v1",
            "acme/reviews",
            {"split": "train[:9%]", "revision": "v1"},
        ),
    ],
)
def test_the_options_of_a_hub_location_are_parsed(location: str, name: str, options: dict[str, str]) -> None:
    assert hub_parts(location) == (name, options)


@pytest.fixture
def reviews_on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`acme/reviews` with configurations en and de, each with the splits train and test."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    configurations = {
        language: {
            split: [{"text": f"{language} {split} {number}", "label": number % 2} for number in range(3)]
            for split in ("train", "test")
        }
        for language in ("en", "de")
    }
    save_data_set(tmp_path / "acme" / "reviews", configurations, class_names=["bad", "good"])


@pytest.mark.usefixtures("reviews_on_hub")
@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ("config=en", ["en train 0", "en train 1", "en train 2"]),
        ("config=de&split=test", ["de test 0", "de test 1", "de test 2"]),
        ("split=train%5B1:%5D&config=de", ["de train 1", "de train 2"]),
    ],
)
def test_a_hub_data_set_is_read_with_its_options_and_its_class_names(
    local: Place, options: str, texts: list[str]
) -> None:
    table = local.read(f"hf://acme/reviews?{options}")
    assert table.columns["text"] == texts
    assert table.columns["label"] == [int(text[-1]) % 2 for text in texts]
    assert table.class_names == ["bad", "good"]
    assert table.place(1) == f"hf://acme/reviews?{options}, row 2"


@pytest.mark.usefixtures("reviews_on_hub")
@pytest.mark.parametrize(
    ("options", "columns", "message"),
    [
        ("config=fr", ["text", "label"], " cannot be loaded: BuilderConfig 'fr' not found. Available: ['en', 'de']"),
        ("config=en&split=dev", ["text", "label"], ' cannot be loaded: Unknown split "dev"'),
        ("config=en", ["txt", "label"], ": no column 'txt'; did you mean 'text'?"),
    ],
)
def test_what_a_hub_data_set_does_not_have_is_named(
    local: Place, options: str, columns: list[str], message: str
) -> None:
    location = f"hf://acme/reviews?{options}"
    with pytest.raises(UsageError, match=re.escape(location + message)):
        local.read(location, *columns)


@pytest.mark.usefixtures("reviews_on_hub")
def test_several_configurations_of_a_hub_data_set_must_name_their_classes_alike(tmp_path: Path) -> None:
    save_data_set(tmp_path / "acme/films", {"en": {"train": [{"text": "a", "label": 0}]}}, class_names=["poor", "fair"])

    def load(*tables: str) -> tuple[list[str], Examples, Examples]:
        arguments = FinetuneClassification(model="unused", train_data=list(tables))
        return labelled_text.load(arguments, s3=lambda: pytest.fail("no data of it lies on S3"))

    names, train, held_out = load("hf://acme/reviews?config=en", "hf://acme/reviews?config=de")
    assert names == ["bad", "good"]
    assert len(train) + len(held_out) == 6
    with pytest.raises(
        UsageError,
        match=r"hf://acme/films names its classes 'poor', 'fair', but hf://acme/reviews\?config=en names them",
    ):
        load("hf://acme/reviews?config=en", "hf://acme/films")


READ_FROM_HUB = """
from pathlib import Path
from jobs.contract.errors import TrainyardError
from jobs.train.data.labelled_text import read_table
from jobs.train.models.pretrained import model_folder
for read in (
    lambda: read_table("hf://acme/none?config=en", ["text", "label"], s3=None),
    lambda: model_folder("hf://acme/none", s3=None, scratch=Path()),
):
    try:
        print(read())
    except TrainyardError as error:
        print(type(error).__name__, str(error).replace("\\n", " | "))
"""


@pytest.fixture
def from_hub(tmp_path: Path) -> Callable[..., list[str]]:
    """Errors of a table and of a model of the hub, read in a process with this environment: both libraries look at it
    when they are imported only."""

    def read(**environment: str) -> list[str]:
        ended = subprocess.run(
            [sys.executable, "-c", READ_FROM_HUB],
            env={"PYTHONPATH": str(Path(__file__).parents[3]), "HF_HOME": str(tmp_path / "hf"), **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=20,  # the retries without a network alone would take longer
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        return ended.stdout.splitlines()

    return read


def test_a_hub_that_is_switched_off_is_told_at_once(from_hub: Callable[..., list[str]]) -> None:
    table, model = from_hub(HF_HUB_OFFLINE="1")
    assert table.startswith(
        "UsageError hf://acme/none?config=en cannot be loaded: Couldn't reach 'acme/none' on the Hub"
    )
    assert model.startswith("TrainyardError hf://acme/none: the Hugging Face Hub could not be reached: ")
    assert "HF_HUB_OFFLINE" in model


class NoSuchRepository(BaseHTTPRequestHandler):
    """What the hub answers about a repository that is not there."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def empty_hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), NoSuchRepository) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_the_hub_does_not_have_is_not_found(from_hub: Callable[..., list[str]], empty_hub: str) -> None:
    table, model = from_hub(HF_ENDPOINT=empty_hub)
    assert table == (
        "NotFoundError hf://acme/none?config=en: Dataset 'acme/none' doesn't exist on the Hub or cannot be accessed. | "
        "Next: check the name; a gated one needs HF_TOKEN"
    )
    assert model == (
        "NotFoundError hf://acme/none: the hub answered 404 Not Found | "
        "Next: check the name; a private or gated model needs HF_TOKEN"
    )
