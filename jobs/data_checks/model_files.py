"""What a pretrained model's files have to be: the same rules before a job is submitted and before it trains."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from jobs.core.errors import TrainyardError, UsageError

CONFIGURATION = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIGURATION = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADAPTER = "adapter_config.json"
READ_BEFORE = (CONFIGURATION, TOKENIZER_CONFIGURATION, SPECIAL_TOKENS)
"""The files that the rules read."""

TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIGURATION, SPECIAL_TOKENS, "added_tokens.json", "vocab.txt")
"""The files of a model that make its tokenizer, as `AutoTokenizer.from_pretrained` loads a fast one."""

MODEL_TEXT = (".json", ".txt", ".model")
"""How the files end that are no weights: configuration, vocabulary, merges, SentencePiece models."""

_SAFE_PICKLES = (2, 10)
"""The release of PyTorch from which on it loads a pickle without running what is in it.

Its `weights_only` could be defeated before 2.6 (CVE-2025-32434), and made to corrupt memory before 2.10
(CVE-2026-24747).
"""

_SAVED_NEXT = "name the folder that save_pretrained wrote, with its tokenizer"

_POSITIONS = frozenset(
    {
        # Encoders.
        *("albert", "bert", "big_bird", "canine", "convbert", "deberta", "deberta-v2", "distilbert", "electra"),
        *("ernie", "flaubert", "layoutlm", "megatron-bert", "mobilebert", "mra", "nezha", "nystromformer"),
        *("perceiver", "rembert", "roc_bert", "roformer", "splinter", "squeezebert", "xlm", "yoso"),
        # Decoders. OPT's and BART's tables have two rows more than `max_position_embeddings`, which they add themselves
        # (`OPTLearnedPositionalEmbedding`, `BartLearnedPositionalEmbedding`).
        *("biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt"),
        # Both.
        *("bart", "bigbird_pegasus", "mbart", "mvp", "plbart"),
    }
)
"""Types of models with a row for each position in a table: a longer sequence is an error of an index.

