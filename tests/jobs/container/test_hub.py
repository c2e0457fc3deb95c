"""Tables, models and artifacts from the Hugging Face Hub, through its real libraries."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.core.run import MANIFEST
from tests.support.container.hub import save_data_set
from tests.support.container.hub_server import Hub
from tests.support.container.packing import publish
from tests.support.container.places import Place

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.fixture
def reviews_on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`acme/reviews` with the configurations en and de, each with the splits train and test."""
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
        ("config=de&split=test", ["de test 0", "de test 1", "de test 2"]),
        ("split=train%5B1:%5D&config=de", ["de train 1", "de train 2"]),
    ],
)
def test_a_hub_data_set_is_read_with_options_and_class_names(local: Place, options: str, texts: list[str]) -> None:
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
        ("config=en", ["txt", "label"], ", schema: no column 'txt'; did you mean 'text'?"),
    ],
)
def test_missing_parts_of_a_hub_data_set_are_named(
    local: Place, options: str, columns: list[str], message: str
) -> None:
    location = f"hf://acme/reviews?{options}"
    with pytest.raises(UsageError, match=re.escape(location + message)):
        local.read(location, *columns)


READ = """
import json
from pathlib import Path
from jobs.core.errors import TrainyardError
from jobs.spec.kinds.pretrain_mlm import PretrainMlm
from jobs.container.trainer.arguments import read_gaudi_config
from jobs.container.data.artifacts import open_artifact
from jobs.container.data.labelled_text import read_table
from jobs.container.data.tokenizer import tokenizer_files
from jobs.container.kinds.pretrain_mlm import fetch_inputs
from jobs.container.models.pretrained import model_folder
scratch = Path("scratch")
scratch.mkdir(exist_ok=True)
arguments = PretrainMlm(data="hf://acme/tokens", config="hf://acme/bert", global_batch_size=8)
of_a_model = arguments.model_copy(update={"config": None, "model": "hf://acme/bert"})
def tokenizer():
    found = tokenizer_files("hf://acme/bert", s3=lambda: None, scratch=scratch)
    return {name: (found.folder / name).read_text() for name in found.names}
found = {}
for name, read in {
    "inputs": lambda: fetch_inputs(arguments, None, scratch).model_dump(mode="json"),
    "inputs of a model": lambda: bool(fetch_inputs(of_a_model, None, scratch)),
    "tokenizer": tokenizer,
    "gaudi_config": lambda: read_gaudi_config("hf://acme/bert", None),
    "no manifest": lambda: open_artifact("hf://acme/bert", kind="packed-tokens", s3=None, scratch=scratch),
    "no artifact": lambda: open_artifact("hf://acme/none", kind="packed-tokens", s3=None, scratch=scratch),
    "no table": lambda: read_table("hf://acme/none?config=en", ["text", "label"], s3=None),
    "no model": lambda: model_folder("hf://acme/none", s3=None, scratch=Path()),
}.items():
    try:
        found[name] = read()
    except TrainyardError as error:
        found[name] = f"{type(error).__name__} {error}"
print(json.dumps(found))
"""


def read_from_hub(folder: Path, **environment: str) -> dict[str, Any]:
    """The result in a new process with this environment, because both libraries read it only at import."""
    ended = subprocess.run(
        [sys.executable, "-c", READ],
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "HF_HOME": str(folder / "hf"), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_offline_mode_is_reported_at_once(tmp_path: Path) -> None:
    found = read_from_hub(tmp_path, HF_HUB_OFFLINE="1")
    message = "UsageError hf://acme/none?config=en cannot be loaded: Couldn't reach 'acme/none' on the Hub"
    assert found["no table"].startswith(message)
    message = "TrainyardError hf://acme/none: the Hugging Face Hub could not be reached: "
    assert found["no model"].startswith(message)
    assert "HF_HUB_OFFLINE" in found["no model"]


def test_pretraining_inputs_come_from_the_hub_or_are_reported(
    hub: Hub, packed: Path, tiny_bert: Path, s3: "S3Client", tmp_path: Path
) -> None:
    manifest = publish(packed, s3, S3Location("runs", "research/hub-20260102-030405-0a1b/")).existing()
    assert manifest is not None
    hub.files["datasets/acme/tokens"] = {
        **{name: (packed / name).read_bytes() for name in manifest.files},
        MANIFEST: manifest.model_dump_json().encode(),
        "README.md": b"as a push leaves it",
    }
    bert = {path.name: path.read_bytes() for path in tiny_bert.iterdir()}
    settings = {"use_torch_autocast": True, "autocast_fp32_ops": ["mm"], "optimum_version": "1.18.1"}
    hub.files["acme/bert"] = {**bert, "gaudi_config.json": json.dumps(settings).encode()}
    hub.files["datasets/acme/bert"] = {"README.md": b"a data set without a manifest"}

    found = read_from_hub(tmp_path, HF_ENDPOINT=hub.url)
    assert found["inputs"]["fingerprint"] == manifest.fingerprint
    assert found["inputs"]["config"]["hidden_size"] == json.loads(bert["config.json"])["hidden_size"]
    assert found["inputs of a model"] is True, "its vocabulary is that of the tokens"
    assert found["tokenizer"]["tokenizer.json"] == bert["tokenizer.json"].decode()
    assert "model.safetensors" not in found["tokenizer"]
    assert found["gaudi_config"] == {"use_torch_autocast": True, "autocast_fp32_ops": ["mm"]}
    assert "hf://acme/bert is not a 'packed-tokens': it has no manifest.json" in found["no manifest"]
    assert found["no artifact"].startswith("NotFoundError hf://acme/none: ")
    assert found["no table"] == (
        "NotFoundError hf://acme/none?config=en: Dataset 'acme/none' doesn't exist on the Hub or cannot be accessed.\n"
        "Next: check the name; a gated data set needs HF_TOKEN"
    )
    assert found["no model"] == (
        "NotFoundError hf://acme/none: the hub answered 404 Not Found\n"
        "Next: check the name; a private or gated model needs HF_TOKEN"
    )
