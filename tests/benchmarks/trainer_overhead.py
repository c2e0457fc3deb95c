"""Step rate of the entrypoint pretrain-mlm against the plain Trainer of transformers, on the same batches.

python -m tests.benchmarks.trainer_overhead              one rank and two, each with one thread; two rounds
python -m tests.benchmarks.trainer_overhead --rounds 3   more; the fastest counts

Three sides train a BERT of 2 layers of 256 from the same weights, without dropout, on the same masked sequences of 128
tokens, 16 a step, under torchrun with gloo:

    plain Trainer    BertForMaskedLM of transformers, its head on every place, the defaults of TrainingArguments
    same model       the plain Trainer with the entrypoint's model and batches: what is left is what the entrypoint adds
    entrypoint       jobs.train.launch pretrain-mlm, with metrics on S3 as in any run

A rate is that of the steps between two lines of the log, so start-up counts nowhere. Beside it stand the CPU seconds
that rank 0 spent on a step, all its threads together: where other work runs on the machine they say more. The losses
must agree.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jobs.kinds.pretrain_mlm import PretrainMlm
from jobs.train.accelerator import Accelerator
from jobs.train.data.packed_tokens import INDEX, TOKENIZER, Index, pack
from jobs.train.kinds.pretrain_mlm import Inputs, masked_data, new_model
from tests.support.benchmarks.launched import launcher
from tests.support.train.launching import NewRun
from tests.support.train.packing import publish
from tests.support.train.reviews import save_tiny_bert

LENGTH, VOCABULARY = 128, 8192
STEPS, FIRST = 30, 10
CONFIG = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ARGUMENTS = {
    "max_steps": STEPS,
    "global_batch_size": 16,
    "learning_rate": 1e-3,
    "log_every_steps": FIRST,
    "checkpoint_every_steps": 10_000,
    "evaluate_every_steps": 10_000,
}
SIDES = ("plain Trainer", "same model", "entrypoint")

Result = tuple[float, float, list[float]]
"""Steps a second, CPU seconds of rank 0 a step, and the logged losses."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.trainer_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="rounds; the fastest of each side counts")
    parser.add_argument("--plain", choices=SIDES[:2], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        _train_plainly(options.folder, own_model=options.plain == "same model")
        return
    best: dict[tuple[str, int], Result] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = packed_tokens(Path(name) / "data")
        with launcher(Path(name)) as new_run:
            data = publish(folder, new_run().s3, new_run().location).location
            for _ in range(options.rounds):
                for ranks in (1, 2):
                    for side in SIDES:
                        if side == "entrypoint":
                            result = _entrypoint(new_run, str(data), folder, ranks)
                        else:
                            result = _plain(side, folder, ranks)
                        print(
                            f"{ranks} rank(s)  {side:<14} {result[0]:6.3f} steps/s  CPU {result[1]:.3f} s",
                            file=sys.stderr,
                            flush=True,
                        )
                        best[side, ranks] = max(best.get((side, ranks), result), result)
    for ranks in (1, 2):
        plain, plain_cpu, losses = best["plain Trainer", ranks]
        for side in SIDES:
            rate, cpu, logged = best[side, ranks]
            np.testing.assert_allclose(logged, losses, atol=2e-3)
            print(
                f"{ranks} rank(s)  {side:<14} {rate:6.3f} steps/s  x{rate / plain:.2f}   "
                f"CPU {cpu:.3f} s a step  x{plain_cpu / cpu:.2f}   last loss {logged[-1]:.4f}"
            )
    for side in SIDES:
        print(f"two ranks against one, {side:<14} x{best[side, 2][0] / best[side, 1][0]:.2f}")


def packed_tokens(folder: Path) -> Path:
    """Packed tokens of a made-up language, with a tokenizer that nobody uses, and the model's configuration."""
    save_tiny_bert(folder / TOKENIZER)
    ids = np.random.default_rng(0).zipf(1.3, 500_000).clip(5, VOCABULARY - 1).astype(np.uint32)
    files = {
        split: [
            pack([part], folder / f"{split}-00000.npy", sequence_length=LENGTH, vocabulary_size=VOCABULARY, pad_id=0)
        ]
        for split, part in (("train", ids[:-LENGTH]), ("held-out", ids[-LENGTH:]))
    }
    special = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    index = Index.model_validate(
        {"sequence_length": LENGTH, "vocabulary_size": VOCABULARY, "special_ids": special, "files": files}
    )
    (folder / INDEX).write_text(index.model_dump_json())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def _entrypoint(new_run: NewRun, data: str, folder: Path, ranks: int) -> Result:
    run = new_run()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ARGUMENTS.items()]
    launched = run.start(f"--data={data}", f"--config={folder}", *flags, kind="pretrain-mlm", nproc=ranks)
    cpu = []
    for step in (FIRST, STEPS):
        launched.wait_for_line(f"[progress] {step}/{STEPS}")
        times = launched.ranks()[0].cpu_times()
        cpu.append(times.user + times.system)
    if launched.wait():
        sys.exit(launched.output)
    lines = [line for line in run.metrics() if "loss" in line]
    first, *_, last = (datetime.fromisoformat(line["time"]).timestamp() for line in lines)
    return (STEPS - FIRST) / (last - first), (cpu[1] - cpu[0]) / (STEPS - FIRST), [line["loss"] for line in lines]