As transformers 4.51.3 has them; how many tokens a tiny model of each takes was tried.
"""

_POSITIONS_BEHIND_PADDING = frozenset(
    {
        *("camembert", "data2vec-text", "ernie_m", "esm", "ibert", "longformer", "luke", "mpnet"),
        *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
"""The same, counted from behind the number of the padding (fairseq's way): 514 rows are 512 positions."""

_WITHOUT_TABLE = {
    "deberta": ("position_biased_input", False),
    "deberta-v2": ("position_biased_input", False),
    "esm": ("position_embedding_type", "rotary"),
}
"""Types of models that may do without the table, and the setting of their configuration that says so: DeBERTa then
knows relative positions only (`DebertaConfig`), ESM-2 turns its vectors (`EsmConfig`)."""

_WITHOUT_PADDING = frozenset(
    ["CodeGenTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "LlamaTokenizer", "PreTrainedTokenizer"]
)
"""Tokenizers of transformers that have a padding token only where their files name one."""


def model_files(names: Iterable[str]) -> list[str]:
    """Choose the files that `from_pretrained` reads: not the same weights twice, nor those of other frameworks."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")] or [name for name in top if is_pickle(name)]
    return [name for name in top if name.endswith(MODEL_TEXT)] + weights


def is_pickle(name: str) -> bool:
    return name.startswith("pytorch_model") and name.endswith(".bin")


def missing_file(names: Collection[str], location: str) -> TrainyardError | None:
    """Return what is wrong where files of these names are no model that can be fine-tuned."""
    files = model_files(names)
    has = {
        CONFIGURATION: CONFIGURATION in files,
        "weights (model.safetensors or pytorch_model.bin)": any(not name.endswith(MODEL_TEXT) for name in files),
        "tokenizer (tokenizer.json or a vocabulary)": any(
            name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for name in files
        ),
    }
    for what, is_there in has.items():
        if not is_there:
            there = ", ".join(sorted(names)[:8]) or "nothing"
            return UsageError(f"{location} is no model: it has no {what}; there is {there}", next_step=_SAVED_NEXT)
    return None


def unsafe_pickle(names: Collection[str], location: str, pytorch: str) -> TrainyardError | None:
    """Return what is wrong where files of these names are weights that a version of PyTorch is not safe to read."""
    pickles = [name for name in model_files(names) if is_pickle(name)]
    # Habana's versions have letters behind the numbers: 2.5.1a0+git….
    if not pickles or tuple(int(number) for number in re.findall(r"\d+", pytorch)[:2]) >= _SAFE_PICKLES:
        return None
    return UsageError(
        f"{location} has its weights in {pickles[0]} only, a pickle, and PyTorch {pytorch} may run code that is hidden "
        "in one (CVE-2025-32434, CVE-2026-24747)",
        next_step="save the model once more with save_pretrained(…, safe_serialization=True), which makes "
        "model.safetensors; PyTorch 2.10 and later, which no Gaudi release has, read pickles too",
    )


def faults(
    location: str,
    names: Collection[str],
    contents: Mapping[str, bytes],
    *,
    max_length: int | None = None,
    is_known: Callable[[str], bool] = lambda _: False,
    pytorch: str | None = None,
    classifies: bool = False,
) -> Iterator[TrainyardError]:
    """Yield all that keeps files of these names and contents from being a model that is fine-tuned on `max_length`.

    `classifies`: whether the model is used as the classifier that it is.

    `contents` has what there is of `READ_BEFORE`; `is_known` tells whether transformers has a type of model itself, so
    that it needs no code of the model's own.
    """
    if ADAPTER in names:
        # from_pretrained would load the model that this file names, from wherever it says.
        yield UsageError(
            f"{location} is an adapter: it has {ADAPTER}, which names the model that it belongs to",
            next_step="merge the adapter into its model (peft: merge_and_unload()), and save that model with its "
            "tokenizer",
        )
    elif fault := missing_file(names, location):
        yield fault
    if pytorch is not None and (fault := unsafe_pickle(names, location, pytorch)):
        yield fault
    if CONFIGURATION in contents:
        try:
            configuration = configuration_of(contents[CONFIGURATION], location)
        except TrainyardError as error:
            yield error
        else:
            if configuration.get("auto_map") and not is_known(configuration["model_type"]):
                yield _own_code(location, configuration["auto_map"])
            if asked := next(_asked_code(configuration), None):
                yield UsageError(
                    f"{location} is refused: its config.json has '{asked}', which makes transformers fetch code and "
                    "run it (CVE-2026-5241, CVE-2026-4372)",
                    next_step="find out who put it there; a model that needs no code of its own has no such line",
                )
            if "quantization_config" in configuration:
                yield UsageError(
                    f"{location} is quantized: its config.json has 'quantization_config', and jobs train whole weights",
                    next_step="start from the model that it was made of",
                )
            if classifies:
                try:
                    class_names(configuration, location)
                except TrainyardError as error:
                    yield error
            yield from _faults_of_length(location, configuration, max_length)
            yield from _faults_of_padding(location, configuration, contents)


def configuration_of(content: bytes, location: str) -> dict[str, Any]:
    """Return what a config.json says.

    Raises UsageError where it is that of no model: transformers would answer with the error of a list's index, or with
    the names of all models that it knows.
    """
    try:
        configuration = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{location} is no model: its config.json is not JSON: {error}") from None
    if not isinstance(configuration, dict) or not isinstance(configuration.get("model_type"), str):
        raise UsageError(f"{location} is no model: its config.json has no model_type", next_step=_SAVED_NEXT)
    return configuration


def class_names(configuration: Mapping[str, Any], location: str) -> list[str]:
    """Return the names of a classifier's classes.

    Raises UsageError if the configuration is that of another model, or of a classifier that gives an example several
    classes or a number.
    """
    heads = configuration.get("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in heads):
        what = ", ".join(map(str, heads)) or "a model without a head"
        raise UsageError(
            f"{location} is no classifier: its config.json names {what}",
            next_step="fine-tune it first (job: finetune-classification), and name run://NAME/model",
        )
    # Without names transformers takes two classes.
    names = {int(number): str(name) for number, name in (configuration.get("id2label") or {}).items()}
    names = names or {number: f"LABEL_{number}" for number in range(2)}
    problem = configuration.get("problem_type")
    if problem == "multi_label_classification":
        gives = "several classes at once (problem_type multi_label_classification)"
    elif problem == "regression" or len(names) == 1:
        gives = "a number (regression)"
    else:
        return [names[number] for number in sorted(names)]
    raise UsageError(
        f"{location} gives an example {gives}, and evaluate measures models that give it one class",
        next_step="name a classifier, or fine-tune this model for classes (job: finetune-classification)",
    )


def positions(configuration: Mapping[str, Any]) -> int | None:
    """Return the tokens that a sequence may have, special ones included; None where no table limits them."""
    kind = configuration["model_type"]
    # GPT-2 and what came from it have another name for it.
    rows = configuration.get("n_positions", configuration.get("max_position_embeddings"))
    setting, value = _WITHOUT_TABLE.get(kind, ("", None))
    if not isinstance(rows, int) or (setting in configuration and configuration[setting] == value):
        return None
    if kind in _POSITIONS_BEHIND_PADDING:
        padding = configuration.get("pad_token_id", 1)
        return rows - 1 - (padding if isinstance(padding, int) else 1)
    return rows if kind in _POSITIONS else None


def _asked_code(content: Any) -> Iterator[str]:
    """Yield what in a configuration has transformers run code from elsewhere, whatever the caller allows.

    LightGlue's configuration decides on trust_remote_code for itself, also as a part of others' configurations; an
    implementation of attention with a slash in its name is a repository of the hub.
    """
    if isinstance(content, list):
        for item in content:
            yield from _asked_code(item)
    if isinstance(content, dict):
        for key, value in content.items():
            if (key == "trust_remote_code" and value) or (
                key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
                and "/" in json.dumps(value)
            ):
                yield f"{key}: {json.dumps(value)}"
            yield from _asked_code(value)


def _own_code(location: str, classes: Any) -> TrainyardError:
    name = next(iter(classes.values()), "") if isinstance(classes, dict) else classes
    return UsageError(
        f"{location} needs code of its own ({name}), which no job runs: trust_remote_code is off",
        next_step="take a model that transformers knows by itself",
    )


def too_long(location: str, max_length: int, most: int) -> UsageError:
    """Return the error of a max_length above the `most` tokens that a model has positions for."""
    return UsageError(
        f"max_length {max_length} is more than the {most} tokens that {location} has positions for, special ones "
        "included",
        next_step=f"set it to {most} or less",
    )


def _faults_of_length(
    location: str, configuration: Mapping[str, Any], max_length: int | None
) -> Iterator[TrainyardError]:
    most = positions(configuration)
    if most is not None and max_length is not None and max_length > most:
        yield too_long(location, max_length, most)


def _faults_of_padding(
    location: str, configuration: Mapping[str, Any], contents: Mapping[str, bytes]
) -> Iterator[TrainyardError]:
    said: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS, TOKENIZER_CONFIGURATION):
        if name not in contents:
            continue
        try:
            content = json.loads(contents[name])
        except (ValueError, RecursionError) as error:
            yield UsageError(f"{location}: its {name} is not JSON: {error}", next_step="stage the model's folder again")
            return
        if isinstance(content, dict):
            said.update({key: value for key, value in content.items() if value})
    default = "GPT2Tokenizer" if configuration["model_type"] == "gpt2" else ""
    kind = str(said.get("tokenizer_class", default)).removesuffix("Fast")
    if kind in _WITHOUT_PADDING and "pad_token" not in said:
        yield no_padding_token(location)


def no_padding_token(location: str) -> TrainyardError:
    return UsageError(
        f"{location}: the model's tokenizer has no padding token",
        next_step="give it one (tokenizer.pad_token = …), and save the tokenizer again",
    )
