r"""Pre-train an encoder by masked language modelling on packed tokens, from random weights or from an existing model.

    python -m jobs.container.launch --instance-type=… --nproc-per-node=8 pretrain-mlm --data=s3://…/packed-tokens-…/

The same file runs on HPU, CUDA and CPU. The result loads with `AutoModelForMaskedLM`, and as the encoder of a
fine-tuning. Step n trains on the same sequences with the same masks for any number of ranks, and whether or not an
earlier attempt was interrupted.
"""

import json
import logging
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from jobs.aws import s3 as object_store
from jobs.container.accelerator import Accelerator, of_rank
from jobs.container.data import packed_tokens, sources
from jobs.container.data.artifacts import open_artifact
from jobs.container.data.masked_tokens import EVALUATION_SEED, MaskedSequences, Masking, Spread, TrainingOrder
from jobs.container.data.packed_tokens import PackedTokens
from jobs.container.models import pretrained
from jobs.container.rank import Rank, run
from jobs.container.versions import load_tokenizer, save_tokenizer
from jobs.core.errors import ConfigurationError, NotFoundError, UsageError
from jobs.core.locations import S3, S3Location
from jobs.data_checks import model_files
from jobs.spec.kinds.pretrain_mlm import MODEL_TYPES, PretrainMlm

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

CONFIG = "config.json"

VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this, because HPUs and GPUs are fastest with matrix dimensions that are
multiples of 128. The additional tokens never occur."""

POSITIONS = 512
"""Minimum number of positions of a model, as in BERT. Fine-tuning may need more positions than pre-training."""


class Inputs(BaseModel):
    """The data and configuration that one rank downloads for all ranks of its node."""

    folder: Path
    fingerprint: str
    config: dict[str, Any] | None
    """The configuration of a model with random weights, or None."""
    model: Path | None = None
    """The model whose weights the training starts from, or None."""


def pretrain(rank: Rank, arguments: PretrainMlm) -> None:
    """Train, evaluate, and save model, metrics and checkpoints to the run."""
    if arguments.push_to_hub is None:
        sources.stay_offline(location for _, location, _ in arguments.sources())
    accelerator = replace(of_rank(os.environ), torch_compile=arguments.torch_compile)
    if accelerator.torch_compile:
        check_compiler(accelerator)
    s3 = object_store.connect() if rank.is_first_on_node else None

    def fetch() -> dict[str, Any]:
        assert s3 is not None  # noqa: S101 - set on the one rank that gets here
        return fetch_inputs(arguments, s3, rank.scratch).model_dump(mode="json")

    if not rank.is_first_on_node:
        accelerator.trainer_class()  # importing it takes seconds, during which the first rank prepares the data
    inputs = Inputs.model_validate(rank.once_per_node("data", fetch))
    train_data, eval_data = masked_data(arguments, inputs)
    sequences = len(PackedTokens(inputs.folder, "train"))
    if rank.is_first:
        index = packed_tokens.Index.read(inputs.folder)
        log.info(
            "data: %s sequences of %s tokens, %s passes, %s held-out sequences, fingerprint %s",
            sequences,
            index.sequence_length,
            round(len(train_data) / sequences, 2),
            len(eval_data),
            inputs.fingerprint,
        )
    rank.start_up.done("data")
    # Imported here, because loading the Trainer takes seconds and would delay preparing the data.
    from jobs.container.trainer.training import Task, train

    rank.start_up.done("imports")
    train(
        rank,
        # A checkpoint is resumed only with the same arguments, and therefore only with the same data.
        arguments.model_copy(update={"data_fingerprint": inputs.fingerprint}),
        Task(
            model=lambda _: bert(arguments, inputs, accelerator),
            start="random weights" if inputs.model is None else f"the weights of {arguments.model}",
            train_data=train_data,
            eval_data=eval_data,
            # An HPU would compile another graph for a batch without an attention mask.
            collate=MaskedSequences.collate if accelerator.name == "hpu" else MaskedSequences.collate_unpadded,
            evaluate=lambda trainer: evaluate(trainer, eval_data),
            save_beside=lambda folder: save_tokenizer(load_tokenizer(inputs.folder / packed_tokens.TOKENIZER), folder),
            schedule={"max_steps": arguments.max_steps},
            ordered_epoch=sequences,
        ),
        s3=s3,
        accelerator=accelerator,
    )


def check_compiler(accelerator: Accelerator) -> None:
    """Raise ConfigurationError if torch.compile cannot work: on an HPU, or without a compiler.

    On a GPU, Triton needs a C compiler to load its kernels (triton/runtime/build.py). On a CPU, the kernels are C++
    (torch/_inductor/config.py, `cpp.cxx`).
    """
    name = accelerator.name
    if name == "hpu":
        raise ConfigurationError(
            "torch_compile is not supported on HPUs: Habana's backend for it has not been tested",
            next_step="remove torch_compile",
        )
    of_cpu = ["clang++" if sys.platform == "darwin" else "g++"]
    variable, compilers = ("CC", ["gcc", "clang"]) if name == "cuda" else ("CXX", of_cpu)
    if not any(map(shutil.which, [os.environ[variable]] if variable in os.environ else compilers)):
        remedy = "use the image `cuda`, which has gcc" if name == "cuda" else f"install {compilers[0]}"
        raise ConfigurationError(
            f"torch_compile needs a compiler on {name}; not found: {', '.join(compilers)}",
            next_step=f"{remedy}, or remove torch_compile",
        )


def fetch_inputs(arguments: PretrainMlm, s3: "S3Client", scratch: Path) -> Inputs:
    """Download data and configuration. Raises UsageError or NotFoundError if they are missing or do not match."""
    artifact = open_artifact(arguments.data, kind=packed_tokens.KIND, s3=lambda: s3, scratch=scratch)
    fingerprint = artifact.manifest.fingerprint
    if not fingerprint.startswith(arguments.data_fingerprint or ""):
        raise UsageError(
            f"{arguments.data} has the fingerprint {fingerprint}, not {arguments.data_fingerprint}",
            next_step="correct data or data_fingerprint",
        )
    folder = artifact.download()
    index = packed_tokens.Index.read(folder)
    needed: dict[packed_tokens.Split, int] = {"train": arguments.global_batch_size, "held-out": 1}
    for split, count in needed.items():
        found = index.sequences(split)
        if found < count:
            raise UsageError(
                f"{arguments.data} has {found} sequences in the split '{split}'; at least {count} are needed",
                next_step="use more text or shorter sequences for the data, or lower global_batch_size",
            )
    if arguments.model is None:
        return Inputs(folder=folder, fingerprint=fingerprint, config=_configuration(arguments, index, s3))
    model = pretrained.model_folder(arguments.model, s3=lambda: s3, scratch=scratch)
    _check_model(model, arguments, folder, index)
    return Inputs(folder=folder, fingerprint=fingerprint, config=None, model=model)


def _check_model(model: Path, arguments: PretrainMlm, data: Path, index: packed_tokens.Index) -> None:
    """Raise UsageError if the model has another type, or was trained with another vocabulary or fewer positions."""
    location = arguments.model
    config = json.loads((model / CONFIG).read_bytes())
    _check_type(config, f"{location}", "model")
    most = model_files.positions(config)
    if most is not None and most < index.sequence_length:
        raise UsageError(
            f"{arguments.data} has sequences of {index.sequence_length} tokens, {location} has only {most} positions",
            next_step=f"tokenize the corpus with sequence_length: {most}",
        )
    with pretrained.explained_loading(str(location), "its tokenizer cannot be loaded"):
        expected = load_tokenizer(model).get_vocab()
    found = load_tokenizer(data / packed_tokens.TOKENIZER).get_vocab()
    if found != expected:
        token = min({*expected.items()} ^ {*found.items()}, key=lambda item: item[1])[0]
        raise UsageError(
            f"{arguments.data} does not have the vocabulary of {location}: the id of '{token}' is "
            f"{found.get(token, 'missing')} instead of {expected.get(token, 'missing')}",
            next_step=f"tokenize the corpus with tokenizer: {location}, and set data to the result",
        )


def _check_type(config: dict[str, Any], location: str, argument: str) -> None:
    if config.get("model_type") not in MODEL_TYPES:
        raise UsageError(
            f"{location} is of type '{config.get('model_type')}', which cannot be pre-trained",
            next_step=f"set {argument} to a model of type {', '.join(MODEL_TYPES)}, or remove it",
        )


def masked_data(arguments: PretrainMlm, inputs: Inputs) -> tuple[TrainingOrder, MaskedSequences]:
    """Return the training sequences in their order, and the evaluation sequences."""
    train = PackedTokens(inputs.folder, "train")

    def masking(seed: int) -> Masking:
        return Masking(
            fraction=arguments.mask_fraction,
            vocabulary_size=train.index.vocabulary_size,
            mask_id=train.index.special_ids["mask"],
            pad_id=train.index.pad_id,
            special_ids=sorted(train.index.special_ids.values()),
            seed=seed,
        )

    length = arguments.max_steps * arguments.global_batch_size
    held_out = Spread(PackedTokens(inputs.folder, "held-out"), arguments.eval_sequences)
    return (
        TrainingOrder(train, masking(arguments.seed), length=length),
        MaskedSequences(held_out, masking(EVALUATION_SEED)),
    )


def bert(arguments: PretrainMlm, inputs: Inputs, accelerator: Accelerator) -> Any:
    """Return the model that the training starts from. Its head computes only the masked positions."""
    model = _first_model(arguments, inputs, accelerator)
    if accelerator.torch_compile:
        model.compile_parts()
    return model


def _first_model(arguments: PretrainMlm, inputs: Inputs, accelerator: Accelerator) -> Any:
    if inputs.model is None:
        assert inputs.config is not None  # noqa: S101 - set if there is no model
        return new_model(inputs.config, accelerator)
    from jobs.container.models import fitting
    from jobs.container.models.masked_bert import masked_lm

    start = fitting.load_model(
        masked_lm(json.loads((inputs.model / CONFIG).read_bytes())["model_type"]),
        inputs.model,
        str(arguments.model),
        "it cannot be loaded for masked language modelling",
        settings=fitting.TRAINING_SETTINGS,
        new_head=True,
        **accelerator.model_arguments(),
    )
    if start.new:
        log.warning(
            "warning: the model has no head for masked language modelling; a new head starts from random weights (%s)",
            ", ".join(start.new),
        )
    return start.model


def new_model(config: dict[str, Any], accelerator: Accelerator) -> Any:
    """Return a model with random weights. Its head computes only the masked positions."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from jobs.container.models.masked_bert import masked_lm

    model_type = config["model_type"]
    return masked_lm(model_type)(CONFIG_MAPPING[model_type].from_dict(config, **accelerator.model_arguments()))


