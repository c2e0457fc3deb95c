"""A head that computes only masked positions, compared with transformers' full head."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jobs.container.data.masked_tokens import IGNORED, MaskedSequences
from jobs.container.models.masked_bert import HEADS, masked_lm
from tests.jobs.container.data.test_masked_tokens import VOCABULARY, Rows, masking


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    """A BERT, or a model of the type that the test names."""
    torch.manual_seed(0)
    model_type = getattr(request, "param", "bert")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    if model_type == "distilbert":
        sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    config = CONFIG_MAPPING[model_type](vocab_size=VOCABULARY, pad_token_id=0, **sizes)
    for name in dropouts:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return masked_lm(model_type)(config)


def full_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return labels for all positions."""
    labels = torch.full_like(batch["input_ids"], IGNORED)
    return labels.scatter(1, batch["masked_positions"], batch["labels"])


@pytest.mark.parametrize("model", HEADS, indirect=True)
def test_loss_and_gradients_equal_those_of_the_full_head(model: Any) -> None:
    rows = Rows(8)
    batch = MaskedSequences(rows, masking()).__getitems__(range(8))  # the last is padded, and has fewer masks
    whole = transformers.AutoModelForMaskedLM.from_config(model.config)
    whole.load_state_dict(model.state_dict())

    found = model.train()(**batch)
    expected = whole.train()(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=full_labels(batch)
    )
    assert found["loss"].item() == pytest.approx(expected.loss.item(), abs=1e-6)
    assert found["sums"][:, 1].tolist() == [19] * 7 + [9]
    assert (found["sums"][:, 0].sum() / found["sums"][:, 1].sum()).item() == pytest.approx(
        expected.loss.item(), abs=1e-6
    )

    found["loss"].backward()
    expected.loss.backward()
    of_whole = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} is not trained"
        torch.testing.assert_close(parameter.grad, of_whole[name].grad, atol=1e-6, rtol=1e-4)


def test_unpadded_batch_needs_no_attention_mask(model: Any) -> None:
    data = MaskedSequences(Rows(8), masking())
    batch = data.collate_unpadded(data.__getitems__(range(7)))
    assert "attention_mask" not in batch
    given = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    found, expected = model.train()(**batch), model(**given)
    assert torch.equal(found["sums"], expected["sums"])
    found["loss"].backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    expected["loss"].backward()
    for found_one, parameter in zip(gradients, model.parameters(), strict=True):
        assert found_one is not None
        assert parameter.grad is not None
        assert torch.equal(found_one, parameter.grad)
    # The last one is padded
    assert "attention_mask" in data.collate_unpadded(data.__getitems__(range(8)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by Dynamo itself
def test_compiled_model_learns_the_same_with_one_layer_graph(model: Any) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds to import, and only this test needs it

    data = MaskedSequences(Rows(8), masking())
    batch = data.collate_unpadded(data.__getitems__(range(7)))
    model.train()(**batch)["loss"].backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    names = list(model.state_dict())

    counter = CompileCounterWithBackend("aot_eager")
    model.compile_parts(counter)
    model(**batch)["loss"].backward()
    assert counter.frame_count == 3, "embeddings, a layer, the head"
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name])
    assert list(model.state_dict()) == names

    # Neither padded batches nor evaluations are compiled
    model(**data.__getitems__(range(8)))["loss"].backward()
    model.eval()
    with torch.no_grad():
        evaluated = model(**batch)["sums"]
    assert counter.frame_count == 3
    assert torch.equal(evaluated[:, 1], torch.full((7,), 19.0))


def test_batch_without_masks_has_a_loss_of_zero(model: Any) -> None:
    batch = MaskedSequences(Rows(2), masking()).__getitems__([0])
    batch["labels"][:] = IGNORED
    assert model(**batch)["loss"].item() == 0


def test_saved_model_is_a_plain_bert_with_tied_embeddings(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(plain) is transformers.BertForMaskedLM
    assert plain.config.architectures == ["BertForMaskedLM"]
    assert plain.cls.predictions.decoder.weight is plain.bert.embeddings.word_embeddings.weight
    for name, weights in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], weights), name
    encoder = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(
        encoder.bert.encoder.layer[1].output.dense.weight, model.bert.encoder.layer[1].output.dense.weight
    )
