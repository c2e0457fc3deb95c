"""BERT whose head computes the masked positions only, and which PyTorch can compile part by part.

Of a sequence's tokens, 15 % are masked. The head is a layer as wide as the model and then one as wide as the
vocabulary, a fifth of BERT-base's arithmetic. For the other 85 % of the tokens its result would be thrown away.

On a GPU much of the remaining time is spent not on arithmetic but on memory, which many small kernels read and write:
dropout, sums, norms, activations. Compiled, they are few kernels.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn import functional

from jobs.container.data.masked_tokens import IGNORED


class BertForMaskedLM(transformers.BertForMaskedLM):  # type: ignore[misc]  # transformers has no types
    """BERT with the same weights, names and loss; only `forward` needs the masked positions.

    It has the name of the class that it replaces, because `config.json` names the class of the weights.
    """

    _is_compiled = False

    def compile_parts(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile embeddings, layers and head, each at its first batch of a shape.

        All layers share one compilation, which takes a fraction of the time of compiling the whole model (pytorch.org,
        "Reducing torch.compile cold start compilation time with regional compilation"). The names of the weights do not
        change. `backend` is passed to torch.compile.
        """
        # The DDP optimizer would cut each layer in two, to send the first half's gradients while the second half's are
        # computed. A layer is small enough already.
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
        has, for each sequence, the sum of its tokens' losses and their number. From these an evaluation computes a mean
        that does not depend on how sequences are grouped into batches.
        """
        # Padded batches and evaluations are few, and would need further graphs.
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
        # BertModel would make a mask of ones and query the device whether all are ones, so at each step the host would
        # wait for everything that it has queued.
        return self.bert.encoder(self.bert.embeddings(input_ids))[0]
