"""Handle the differences between the versions of transformers, accelerate and huggingface_hub in images/releases.toml.

No other file distinguishes versions. Each entry names the releases that need it. Remove it with the last of them.
"""

import functools
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.data_checks.model_files import TOKENIZER_CONFIGURATION

_IS_TRANSFORMERS_4 = int(importlib.metadata.version("transformers").partition(".")[0]) < 5
"""True in Gaudi's releases, False in those for CUDA and CPU."""

LOSES_SHORT_STEP = _IS_TRANSFORMERS_4
"""Gaudi's releases: a resumed run loses the last step of an epoch if that step has fewer batches than the others.

transformers 4.51 does not count that step when it resumes. Neither 4.51 nor 4.55 runs it in the epoch that is resumed,
because both use the length of the rest of the epoch as the epoch's length. transformers 5 uses the right length
(Trainer._run_epoch). `Steps` and `shorten` correct the older versions.
"""

LOSES_SHARDED_OPTIMIZER = tuple(map(int, importlib.metadata.version("accelerate").split(".")[:2])) < (1, 15)
"""Gaudi's releases: accelerate 1.9 resumes a model sharded by FSDP2 with an empty optimizer."""


def warmup(ratio: float) -> dict[str, float]:
    """Return the training argument for a warm-up over a share of all steps, from 0 to 1.

    Gaudi's releases call it `warmup_ratio`. transformers 5 has no such argument; its `warmup_steps` accepts a share.
    """
    return {"warmup_ratio" if _IS_TRANSFORMERS_4 else "warmup_steps": ratio}


def gradient_checkpointing(enabled: bool) -> dict[str, bool]:
    """Return the training argument that makes the backward pass compute activations again.

    transformers 5 has renamed it, and warns about the name that Gaudi's releases have.
    """
    return {"gradient_checkpointing" if _IS_TRANSFORMERS_4 else "activation_checkpointing": enabled}


def hub_unreachable() -> tuple[type[Exception], ...]:
    """Return the exceptions that huggingface_hub raises if the hub does not answer.

    Its version in Gaudi's releases uses `requests`, whose exceptions are OSErrors. All others use httpx, whose
    exceptions are not.
    """
    from huggingface_hub import errors

    return OSError, errors.HTTPError  # type: ignore[attr-defined]  # imported there


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model's folder, with any version of transformers that saved it.

    Gaudi's releases have neither the class TokenizersBackend nor lists as `extra_special_tokens`, which transformers 5
    writes.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    changes = _for_both_versions(folder) if _IS_TRANSFORMERS_4 else {}
    loader: Any = PreTrainedTokenizerFast if changes.pop("tokenizer_class", None) else AutoTokenizer
    return loader.from_pretrained(folder, trust_remote_code=False, **changes)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer so that transformers 4 and 5 load it. Both know what transformers 4 writes."""
    tokenizer.save_pretrained(folder)
    if changes := _for_both_versions(folder):
        path = Path(folder) / TOKENIZER_CONFIGURATION
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2, ensure_ascii=False) + "\n")


def _for_both_versions(folder: Path) -> dict[str, Any]:
    """Return the settings of a saved tokenizer that only transformers 5 knows, as transformers 4 writes them."""
    try:
        settings = json.loads((Path(folder) / TOKENIZER_CONFIGURATION).read_text())
    except FileNotFoundError:
        return {}
    changes: dict[str, Any] = {}
    if settings.get("tokenizer_class") == "TokenizersBackend":
        changes["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(tokens := settings.get("extra_special_tokens"), list):
        changes |= {"extra_special_tokens": {}, "additional_special_tokens": tokens}
    return changes


class Steps(int):
    """The number of steps in an epoch. Dividing a saved step by it gives the saved epoch and position.

    Gaudi's releases: `_inner_training_loop` of transformers 4 offers no other way to set them.
    """

    def of(self, epoch: Any, trainer: Any) -> "Steps":
        """Set where to read the position: an `Epoch` and the Trainer's state."""
        self._epoch, self._trainer = epoch, trainer
        return self

    def __rfloordiv__(self, _step: int) -> int:
        return int(self._epoch.position(self._trainer)[0])

    def __rmod__(self, _step: int) -> int:
        done = int(self._epoch.position(self._trainer)[1])
        return done // int(self._trainer.args.gradient_accumulation_steps)


def shorten(batches: Any, length: Callable[[], int]) -> None:
    """Change a batch sampler's length, by which the Trainer detects an epoch's last batch, but not its batches.

    Gaudi's releases, as for `Steps`.
    """
    own = type(batches)
    batches.__class__ = type(own.__name__, (own,), {"__len__": lambda _: length(), "__module__": own.__module__})


def keep_epoch(trainer: type[Any]) -> None:
    """Make a Trainer that resumes within an epoch use that epoch's samples, not those of the first.

    Gaudi's releases: to skip batches, their accelerate (1.9.0 and 1.10.1) creates a new data loader that resets the
    sampler to epoch 0, on any number of ranks. accelerate 1.15.0 (pull request 4071) fixes this, and the change here
    does not harm it.
    """
    for part in trainer.__mro__:
        loop = vars(part).get("_inner_training_loop")
        names = loop.__globals__ if loop else {}
        skip = names.get("skip_first_batches")
        if skip is not None and not hasattr(skip, "keeps_epoch"):
            names["skip_first_batches"] = _keeping_epoch(skip)


def _keeping_epoch(skip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(skip)
    def skip_first_batches(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        rest = skip(dataloader, *args, **kwargs)
        if hasattr(rest, "iteration"):
            rest.iteration = dataloader.iteration
        return rest

    skip_first_batches.keeps_epoch = True  # type: ignore[attr-defined]
    return skip_first_batches
