"""Train a tiny model as one of two ranks, with the accelerator, Trainer and backend that a job would use."""

import faulthandler
import os
import sys
import tempfile
import traceback

from jobs.container import accelerator

STEPS = 30
LENGTH = 16
HANG_SECONDS = 300


def train() -> str:
    chosen = accelerator.of_rank(os.environ)
    chosen.prepare()
    trainer_class, arguments_class = chosen.trainer_class(), chosen.training_arguments_class()
    import torch
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    set_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    tokens = torch.randint(2, config.vocab_size, (256, LENGTH))
    tokens[:, 0] = torch.randint(0, 2, (256,))  # the first token is the class
    examples = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0]} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_class(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **chosen.training_arguments(),
        )
        model = BertForSequenceClassification(config)
        trainer = trainer_class(model=model, args=arguments, train_dataset=examples, **chosen.trainer_arguments())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    backend, size = torch.distributed.get_backend(), torch.distributed.get_world_size()
    weights = torch.cat([parameter.detach().float().flatten() for parameter in trainer.model.parameters()])
    everywhere = [torch.zeros_like(weights) for _ in range(size)]
    torch.distributed.all_gather(everywhere, weights)
    torch.distributed.barrier()
    assert (backend, size) == (chosen.backend, 2), f"{size} ranks over {backend}"
    assert all(torch.equal(weights, others) for others in everywhere), "the ranks' weights differ"
    assert losses[-1] < 0.5 * losses[0], f"the loss went from {losses[0]:.3f} only to {losses[-1]:.3f}"
    return f"{size} ranks over {backend} on {chosen.name}: loss {losses[0]:.3f} to {losses[-1]:.3f}"


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    code = 0
    try:
        found = train()
        if os.environ["RANK"] == "0":
            print(found, flush=True)
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    # Exit like our ranks: cleaning up a process group can wait forever for a lost peer.
    os._exit(code)
