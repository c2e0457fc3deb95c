"""Encoders with a head that computes only the masked positions, and with parts that PyTorch can compile separately.

Only 15 % of a sequence's tokens are masked. The head, a layer as wide as the model and one as wide as the vocabulary,
is a fifth of BERT-base's arithmetic. Its results for the other 85 % would be thrown away.

On a GPU, much of the remaining time is memory traffic of many small kernels: dropout, sums, norms, activations.
Compiling merges them into a few.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from jobs.container.data.masked_tokens import IGNORED

HEADS: Mapping[str, tuple[str, ...]] = {
    "bert": ("cls",),
    "camembert": ("lm_head",),
    "distilbert": ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
    "modernbert": ("head", "decoder"),
    "roberta": ("lm_head",),
    "xlm-roberta": ("lm_head",),
}
"""Each model type's modules after the encoder, in the order in which its `forward` calls them."""


@functools.cache
def masked_lm(model_type: str) -> Any:
    """Return the class of a model type with the weights, names and loss of transformers', and `MaskedHead.forward`.

    It also has the name of transformers' class, because `config.json` records it.
    """
    base = getattr(transformers, MODEL_FOR_MASKED_LM_MAPPING_NAMES[model_type])
    return type(base.__name__, (MaskedHead, base), {"head_parts": HEADS[model_type]})


class MaskedHead(nn.Module):
    """A model whose `forward` needs the masked positions, and computes its head only there."""

    head_parts: ClassVar[tuple[str, ...]]
    base_model: Any
    _is_compiled = False

    def compile_parts(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile embeddings, layers and head, each at the first batch of each shape.

        All layers share one compilation, which takes a fraction of the time of compiling the whole model (pytorch.org,
        "Reducing torch.compile cold start compilation time with regional compilation"). The names of the weights do not
        change. `backend` is passed to torch.compile.
        """
        # The DDP optimizer would split each layer, to send one half's gradients while the other half's are computed. A
        # layer is small enough already.
        torch._dynamo.config.optimize_ddp = False  # noqa: SLF001 - PyTorch documents it under this name
        body = getattr(self.base_model, "encoder", None) or getattr(self.base_model, "transformer", self.base_model)
        layers = body.layers if hasattr(body, "layers") else body.layer
        for part in (self.base_model.embeddings, *layers, *(getattr(self, name) for name in self.head_parts)):
            part.compile(backend=backend)
        self._is_compiled = True

    def forward(
        self,
        input_ids: torch.Tensor,
        masked_positions: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return `loss`, the mean over the batch's masked tokens, and `sums`.

        `labels` belong to `masked_positions` and have the shape `batch x places`; IGNORED labels do not count. `sums`
        contains the sum and the number of each sequence's token losses, from which an evaluation computes a mean that
        does not depend on how sequences are batched.
        """
        # Padded batches and evaluations are rare and would need more graphs.
        runs_eagerly = self._is_compiled and (attention_mask is not None or not self.training)
        with torch.compiler.set_stance("force_eager") if runs_eagerly else contextlib.nullcontext():
            hidden = self._hidden(input_ids, attention_mask)
            masked = hidden.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
            logits = functools.reduce(lambda values, name: getattr(self, name)(values), self.head_parts, masked)
        losses = functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
        ).view_as(labels)
        tokens = (labels != IGNORED).sum(dim=1)
        sums = losses.sum(dim=1)
        return {
            "loss": sums.sum() / tokens.sum().clamp(min=1),
            "sums": torch.stack([sums.detach(), tokens.to(sums.dtype)], dim=1),
        }

    def _hidden(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Any:
        encoder = getattr(self.base_model, "encoder", None)
        if attention_mask is not None or encoder is None:
            return self.base_model(input_ids, attention_mask=attention_mask)[0]
        # BertModel would create a mask of ones and check it on the device, so the host would wait for all queued work
        # at each step.
        return encoder(self.base_model.embeddings(input_ids))[0]
