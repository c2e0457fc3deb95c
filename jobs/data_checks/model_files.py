"""Check the files of a pretrained model, by the same rules before a job is submitted and before it trains."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from jobs.core.errors import TrainyardError, UsageError
from jobs.core.labels import Problem

CONFIGURATION = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIGURATION = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADAPTER = "adapter_config.json"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SMALL_FILES = (CONFIGURATION, TOKENIZER_CONFIGURATION, SPECIAL_TOKENS, *_INDEXES)
"""The checked files that are small."""
CHECKED_FILES = (*SMALL_FILES, TOKENIZER)
"""The files whose content is checked. Of weights, only the beginning is checked."""

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that git, without its extension LFS, wrote in place of a large file."""

TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIGURATION, SPECIAL_TOKENS, "added_tokens.json", "vocab.txt")
"""The files of a fast tokenizer, as `AutoTokenizer.from_pretrained` loads it."""

MODEL_TEXT = (".json", ".txt", ".model")
"""Suffixes of files other than weights: configuration, vocabulary, merges, SentencePiece models."""

_SAFE_PICKLES = (2, 10)
"""The first PyTorch version that loads a pickle without running code in it.

Its `weights_only` could be bypassed before 2.6 (CVE-2025-32434), and made to corrupt memory before 2.10
(CVE-2026-24747).
"""

_BEGINNING_BYTES = 64 << 10
"""Bytes of weights that are read first: the whole header of a model with some hundred tensors."""

_MAX_HEADER_BYTES = 100_000_000
"""Maximum header that the library safetensors reads (MAX_HEADER_SIZE)."""

_SAVED_NEXT = "name the folder that save_pretrained wrote, with its tokenizer"

_POSITIONS = frozenset(
    {
        # Encoders.
        *("albert", "bert", "big_bird", "canine", "convbert", "deberta", "deberta-v2", "distilbert", "electra"),
        *("ernie", "flaubert", "layoutlm", "megatron-bert", "mobilebert", "mra", "nezha", "nystromformer"),
        *("perceiver", "rembert", "roc_bert", "roformer", "splinter", "squeezebert", "xlm", "yoso"),
        # Decoders. The tables of OPT and BART have two rows more than `max_position_embeddings`; the models add these
        # themselves (`OPTLearnedPositionalEmbedding`, `BartLearnedPositionalEmbedding`).
        *("biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt"),
        # Both.
        *("bart", "bigbird_pegasus", "mbart", "mvp", "plbart"),
    }
)
"""Model types with a table of positions, for which a longer sequence raises an IndexError.

From transformers 4.51.3; the longest sequence that a tiny model of each type accepts was measured.
"""

