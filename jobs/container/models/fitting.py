"""Load a model's weights, refuse weights that do not fit, and fit a classifier's head to the classes of the data.

`from_pretrained` replaces weights that are missing or have another shape with random ones, and only warns. A start
model's configuration may contain settings that would change the task, so the job overrides them (`TRAINING_SETTINGS`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs.container.models.pretrained import explained_loading
from jobs.core.errors import UsageError
from jobs.core.labels import Problem, class_name
from jobs.core.words import counted

OUTPUT_SETTINGS: Mapping[str, Any] = {
    # The Trainer reads outputs by name, and collects every output that an evaluation returns.
    "return_dict": True,
    "torchscript": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "use_cache": False,
}
"""Settings that a job sets in every model it loads. They change what a model returns, not what it computes."""

PROBLEM_TYPES: Mapping[Problem, str] = {
    "single-label": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
"""The names in transformers, whose models compute the loss for them."""

TRAINING_SETTINGS: Mapping[str, Any] = {
    **OUTPUT_SETTINGS,
    # Fine-tuning sets what its labels are.
    "problem_type": "single_label_classification",
    # A classifier of this type reads the first token, which sees no other token in a decoder.
    "is_decoder": False,
    # It trades time for memory, which the recipe's batch size already controls.
    "gradient_checkpointing": False,
}
"""Settings that fine-tuning overrides in its start model's configuration.

The other settings in transformers 4.51.3's PretrainedConfig are kept:
- The model's shape, because the weights have it: sizes, `pruned_heads`, `is_encoder_decoder`, `tie_word_embeddings`.
  `add_cross_attention` and `cross_attention_hidden_size` too: weights of cross-attention do not fit and are refused.
- Dropouts and initializer ranges: they belong to the model's recipe.
- `id2label`, `label2id`, `num_labels`: `set_classes` sets them from the data.
- `torch_dtype`: `load_model` makes every weight fp32, and the accelerator chooses the precision.
- `pad_token_id`: the tokenizer's if the model has none (`set_padding_token`).
- `chunk_size_feed_forward`: the result is the same.
- Generation's settings, `finetuning_task`, `prefix`, `task_specific_params`: no classifier reads them.
- `quantization_config` and adapters: refused by jobs.data_checks.model_files. `auto_map`: refused for unknown types.
"""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its weights loaded."""

    model: Any
    new: list[str]
    """Names of random weights in the head or pooler, which the model's files lack."""


def load_model(
    model_class: Any,
    folder: Path,
    location: str,
    what: str,
    *,
    settings: Mapping[str, Any],
    new_head: bool,
    **more: Any,
) -> LoadedModel:
    """Load the model in `folder` in fp32, with `settings` overriding its configuration.

    The error for unreadable files begins with `what`. `new_head` allows a missing head and pooler, which are then
    random. Raises UsageError if other weights are missing, unknown, of another shape or not finite.
    """
    from transformers import AutoConfig

    with explained_loading(location, what):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for name, value in settings.items():
            setattr(config, name, value)
        model, found = model_class.from_pretrained(
            folder,
            config=config,
            # Reported below with all names; transformers would raise an error that names only one.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            # If unset, transformers prompts on standard input whether to run the model's own code.
            trust_remote_code=False,
            **more,
        )
    # transformers 5 adds the two shapes to each name.
    mismatched = sorted(name if isinstance(name, str) else name[0] for name in found["mismatched_keys"])
    missing, unknown = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    wrong = {
        "missing": [name for name in missing if not (new_head and _is_of_head(model, name))],
        "of another shape": [name for name in mismatched if not (new_head and _is_of_head(model, name))],
        "unknown to the model": [name for name in unknown if not _is_of_head(model, name)],
    }
    if any(wrong.values()):
        # transformers may have added its own prefix to the names of a model without a head.
        in_file = [name.removeprefix(f"{model.base_model_prefix}.") if missing else name for name in unknown]
        raise _misfit(location, {**wrong, "unknown to the model": in_file})
    if broken := next((name for name, values in model.state_dict().items() if not _is_finite(values)), None):
        raise UsageError(
            f"{location}: its weights are not all finite numbers: {broken} has NaN or infinity",
            next_step="start from a model whose training did not diverge",
        )
    # The loss is a batch's mean, which the Trainer divides by the number of batches in a step. If the model takes
    # `**kwargs`, the Trainer assumes that the model has already divided by the step's items. ModernBERT takes them and
    # does not divide (transformers issue 38982).
    model.accepts_loss_kwargs = False
    return LoadedModel(model=model.float(), new=[*missing, *mismatched])


