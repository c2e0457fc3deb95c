"""Models from S3 and local paths; everything wrong with a model is reported."""

import ast
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import jobs
from jobs.container import versions
from jobs.container.kinds import finetune_classification
from jobs.container.models import pretrained
from jobs.container.rank import one_line
from jobs.core.errors import NotFoundError, UsageError
from jobs.data_checks import model_files
from tests.support.container.places import Place
from tests.support.container.reviews import save_tiny_bert


def put_model(place: Place, tiny_bert: Path, *left_out: str, more: tuple[str, ...] = ()) -> str:
    for file in tiny_bert.iterdir():
        if file.name not in left_out:
            place.put(f"model/{file.name}", file.read_bytes())
    for name in more:
        place.put(f"model/{name}", b"\0" * 10)
    return place.at("model")


LOADERS = {"from_pretrained", "from_config", "load_dataset", "load_dataset_builder"}


def test_every_loader_disables_remote_code() -> None:
    """If unset, transformers prompts on standard input, and `datasets` 2.x runs the code."""
    calls = [
        (path.name, node)
        for path in Path(jobs.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS
    ]
    assert len(calls) >= 8
    for name, call in calls:
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert keywords.get("trust_remote_code") == "False", f"{name}, line {call.lineno}"


@pytest.mark.parametrize("slash", ["", "/"])
def test_s3_download_has_only_what_from_pretrained_reads(remote: Place, tiny_bert: Path, slash: str) -> None:
    more = ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "training_args.bin")
    folder = remote.model(put_model(remote, tiny_bert, more=more) + slash)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in tiny_bert.iterdir()
    }


@pytest.mark.parametrize("weights", [True, False])
def test_hub_download_has_only_wanted_files(
    local: Place, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, *, weights: bool
) -> None:
    there = [path.name for path in tiny_bert.iterdir()]
    asked: list[list[str]] = []

    def download(_name: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert revision == "v1"
        asked.append(allow_patterns)
        return str(tiny_bert)

    siblings = [SimpleNamespace(rfilename=name) for name in [*there, "tf_model.h5", "README.md"]]
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = pretrained.model_folder(
        "hf://org/tiny?revision=v1", s3=local._client, scratch=local.folder, weights=weights
    )
    assert found == tiny_bert
    assert sorted(*asked) == sorted(name for name in there if weights or name != "model.safetensors")


@pytest.mark.parametrize(
    ("version", "is_safe"),
    [("2.6.0a0+git7e5e9ab", False), ("2.9.1", False), ("2.10.0", True)],
)
def test_pickled_weights_are_refused_if_pytorch_may_run_them(
    version: str, *, is_safe: bool, local: Place, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "_torch_version", lambda: version)
    both = put_model(local, tiny_bert, more=("pytorch_model.bin",))
    assert local.model(both) == Path(both)
    (Path(both) / "model.safetensors").unlink()
    if is_safe:
        assert local.model(both) == Path(both)
        return
    with pytest.raises(UsageError) as refused:
        local.model(both)
    assert one_line(refused.value) == (
        f"{both} has its weights only in pytorch_model.bin, a pickle, and PyTorch {version} may run code that is "
        "hidden in a pickle (CVE-2025-32434, CVE-2026-24747). Next: save the model again with save_pretrained(…, "
        "safe_serialization=True), which writes model.safetensors; PyTorch 2.10 and later can read pickles too, "
        "but no Gaudi release has it"
    )


def test_folder_without_a_model_is_refused_with_what_it_lacks(place: Place, tiny_bert: Path) -> None:
    missing = ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    location = put_model(place, tiny_bert, *missing)
    there = ", ".join(sorted(file.name for file in tiny_bert.iterdir() if file.name not in missing))
    message = f"{location} is not a model: it has no tokenizer (tokenizer.json or a vocabulary), only {there}"
    with pytest.raises(UsageError, match=re.escape(message)):
        place.model(location)


def test_missing_model_is_reported(local: Place, remote: Place) -> None:
    with pytest.raises(NotFoundError, match=re.escape(f"model folder {local.at('none')} does not exist")):
        local.model(local.at("none"))
    missing = remote.at("none")
    with pytest.raises(NotFoundError, match=re.escape(f"{missing} does not exist: there is no object below it")):
        remote.model(missing)
    remote.put("none-such/config.json", b"{}")  # only the beginning of the name is the same
    with pytest.raises(NotFoundError, match="there is no object below it"):
        remote.model(missing)


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "lightglue", "trust_remote_code": True, "keypoint_detector_config": {"_name_or_path": "evil/x"}},
        {"model_type": "bert", "parts": [{"attn_implementation": {"text": "evil/kernel@main"}}]},
    ],
)
def test_configuration_that_runs_code_is_refused_unread(
    local: Place, tiny_bert: Path, content: dict[str, object]
) -> None:
    location = put_model(local, tiny_bert, "config.json")
    local.put("model/config.json", json.dumps(content).encode())
    with pytest.raises(UsageError, match=r"its config.json has '\w+: .*', which makes transformers download and"):
        local.model(location)