def evaluate(trainer: Any, data: MaskedSequences) -> dict[str, float]:
    """Return the mean loss over all masked tokens, and its exponential, the perplexity."""
    sums = trainer.predict(data).predictions.astype(float).sum(axis=0)
    loss = float(sums[0] / sums[1])
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}


def _configuration(arguments: PretrainMlm, index: packed_tokens.Index, s3: "S3Client") -> dict[str, Any]:
    """Return the configuration of a new model, with as many embeddings as the data's tokenizer needs.

    Raises UsageError if the given configuration does not match the data.
    """
    vocabulary = -(-index.vocabulary_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if arguments.config is None:
        return {
            "model_type": "bert",
            "hidden_size": arguments.hidden_size,
            "num_hidden_layers": arguments.layers,
            "num_attention_heads": arguments.heads,
            "intermediate_size": arguments.intermediate_size,
            "vocab_size": vocabulary,
            "max_position_embeddings": max(POSITIONS, index.sequence_length),
            "pad_token_id": index.pad_id,
        }
    config = _read_configuration(arguments.config, s3)
    _check_type(config, f"{arguments.config}: {CONFIG}", "config")
    known = {"max_position_embeddings": POSITIONS, **config, "pad_token_id": index.pad_id}
    positions = model_files.positions(known)
    if positions is not None and positions < index.sequence_length:
        need = index.sequence_length + known["max_position_embeddings"] - positions  # RoBERTa's has unused rows
        raise UsageError(
            f"{arguments.config}: max_position_embeddings is {known['max_position_embeddings']}, but {arguments.data} "
            f"needs {need}",
            next_step=f"set max_position_embeddings to {need} or more, or remove config",
        )
    log.info(
        "model: %s embeddings for the tokenizer's %s tokens; %s has %s",
        vocabulary,
        index.vocabulary_size,
        arguments.config,
        config.get("vocab_size", "no vocab_size"),
    )
    return {**config, "vocab_size": vocabulary, "pad_token_id": index.pad_id}


def _read_configuration(location: str, s3: "S3Client") -> dict[str, Any]:
    if location.startswith(S3):
        content = object_store.read(s3, S3Location.parse(location) / CONFIG)
    else:
        folder = sources.hub_folder(location, "model", [CONFIG]) if sources.is_on_hub(location) else Path(location)
        content = (folder / CONFIG).read_bytes() if (folder / CONFIG).is_file() else None
    if content is None:
        raise NotFoundError(f"{location} has no {CONFIG}", next_step="check the folder")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{location}: its {CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{location}: its {CONFIG} is not an object but {type(config).__name__}")
    return config


if __name__ == "__main__":
    run(pretrain, PretrainMlm)
