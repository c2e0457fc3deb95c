"""Pre-training BERT by masked language modelling: this project's job beside the plain Trainer, on one accelerator.

python -m tests.benchmarks.pretraining_speed --device cuda               BERT-base, 32 x 512 tokens, 200 steps, bf16
python -m tests.benchmarks.pretraining_speed --device cuda --batch 128   more sequences a step, on all sides
python -m tests.benchmarks.pretraining_speed --device cuda --batch 128 --compile    with `torch_compile`, too
python -m tests.benchmarks.pretraining_speed --device cpu --layers 2 --hidden 128 --heads 2 --length 128 --steps 40

All sides pre-train once over the same made-up tokens, in the same batch sizes, with the same rate of learning:

    plain Trainer   BertForMaskedLM and Trainer of transformers with their defaults, an Arrow table of `datasets`, and
                    DataCollatorForLanguageModeling, which is given the table's special tokens mask
    entrypoint      jobs.train.launch pretrain-mlm, with metrics and the model on S3 as in any run
    compiled        the same with `torch_compile: true`

In bf16 autocast on a card, in fp32 on a CPU: what the entrypoint does there. Steps between the first and the last line
of the log count. Their order and masks differ, so in the end all models are given the same held-out sequences with the
same masks, and their losses must agree to `--tolerance`.

Utilisation is the arithmetic of a step over what the card could do in its time. Two kinds of arithmetic are counted,
forward and backward, two operations a multiplication: what the task needs, with the head on masked places only, and
the usual 6 N D + 12 L H Q T, with all N weights at each of D tokens (Kaplan et al., arXiv 2001.08361; PaLM, arXiv
2204.02311, appendix B), as if the head were on every place. The first is the honest one for both sides. A card's peak
is its data sheet's, for dense bf16; of a CPU and an unknown card, what a large matrix product reaches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

from jobs.kinds.pretrain_mlm import PretrainMlm
from jobs.train.data.packed_tokens import INDEX, TOKENIZER, Index, PackedFile, pack
from tests.support.benchmarks.launched import finished, launcher
from tests.support.train.launching import NewRun
from tests.support.train.packing import publish

SPECIAL = ("pad", "unk", "cls", "sep", "mask")
"""Their ids are their places."""
VOCABULARY = 30522

PEAKS = {
    "H200": 989e12,  # nvidia.com, H200 data sheet: 1,979 with sparsity
    "H100 NVL": 835e12,  # nvidia.com, H100 data sheet: 1,671 with sparsity
    "H100 PCIe": 756e12,  # the same: 1,513
    "H100": 989e12,  # the same, SXM: 1,979
    "A100": 312e12,  # nvidia.com, A100 data sheet
    "L40S": 362e12,  # nvidia.com, L40S data sheet
}
"""Operations a second in bf16, dense, by what the driver calls the card; the first that fits."""

Result = dict[str, Any]
"""`steps_per_second`, `loss` of the last line of the log, `eval_loss`; of the plain side also `device` and `peak`."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pretraining_speed", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--log-every", type=int, default=20, help="steps between lines; those up to the first warm up")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--held-out", type=int, default=256, help="sequences")
    parser.add_argument("--compile", action="store_true", help="compile the model, as a third side")
    parser.add_argument("--rounds", type=int, default=2, help="in turns; the fastest of each side counts")
    parser.add_argument("--tolerance", type=float, default=0.05, help="of the held-out losses")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        _train_plainly(
            options.plain, PretrainMlm.model_validate_json((options.plain / "job.json").read_text()), options
        )
        return
    ours: dict[str, dict[str, Any]] = {"entrypoint": {}}
    if options.compile:
        ours["compiled"] = {"torch_compile": True}
    results: dict[str, list[Result]] = {side: [] for side in ("plain Trainer", *ours)}
    with tempfile.TemporaryDirectory() as name, launcher(Path(name), is_fresh=True) as new_run:
        folder = Path(name)
        job = _save_data(folder, options)
        data = publish(folder / "packed", new_run().s3, new_run().location).location
        for _ in range(options.rounds):
            results["plain Trainer"].append(_plain(folder, options.device))
            for side, more in ours.items():
                results[side].append(_entrypoint(new_run, job, {"data": str(data), **more}, options.device))
            for side, rounds in results.items():
                print(f"{side:<14} {rounds[-1]}", file=sys.stderr, flush=True)
    _report(results, job, options)


