"""Start models that do not fit the data: classes, weights and settings are kept, reordered, replaced or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
)

from jobs.container.models import fitting
from jobs.core.errors import UsageError
from jobs.data_checks import model_files

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "pad_token_id": 0,
}
TOKENS = torch.arange(5, 13).reshape(2, 4)


def saved(folder: Path, kind: str = "bert", **settings: Any) -> Any:
    """Save a model whose head differs from row to row."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(CONFIG_MAPPING[kind](**{**SMALL, **settings})).eval()
    for name, values in model.named_parameters():
        if name.endswith(("classifier.bias", "out_proj.bias")):
            torch.nn.init.normal_(values)
    model.save_pretrained(folder)
    return model


def start(folder: Path, *, new_head: bool = True) -> fitting.LoadedModel:
    settings = fitting.TRAINING_SETTINGS if new_head else fitting.OUTPUT_SETTINGS
    return fitting.load_model(
        AutoModelForSequenceClassification,
        folder,
        "s3://m",
        "it cannot be loaded",
        settings=settings,
        new_head=new_head,
    )


def with_classes(folder: Path, names: list[str]) -> tuple[Any, str]:
    loaded = start(folder)
    head = fitting.set_classes(loaded, names, "s3://m")
    return loaded.model.eval(), head


# ModernBERT's module compiles a function on import, in a way that PyTorch has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2", "modernbert"])
def test_head_with_reordered_classes_predicts_the_same_names(kind: str, tmp_path: Path) -> None:
    own = saved(tmp_path, kind, id2label={0: "b", 1: "c", 2: "a"}, label2id={"b": 0, "c": 1, "a": 2})
    model, head = with_classes(tmp_path, ["a", "b", "c"])
    assert head == "kept: the model's classes are the data's, and its rows were reordered"
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert torch.equal(model(TOKENS).logits, own(TOKENS).logits[:, [2, 0, 1]])

    # A resumed attempt loads what was saved and changes nothing.
    model.save_pretrained(tmp_path / "step-1")
    again, head = with_classes(tmp_path / "step-1", ["a", "b", "c"])
    assert head == "kept: the model's classes are the data's, in the same order"
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_unnamed_classes_are_their_numbers(tmp_path: Path) -> None:
    own = saved(tmp_path, num_labels=3)
    model, head = with_classes(tmp_path, ["0", "1", "2"])
    assert head == "kept: the model's classes are the data's, in the same order"
    assert torch.equal(model(TOKENS).logits, own(TOKENS).logits)


@pytest.mark.parametrize("names", [["no", "yes"], ["a", "b", "c"]])
def test_other_classes_get_a_new_head(names: list[str], tmp_path: Path) -> None:
    own = saved(tmp_path, num_labels=2)
    model, head = with_classes(tmp_path, names)
    assert head == "new: the model's classes are LABEL_0, LABEL_1, not the data's"
    assert model(TOKENS).logits.shape == (2, len(names))
    assert not torch.equal(model.classifier.weight[:2], own.classifier.weight)
    assert torch.equal(model.bert.pooler.dense.weight, own.bert.pooler.dense.weight)


@pytest.mark.parametrize(
    "settings",
    [
        {"problem_type": "regression", "num_labels": 1},
        {
            "problem_type": "multi_label_classification",
            "num_labels": 2,
            "return_dict": False,
            "output_hidden_states": True,
            "output_attentions": True,
            "torchscript": True,
            "is_decoder": True,
            "torch_dtype": "bfloat16",
        },
    ],
)
def test_start_models_settings_do_not_change_the_task(settings: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path, num_labels=settings["num_labels"])
    of_configuration(**settings)(tmp_path)
    model, _ = with_classes(tmp_path, ["a", "b"])
    found = model(TOKENS, labels=torch.tensor([0, 1]))
    assert {*found.keys()} == {"loss", "logits"}
    assert found.loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(found.logits, torch.tensor([0, 1])).item()
    )
    assert model.classifier.weight.dtype == torch.float32
    # Otherwise a step of four batches would differ from a step of one, for models with **kwargs (ModernBERT)
    assert model.accepts_loss_kwargs is False


def renamed(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return apply


def of_configuration(**settings: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **settings}))

    return apply


@pytest.mark.parametrize(
    ("damage", "message", "next_step"),
    [
        (
            renamed(lambda weights: {f"module.{name}": values for name, values in weights.items()}),
            r"missing \(bert\.embeddings\..*unknown to the model \(module\.",
            "remove the prefix 'module.'",
        ),
        (
            of_configuration(num_hidden_layers=3),
            r"32 weights missing \(bert\.encoder\.layer\.1",
            "save the model again",
        ),
        (of_configuration(intermediate_size=32), "3 weights of another shape", "save the model again"),
        (
            renamed(lambda weights: {name: values * float("nan") for name, values in weights.items()}),
            "its weights are not all finite numbers: bert.embeddings.word_embeddings.weight has NaN or infinity",
            "start from a model",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_their_names(
    damage: Callable[[Path], None], message: str, next_step: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError, match=message) as refused:
        start(tmp_path)
    assert str(refused.value.next_step).startswith(next_step)


def test_missing_head_is_new_in_training_refused_in_evaluation(tmp_path: Path) -> None:
    saved(tmp_path)
    renamed(lambda weights: {name: values for name, values in weights.items() if "classifier" not in name})(tmp_path)
    _, head = with_classes(tmp_path, ["a", "b"])
    assert head == "new: classifier.bias, classifier.weight"
    with pytest.raises(UsageError, match=r"2 weights missing \(classifier\.bias, classifier\.weight\)"):
        start(tmp_path, new_head=False)


def test_head_is_new_if_its_pooler_is(tmp_path: Path) -> None:
    torch.manual_seed(3)
    BertForMaskedLM(CONFIG_MAPPING["bert"](**SMALL)).save_pretrained(tmp_path)
    model, head = with_classes(tmp_path, ["0", "1"])
    assert head == "new: bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias, classifier.weight"
    assert model(TOKENS).logits.shape == (2, 2)


def test_evaluation_refuses_models_that_predict_several_numbers(tmp_path: Path) -> None:
    saved(tmp_path)
    of_configuration(problem_type="regression")(tmp_path)
    contents = {"config.json": (tmp_path / "config.json").read_bytes()}
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    (fault,) = model_files.model_errors("s3://m", names, contents, classifies=True)
    assert "s3://m predicts 2 numbers for each text" in str(fault)
    assert not [*model_files.model_errors("s3://m", names, contents)]


def test_adapters_and_quantized_models_are_refused() -> None:
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    (fault,) = model_files.model_errors("s3://m", [*names, "adapter_config.json"], {})
    assert str(fault).startswith("s3://m is an adapter: its adapter_config.json")
    quantized = {"config.json": b'{"model_type": "bert", "quantization_config": {"load_in_4bit": true}}'}
    (fault,) = model_files.model_errors("s3://m", names, quantized)
    assert str(fault).startswith("s3://m is quantized: its config.json has 'quantization_config'")


def test_models_padding_token_comes_from_the_tokenizer(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2", pad_token_id=None)
    model = start(tmp_path).model
    batch = {"input_ids": torch.tensor([[5, 6, 7], [5, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    with pytest.raises(ValueError, match="padding token"):
        model(**batch)
    fitting.set_padding_token(model, SimpleNamespace(pad_token_id=0))
    assert model(**batch).logits.shape == (2, 2)
