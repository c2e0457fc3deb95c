"""Fine-tune BERT on Yelp reviews with Ray Train, which starts a worker for each card; each worker runs a Trainer.

    python train.py MODEL Yelp/yelp_review_full --output out

The two lines with `trainyard` are for the platform. On a machine without the platform they have no effect.
"""

import argparse
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

# For Ray and all processes that it starts.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # only this job's processes may connect
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Longer timeouts to start Ray's processes on a busy machine. start_ray retries after the first timeout.
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_agent_register_timeout_ms": "300000",
    # Habana's software finds a worker's card by its local rank in this list, so all workers need the whole list.
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES": "1",
}

import ray
import torch
from datasets import load_dataset
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, set_seed
from transformers.trainer_utils import get_last_checkpoint

import trainyard


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", help="data set on the hub, or a folder with files of the splits train and test")
    parser.add_argument("--output", required=True, help="folder for checkpoints and model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--examples", type=int, default=1000, help="number of examples of each split, from its start")
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--batch-size", type=int, default=8, help="total over all workers")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help="sgd has a momentum of 0.9")
    parser.add_argument("--learning-rate", type=float, help="default: 2e-5, falling to 0; for sgd a constant 1e-3")
    parser.add_argument("--evaluate-each-epoch", action="store_true", help="default: evaluate only at the end")
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def device() -> str:
    try:
        from habana_frameworks.torch import hpu
    except ImportError:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "hpu" if hpu.is_available() else "cpu"


def trainer_classes(optimizer: str) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Return the Trainer class, its arguments class, and extra keyword arguments for the arguments and the Trainer."""
    if device() != "hpu":
        from transformers import Trainer, TrainingArguments

        return Trainer, TrainingArguments, {"use_cpu": device() == "cpu"}, {}
    from optimum.habana import GaudiConfig, GaudiTrainer, GaudiTrainingArguments

    config = GaudiConfig(use_fused_adam=optimizer == "adamw", use_fused_clip_norm=True, use_torch_autocast=True)
    return GaudiTrainer, GaudiTrainingArguments, {"use_habana": True, "use_lazy_mode": True}, {"gaudi_config": config}


def train(config: dict[str, Any]) -> dict[str, float]:
    """Train in one worker and return the metrics on the held-out reviews."""
    args = argparse.Namespace(**config)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    # Pad to one length on an HPU, which compiles a graph for each shape.
    padding = "max_length" if device() == "hpu" else False

    def split(name: str) -> Any:
        rows = load_dataset(args.data, split=name)
        rows = rows.select(range(min(args.examples, len(rows))))
        return rows.map(
            lambda some: tokenizer(some["text"], truncation=True, max_length=args.max_length, padding=padding),
            batched=True,
            remove_columns="text",
        )

    examples, held_out = split("train"), split("test")
    rate = args.learning_rate or (1e-3 if args.optimizer == "sgd" else 2e-5)
    sgd = (torch.optim.SGD, {"lr": rate, "momentum": 0.9}) if args.optimizer == "sgd" else None
    trainer_class, arguments_class, device_arguments, trainer_arguments = trainer_classes(args.optimizer)
    trainer = trainer_class(
        model=AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=1 + max(examples["label"]), trust_remote_code=False
        ),
        args=arguments_class(
            output_dir=args.output, num_train_epochs=args.epochs, seed=args.seed, learning_rate=rate,
            lr_scheduler_type="constant" if sgd else "linear",
            eval_strategy="epoch" if args.evaluate_each_epoch else "no",
            per_device_train_batch_size=args.batch_size // args.workers, save_steps=args.save_steps,
            save_total_limit=2, logging_steps=10, report_to=[], disable_tqdm=True, **device_arguments,
        ),
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=examples,
        eval_dataset=held_out,
        optimizer_cls_and_kwargs=sgd,
        compute_metrics=lambda found: {"accuracy": float((found[0].argmax(-1) == found[1]).mean())},
        **trainer_arguments,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output))
    metrics = trainer.evaluate()
    trainer.save_model(f"{args.output}/model")
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(f"{args.output}/model")
    return {name: metrics[f"eval_{name}"] for name in ("accuracy", "loss")}


def start_ray(args: argparse.Namespace, card: str | None, folder: str, tries: int = 3) -> None:
    """Start Ray on this node only, with retries: on a busy machine its agents may time out (issue 65983)."""
    try:
        ray.init(
            address="local",
            num_cpus=args.workers + 2,  # two for Ray's own actors
            num_gpus=args.workers if card == "GPU" else 0,
            resources={"HPU": args.workers} if card == "HPU" else None,  # Ray may not detect them (issue 45302)
            include_dashboard=False,
            object_store_memory=100_000_000,  # workers exchange tensors over their own backend
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
    except Exception:  # Ray has no specific exception class
        ray.shutdown()
        if tries == 1:
            raise
        start_ray(args, card, folder, tries - 1)


def main() -> None:
    args = arguments()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    card, backend = {"hpu": ("HPU", "hccl"), "cuda": ("GPU", "nccl"), "cpu": (None, "gloo")}[device()]
    # Socket paths must be short, so Ray's folder is directly below /tmp.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        start_ray(args, card, folder)
        result = TorchTrainer(
            train,
            train_loop_config=vars(args),
            torch_config=TorchConfig(backend=backend),
            scaling_config=ScalingConfig(
                num_workers=args.workers,
                use_gpu=card == "GPU",
                resources_per_worker={"CPU": 1.0, **({card: 1.0} if card else {})},
            ),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        ray.shutdown()
    trainyard.result(**{f"eval_{name}": value for name, value in result.return_value.items()})
    print(f"held-out accuracy of {args.workers} workers over {backend}: {result.return_value['accuracy']:.4f}")


if __name__ == "__main__":
    main()
