"""The MLM head on masked places only against transformers' on every place: BERT-base, forward and backward, on a CPU.

python -m tests.benchmarks.mlm_head                        fp32 and bf16 autocast, 4 sequences of 512 tokens
python -m tests.benchmarks.mlm_head --repeat 7 --batch 8   more rounds; more sequences

Both sides have the same weights, the same batch, the same masks and no dropout, so their losses must agree. They take
turns, and the median of each side's rounds counts: of the seconds on the clock, and of those of the CPU, which say more
where other work runs beside it (with OMP_NUM_THREADS=1; threads that wait for others take time, too).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

from jobs.train.data.masked_tokens import IGNORED, Masking
from jobs.train.models.masked_bert import BertForMaskedLM

SPECIAL = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}
"""Special tokens of BERT's own vocabulary."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.mlm_head", description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    options = parser.parse_args()

    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    masked = BertForMaskedLM(config).train()
    every = transformers.BertForMaskedLM(config).train()
    every.load_state_dict(masked.state_dict())
    batch = _batch(config, options.batch, options.length)
    labels = torch.full_like(batch["input_ids"], IGNORED).scatter(1, batch["masked_positions"], batch["labels"])
    whole = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
    places = batch["labels"].shape[1]
    print(f"BERT-base, {options.batch} x {options.length} tokens, {places} masked, {torch.get_num_threads()} threads")
    print(f"arithmetic of a sequence, every place / masked places: {_arithmetic(config, options.length, places):.2f}")
    for name, dtype in (("fp32", None), ("bf16 autocast", torch.bfloat16)):
        sides: dict[str, Callable[[], float]] = {
            "every place": lambda dtype=dtype: _step(every, whole, dtype),  # type: ignore[misc]  # a lambda's default
            "masked places": lambda dtype=dtype: _step(masked, batch, dtype),  # type: ignore[misc]
        }
        losses = {side: step() for side, step in sides.items()}  # also the warm-up
        seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for _ in range(options.repeat):
            for side, step in sides.items():
                started = time.perf_counter(), time.process_time()
                step()
                seconds[side].append((time.perf_counter() - started[0], time.process_time() - started[1]))
        medians = {
            side: [statistics.median(kind) for kind in zip(*times, strict=True)] for side, times in seconds.items()
        }
        for side, (clock, cpu) in medians.items():
            print(f"{name:<14} {side:<14} {clock:7.3f} s  CPU {cpu:7.3f} s  loss {losses[side]:.6f}", flush=True)
        clock, cpu = (many / few for many, few in zip(medians["every place"], medians["masked places"], strict=True))
        print(f"{name:<14} speed-up       x{clock:.2f}     CPU x{cpu:.2f}", flush=True)


def _batch(config: transformers.BertConfig, sequences: int, length: int) -> dict[str, torch.Tensor]:
    masking = Masking(
        fraction=0.15,
        vocabulary_size=config.vocab_size,
        mask_id=SPECIAL["mask"],
        pad_id=SPECIAL["pad"],
        special_ids=sorted(SPECIAL.values()),
        seed=0,
    )
    ids = np.random.default_rng(0).integers(1000, config.vocab_size, (sequences, length))
    return {name: torch.from_numpy(array) for name, array in masking(ids, np.arange(sequences)).items()}


def _step(model: torch.nn.Module, batch: dict[str, torch.Tensor], dtype: torch.dtype | None) -> float:
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(**batch)["loss"]
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return float(loss.detach())


def _arithmetic(config: transformers.BertConfig, length: int, places: int) -> float:
    """How many times fewer multiplications a sequence takes, by the sizes of the matrices."""
    width = config.hidden_size
    layer = 4 * width * width + 2 * width * config.intermediate_size + 2 * length * width
    head = width * width + width * config.vocab_size
    encoder = config.num_hidden_layers * layer * length
    return float((encoder + head * length) / (encoder + head * places))


if __name__ == "__main__":
    main()
