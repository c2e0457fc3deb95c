"""BERT with a head that works on the masked places only.

Of a sequence's tokens 15 % are masked. The head is a layer as wide as the model and then one as wide as the vocabulary,
a fifth of BERT-base's arithmetic: on the other 85 % of the tokens its result would be thrown away.
"""

import torch
import transformers
from torch.nn import functional

from jobs.train.data.masked_tokens import IGNORED


class BertForMaskedLM(transformers.BertForMaskedLM):  # type: ignore[misc]  # transformers has no types
    """BERT with the same weights under the same names and the same loss; only `forward` asks for the masked places.

    Named as the class that it stands for, because `config.json` names the class of the weights beside it.
    """

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
        hidden = self.bert(input_ids, attention_mask=attention_mask)[0]
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