def _is_of_head(model: Any, name: str) -> bool:
    prefix = f"{model.base_model_prefix}."
    return not name.startswith(prefix) or name.startswith(f"{prefix}pooler.")


def _is_finite(values: torch.Tensor) -> bool:
    return not values.is_floating_point() or bool(torch.isfinite(values).all())


def _misfit(location: str, wrong: Mapping[str, Sequence[str]]) -> UsageError:
    found = [f"{counted(len(names), 'weight')} {what} ({_some(names)})" for what, names in wrong.items() if names]
    unknown = wrong["unknown to the model"]
    prefix = next((each for each in _PREFIXES if unknown and all(name.startswith(each) for name in unknown)), "")
    return UsageError(
        f"{location}: its weights do not fit its config.json: {', '.join(found)}",
        next_step=f"remove the prefix '{prefix}' from the names: {_PREFIXES[prefix]}"
        if prefix
        else "save the model again with save_pretrained(), which writes matching weights and config.json",
    )


_PREFIXES = {
    "module.": "DistributedDataParallel adds it, so save its .module",
    "_orig_mod.": "torch.compile adds it, so save its ._orig_mod",
    "model.": "a module that wraps the model adds it, so save the model inside it",
}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def set_padding_token(model: Any, tokenizer: Any) -> None:
    """Set the tokenizer's padding token if the model has none: decoders use it to find an example's last token."""
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id


def set_classes(start: LoadedModel, names: Sequence[str], location: str) -> str:
    """Set a classifier's classes to `names`, in this order. Return a description of the head for the log.

    If the model's classes have the same names, the head is kept and its rows are reordered. Unnamed classes (LABEL_0,
    LABEL_1, …) are matched by their numbers. Otherwise the head is new. Without names, it has one output.
    """
    model = start.model
    path, layer = _output_layer(model, location)
    own = [str(model.config.id2label[number]) for number in range(model.config.num_labels)]
    names = names or (own if len(own) == 1 else ["LABEL_0"])
    rows = None if start.new else _rows(own, names)
    if rows is None:
        # Keep a layer that transformers has just initialized.
        if layer.out_features != len(names) or f"{path}.weight" not in start.new:
            _renew(model, path, layer, len(names))
        head = f"new: {_some(start.new)}" if start.new else f"new: the model's classes are {_some(own)}, not the data's"
    elif rows == list(range(len(rows))):
        head = "kept: the model's classes are the data's, in the same order"
    else:
        with torch.no_grad():
            for values in layer.parameters():
                values.copy_(values[rows].clone())
        head = "kept: the model's classes are the data's, and its rows were reordered"
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: number for number, name in enumerate(names)}
    model.num_labels = len(names)
    return head


def _rows(own: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Return the model's number for each of the data's classes, or None if the names differ."""
    numbers = [str(number) for number in range(len(own))]
    unnamed = [f"LABEL_{number}" for number in numbers]
    for known in ([class_name(name) for name in own], numbers if list(own) == unnamed else []):
        if len(set(known)) == len(known) and sorted(known) == sorted(names):
            of_name = {name: number for number, name in enumerate(known)}
            return [of_name[name] for name in names]
    return None


def _output_layer(model: Any, location: str) -> tuple[str, nn.Linear]:
    """Return the layer with a row per class: the last one outside the encoder (classifier, out_proj, score)."""
    inside = {*model.base_model.modules()}
    layers = [
        (name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear) and part not in inside
    ]
    if not layers or layers[-1][1].out_features != model.config.num_labels:
        raise UsageError(
            f"{location}: its head has no last layer with a row per class, so its classes cannot be changed",
            next_step="start from another model",
        )
    return layers[-1]


def _renew(model: Any, path: str, layer: nn.Linear, classes: int) -> None:
    """Replace a head's last layer with a random one, initialized by the model's own code."""
    owner = model.get_submodule(path.rpartition(".")[0])
    new = nn.Linear(layer.in_features, classes, bias=layer.bias is not None)
    setattr(owner, path.rpartition(".")[2], new)
    with torch.no_grad():
        model._init_weights(new)  # noqa: SLF001 - there is no public method
        model._init_weights(owner)  # noqa: SLF001 - ModernBERT initializes its head's weights in their owner
