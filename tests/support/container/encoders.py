"""Tiny encoders with tokenizers of their type, as their folders on the hub have them."""

import json
from collections.abc import Sequence
from pathlib import Path


def save_tiny_encoder(folder: Path, model_type: str, texts: Sequence[str]) -> Path:
    """Save random weights for masked language modelling, and a tokenizer trained on the texts.

    As on the hub, RoBERTa and XLM-R do not name their special tokens: the class of their tokenizers has them.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoModelForMaskedLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder.mkdir()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    if model_type == "modernbert":
        special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    cls, pad, sep, unknown, _ = special
    trainer: trainers.Trainer
    if model_type == "xlm-roberta":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token=unknown)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    ids = tokenizer.get_vocab()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} {sep} $B {sep}",
        special_tokens=[(cls, ids[cls]), (sep, ids[sep])],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"model_max_length": 64}
    if model_type == "modernbert":
        names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(names, special, strict=True))}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    positions = 34 if "roberta" in model_type else 32  # RoBERTa's begin after the padding id
    config = CONFIG_MAPPING[model_type](
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=positions,
        type_vocab_size=1,
        **{f"{name}_token_id": ids[token] for name, token in (("bos", cls), ("pad", pad), ("eos", sep))},
    )
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    return folder
