"""The card (README.md) of what is pushed to the Hugging Face Hub: what it is, what it amounts to, what it came from.

Markdown with the metadata that the hub reads. No card names a licence: that is for whoever publishes the repository.
"""

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs.contract.artifact import Manifest
from jobs.contract.locations import HUB, S3Location, hub_parts
from jobs.contract.recipe import Recipe

CARD = "README.md"

IMAGE_VARIABLE = "TRAINYARD_IMAGE"
"""Set in every image: name, release and revision of the code (jobs.images.revision); on a laptop there is none."""

_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "optimum-habana")


def model_card(run: S3Location, recipe: Recipe, result: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Of a trained model."""
    inputs = {name: location for name, location, _ in recipe.sources()}
    on_hub = {name: hub_parts(location)[0] for name, location in inputs.items() if location.startswith(HUB)}
    metadata: dict[str, Any] = {"library_name": "transformers", "tags": ["trainyard"]}
    if "model" in on_hub:
        metadata["base_model"] = on_hub["model"]
    data_sets = sorted({name for field, name in on_hub.items() if field != "model"})
    if data_sets:
        metadata["datasets"] = data_sets
    commit = cached_commit(inputs["model"]) if "model" in on_hub else None
    arguments = recipe.model_dump(mode="json", exclude_none=True)
    return _card(
        metadata,
        title=recipe.push_to_hub or run_id(run),
        summary=f"{_summary(recipe)} Made by trainyard's run `{run_id(run)}`.",
        tables=[
            ("Result", "metric", result),
            ("Inputs", "argument", {**inputs, **({"model's commit": commit} if commit else {})}),
            ("Arguments", "argument", {key: arguments[key] for key in arguments if key not in inputs}),
            ("Provenance", "part", {"run": run, **environment, **_origin()}),
        ],
    )


def artifact_card(repository: str, location: S3Location, manifest: Manifest) -> str:
    """Of an artifact, from its manifest alone: whoever pushes it, the card is of what made it."""
    metadata: dict[str, Any] = {"tags": ["trainyard", manifest.kind]}
    if manifest.kind == "tokenizer":
        metadata["library_name"] = "transformers"
    else:
        metadata["viewer"] = False  # the hub would show the shards' bytes as rows
    data_sets = sorted(set(_data_sets(manifest.inputs)))
    if data_sets:
        metadata["datasets" if manifest.kind == "tokenizer" else "source_datasets"] = data_sets
    return _card(
        metadata,
        title=repository,
        summary=f"Trainyard's artifact `{manifest.kind}`, version {manifest.version} of its format. `manifest.json` "
        "names each file with its size and sha256.",
        tables=[
            ("Provenance", "part", {"fingerprint": manifest.fingerprint, "artifact": location, **manifest.provenance}),
            ("Inputs", "input", manifest.inputs),
            ("Options", "option", manifest.options),
            ("Content", "count", {"files": len(manifest.files), "bytes": manifest.total_bytes, **_counts(manifest)}),
        ],
    )


def run_id(run: S3Location) -> str:
    return run.key.rstrip("/").rpartition("/")[2]


def cached_commit(location: str) -> str | None:
    """Commit of the model at `hf://…` that lies in this machine's cache; None where it does not say."""
    from huggingface_hub import try_to_load_from_cache

    name, options = hub_parts(location)
    found = try_to_load_from_cache(name, "config.json", revision=options.get("revision"))
    return Path(found).parent.name if isinstance(found, str) else None


def _card(metadata: Mapping[str, Any], *, title: str, summary: str, tables: list[tuple[str, str, Any]]) -> str:
    # JSON is YAML too, and quotes whatever needs it.
    header = "".join(f"{key}: {json.dumps(value)}\n" for key, value in metadata.items())
    sections = "\n".join(f"## {name}\n\n{_table(heading, rows)}" for name, heading, rows in tables)
    return f"---\n{header}---\n\n# {title}\n\n{summary}\n\n{sections}"


def _table(heading: str, rows: Mapping[str, Any]) -> str:
    shown = "".join(f"| {name} | {_cell(value)} |\n" for name, value in rows.items())
    return f"| {heading} | value |\n|---|---|\n{shown}"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _summary(recipe: Recipe) -> str:
    return (type(recipe).__doc__ or "").strip().partition("\n")[0]


def _origin() -> dict[str, str]:
    """What the code is, and what it ran with."""
    image = os.environ.get(IMAGE_VARIABLE)
    installed = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    packages = {package: installed[package] for package in _PACKAGES if package in installed}
    return {**({"image": image} if image else {}), "python": platform.python_version(), **packages}


def _counts(manifest: Manifest) -> dict[str, int]:
    """Summed over the files, without those that are places (jobs.train.kinds.prepare_corpus)."""
    names = {name: None for file in manifest.files.values() for name in file.counts if not name.startswith("next_")}
    return {name: manifest.count(name) for name in names}


def _data_sets(inputs: Any) -> Iterator[str]:
    """Names on the hub, wherever they stand among the identities of the inputs."""
    if isinstance(inputs, dict):
        if "data_set" in inputs and "commit" in inputs:
            yield str(inputs["data_set"])
        inputs = list(inputs.values())
    if isinstance(inputs, list):
        for item in inputs:
            yield from _data_sets(item)
