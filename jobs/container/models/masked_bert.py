"""BERT with a head that computes only the masked positions, and with parts that PyTorch can compile separately.

Only 15 % of a sequence's tokens are masked. The head, a layer as wide as the model and one as wide as the vocabulary,
is a fifth of BERT-base's arithmetic. Its results for the other 85 % would be thrown away.

On a GPU, much of the remaining time is memory traffic of many small kernels: dropout, sums, norms, activations.
Compiling merges them into a few.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn import functional

from jobs.container.data.masked_tokens import IGNORED


class BertForMaskedLM(transformers.BertForMaskedLM):  # type: ignore[misc]  # transformers has no types
    """BERT with the same weights, names and loss, but `forward` needs the masked positions.

    The class has its base's name, because `config.json` records it.
    """

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
        for part in (self.bert.embeddings, *self.bert.encoder.layer, self.cls):
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
            logits = self.cls(masked)
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
        if attention_mask is not None:
            return self.bert(input_ids, attention_mask=attention_mask)[0]
        # BertModel would create a mask of ones and check it on the device, so the host would wait for all queued work
        # at each step.
        return self.bert.encoder(self.bert.embeddings(input_ids))[0]
