"""BERT with a head that works on the masked places only, and that PyTorch can compile part by part.

Of a sequence's tokens 15 % are masked. The head is a layer as wide as the model and then one as wide as the vocabulary,
a fifth of BERT-base's arithmetic: on the other 85 % of the tokens its result would be thrown away.

On a GPU much of the rest is no arithmetic but memory, read and written by one small kernel after the other: dropout,
sums, norms, activations. Compiled, they are few kernels.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn import functional

from jobs.container.data.masked_tokens import IGNORED


class BertForMaskedLM(transformers.BertForMaskedLM):  # type: ignore[misc]  # transformers has no types
    """BERT with the same weights under the same names and the same loss; only `forward` asks for the masked places.

    Named as the class that it stands for, because `config.json` names the class of the weights beside it.
    """

    _is_compiled = False

    def compile_parts(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Have PyTorch compile embeddings, layers and head, each at its first batch of a shape.

        A layer is compiled once for all of them, which takes a fraction of the time of compiling the whole model
        (pytorch.org, "Reducing torch.compile cold start compilation time with regional compilation"). The names of the
        weights stay as they are. `backend` is that of torch.compile.
        """
        # It would cut each layer in two, so that the first half's gradients can be sent while the second's are made. A
        # layer is such a part already.
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
        """`labels` are those of `masked_positions`, `batch x places`; IGNORED ones do not count.

        `loss` is the mean over the batch's tokens; `sums` has for each sequence the sum of its tokens' losses, and
        their number: of those an evaluation makes a mean that is the same however the sequences lie in batches.
        """
        # Padded batches and evaluations are few, and would take graphs of their own.
        as_it_is = self._is_compiled and (attention_mask is not None or not self.training)
        with torch.compiler.set_stance("force_eager") if as_it_is else contextlib.nullcontext():
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
        # BertModel would make a mask of ones and ask the device whether it is one of ones: at each step the host would
        # wait for all that it has asked for before.
        return self.bert.encoder(self.bert.embeddings(input_ids))[0]
