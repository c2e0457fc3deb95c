"""Compare the speed of pre-training BERT (masked language modelling): our job and the plain Trainer, on one card.

python -m tests.benchmarks.pretraining_speed --device cuda               BERT-base, 32 x 512 tokens, 200 steps, bf16
python -m tests.benchmarks.pretraining_speed --device cuda --batch 128   more sequences per step, on all sides
python -m tests.benchmarks.pretraining_speed --device cuda --batch 128 --compile    also with `torch_compile`
python -m tests.benchmarks.pretraining_speed --layers 2 --hidden 128 --heads 2 --length 128 --steps 40    on this CPU

All sides pre-train once over the same synthetic tokens, with the same batch size and the same learning rate:

    plain Trainer   BertForMaskedLM and Trainer of transformers with their defaults, an Arrow table of `datasets`, and
                    DataCollatorForLanguageModeling with the table's special tokens mask
    entrypoint      jobs.container.launch pretrain-mlm, with metrics and the model on S3 as in any run
    compiled        the same with `torch_compile: true`

All sides use bf16 autocast on a card and fp32 on a CPU, like the entrypoint. Steps between the first and the last log
line count. Order and masks differ between the sides, so at the end all models are evaluated on the same held-out
sequences with the same masks. Their losses must agree within `--tolerance`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast, DataCollatorForLanguageModeling, set_seed

from jobs.container.data.packed_tokens import INDEX, TOKENIZER, Index, PackedFile, pack
from jobs.container.kinds.pretrain_mlm import Inputs, masked_data
from jobs.container.models import masked_bert
from jobs.container.versions import warmup
from jobs.spec.kinds.pretrain_mlm import PretrainMlm
from tests.support.benchmarks.launched import launcher
from tests.support.benchmarks.speed import (
    Result,
    by_entrypoint,
    by_plain_trainer,
    in_turns,
    plainly,
    show,
    training_options,
)
from tests.support.container.packing import publish

SPECIAL = ("pad", "unk", "cls", "sep", "mask")
"""Special tokens; the id of each is its position."""
VOCABULARY = 30522
PLAIN = "plain Trainer"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pretraining_speed", description=__doc__)
    training_options(parser, layers=12, hidden=768, heads=12)
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--log-every", type=int, default=20, help="steps between log lines; steps before the first are warm-up"
    )
    parser.add_argument("--held-out", type=int, default=256, help="held-out sequences")
    parser.add_argument("--compile", action="store_true", help="also measure a compiled model")
    parser.add_argument("--tolerance", type=float, default=0.05, help="largest difference between held-out losses")
    options = parser.parse_args()
    if options.plain:
        folder = Path(options.plain[1])
        job = PretrainMlm.model_validate_json((folder / "job.json").read_text())
        print(json.dumps(_train_plainly(folder, job, options.device)))
        return
    with tempfile.TemporaryDirectory() as name, launcher(Path(name), is_fresh=True) as new_run:
        folder = Path(name)
        job = _save_data(folder, options)
        data = str(publish(folder / "packed", new_run().s3, new_run().location).location)

        def entrypoint(**more: Any) -> Result:
            given = job.model_copy(update={"data": data, **more}).model_dump(exclude_defaults=True)
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
            return by_entrypoint(new_run(), *flags, kind="pretrain-mlm", device=options.device)

        sides = {
            PLAIN: lambda: plainly("tests.benchmarks.pretraining_speed", PLAIN, folder, options),
            "entrypoint": entrypoint,
            **({"compiled": lambda: entrypoint(torch_compile=True)} if options.compile else {}),
        }
        results = in_turns(sides, options.rounds)
    print(
        f"{options.device}: {job.layers} layers of {job.hidden_size}, {options.batch} x {options.length} tokens a step"
    )
    columns = {"loss": "last loss", "eval_loss": "held-out loss"}
    show(results, PLAIN, columns, unit=options.batch * options.length, name="tokens/s")
    losses = [result["eval_loss"] for rounds in results.values() for result in rounds]
    if max(losses) - min(losses) > options.tolerance:
        sys.exit(f"the held-out losses differ by more than {options.tolerance}")


def _save_data(folder: Path, options: argparse.Namespace) -> PretrainMlm:
    """Save the same sequences as packed tokens and as a table, and return the job that trains on them once."""
    count = options.steps * options.batch
    ids = _synthetic_tokens(count + options.held_out, options.length)
    _memory_map(folder / "packed", ids[:count], ids[count:])
    columns: dict[str, np.ndarray[Any, Any]] = {
        "input_ids": ids[:count].astype(np.int32),
        "attention_mask": np.ones_like(ids[:count], dtype=np.int8),
        "special_tokens_mask": (ids[:count] < len(SPECIAL)).astype(np.int8),
    }
    Dataset.from_dict({name: list(values) for name, values in columns.items()}).save_to_disk(folder / "arrow")
    job = PretrainMlm(
        data=str(folder / "packed"),
        hidden_size=options.hidden,
        layers=options.layers,
        heads=options.heads,
        intermediate_size=4 * options.hidden,
        max_steps=options.steps,
        global_batch_size=options.batch,
        max_batch_size_per_rank=options.batch,
        eval_sequences=options.held_out,
        log_every_steps=options.log_every,
        evaluate_every_steps=1_000_000,
        checkpoint_every_steps=1_000_000,
    )
    (folder / "job.json").write_text(job.model_dump_json())
    return job


def _synthetic_tokens(sequences: int, length: int) -> "np.typing.NDArray[np.int64]":
    """Draw a language in which few words are frequent, and half of the words follow from the word before."""
    chance = np.random.default_rng(0)
    words = VOCABULARY - len(SPECIAL)
    ids = (chance.zipf(1.2, (sequences, length)) - 1) % words
    follows = chance.permutation(words)
    bound = chance.random((sequences, length)) < 0.5
    for place in range(1, length):
        ids[:, place] = np.where(bound[:, place], follows[ids[:, place - 1]], ids[:, place])
    ids += len(SPECIAL)
    ids[:, 0], ids[:, -1] = SPECIAL.index("cls"), SPECIAL.index("sep")
    return ids


def _memory_map(folder: Path, ids: "np.typing.NDArray[np.int64]", held_out: "np.typing.NDArray[np.int64]") -> None:
    """Save the sequences as packed tokens, with a tokenizer that has a word for each id."""
    folder.mkdir()

    def packed(name: str, rows: "np.typing.NDArray[np.int64]") -> PackedFile:
        shape = {"sequence_length": rows.shape[1], "vocabulary_size": VOCABULARY}
        return pack([rows.reshape(-1).astype(np.uint32)], folder / name, **shape, pad_id=SPECIAL.index("pad"))

    index = Index(
        sequence_length=ids.shape[1],
        vocabulary_size=VOCABULARY,
        special_ids={name: number for number, name in enumerate(SPECIAL)},
        files={"train": [packed("train-00000.npy", ids)], "held-out": [packed("held-out-00000.npy", held_out)]},
    )
    (folder / INDEX).write_text(index.model_dump_json())
    _tokenizer(folder / TOKENIZER).save_pretrained(folder / TOKENIZER)


def _tokenizer(folder: Path) -> BertTokenizerFast:
    folder.mkdir(exist_ok=True)
    vocabulary = folder / "vocab.txt"
    words = [f"[{name.upper()}]" for name in SPECIAL]
    vocabulary.write_text("\n".join([*words, *(f"word{number}" for number in range(VOCABULARY - len(words)))]))
    return BertTokenizerFast(vocab_file=str(vocabulary))


def _train_plainly(folder: Path, job: PretrainMlm, device: str) -> Result:
    """Train in this process, which is separate from the benchmark."""
    table = load_from_disk(folder / "arrow")
    set_seed(job.seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=job.hidden_size,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        intermediate_size=job.intermediate_size,
        max_position_embeddings=max(512, len(table[0]["input_ids"])),
    )
    model = BertForMaskedLM(config)
    found, _ = by_plain_trainer(
        device,
        folder / "output",
        arguments={
            "max_steps": job.max_steps,
            "learning_rate": job.learning_rate,
            "weight_decay": job.weight_decay,
            **warmup(job.warmup_ratio),
            "per_device_train_batch_size": job.global_batch_size,
            "logging_steps": job.log_every_steps,
            "remove_unused_columns": False,  # the collator saves time with the special tokens mask
            "seed": job.seed,
        },
        model=model,
        train_dataset=table,
        data_collator=DataCollatorForLanguageModeling(_tokenizer(folder / "arrow"), mlm_probability=0.15),
    )
    return {**found, "eval_loss": _held_out_loss(model, job)}


def _held_out_loss(model: Any, job: PretrainMlm) -> float:
    """Return the loss on the same sequences and masks as in the entrypoint's evaluation."""
    _, data = masked_data(job, Inputs(folder=Path(job.data), fingerprint="", config={}))
    masked = masked_bert.masked_lm("bert")(model.config).to(model.device).eval()
    masked.load_state_dict(model.state_dict())
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        for start in range(0, len(data), job.eval_batch_size):
            batch = data.__getitems__(range(start, min(start + job.eval_batch_size, len(data))))
            sums += masked(**{name: values.to(model.device) for name, values in batch.items()})["sums"].sum(0).cpu()
    return float(sums[0] / sums[1])


if __name__ == "__main__":
    main()