def _report(results: dict[str, list[Result]], job: PretrainMlm, options: argparse.Namespace) -> None:
    best = {side: max(rounds, key=lambda result: result["steps_per_second"]) for side, rounds in results.items()}
    plain = best["plain Trainer"]
    peak, source = plain["peak"], plain["peak_source"]
    tokens = options.batch * options.length
    precision = "bf16 autocast" if options.device == "cuda" else "fp32"
    print(
        f"{plain['device']}, {precision}: {job.layers} layers of {job.hidden_size}, {options.batch} x {options.length} "
        f"tokens a step, {options.steps} steps; peak {peak / 1e12:.3g} TFLOP/s ({source})"
    )
    needed, every = arithmetic_of_a_step(job, options.batch, options.length)
    print(f"a step takes {needed / 1e12:.3g} TFLOP with the head on masked places, {every / 1e12:.3g} by 6 N D")
    print(f"{'':<14} {'steps/s':>8} {'tokens/s':>11} {'needed':>7} {'6 N D':>7} {'last loss':>10} {'held-out':>9}")
    for side, result in best.items():
        rate = result["steps_per_second"]
        print(
            f"{side:<14} {rate:8.3f} {rate * tokens:11,.0f} {rate * needed / peak:7.1%} {rate * every / peak:7.1%} "
            f"{result['loss']:10.4f} {result['eval_loss']:9.4f}"
        )
    for side, result in best.items():
        if side == "plain Trainer":
            continue
        apart = result["eval_loss"] - plain["eval_loss"]
        faster = result["steps_per_second"] / plain["steps_per_second"]
        print(f"{side}: x{faster:.2f} as fast as the plain Trainer, its held-out loss {apart:+.4f}")
    losses = [result["eval_loss"] for result in best.values()]
    if max(losses) - min(losses) > options.tolerance:
        sys.exit(f"the held-out losses are further apart than {options.tolerance}")


def _save_data(folder: Path, options: argparse.Namespace) -> PretrainMlm:
    """The same sequences as packed tokens and as a table, and the job that trains on them once."""
    count = options.steps * options.batch
    ids = made_up_tokens(count + options.held_out, options.length)
    memory_map(folder / "packed", ids[:count], held_out=ids[count:])
    arrow_table(folder / "arrow", ids[:count])
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


def made_up_tokens(sequences: int, length: int) -> "np.typing.NDArray[np.int64]":
    """A language in which few words are frequent, and every second word follows from the one before it."""
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


def _entrypoint(new_run: NewRun, job: PretrainMlm, more: Mapping[str, Any], device: str) -> Result:
    run = new_run()
    given = job.model_copy(update=dict(more)).model_dump(exclude_defaults=True)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    finished(run.start(*flags, kind="pretrain-mlm", TRAINYARD_ACCELERATOR=device))
    lines = [line for line in run.metrics() if "loss" in line]
    first, *_, last = lines
    seconds = (datetime.fromisoformat(last["time"]) - datetime.fromisoformat(first["time"])).total_seconds()
    return {
        "steps_per_second": (last["step"] - first["step"]) / seconds,
        "loss": last["loss"],
        "eval_loss": run.receipt().result["eval_loss"],
    }


def _plain(folder: Path, device: str) -> Result:
    command = [sys.executable, "-m", "tests.benchmarks.pretraining_speed", "--plain", str(folder), "--device", device]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: Result = json.loads(done.stdout.splitlines()[-1])
    return answer


def _train_plainly(folder: Path, job: PretrainMlm, options: argparse.Namespace) -> None:
    """In a process of its own. Prints a `Result` as JSON."""
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    table, collate = arrow_table(folder / "arrow")
    transformers.set_seed(job.seed)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=job.hidden_size,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        intermediate_size=job.intermediate_size,
        max_position_embeddings=max(512, len(table[0]["input_ids"])),
    )
    model = transformers.BertForMaskedLM(config)

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def __init__(self) -> None:
            self.logged: list[tuple[float, int, float]] = []

        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                self.logged.append((time.time(), state.global_step, logs["loss"]))

    watch = Watch()
    Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "output"),
            max_steps=job.max_steps,
            learning_rate=job.learning_rate,
            weight_decay=job.weight_decay,
            warmup_ratio=job.warmup_ratio,
            per_device_train_batch_size=job.global_batch_size,
            logging_steps=job.log_every_steps,
            bf16=options.device == "cuda",
            use_cpu=options.device == "cpu",
            save_strategy="no",
            remove_unused_columns=False,  # which would be the special tokens mask, that the collator saves time with
            disable_tqdm=True,
            report_to=[],
            seed=job.seed,
        ),
        train_dataset=table,
        data_collator=collate,
        callbacks=[watch],
    ).train()
    first, *_, last = watch.logged
    peak = peak_of(options.device)
    rate = (last[1] - first[1]) / (last[0] - first[0])
    print(json.dumps({"steps_per_second": rate, "loss": last[2], "eval_loss": _held_out_loss(model, job), **peak}))


