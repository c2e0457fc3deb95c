"""What a model that was pre-trained puts in the masked places of some held-out texts, for people to read."""

from pathlib import Path
from typing import Any

import numpy as np

from jobs.contract.fill_ins import MAX_TEXTS, MAX_TOKENS, FillIn, FillIns
from jobs.contract.run import FILL_INS
from jobs.train.data.masked_tokens import IGNORED, MaskedSequences

_CONTINUES = "##"
"""Begins a token of WordPiece that goes on with the word before."""


def write_fill_ins(folder: Path, model: Path, data: MaskedSequences, tokenizer: Any) -> None:
    """Write into the folder what the model that lies in `model` makes of texts of `data`, evenly chosen.

    It is loaded as its users will load it, on the CPU: the texts are few, and a card would compile for their shape.
    """
    import torch
    from transformers import AutoModelForMaskedLM

    rows = np.unique(np.linspace(0, len(data) - 1, MAX_TEXTS).round().astype(int)).tolist()
    batch = data.__getitems__(rows)
    ids, seen = (batch[name][:, :MAX_TOKENS] for name in ("input_ids", "attention_mask"))
    places = torch.full_like(batch["input_ids"], IGNORED)
    truths = places.scatter(1, batch["masked_positions"], batch["labels"])[:, :MAX_TOKENS]
    with torch.no_grad():
        logits = (
            AutoModelForMaskedLM.from_pretrained(model, trust_remote_code=False)
            .eval()(input_ids=ids, attention_mask=seen)
            .logits
        )
    # The head is wider than the vocabulary: of what it has more there are no tokens.
    confidences, guesses = logits[..., : len(tokenizer)].float().softmax(dim=-1).max(dim=-1)
    texts = []
    for row, length in enumerate(seen.sum(dim=1).tolist()):
        of_row = (values[row, :length].tolist() for values in (ids, truths, guesses, confidences))
        texts.append(_text(list(zip(*of_row, strict=True)), tokenizer))
    (folder / FILL_INS).write_text(FillIns(texts=texts).model_dump_json(indent=1) + "\n", encoding="utf-8")


def _text(tokens: list[tuple[int, int, int, float]], tokenizer: Any) -> list[str | FillIn]:
    """Return a text by its tokens' ids, the true and the guessed ones, and the guesses' probabilities."""
    parts: list[str | FillIn] = [""]
    special = set(tokenizer.all_special_ids)
    for token, truth, guess, confidence in tokens:
        if truth != IGNORED:
            true, guessed = tokenizer.convert_ids_to_tokens([truth, guess])
            parts += [FillIn(truth=true, guess=guessed, confidence=round(confidence, 4)), ""]
        elif token not in special:
            piece = tokenizer.convert_ids_to_tokens(token)
            follows = piece.removeprefix(_CONTINUES) if piece.startswith(_CONTINUES) else f" {piece}"
            parts[-1] = f"{parts[-1]}{follows}"
    return [part for part in parts if part]
