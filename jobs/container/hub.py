"""Push a run's result to the Hugging Face Hub on request: a model with its tokenizer, or an artifact.

A corpus or packed tokens become a data set; a tokenizer becomes a model repository. The card (README.md) lists the
result, the arguments and the provenance. It names no license, because that is the publisher's choice.

huggingface_hub reads the token from HF_TOKEN, so that no argument, process list or log contains the token. The push is
the last step, after everything is on S3. If it fails, the run succeeds, and a warning explains how to repeat the push.
`hub_saves` also pushes while a training continues.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.container.data.artifacts import open_artifact
from jobs.container.data.sources import hub_answer
from jobs.container.environment import ran_with
from jobs.container.versions import hub_unreachable
from jobs.core.artifact import Manifest
from jobs.core.errors import ConfigurationError, UsageError
from jobs.core.locations import HUB, S3Location, hub_parts
from jobs.core.run import MANIFEST, MODEL
from jobs.spec.arguments import CONFIGURATION_FOLDER, FILE_OR_FOLDER, MODEL_FOLDER, Arguments
from jobs.spec.recipe import Recipe

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of a variable

CARD = "README.md"


def check(arguments: Arguments, *, is_first_attempt: bool) -> None:
    """Check that a push can succeed, and create the repository if it does not exist.

    The launcher of each node calls this before any rank starts. Raises ConfigurationError or UsageError if the push
    cannot succeed. Only warns if the hub does not answer, because it may answer later, or if it rejects the token in a
    later attempt, because an expired token must not end a training that has made progress.
    """
    repository = arguments.hub_repository
    if repository is None:
        return
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigurationError(
            f"push_to_hub: {TOKEN_VARIABLE} is not set, so nothing can be pushed to {repository}",
            next_step="store the team's token in its secret (created by huggingface_token in infra/settings.py), or "
            "remove push_to_hub",
        )
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        _create(HfApi(), repository, arguments.HUB_REPOSITORY_TYPE)
    except OfflineModeIsEnabled:
        raise ConfigurationError(
            f"push_to_hub: HF_HUB_OFFLINE is set, so nothing can be pushed to {repository}",
            next_step="unset it, or remove push_to_hub",
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if is_first_attempt and status in (400, 401, 403, 404):
            raise UsageError(
                f"push_to_hub: the token may not write to {repository}: the hub answered {hub_answer(error)}",
                next_step="check the name, and that the token is valid and has write access",
            ) from None
        log.warning("warning: push_to_hub: unexpected answer from the hub: %s", first_line(error))
    except hub_unreachable() as error:
        log.warning("warning: push_to_hub: the hub cannot be reached now: %s", first_line(error))


def write_card(
    folder: Path, *, run: S3Location, recipe: Recipe, result: Mapping[str, Any], world_size: int, accelerator: str
) -> None:
    """Write the model's card into its folder, which is uploaded to S3 and to the hub."""
    environment = {"ranks": world_size, "accelerator": accelerator}
    (folder / CARD).write_text(model_card(run, recipe, result, environment), encoding="utf-8")


def push(folder: Path, *, run: S3Location, repository: str) -> None:
    """Push the model in `folder`. A failure is only a warning, because the model is on S3."""
    try:
        upload(folder, run=run, repository=repository, repository_type="model")
    except Exception as error:  # noqa: BLE001 - no error of the push may fail the run
        log.warning(
            "warning: the model was not pushed to %s: %s. To push it: aws s3 cp --recursive %s model && hf upload %s "
            "model . --private",
            repository,
            first_line(error),
            run / MODEL,
            repository,
        )


