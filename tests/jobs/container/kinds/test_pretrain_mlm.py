"""A pre-training from the launcher's start to its saved files, with real ranks, and what it refuses."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoTokenizer

from jobs.container.accelerator import Accelerator
from jobs.container.data.masked_tokens import EVALUATION_SEED, MaskedSequences, Masking
from jobs.container.data.packed_tokens import PackedTokens
from jobs.container.kinds.pretrain_mlm import bert, fetch_inputs, new_model
from jobs.core.errors import NotFoundError, UsageError
from jobs.core.locations import S3Location
from jobs.spec.kinds.pretrain_mlm import PretrainMlm
from tests.support.container.corpora import Workshop, paragraphs, put_jsonl, texts_of
from tests.support.container.encoders import save_tiny_encoder
from tests.support.container.hub_server import Hub
from tests.support.container.launching import Run
from tests.support.container.packing import publish

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

KIND = "pretrain-mlm"

MODEL = "model/model.safetensors"

Put = Callable[[Path, str], str]

CPU = Accelerator(name="cpu", devices=0, reason="a test")


@pytest.mark.every_release
def test_pre_training_resumes_as_if_uninterrupted(
    run: Run, pretraining: tuple[str, ...], packed: Path, *, hub: Hub, tmp_path: Path
) -> None:
    launched = run.attempt(*pretraining, kind=KIND, nproc=2)

    assert "arning" not in launched.output
    assert "start: from random weights\n" in launched.lines
    lines = run.metrics()
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == [*range(4, 49, 4)]
    assert trained[-1]["epoch"] == pytest.approx(48 * 16 / len(PackedTokens(packed, "train")), abs=1e-3)
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [16, 32, 48]
    assert trained[0]["loss"] > evaluated[-1]["eval_loss"] + 1, "it did not learn"
    receipt = run.receipt()
    assert receipt.result["eval_loss"] == evaluated[-1]["eval_loss"]
    assert receipt.result["eval_perplexity"] == pytest.approx(math.exp(receipt.result["eval_loss"]))
    assert receipt.result["eval_loss"] == pytest.approx(_evaluated_by_hand(run, packed, tmp_path), abs=1e-5)
    assert json.loads(run.read("model/config.json"))["vocab_size"] == 128

    # A second attempt, after one that was interrupted in its last upload.
    weights = run.read(MODEL)
    run.s3.delete_object(Bucket=run.location.bucket, Key=f"{run.location.key}checkpoints/step-48/manifest.json")
    push: dict[str, Any] = hub.environment
    second = run.attempt(*pretraining, "--push-to-hub=acme/bert", kind=KIND, nproc=2, attempt=2, **push)

    assert "start: resumed from checkpoint step-32\n" in second.lines
    assert run.read(MODEL) == weights, "the resumed run went another way"
    for name in ("step", "loss", "eval_loss"):
        assert [line.get(name) for line in run.metrics()] == [line.get(name) for line in lines]
    assert hub.files["acme/bert"] == {name.removeprefix("model/"): run.read(name) for name in run.keys("model/")}
    assert "model.safetensors" in hub.by_lfs["acme/bert"]
    assert f"| data | {pretraining[0].removeprefix('--data=')} |" in hub.files["acme/bert"]["README.md"].decode()


def _evaluated_by_hand(run: Run, packed: Path, folder: Path) -> float:
    """Return the loss of the saved model on all held-out sequences, with transformers' head on every position."""
    from transformers import AutoModelForMaskedLM

    left = run.download("model/", folder / "model")
    model = AutoModelForMaskedLM.from_pretrained(left).eval()
    batch = _held_out(packed, AutoTokenizer.from_pretrained(left))
    labels = torch.full_like(batch["input_ids"], -100).scatter(1, batch["masked_positions"], batch["labels"])
    with torch.no_grad():
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    return float(loss)


