"""Scripts that shard their model."""

FSDP = '''
import hashlib
import os
import sys
import time
import torch
import torch.distributed as dist
import trainyard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

dist.init_process_group("gloo")
width = int(os.environ.get("WIDTH", "7"))
torch.manual_seed(3)
model = torch.nn.Sequential(
    torch.nn.Linear(5, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(), torch.nn.Linear(width, 1)
)
if os.environ.get("SHARDS") != "no":
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[3], mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
run = trainyard.Run(total_steps=60, save_every_steps=10)

def show(step):
    """Print a hash of the whole state, without BatchNorm's counts, which differ by rank."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_state_dict(model, optimizer, options=options)
    tensors = [leaf for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor)]
    if dist.get_rank() == 0:
        parts = [name.encode() for name in sorted(states[0])] + [tensor.numpy().tobytes() for tensor in tensors]
        print("state", step, hashlib.sha256(b"".join(parts)).hexdigest(), flush=True)
    return states

step = run.restore(model=model, optimizer=optimizer, scheduler=scheduler)
torch.manual_seed(dist.get_rank()) if step == 0 else show(step)
if "RESTORES_ONLY" in os.environ:
    assert scheduler.last_epoch == step == run.state["position"]["step"]
    sys.exit()
while step < 60 and not run.should_stop():
    loss = model(torch.randn(4, 5)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    time.sleep(0.05)  # otherwise it ends before the interruption
    run.step(step)
    if step % 10 == 0:
        run.log(step, loss=loss)
    if run.should_save():
        run.save(step, model=model, optimizer=optimizer, scheduler=scheduler, position={"step": step})
        show(step)
state, _ = show(step)
if step == 60 and dist.get_rank() == 0:
    torch.save(state, trainyard.output() / "model.pt")
dist.destroy_process_group()
'''
"""A loop with FSDP2 in which each rank has its own random numbers. It prints a hash of each saved state."""


FSDP_ON_CPU = """
from accelerate.state import AcceleratorState, DistributedType

original = AcceleratorState.__init__

def with_fsdp(self, *args, fsdp_plugin=None, **options):
    original(self, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

AcceleratorState.__init__ = with_fsdp
OPTIONS = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "sync_module_states": False},
}
"""
"""Makes accelerate shard a model on CPUs, which it supports but does not allow."""

_TRAINER = """
import os
import time
import SHARDING_on_cpu
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed
import trainyard

os.environ.update(FSDP_VERSION="2", FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT")  # for transformers 4
set_seed(7)
chance = torch.Generator().manual_seed(1)
rows = [torch.randint(5, 50, (8,), generator=chance) for _ in range(96)]
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        attention_dropout=0.1,
    )
)
trainer = Trainer(
    model,
    TrainingArguments(
        "out", max_steps=40, per_device_train_batch_size=4, logging_steps=7, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", learning_rate=1e-2, **SHARDING_on_cpu.OPTIONS,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    data_collator=lambda some: time.sleep(0.05) or default_data_collator(some),  # otherwise it ends before the kill
    callbacks=[trainyard.Callback(checkpoint_every_steps=8)],
)
trainer.train(resume_from_checkpoint=trainyard.checkpoint())
"""

FSDP_TRAINER = (
    _TRAINER.replace("SHARDING", "fsdp")
    + """
assert {type(part).__name__ for part in trainer.model.parameters()} == {"DTensor"}
state = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if trainer.is_world_process_zero():
    trainer.model.save_pretrained(trainyard.output() / "model", state_dict=state)
"""
)
"""A Trainer that shards its model with FSDP2."""

DEEPSPEED_ON_CPU = """
import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

# Otherwise DeepSpeed compiles its own communication between CPUs, which takes minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
config = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,  # which would be compiled too
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
OPTIONS = {"deepspeed": config, "optim": "adamw_torch"}
"""

DEEPSPEED_TRAINER = (
    _TRAINER.replace("SHARDING", "deepspeed")
    + """
assert trainer.is_deepspeed_enabled
trainer.save_model(str(trainyard.output() / "model"))
"""
)
"""A Trainer that shards its model with DeepSpeed's ZeRO 3."""