_POSITIONS_BEHIND_PADDING = frozenset(
    {
        *("camembert", "data2vec-text", "ernie_m", "esm", "ibert", "longformer", "luke", "mpnet"),
        *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
"""Model types with a table whose positions start after the padding token's id (as in fairseq): 514 rows are 512
positions."""

_WITHOUT_TABLE = {
    "deberta": ("position_biased_input", False),
    "deberta-v2": ("position_biased_input", False),
    "esm": ("position_embedding_type", "rotary"),
}
"""Model types that need no table if they have this setting: DeBERTa then uses only relative positions
(`DebertaConfig`), ESM-2 rotary embeddings (`EsmConfig`)."""

_WITHOUT_PADDING = frozenset(
    [
        *("CodeGenTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "LlamaTokenizer", "PreTrainedTokenizer"),
        "TokenizersBackend",  # the same as PreTrainedTokenizerFast, in transformers 5
    ]
)
"""Tokenizers of transformers that have a padding token only if their files name one."""


def model_files(names: Iterable[str]) -> list[str]:
    """Return the files that `from_pretrained` reads, without duplicate weights and weights of other frameworks."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")] or [name for name in top if is_pickle(name)]
    return [name for name in top if name.endswith(MODEL_TEXT)] + weights


def is_pickle(name: str) -> bool:
    return name.startswith("pytorch_model") and name.endswith(".bin")


def is_weights(name: str) -> bool:
    """Return whether a file of `model_files` has weights."""
    return not name.endswith(MODEL_TEXT)


class Beginning(NamedTuple):
    """The beginning of a file with weights."""

    content: bytes
    size: int
    """Size of the whole file, in bytes."""


def beginning_of(size: int, read: Callable[[int, int], bytes]) -> Beginning:
    """Read the beginning of weights: of safetensors the header, which describes the rest.

    `read` returns the bytes from an offset up to another, at most `size`.
    """
    content = read(0, min(size, _BEGINNING_BYTES))
    end = min(size, 8 + int.from_bytes(content[:8], "little"), _MAX_HEADER_BYTES)
    return Beginning(content + read(len(content), end) if end > len(content) else content, size)


def lfs_pointer_error(what: str) -> TrainyardError:
    return UsageError(
        f"{what} is a pointer of Git LFS, not the file itself",
        next_step="git lfs pull in the clone, and copy the file again from there",
    )


def _weights_error(location: str, name: str, weights: Beginning) -> TrainyardError | None:
    """Return an error if a safetensors file is incomplete or something else."""
    if not name.endswith(".safetensors"):
        return None
    header_bytes = int.from_bytes(weights.content[:8], "little")
    try:
        header = json.loads(weights.content[8 : 8 + header_bytes])
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected = 8 + header_bytes + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        problem = f"has {weights.size:,} bytes, but no complete header of a safetensors file"
    else:
        if weights.size == expected:
            return None
        problem = f"has {weights.size:,} bytes, but its header describes {expected:,}"
    return UsageError(
        f"{location}: its {name} {problem}; the file was probably cut off while it was copied",
        next_step="download or save the model again, and compare the sizes of its files",
    )


def _missing_shards(location: str, names: Collection[str], contents: Mapping[str, bytes]) -> Iterator[TrainyardError]:
    """Yield an error if an index of weights names files that are not there."""
    name = next((index for index in _INDEXES if index in contents), "")
    if not name or name.removesuffix(".index.json") in names:  # a whole file takes precedence
        return
    try:
        named = {*json.loads(contents[name])["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError):
        yield UsageError(f"{location}: its {name} is not an index of weights", next_step="save the model again")
        return
    if missing := sorted(named - {*names}):
        yield UsageError(
            f"{location}: {len(missing)} of the {len(named)} files in its {name} are missing: {', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}",
            next_step="copy the whole folder again, or save the model again",
        )


def _too_many_tokens(
    location: str, configuration: Mapping[str, Any], contents: Mapping[str, bytes]
) -> TrainyardError | None:
    """Return an error if the tokenizer has tokens for which the model has no embeddings."""
    rows = configuration.get("vocab_size")
    try:
        tokenizer = json.loads(contents[TOKENIZER])
        vocabulary = tokenizer["model"]["vocab"]  # a list for SentencePiece's unigrams
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        tokens = 1 + max(chain(ids, (token["id"] for token in tokenizer.get("added_tokens") or ())))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # the job reports what `tokenizers` cannot load
    if not isinstance(rows, int) or tokens <= rows:
        return None
    return UsageError(
        f"{location}: its tokenizer has {tokens:,} tokens, but the model has embeddings for {rows:,} (vocab_size)",
        next_step="resize the model (model.resize_token_embeddings(len(tokenizer))), and save it again",
    )


def missing_file(names: Collection[str], location: str) -> TrainyardError | None:
    """Return an error if files of these names are not a complete model, else None."""
    files = model_files(names)
    has = {
        CONFIGURATION: CONFIGURATION in files,
        "weights (model.safetensors or pytorch_model.bin)": any(map(is_weights, files)),
        "tokenizer (tokenizer.json or a vocabulary)": any(
            name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for name in files
        ),
    }
    for what, is_there in has.items():
        if not is_there:
            present = ", ".join(sorted(names)[:8]) or "nothing"
            return UsageError(f"{location} is not a model: it has no {what}, only {present}", next_step=_SAVED_NEXT)
    return None


def unsafe_pickle(names: Collection[str], location: str, pytorch: str) -> TrainyardError | None:
    """Return an error if the only weights are a pickle that this version of PyTorch cannot load safely."""
    pickles = [name for name in model_files(names) if is_pickle(name)]
    # Habana's versions have letters after the numbers: 2.5.1a0+git….
    if not pickles or tuple(int(number) for number in re.findall(r"\d+", pytorch)[:2]) >= _SAFE_PICKLES:
        return None
    return UsageError(
        f"{location} has its weights only in {pickles[0]}, a pickle, and PyTorch {pytorch} may run code that is hidden "
        "in a pickle (CVE-2025-32434, CVE-2026-24747)",
        next_step="save the model again with save_pretrained(…, safe_serialization=True), which writes "
        "model.safetensors; PyTorch 2.10 and later can read pickles too, but no Gaudi release has it",
    )


def model_errors(
    location: str,
    names: Collection[str],
    contents: Mapping[str, bytes],
    *,
    max_length: int | None = None,
    is_known: Callable[[str], bool] = lambda _: False,
    pytorch: str | None = None,
    classifies: bool = False,
    weights: Mapping[str, Beginning] = MappingProxyType({}),
) -> Iterator[TrainyardError]:
    """Yield an error for each reason why the files are not a model that can be trained with `max_length`.

    `contents` has the files of CHECKED_FILES that exist, `weights` the beginning of those with weights, if known.
    `is_known` returns whether transformers itself has a model type, so that the model needs no custom code.
    `classifies`: the model must be a classifier.
    """
    beginnings = {**contents, **{name: each.content for name, each in weights.items()}}
    if pointer := next((name for name, content in beginnings.items() if content.startswith(LFS_POINTER)), None):
        yield lfs_pointer_error(f"{location}: its {pointer}")
        return
    if ADAPTER in names:
        # from_pretrained would load the model that this file names, from any location.
        yield UsageError(
            f"{location} is an adapter: its {ADAPTER} names the model that it adapts",
            next_step="merge the adapter into its model (peft: merge_and_unload()), and save the merged model with its "
            "tokenizer",
        )
    elif error := missing_file(names, location):
        yield error
    yield from _missing_shards(location, names, contents)
    yield from filter(None, (_weights_error(location, name, each) for name, each in weights.items()))
    if pytorch is not None and (error := unsafe_pickle(names, location, pytorch)):
        yield error
    if CONFIGURATION in contents:
        try:
            configuration = configuration_of(contents[CONFIGURATION], location)
        except TrainyardError as invalid:
            yield invalid
        else:
            if configuration.get("auto_map") and not is_known(configuration["model_type"]):
                yield _custom_code(location, configuration["auto_map"])
            if setting := next(_code_settings(configuration), None):
                yield UsageError(
                    f"{location} is rejected: its config.json has '{setting}', which makes transformers download and "
                    "run code (CVE-2026-5241, CVE-2026-4372)",
                    next_step="find out who added it; a model without custom code does not have it",
                )
            if "quantization_config" in configuration:
                yield UsageError(
                    f"{location} is quantized: its config.json has 'quantization_config', but jobs train full weights",
                    next_step="start from the model that was quantized",
                )
            if classifies:
                try:
                    class_names(configuration, location)
                except TrainyardError as invalid:
                    yield invalid
            most = positions(configuration)
            if most is not None and max_length is not None and max_length > most:
                yield too_long(location, max_length, most)
            yield from _padding_errors(location, configuration, contents)
            if error := _too_many_tokens(location, configuration, contents):
                yield error


def configuration_of(content: bytes, location: str) -> dict[str, Any]:
    """Return the content of a config.json.

    Raises UsageError if it is not a model's, because transformers would raise an obscure IndexError or list all models
    that it supports.
    """
    try:
        configuration = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{location} is not a model: its config.json is not JSON: {error}") from None
    if not isinstance(configuration, dict) or not isinstance(configuration.get("model_type"), str):
        raise UsageError(f"{location} is not a model: its config.json has no model_type", next_step=_SAVED_NEXT)
    return configuration


def class_names(configuration: Mapping[str, Any], location: str) -> list[str]:
    """Return the names of a classifier's classes, or of a regression's single output.

    Raises UsageError if the model is neither.
    """
    heads = configuration.get("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in heads):
        what = ", ".join(map(str, heads)) or "a model without a head"
        raise UsageError(
            f"{location} is not a classifier: its config.json names {what}",
            next_step="fine-tune it first (job: finetune-classification), and name run://NAME/model",
        )
    # Without names, transformers assumes two classes.
    names = {int(number): str(name) for number, name in (configuration.get("id2label") or {}).items()}
    names = names or {number: f"LABEL_{number}" for number in range(2)}
    if problem_of(configuration) == "regression" and len(names) > 1:
        raise UsageError(
            f"{location} predicts {len(names)} numbers for each text, but evaluate measures only one",
            next_step="name another model, or fine-tune this one (job: finetune-classification)",
        )
    return [names[number] for number in sorted(names)]


def problem_of(configuration: Mapping[str, Any]) -> Problem:
    """Return what a model with a classifier's head predicts."""
    if configuration.get("problem_type") == "multi_label_classification":
        return "multi-label"
    has_one = len(configuration.get("id2label") or {}) == 1
    return "regression" if configuration.get("problem_type") == "regression" or has_one else "single-label"


def positions(configuration: Mapping[str, Any]) -> int | None:
    """Return the maximum tokens of a sequence, special tokens included, or None if no table limits it."""
    kind = configuration["model_type"]
    # GPT-2 and its relatives use another name.
    rows = configuration.get("n_positions", configuration.get("max_position_embeddings"))
    setting, value = _WITHOUT_TABLE.get(kind, ("", None))
    if not isinstance(rows, int) or (setting in configuration and configuration[setting] == value):
        return None
    if kind in _POSITIONS_BEHIND_PADDING:
        padding = configuration.get("pad_token_id", 1)
        return rows - 1 - (padding if isinstance(padding, int) else 1)
    return rows if kind in _POSITIONS else None


def _code_settings(content: Any) -> Iterator[str]:
    """Yield the settings of a configuration that make transformers run downloaded code, whatever the caller allows.

    LightGlue's configuration sets trust_remote_code for itself, even nested in other configurations. An attention
    implementation with a slash in its name is a repository on the hub.
    """
    if isinstance(content, list):
        for item in content:
            yield from _code_settings(item)
    if isinstance(content, dict):
        for key, value in content.items():
            if (key == "trust_remote_code" and value) or (
                key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
                and "/" in json.dumps(value)
            ):
                yield f"{key}: {json.dumps(value)}"
            yield from _code_settings(value)


def _custom_code(location: str, classes: Any) -> TrainyardError:
    name = next(iter(classes.values()), "") if isinstance(classes, dict) else classes
    return UsageError(
        f"{location} needs custom code ({name}), which jobs do not run: trust_remote_code is off",
        next_step="use a model that transformers supports itself",
    )


def too_long(location: str, max_length: int, most: int) -> UsageError:
    """Return the error for a max_length above the `most` tokens that a model has positions for."""
    return UsageError(
        f"max_length {max_length} is more than the {most} tokens that {location} has positions for, special tokens "
        "included",
        next_step=f"set it to {most} or less",
    )


def _padding_errors(
    location: str, configuration: Mapping[str, Any], contents: Mapping[str, bytes]
) -> Iterator[TrainyardError]:
    settings: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS, TOKENIZER_CONFIGURATION):
        if name not in contents:
            continue
        try:
            content = json.loads(contents[name])
        except (ValueError, RecursionError) as error:
            yield UsageError(f"{location}: its {name} is not JSON: {error}", next_step="save the model again")
            return
        if isinstance(content, dict):
            settings.update({key: value for key, value in content.items() if value})
    default = "GPT2Tokenizer" if configuration["model_type"] == "gpt2" else ""
    kind = str(settings.get("tokenizer_class", default)).removesuffix("Fast")
    if kind in _WITHOUT_PADDING and "pad_token" not in settings:
        yield no_padding_token(location)


def no_padding_token(location: str) -> TrainyardError:
    return UsageError(
        f"{location}: the model's tokenizer has no padding token",
        next_step="set one (tokenizer.pad_token = …), and save the tokenizer again",
    )
