"""Small data and a small model: a BERT of two layers, and reviews whose label depends on a few words."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GOOD = ("superb", "moving", "clever", "bright")
BAD = ("dull", "clumsy", "hollow", "tedious")
FILLER = ("the", "film", "is", "a", "story", "with", "and", "its", "cast", "of", "plot", "scene")


def reviews(count: int, *, seed: int, labels: Sequence[Any] = ("bad", "good")) -> list[dict[str, Any]]:
    """Return sentences with one decisive word each. A tenth has the wrong label, so that no model is perfect."""
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        label = number % 2
        telling = chance.choice((BAD, GOOD)[label if chance.random() > 0.1 else 1 - label])
        words = [chance.choice(FILLER) for _ in range(chance.randint(3, 9))]
        words.insert(chance.randrange(len(words)), telling)
        rows.append({"text": " ".join(words), "label": labels[label]})
    return rows


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_tiny_bert(folder: Path, *, positions: int = 32) -> Path:
    """Save a model for `from_pretrained`: random weights, and a WordPiece vocabulary of the words above.

    Unused `positions` make its checkpoints larger, but hardly slow down its steps.
    """
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": positions,
    }
    return save_new_bert(folder, [*GOOD, *BAD, *FILLER], **sizes)


def save_new_bert(folder: Path, words: Sequence[str], **sizes: int) -> Path:
    """Save random weights and a tokenizer with one token per word. `sizes` are arguments of BertConfig."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, BertTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    BertTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
