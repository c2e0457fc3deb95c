"""The model of pre-training by itself, as it is and compiled: no data, no Trainer, no S3.

python -m tests.benchmarks.compiled_model --device cuda               BERT-base, 32 x 512 tokens a step, bf16 autocast
python -m tests.benchmarks.compiled_model --device cuda --batch 128   where the GPU is the limit, not the host
python -m tests.benchmarks.compiled_model --layers 2 --hidden 64 --heads 2 --length 64 --batch 4    small, on this CPU

A step is forward, backward, clipping of gradients and AdamW, with the same random tokens each time, in the order of the
Trainer. Nothing in it waits for the device, so a step takes what is longer: the host's time to ask for its work, or the
device's to do it. PyTorch's profiler says the latter (`on the GPU`) in three more steps. The first three compile.

The share of the card's peak is by 6 N D, as `pretraining_speed` says.
"""

import argparse
import time
from typing import Any

import torch
import transformers

from jobs.kinds.pretrain_mlm import PretrainMlm
from jobs.train.models.masked_bert import BertForMaskedLM
from tests.benchmarks.masking import VOCABULARY

PEAKS = {
    "H200": 989e12,  # nvidia.com, H200 data sheet: 1,979 with sparsity
    "H100 NVL": 835e12,  # nvidia.com, H100 data sheet: 1,671 with sparsity
    "H100 PCIe": 756e12,  # the same: 1,513
    "H100": 989e12,  # the same, SXM: 1,979
    "A100": 312e12,  # nvidia.com, A100 data sheet
    "L40S": 362e12,  # nvidia.com, L40S data sheet
}
"""Operations a second in bf16, dense, by what the driver calls the card; the first that fits."""

FIRST_STEPS = PROFILED_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.compiled_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    options = parser.parse_args()
    peak = peak_of(options.device)
    print(f"{peak['device']}, PyTorch {torch.__version__}, {options.batch} x {options.length} tokens a step")
    print(f"{'':<10} {'first 3':>8} {'a step':>10} {'on the GPU':>10} {'tokens/s':>11} {'6 N D':>6} {'loss':>8}")
    for name in ("as it is", "compiled"):
        _measure(name, options, peak["peak"])


def _measure(name: str, options: argparse.Namespace, peak: float) -> None:
    transformers.set_seed(1)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=4 * options.hidden,
        max_position_embeddings=max(512, options.length),
    )
    model = BertForMaskedLM(config).to(options.device).train()
    if name == "compiled":
        model.compile_parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    batch = _batch(options)

    def step() -> Any:
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = model(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    def seconds(steps: int) -> tuple[float, float]:
        """Return the seconds of the steps, and the loss of the last, for which the host has to wait."""
        started = time.perf_counter()
        for _ in range(steps - 1):
            step()
        loss = step().item()
        return time.perf_counter() - started, loss

    first, _ = seconds(FIRST_STEPS)
    taken, loss = seconds(options.steps)
    taken /= options.steps
    on_gpu = f"{_on_gpu(step) * 1000:7.1f} ms" if options.device == "cuda" else ""
    job = PretrainMlm(
        data="run://tokens",
        hidden_size=options.hidden,
        layers=options.layers,
        heads=options.heads,
        intermediate_size=4 * options.hidden,
    )
    _, every = arithmetic_of_a_step(job, options.batch, options.length)
    rate = options.batch * options.length / taken
    print(
        f"{name:<10} {first:6.1f} s {taken * 1000:7.1f} ms {on_gpu:>10} {rate:11,.0f} {every / taken / peak:6.1%} "
        f"{loss:8.4f}",
        flush=True,
    )


def _batch(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (options.batch, options.length), generator=generator)
    places = max(1, round(0.15 * options.length))
    order = torch.rand(ids.shape, generator=generator).argsort(dim=1)[:, :places]
    batch = {"input_ids": ids, "masked_positions": order, "labels": ids.gather(1, order)}
    return {name: values.to(options.device) for name, values in batch.items()}


def _on_gpu(step: Any) -> float:
    """Return the seconds for which the kernels of a step run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    # Stretches that somebody has named are there as well, over the kernels within them.
    kernels = [event for event in profiler.events() or [] if not event.is_user_annotation]
    return float(sum(event.self_device_time_total for event in kernels)) / 1e6 / PROFILED_STEPS


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


if __name__ == "__main__":
    main()