def _held_out(packed: Path, tokenizer: Any) -> dict[str, torch.Tensor]:
    masking = Masking(
        fraction=0.15,
        vocabulary_size=len(tokenizer),
        mask_id=tokenizer.mask_token_id,
        pad_id=tokenizer.pad_token_id,
        special_ids=tokenizer.all_special_ids,
        seed=EVALUATION_SEED,
    )
    data = MaskedSequences(PackedTokens(packed, "held-out"), masking)
    return data.__getitems__(range(len(data)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"data_fingerprint": "0123456789abcdef"},
            r"has the fingerprint \w{64}, not 0123456789abcdef\nNext: correct data",
        ),
        (
            {"global_batch_size": 4096},
            r"has \d+ sequences in the split 'train'; at least 4096 are needed\nNext: use more text",
        ),
        ({"data": "s3://runs/research/corpus/"}, "is a 'corpus', not a 'packed-tokens'\nNext: "),
        ({"config": "s3://runs/nowhere/"}, "s3://runs/nowhere/ has no config.json\nNext: "),
        ({"config": "gpt2"}, "gpt2: config.json is of type 'gpt2', which cannot be pre-trained\nNext: set config to "),
        ({"config": "small"}, r"small: max_position_embeddings is 8, but s3://.* needs 16\nNext: set .* to 16 or more"),
        ({"config": "text"}, "text: its config.json is not JSON"),
    ],
    ids=str,
)
def test_mismatched_inputs_are_refused(
    s3: "S3Client", pretraining: tuple[str, ...], tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    for name, content in {
        "gpt2": '{"model_type": "gpt2"}',
        "small": '{"model_type": "bert", "max_position_embeddings": 8}',
        "text": "{",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    publish(tmp_path / "gpt2", s3, S3Location("runs", "research/corpus/"), kind="corpus")
    if "config" in values and "://" not in values["config"]:
        values = {"config": str(tmp_path / values["config"])}
    arguments = PretrainMlm.model_validate(
        {"data": pretraining[0].removeprefix("--data="), "global_batch_size": 8, **values}
    )

    with pytest.raises((UsageError, NotFoundError), match=message):
        fetch_inputs(arguments, s3, tmp_path)


@pytest.mark.parametrize("vocabulary", [8, 30522])
def test_a_configuration_sets_the_shape_and_the_tokenizer_the_vocabulary(
    s3: "S3Client", pretraining: tuple[str, ...], tmp_path: Path, vocabulary: int
) -> None:
    config = {"model_type": "bert", "num_hidden_layers": 3, "vocab_size": vocabulary}
    s3.put_object(Bucket="runs", Key="shapes/a/config.json", Body=json.dumps(config).encode())
    data = pretraining[0].removeprefix("--data=")
    arguments = PretrainMlm(data=data, config="s3://runs/shapes/a/", global_batch_size=8)
    found = fetch_inputs(arguments, s3, tmp_path).config
    assert found is not None
    model = new_model(found | {"hidden_size": 24}, CPU)
    # 25 tokens, and places up to a multiple of 128
    assert (model.config.num_hidden_layers, len(model.get_input_embeddings().weight)) == (3, 128)


def test_training_starts_from_a_model_with_the_same_tokenizer(
    s3: "S3Client", pretraining: tuple[str, ...], tiny_bert: Path, put: Put, tmp_path: Path
) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    def model(name: str, made: Any, tokens: list[str] | None = None) -> str:
        tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
        tokenizer.add_tokens(tokens or [])
        made.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return put(tmp_path / name, f"models/{tmp_path.name}-{name}")

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    shape["vocab_size"] = len(AutoTokenizer.from_pretrained(tiny_bert))
    whole = BertForMaskedLM(BertConfig(**shape))

    def started(location: str) -> Any:
        data = pretraining[0].removeprefix("--data=")
        arguments = PretrainMlm(data=data, model=location, global_batch_size=8)
        scratch = tmp_path / location.rpartition("-")[2] / "scratch"
        scratch.mkdir()
        return bert(arguments, fetch_inputs(arguments, s3, scratch), CPU)

    # WHEN the model has a head for this task, THEN the head is loaded, too
    same = started(model("whole", whole))
    assert type(same).__name__ == "BertForMaskedLM"
    state = same.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in whole.state_dict().items())
    # WHEN it has another head, THEN only the encoder is loaded
    classifier = BertForSequenceClassification(BertConfig(**shape))
    state = started(model("classifier", classifier)).state_dict()
    assert torch.equal(
        state["bert.encoder.layer.0.output.dense.weight"], classifier.bert.encoder.layer[0].output.dense.weight
    )

    more = BertForMaskedLM(BertConfig(**{**shape, "vocab_size": shape["vocab_size"] + 1}))
    with pytest.raises(UsageError, match=r"does not have the vocabulary of s3://.*: the id of 'another' is missing"):
        started(model("wrong", more, ["another"]))
    shutil.rmtree(tmp_path / "wrong")
    with pytest.raises(UsageError, match=r"sequences of 16 tokens, .* only 8 positions\nNext"):
        started(model("wrong", BertForMaskedLM(BertConfig(**shape, max_position_embeddings=8))))


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "modernbert"])
def test_other_encoders_continue_on_tokens_of_their_tokenizers(
    model_type: str, workshop: Workshop, run: Run, tmp_path: Path
) -> None:
    texts = [*paragraphs(200), "this text spells <mask> and [MASK] itself"]
    corpus = workshop.corpus(data=[str(put_jsonl(tmp_path / "corpus.jsonl", texts))], held_out_fraction=0.1)
    model = save_tiny_encoder(tmp_path / "start", model_type, texts)
    packed = workshop.packed(corpus, SimpleNamespace(location=str(model)), sequence_length=32)
    assert workshop.result()["special_tokens_in_text"] == 1
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = PackedTokens(packed.download(), "train")
    ids = [number for text in texts_of(corpus) for number in tokenizer(text)["input_ids"]]
    assert rows.__getitems__(range(len(rows))).flatten().tolist()[: len(ids)] == ids

    launched = run.attempt(
        *(f"--data={packed.location}", f"--model={model}", "--max-steps=30", "--global-batch-size=16"),
        *("--learning-rate=0.01", "--log-every-steps=10"),
        kind=KIND,
    )

    assert f"start: from the weights of {model}\n" in launched.lines
    assert "warning" not in launched.output
    result = run.receipt().result
    assert result["eval_loss"] < run.metrics()[0]["loss"] - 0.3, "it did not learn"
    assert result["eval_loss"] == pytest.approx(_evaluated_by_hand(run, packed.download(), tmp_path), abs=1e-4)
    assert json.loads(run.read("model/config.json"))["model_type"] == model_type


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "m", "config": "c"}, "'model' sets the model's shape; remove config, hidden_size"),
        ({"hidden_size": 100}, "hidden_size 100 is not divisible by 12 heads"),
        ({"config": "a", "layers": 6}, "'config' sets the model's shape; remove hidden_size, layers, heads"),
        ({"training_arguments": {"warmup_steps": 3}, "warmup_ratio": 0.2}, "set either 'warmup_ratio' or 'training"),
        ({"training_arguments": {"lr_scheduler_kwargs": {"power": 2}}}, "'linear' has no parameters; remove power"),
        ({"training_arguments": {"adam_beta1": 0.5}, "optimizer": "sgd"}, "adam_beta1 needs 'optimizer: adamw'"),
        ({"evaluate_every_steps": None}, "evaluate_every_steps"),
        ({"gaudi_config": "g.json", "hpu_trainer": "transformers"}, "'gaudi_config' is for optimum-habana's Trainer"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused_before_submission(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PretrainMlm.model_validate({"data": "d", **values})