def _held_out_loss(model: Any, job: PretrainMlm) -> float:
    """Return the loss of the sequences and masks that the entrypoint evaluates, as it does."""
    import torch

    from jobs.train.kinds.pretrain_mlm import Inputs, masked_data
    from jobs.train.models.masked_bert import BertForMaskedLM

    _, data = masked_data(job, Inputs(folder=Path(job.data), fingerprint="", config={}))
    masked = BertForMaskedLM(model.config).to(model.device).eval()
    masked.load_state_dict(model.state_dict())
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        for start in range(0, len(data), job.eval_batch_size):
            batch = data.__getitems__(range(start, min(start + job.eval_batch_size, len(data))))
            sums += masked(**{name: values.to(model.device) for name, values in batch.items()})["sums"].sum(0).cpu()
    return float(sums[0] / sums[1])


def arithmetic_of_a_step(job: PretrainMlm, batch: int, length: int) -> tuple[float, float]:
    """Operations: those that the task needs, and 6 N D with attention."""
    width = job.hidden_size
    layers = job.layers * (4 * width * width + 2 * width * job.intermediate_size)
    attention = 12 * job.layers * width * length  # a token, forward and backward: scores, and what they weigh
    head = width * width + width * VOCABULARY
    places = max(1, round(job.mask_fraction * length))
    tokens = batch * length
    needed = (6 * layers + attention) * tokens + 6 * head * batch * places
    embeddings = width * (VOCABULARY + max(512, length) + 2)  # the words' are the head's matrix as well
    return needed, (6 * (layers + width * width + embeddings) + attention) * tokens


def peak_of(device: str) -> dict[str, Any]:
    """Operations a second that this accelerator can do at most, and who says so."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    for card, peak in PEAKS.items():
        if card in name:
            return {"device": name, "peak": peak, "peak_source": "its data sheet"}
    size, kind = (8192, torch.bfloat16) if device == "cuda" else (2048, torch.float32)
    left, right = (torch.randn(size, size, dtype=kind, device=device) for _ in range(2))

    def seconds() -> float:
        started = time.perf_counter()
        (left @ right).flatten()[0].item()  # waits for it
        return time.perf_counter() - started

    fastest = min(seconds() for _ in range(10))
    return {"device": name, "peak": 2 * size**3 / fastest, "peak_source": f"a product of {size} x {size}, measured"}


def memory_map(
    folder: Path, ids: "np.typing.NDArray[np.int64]", *, held_out: "np.typing.NDArray[np.int64] | None" = None
) -> Path:
    """Packed tokens of those sequences; their tokenizer has a word for each id."""
    folder.mkdir()

    def packed(name: str, rows: "np.typing.NDArray[np.int64]") -> PackedFile:
        return pack(
            [rows.reshape(-1).astype(np.uint32)],
            folder / name,
            sequence_length=rows.shape[1],
            vocabulary_size=VOCABULARY,
            pad_id=SPECIAL.index("pad"),
        )

    index = Index(
        sequence_length=ids.shape[1],
        vocabulary_size=VOCABULARY,
        special_ids={name: number for number, name in enumerate(SPECIAL)},
        files={
            "train": [packed("train-00000.npy", ids)],
            "held-out": [] if held_out is None else [packed("held-out-00000.npy", held_out)],
        },
    )
    (folder / INDEX).write_text(index.model_dump_json())
    _tokenizer(folder / TOKENIZER).save_pretrained(folder / TOKENIZER)
    return folder


def arrow_table(folder: Path, ids: "np.typing.NDArray[np.int64] | None" = None) -> tuple[Any, Any]:
    """A table as the tutorials make it, of `ids` or as it was saved, and the collator that they give it to."""
    if ids is not None:
        columns: dict[str, np.ndarray[Any, Any]] = {
            "input_ids": ids.astype(np.int32),
            "attention_mask": np.ones_like(ids, dtype=np.int8),
            "special_tokens_mask": (ids < len(SPECIAL)).astype(np.int8),
        }
        Dataset.from_dict({name: list(values) for name, values in columns.items()}).save_to_disk(folder)
    return load_from_disk(folder), DataCollatorForLanguageModeling(_tokenizer(folder), mlm_probability=0.15)


def _tokenizer(folder: Path) -> BertTokenizerFast:
    folder.mkdir(exist_ok=True)
    vocabulary = folder / "vocab.txt"
    words = [f"[{name.upper()}]" for name in SPECIAL]
    vocabulary.write_text("\n".join([*words, *(f"word{number}" for number in range(VOCABULARY - len(words)))]))
    return BertTokenizerFast(vocab_file=str(vocabulary))


if __name__ == "__main__":
    main()
