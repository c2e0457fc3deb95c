"""Keys that people know from other tools, and the keys of a spec that replace them, for errors about unknown keys.

Most are the names of transformers' TrainingArguments and of its example scripts.
"""

from collections.abc import Collection, Sequence

from jobs.core.errors import did_you_mean

_PER_RANK = "cards and gradient_accumulation_steps"
_EPOCHS = "which are steps x global_batch_size / training examples"
_STEPS = "which are epochs x sequences / global_batch_size"

ROWS: Sequence[tuple[str, str, str]] = (
    ("batch_size train_batch_size", "arguments.global_batch_size", "for all cards together"),
    (
        "per_device_train_batch_size per_gpu_train_batch_size micro_batch_size",
        "arguments.global_batch_size",
        f"for all cards together: multiply by the number of {_PER_RANK}",
    ),
    (
        "gradient_accumulation_steps",
        "arguments.max_batch_size_per_rank",
        "what a card processes at once; the rest of its share of global_batch_size is accumulated",
    ),
    ("per_device_eval_batch_size per_gpu_eval_batch_size", "arguments.eval_batch_size", "also per card"),
    ("per_device_eval_batch_size eval_batch_size", "arguments.batch_size", "also per card"),
    ("lr peak_lr", "arguments.learning_rate", ""),
    ("num_train_epochs num_epochs n_epochs max_epochs", "arguments.epochs", ""),
    ("num_train_epochs num_epochs n_epochs max_epochs epochs", "arguments.max_steps", _STEPS),
    ("max_steps max_train_steps num_train_steps", "arguments.epochs", _EPOCHS),
    ("max_train_steps num_train_steps", "arguments.max_steps", ""),
    ("num_warmup_steps", "arguments.training_arguments.warmup_steps", ""),
    ("lr_scheduler scheduler", "arguments.lr_scheduler_type", ""),
    ("optim", "arguments.optimizer", "adamw, adafactor, sgd, rmsprop or adagrad"),
    ("max_seq_length max_seq_len seq_length", "arguments.max_length", "in tokens"),
    ("max_seq_length max_seq_len seq_length block_size", "arguments.sequence_length", "in tokens"),
    ("model_name_or_path model_name model_id base_model", "arguments.model", "hf://org/name or a folder"),
    ("tokenizer_name tokenizer", "arguments.model", "its folder has the tokenizer"),
    ("config_name", "arguments.config", ""),
    ("train_file train_dataset dataset dataset_name data", "arguments.train_data", "a table or hf://org/name"),
    ("validation_file eval_file eval_dataset test_file", "arguments.eval_data", "a table or hf://org/name"),
    ("text_column_name", "arguments.text_column", ""),
    ("label_column_name target", "arguments.label_column", ""),
    ("task_name", "arguments.glue_task", ""),
    ("mlm_probability", "arguments.mask_fraction", ""),
    ("logging_steps logging_strategy", "arguments.log_every_steps", ""),
    ("eval_steps eval_strategy evaluation_strategy", "arguments.evaluate_every_steps", "a number of steps, or epoch"),
    ("save_steps save_strategy", "arguments.checkpoint_every_steps", "a number of steps, epoch or auto"),
    ("save_total_limit", "arguments.keep_checkpoints", ""),
    ("load_best_model_at_end", "arguments.metric_for_best_model", "which names the metric"),
    ("data_seed", "arguments.seed", ""),
    ("hub_model_id", "arguments.push_to_hub", ""),
    ("hub_strategy", "arguments.push_to_hub", "with each_save: true for every_save"),
    ("model_name_or_path model train_file train_data eval_data data dataset", "arguments.inputs", "which you name"),
    ("entry_point entrypoint script", "arguments.command", "such as train.py --epochs 3"),
    ("source_dir", "arguments.code", "the folder of the script"),
    ("hyperparameters", "arguments.parameters", ""),
    ("gpus num_gpus n_gpus num_processes", "resources.nproc_per_node", ""),
    ("nodes num_nodes num_machines instance_count", "resources.nnodes", ""),
    ("spot use_spot", "resources.capacity", "spot or on-demand"),
    ("max_run max_runtime timeout", "timeout_hours", "of one attempt"),
    ("max_retries retries", "attempts", ""),
    ("type kind task", "job", "the kind of job"),
    ("fp16 bf16 tf32", "", "the precision follows from the card"),
    ("greater_is_better", "", "it follows from the metric"),
    ("deepspeed fsdp", "", "only a script can shard its model"),
    ("output_dir overwrite_output_dir logging_dir", "", "trainyard fetch RUN downloads the results"),
    ("resume_from_checkpoint", "", "a run resumes by itself, and trainyard resume RUN continues an ended one"),
    ("do_train do_eval do_predict", "", "the kind of job determines this"),
    ("instance_type", "resources.instance_types", "a list, of the stage's types"),
    ("gpu_type accelerators accelerator", "resources.gpu", "EC2's name of the card: L40S"),
    ("gpu_memory", "resources.gpu_memory_gib", ""),
)
"""By other names, separated by spaces: our key, and what differs. No key: there is nothing to set. If several rows have
a name, the first whose key the kind has applies."""

_PARAMETERS = "arguments.parameters"


def unknown_key(path: Sequence[str], keys: Collection[str], *, siblings: Collection[str]) -> str:
    """Return what an error says about an unknown key: the key to use in its place, if one can be named.

    `keys` are the dotted paths of all keys of the spec, `siblings` the keys that are allowed beside the unknown one.
    """
    parent, name = ".".join(path[:-1]), path[-1].replace("-", "_").lower()
    found = [key for key in keys if key.rpartition(".")[2] == name]
    if found:
        return f"unknown key here; use {' or '.join(_short(key, parent) for key in found)}"
    rows = [(key, note) for names, key, note in ROWS if name in names.split() and (not key or key in keys)]
    if rows:
        key, note = rows[0]
        after = f", {note}" if note else ""
        return f"unknown key; use {_short(key, parent)}{after}" if key else f"unknown key; remove it: {note}"
    meant = did_you_mean(path[-1], siblings)
    if parent == "arguments" and _PARAMETERS in keys and "did you mean" not in meant:
        return "unknown key; settings of your script go under arguments.parameters, or into arguments.command"
    return f"unknown key{meant}"


def _short(key: str, parent: str) -> str:
    """Return a key as it is written beside the unknown one, or its whole path if it belongs elsewhere."""
    place, _, name = key.rpartition(".")
    return name if place == parent else key
