"""Encoders with a head for classification that take several examples in one row (jobs.train.data.labelled_packing)."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers.modeling_outputs import SequenceClassifierOutput

from jobs.contract.errors import UsageError


def _packing(base: type[Any]) -> type[Any]:
    """Make a class with the same weights under the same names, whose `forward` takes packed batches as well.

    Named as the class that it stands for, because `config.json` names the class of the weights beside it.
    """

    class Packing(base):  # type: ignore[misc]  # transformers has no types
        def forward(
            self,
            input_ids: torch.Tensor,
            *,
            attention_mask: torch.Tensor | None = None,
            token_type_ids: torch.Tensor | None = None,
            labels: torch.Tensor | None = None,
            examples: torch.Tensor | None = None,
            position_ids: torch.Tensor | None = None,
            first_tokens: torch.Tensor | None = None,
        ) -> Any:
            """Packed: `examples` has each token's example, 0 for padding; `position_ids` count from 0 in each of them.

            `first_tokens` has the place of each example's first one, counted through all rows; `labels` and `logits`
            are in its order.
            """
            if examples is None or position_ids is None or first_tokens is None:
                return super().forward(
                    input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, labels=labels
                )
            encoder = self.base_model
            hidden = encoder(
                input_ids,
                # Padding attends to padding: over a token that may look at nothing there is no softmax.
                attention_mask=(examples[:, :, None] == examples[:, None, :]).long(),
                # What encoders take without it is as long as the longest example may be, and a row may be longer.
                token_type_ids=torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids,
                # RoBERTa's positions begin after its padding's number.
                position_ids=position_ids + getattr(encoder.embeddings, "padding_idx", -1) + 1,
            )[0]
            firsts = hidden.flatten(0, 1).index_select(0, first_tokens).unsqueeze(1)
            if encoder.pooler is not None:
                firsts = self.dropout(encoder.pooler(firsts))
            logits = self.classifier(firsts)
            loss = None if labels is None else functional.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)

    Packing.__name__ = base.__name__
    return Packing


CLASSES = {
    "bert": _packing(transformers.BertForSequenceClassification),
    "roberta": _packing(transformers.RobertaForSequenceClassification),
    "xlm-roberta": _packing(transformers.XLMRobertaForSequenceClassification),
}
"""The classes by the `model_type` of a config.json.

Their encoders take a mask for each pair of tokens, and their heads read an example's first token alone.
"""


def model_class(folder: Path, location: str) -> type[Any]:
    """Return the class for the model in `folder`. Raises UsageError on a model whose results packing would change."""
    found = str(json.loads((folder / "config.json").read_bytes())["model_type"])
    if found not in CLASSES:
        *others, last = CLASSES
        raise UsageError(
            f"{location} is of type '{found}': examples are packed for {', '.join(others)} and {last} only",
            next_step="set packing to false",
        )
    return CLASSES[found]
