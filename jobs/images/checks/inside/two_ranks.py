"""Trains a tiny model on two ranks, as a job does: the launcher's choice of accelerator, its Trainer, its backend.

Takes the accelerator: cpu, cuda or hpu. The first process starts the ranks, which find RANK in their environment.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from jobs.contract.errors import TrainyardError
from jobs.train import accelerator as accelerators

RANKS = 2
STEPS = 30
LENGTH = 16
HANG_SECONDS = 300
"""After so long a rank says where it stands and ends: thirty times what it takes."""
TIMEOUT_SECONDS = 500
"""The limit of torchrun: less than the time after which the container is removed with all that it said."""


def start(asked: str) -> None:
    chosen = accelerators.choose(asked, nproc_per_node=RANKS)
    ranks = ["--nnodes=1", f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *ranks, "--local-addr=localhost", __file__],
            env={**os.environ, **chosen.environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        sys.exit(f"{said}\ntorchrun still ran after {TIMEOUT_SECONDS} s")
    told = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    if done.returncode or not told:
        sys.exit("\n".join([done.stdout, *(told[:1] or [f"torchrun ended with exit code {done.returncode}"])]))
    print(told[-1].partition(": ")[2])


def train() -> None:
    chosen = accelerators.of_rank(os.environ)
    chosen.prepare()
    trainer_class, arguments_class = chosen.trainer_class(), chosen.training_arguments_class()
    import torch  # noqa: PLC0415 - after what the accelerator has set up
    from transformers import BertConfig, BertForSequenceClassification, set_seed  # noqa: PLC0415 - imports torch

    set_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    tokens = torch.randint(2, config.vocab_size, (256, LENGTH))
    tokens[:, 0] = torch.randint(0, 2, (256,))  # the class stands at the beginning
    examples = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0]} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=BertForSequenceClassification(config),
            args=arguments_class(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=16,
                learning_rate=3e-3,
                logging_steps=5,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                **chosen.training_arguments(),
            ),
            train_dataset=examples,
            **chosen.trainer_arguments(),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    backend, world_size = torch.distributed.get_backend(), torch.distributed.get_world_size()
    weights = torch.cat([parameter.detach().float().flatten() for parameter in trainer.model.parameters()])
    everywhere = [torch.zeros_like(weights) for _ in range(world_size)]
    torch.distributed.all_gather(everywhere, weights)
    torch.distributed.barrier()
    if (backend, world_size) != (chosen.backend, RANKS):
        raise RuntimeError(f"{world_size} ranks over {backend}, not {RANKS} over {chosen.backend}")
    if not all(torch.equal(weights, others) for others in everywhere):
        raise RuntimeError("the ranks' weights differ: gradients were not averaged")
    if losses[-1] > 0.5 * losses[0]:
        raise RuntimeError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} only: nothing was learned")
    if os.environ["RANK"] == "0":
        told = f"{world_size} ranks over {backend} on {chosen.name}: loss {losses[0]:.3f} to {losses[-1]:.3f}"
        print(f"rank 0: {told}", flush=True)


def hung(thread: int) -> None:
    """End this rank with one line that says where its main thread stands."""
    stack = traceback.extract_stack(sys._current_frames()[thread])  # noqa: SLF001 - the documented way to another's stack
    places = " < ".join(f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in stack[:-7:-1])
    print(f"rank {os.environ['RANK']}: it still ran after {HANG_SECONDS} s, in {places}", flush=True)
    os._exit(1)


if __name__ == "__main__":
    if "RANK" in os.environ:
        code = 0
        watch = threading.Timer(HANG_SECONDS, hung, [threading.get_ident()])
        watch.daemon = True
        watch.start()
        try:
            train()
        except Exception as error:  # noqa: BLE001 - the process ends here
            print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
            code = 1
        # As our ranks end, by os._exit and without the clean-up of their process group: either can wait for ever, for a
        # peer that is gone or for gloo's own threads.
        os._exit(code)
    else:
        try:
            start(json.loads(sys.argv[1]))
        except TrainyardError as error:
            sys.exit(str(error))