def push_artifact(
    location: S3Location, *, kind: str, arguments: Arguments, run: S3Location, s3: "S3Client", scratch: Path
) -> None:
    """Push a complete artifact with a card, if `arguments` request it.

    A failure is only a warning, because the artifact is on S3, where a later run can find it and push it.
    """
    repository = arguments.hub_repository
    if repository is None:
        return
    try:
        artifact = open_artifact(str(location), kind=kind, s3=lambda: s3, scratch=scratch / "push")
        folder = artifact.download()
        # The manifest makes a copy from the hub a complete artifact, too.
        (folder / MANIFEST).write_text(artifact.manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (folder / CARD).write_text(artifact_card(repository, location, artifact.manifest), encoding="utf-8")
        upload(folder, run=run, repository=repository, repository_type=arguments.HUB_REPOSITORY_TYPE)
    except Exception as error:  # noqa: BLE001 - no error of the push may fail the run
        log.warning(
            "warning: the %s was not pushed to %s: %s. To push it: submit the same job again, which finds %s and "
            "pushes it",
            kind,
            repository,
            first_line(error),
            location,
        )


def upload(folder: Path, *, run: S3Location, repository: str, repository_type: str, step: int | None = None) -> None:
    """Create the repository if it does not exist, and push all files of `folder` in one commit.

    `step` is named in the commit's message if the model is not the final one.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()  # the log consists of lines
    api = HfApi()
    _create(api, repository, repository_type)
    message = f"Run {run_id(run)}" if step is None else f"Run {run_id(run)}, step {step}"
    api.upload_folder(repo_id=repository, repo_type=repository_type, folder_path=folder, commit_message=message)
    path = repository if repository_type == "model" else f"{repository_type}s/{repository}"
    log.info("hub: pushed to %s/%s", api.endpoint, path)


def _create(api: "HfApi", repository: str, repository_type: str) -> None:
    api.create_repo(repository, repo_type=repository_type, private=True, exist_ok=True)


def first_line(error: Exception) -> str:
    """Return the first two lines of an error as one line. An error of the hub has its address in the second one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def model_card(run: S3Location, recipe: Recipe, result: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Return the card of a trained model."""
    inputs = {name: location for name, location, _ in recipe.sources()}
    on_hub = {name: hub_parts(location)[0] for name, location in inputs.items() if location.startswith(HUB)}
    no_data = {
        name for name, _, what in recipe.sources() if what in (MODEL_FOLDER, CONFIGURATION_FOLDER, FILE_OR_FOLDER)
    }
    metadata: dict[str, Any] = {"library_name": "transformers", "tags": ["trainyard"]}
    if "model" in on_hub:
        metadata["base_model"] = on_hub["model"]
    data_sets = sorted({name for field, name in on_hub.items() if field not in no_data})
    if data_sets:
        metadata["datasets"] = data_sets
    commit = cached_commit(inputs["model"]) if "model" in on_hub else None
    arguments = recipe.model_dump(mode="json", exclude_none=True)
    return _card(
        metadata,
        title=recipe.hub_repository or run_id(run),
        summary=f"{_summary(recipe)} Produced by trainyard's run `{run_id(run)}`.",
        tables=[
            ("Result", "metric", result),
            ("Inputs", "argument", {**inputs, **({"model's commit": commit} if commit else {})}),
            ("Arguments", "argument", {key: arguments[key] for key in arguments if key not in inputs}),
            ("Provenance", "part", {"run": run, **environment, **ran_with()}),
        ],
    )


def artifact_card(repository: str, location: S3Location, manifest: Manifest) -> str:
    """Return the card of an artifact. It describes the run that produced the artifact, not the one that pushes it."""
    metadata: dict[str, Any] = {"tags": ["trainyard", manifest.kind]}
    if manifest.kind == "tokenizer":
        metadata["library_name"] = "transformers"
    else:
        metadata["viewer"] = False  # the viewer would show the bytes of shards as rows
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
    """Return the commit of the model at `hf://…` in this machine's cache, or None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    name, options = hub_parts(location)
    found = try_to_load_from_cache(name, "config.json", revision=options.get("revision"))
    return Path(found).parent.name if isinstance(found, str) else None


def _card(metadata: Mapping[str, Any], *, title: str, summary: str, tables: list[tuple[str, str, Any]]) -> str:
    # JSON is valid YAML, and quotes what needs quotes.
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


def _counts(manifest: Manifest) -> dict[str, int]:
    """Return each count summed over all files, except the positions that prepare_corpus stores."""
    names = {name: None for file in manifest.files.values() for name in file.counts if not name.startswith("next_")}
    return {name: manifest.count(name) for name in names}


def _data_sets(inputs: Any) -> Iterator[str]:
    """Yield the hub's data sets found at any depth of the inputs' identities."""
    if isinstance(inputs, dict):
        if "data_set" in inputs and "commit" in inputs:
            yield str(inputs["data_set"])
        inputs = list(inputs.values())
    if isinstance(inputs, list):
        for item in inputs:
            yield from _data_sets(item)
