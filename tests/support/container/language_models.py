"""A small language model with random weights, and real text for it: the descriptions of installed packages.

    python -m tests.support.container.language_models MODEL ADAPTER MERGED

Prints the largest difference between logits of the model with its adapter and of the merged model.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_llama(folder: Path, *, chat_template: str | None = CHAT) -> Path:
    """Save a model for `from_pretrained`: random weights, and a tokenizer of 600 tokens trained on real text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from jobs.container.versions import save_tokenizer
    from tests.support.container.corpora import paragraphs

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer.train_from_iterator(
        paragraphs(300),
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = chat_template
    save_tokenizer(fast, folder)  # transformers 4 loads it too
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,  # otherwise its answers hardly depend on the question
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def instructions(count: int) -> list[dict[str, str]]:
    """Return questions with the beginning of a paragraph, and its rest as the answer."""
    from tests.support.container.corpora import paragraphs

    found = []
    for text in paragraphs(count):
        words = " ".join(text.split()).split(" ")
        found.append({"prompt": f"Continue: {' '.join(words[:4])}", "completion": " ".join(words[4:24])})
    return found


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def difference(model: str, adapter: str, merged: str) -> float:
    import torch
    import torch.distributed.tensor  # expected by peft (optimum_habana_on_cpu.py)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked = AutoTokenizer.from_pretrained(merged)("a text of some words", return_tensors="pt").input_ids
    apart = AutoModelForCausalLM.from_pretrained(model, torch_dtype="auto")
    base, adapted, one = (
        which(asked).logits.float()
        for which in (
            AutoModelForCausalLM.from_pretrained(model).eval(),
            PeftModel.from_pretrained(apart, adapter).eval(),
            AutoModelForCausalLM.from_pretrained(merged).eval(),
        )
    )
    assert not torch.allclose(base, adapted, atol=0.1), "the adapter changes nothing"
    return float((adapted - one).detach().abs().max())


if __name__ == "__main__":
    print(difference(*sys.argv[1:]))