def _plain(side: str, folder: Path, ranks: int) -> Result:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--module", "tests.benchmarks.trainer_overhead", "--plain", side, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rate, cpu, losses = json.loads(done.stdout.splitlines()[-1])
    return rate, cpu, losses


def _train_plainly(folder: Path, *, own_model: bool) -> None:
    """One rank; the first prints rate and losses as JSON."""
    import torch
    import transformers
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    arguments = PretrainMlm(data=str(folder), config=str(folder), **ARGUMENTS)
    train, _ = masked_data(arguments, Inputs(folder=folder, fingerprint="", config={}))
    ranks = int(os.environ["WORLD_SIZE"])
    transformers.set_seed(arguments.seed)
    model: Any = new_model(CONFIG, Accelerator(name="cpu", devices=0, reason="a benchmark"))
    if not own_model:
        weights = model.state_dict()
        model = transformers.BertForMaskedLM(model.config)
        model.load_state_dict(weights)

    class Plain(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        """One example at a time, with a label for every place."""

        def __len__(self) -> int:
            return len(train)

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            item = train[number]
            labels = torch.full_like(item["input_ids"], -100).scatter(0, item["masked_positions"], item["labels"])
            return {"input_ids": item["input_ids"], "attention_mask": item["attention_mask"], "labels": labels}

    class InOrder(Trainer):  # type: ignore[misc]  # transformers has no types
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    class Watch(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.logged: list[tuple[float, float, float]] = []

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                self.logged.append((time.time(), time.process_time(), logs["loss"]))

    watch = Watch()
    with tempfile.TemporaryDirectory() as output:
        InOrder(
            model=model,
            args=TrainingArguments(
                output_dir=output,
                max_steps=STEPS,
                learning_rate=arguments.learning_rate,
                weight_decay=arguments.weight_decay,
                warmup_ratio=arguments.warmup_ratio,
                per_device_train_batch_size=arguments.global_batch_size // ranks,
                logging_steps=FIRST,
                save_strategy="no",
                use_cpu=True,
                ddp_backend="gloo",
                remove_unused_columns=False,
                disable_tqdm=True,
                report_to=[],
                seed=arguments.seed,
            ),
            train_dataset=train if own_model else Plain(),
            data_collator=train.collate if own_model else None,
            callbacks=[watch],
        ).train()
    if os.environ["RANK"] == "0":
        clock, cpu, _ = (last - first for first, last in zip(watch.logged[0], watch.logged[-1], strict=True))
        losses = [loss for *_, loss in watch.logged]
        print(json.dumps([(STEPS - FIRST) / clock, cpu / (STEPS - FIRST), losses]))


if __name__ == "__main__":
    main()