TINY = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "pad_token_id": 1}
DECODER = {"n_embd": 8, "n_head": 1, "n_layer": 1}
BOTH = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1}


@pytest.mark.parametrize(
    ("kind", "settings", "most"),
    [
        ("bert", {}, 16),
        ("roberta", {}, 14),
        ("esm", {"position_embedding_type": "rotary"}, None),
        ("gpt2", {**DECODER, "n_positions": 16}, 16),
        ("bart", {**BOTH, "decoder_attention_heads": 1}, 16),
    ],
)
def test_positions_of_each_model_type_are_known(kind: str, settings: dict[str, object], most: int | None) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

    config = CONFIG_MAPPING[kind](**{**TINY, "max_position_embeddings": 16, **settings})
    assert model_files.positions(json.loads(config.to_json_string())) == most
    model = AutoModelForSequenceClassification.from_config(config).eval()
    tokens = torch.full((1, 17 if most is None else most), 5)
    tokens[:, -1] = 2  # the end token, where BART reads what it classifies
    model(tokens)
    if most is not None:
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.cat([torch.full((1, 1), 5), tokens], dim=1))


def test_max_length_beyond_the_model_is_refused_early(tiny_bert: Path) -> None:
    message = r"max_length 4000 is more than the \d+ tokens that s3://models/m has positions for"
    with pytest.raises(UsageError, match=message):
        load_model(tiny_bert, max_length=4000)


def load_model(folder: Path, *, tokenizer: Any = None, max_length: int = 32) -> Any:
    finetune_classification._tokenizer(folder, "s3://models/m")
    model, _ = finetune_classification._model(
        folder, "s3://models/m", ["bad", "good"], tokenizer, max_length=max_length
    )
    return model


def with_own_code(tiny_bert: Path, folder: Path, **changes: dict[str, object]) -> Path:
    """Copy the model with changed JSON files and with code that would write a file into `folder`."""
    model = Path(shutil.copytree(tiny_bert, folder / "model"))
    (model / "own.py").write_text(f"open({str(folder / 'was-run')!r}, 'w')\n")
    for name, change in changes.items():
        path = model / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    return model


OWN_MODEL: dict[str, object] = {
    "model_type": "own",
    "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"), "own.Own"),
}
OWN_TOKENIZER: dict[str, object] = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Own", None]}}


def test_models_own_code_never_runs_without_a_prompt(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_own_code(tiny_bert, tmp_path, config=OWN_MODEL, tokenizer_config=OWN_TOKENIZER)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    with pytest.raises(UsageError, match=r"^s3://models/m: its tokenizer cannot be loaded: "):
        finetune_classification._tokenizer(model, "s3://models/m")
    with pytest.raises(UsageError, match=r"^s3://models/m: it cannot be loaded as an encoder"):
        finetune_classification._model(model, "s3://models/m", ["bad", "good"], None, max_length=32)
    assert not (tmp_path / "was-run").exists()


def test_damaged_model_file_error_names_the_model(tiny_bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    load_model(model)
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UsageError, match=r"^s3://models/m: it cannot be loaded as an encoder"):
        load_model(model)


def test_incomplete_weights_are_refused_before_they_are_loaded(place: Place, tiny_bert: Path) -> None:
    folder = Path(shutil.copytree(tiny_bert, place.folder / "cut"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"its model.safetensors has .* bytes, but its header describes"):
        place.model(put_model(place, folder))


@pytest.mark.parametrize("is_4", [True, False])
def test_tokenizers_of_transformers_5_are_loaded_and_saved_for_4(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_4: bool
) -> None:
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "of-5"))
    settings = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<ask>"], "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(versions, "_IS_TRANSFORMERS_4", is_4)
    tokenizer = versions.load_tokenizer(folder)
    versions.save_tokenizer(tokenizer, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (saved["extra_special_tokens"], saved["additional_special_tokens"]) == ({}, ["<ask>"])
    again = versions.load_tokenizer(tmp_path / "saved")
    assert again("so good <ask>").input_ids == tokenizer("so good <ask>").input_ids
    assert "<ask>" in again.all_special_tokens


def test_copied_weights_do_not_depend_on_their_file(tmp_path: Path) -> None:
    # At another address a single row is summed in another order, so an evaluation would differ after a resume.
    save_tiny_bert(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    logits = []
    for longer in range(0, 64, 8):
        save_file(weights, file, {"format": "pt", "longer": "x" * longer})
        model = load_model(tmp_path)
        assert {place.data_ptr() % 64 for place in model.parameters()} == {0}
        with torch.no_grad():
            for name, values in model.classifier.named_parameters():  # a new object each time
                values.fill_(len(name))
            logits.append(model(torch.tensor([[2, 7, 8, 9, 3]])).logits)
    assert all(torch.equal(found, logits[0]) for found in logits)
