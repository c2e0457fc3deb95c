"""The optional push of a finished model to the Hugging Face Hub: weights, tokenizer, and a card that says what it is.

The token is HF_TOKEN of the environment, which huggingface_hub reads there itself: it is in no argument, so in no list
of processes, and in no log. A push comes last, when the model is safe on S3, and a failing one costs a warning that
says how to repeat it, not the run: the exit code stays 0.
"""

import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.arguments import Arguments
from jobs.errors import ConfigurationError, UsageError
from jobs.locations import HUB, hub_parts
from jobs.recipe import Recipe
from jobs.runs import MODEL, S3Location

log = logging.getLogger("trainyard")

TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of a variable

CARD = "README.md"

_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "optimum-habana")


def check(arguments: Arguments) -> None:
    """Called by the launcher of each node before any rank starts; makes the repository, if there is none.

    Raises ConfigurationError or UsageError where the push could not succeed; where the hub does not answer now, it only
    warns, since it may later.
    """
    if not isinstance(arguments, Recipe) or arguments.push_to_hub is None:
        return
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigurationError(
            f"push_to_hub: there is no {TOKEN_VARIABLE} here to push to {arguments.push_to_hub} with",
            next_step="put the team's token into its secret (huggingface_token in infra/settings.py makes one), or "
            "leave push_to_hub out",
        )
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        HfApi().create_repo(arguments.push_to_hub, private=True, exist_ok=True)
    except OfflineModeIsEnabled:
        raise ConfigurationError(
            f"push_to_hub: HF_HUB_OFFLINE is set, so nothing can be pushed to {arguments.push_to_hub}",
            next_step="unset it, or leave push_to_hub out",
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (400, 401, 403, 404):
            raise UsageError(
                f"push_to_hub: the token may not write to {arguments.push_to_hub}: {_first_line(error)}",
                next_step="check the name, and that the token is valid and has the right to write there",
            ) from None
        log.warning("warning: push_to_hub: the hub does not answer as it should: %s", _first_line(error))
    except OSError as error:
        log.warning("warning: push_to_hub: the hub cannot be reached now: %s", _first_line(error))


def write_card(
    folder: Path, *, run: S3Location, recipe: Recipe, result: Mapping[str, Any], world_size: int, accelerator: str
) -> None:
    """The model's card into its folder, from which it goes to S3 and to the hub."""
    run_id = run.key.rstrip("/").rpartition("/")[2]
    (folder / CARD).write_text(
        card(run_id, recipe, result, {"ranks": world_size, "accelerator": accelerator, **_versions()}),
        encoding="utf-8",
    )


def push(folder: Path, *, run: S3Location, repository: str) -> None:
    """The model in `folder`, all of it in one commit. A failure is a warning: the model is on S3."""
    import transformers
    from huggingface_hub import HfApi

    run_id = run.key.rstrip("/").rpartition("/")[2]
    try:
        transformers.logging.disable_progress_bar()  # huggingface_hub's too: the log is read by lines
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Run {run_id}")
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost the run
        log.warning(
            "warning: the model was not pushed to %s: %s. To repeat it: aws s3 cp --recursive %s model && hf upload %s "
            "model . --private",
            repository,
            _first_line(error),
            run / MODEL,
            repository,
        )
    else:
        log.info("hub: pushed to %s/%s", api.endpoint, repository)


def card(run_id: str, recipe: Recipe, result: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """What the model is: metrics, and all it came from. Markdown with the metadata that the hub reads."""
    inputs = {name: location for name, location, _ in recipe.sources()}
    on_hub = {name: hub_parts(location)[0] for name, location in inputs.items() if location.startswith(HUB)}
    metadata: dict[str, Any] = {"library_name": "transformers", "tags": ["trainyard"]}
    if "model" in on_hub:
        metadata["base_model"] = on_hub["model"]
    data_sets = sorted({name for field, name in on_hub.items() if field != "model"})
    if data_sets:
        metadata["datasets"] = data_sets
    # JSON is YAML too, and quotes whatever needs it.
    header = "".join(f"{key}: {json.dumps(value)}\n" for key, value in metadata.items())
    summary = (type(recipe).__doc__ or "").strip().partition("\n")[0]
    arguments = recipe.model_dump(mode="json", exclude_none=True)
    return (
        f"---\n{header}---\n\n# {recipe.push_to_hub or run_id}\n\n{summary} Made by trainyard's run `{run_id}`.\n\n"
        f"## Result\n\n{_table('metric', result)}\n"
        f"## Inputs\n\n{_table('argument', inputs)}\n"
        f"## Arguments\n\n{_table('argument', {key: arguments[key] for key in arguments if key not in inputs})}\n"
        f"## Environment\n\n{_table('part', environment)}"
    )


def _table(heading: str, rows: Mapping[str, Any]) -> str:
    shown = (f"| {name} | {f'{value:.6g}' if isinstance(value, float) else value} |\n" for name, value in rows.items())
    return f"| {heading} | value |\n|---|---|\n{''.join(shown)}"


def _versions() -> dict[str, str]:
    installed = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    packages = {package: installed[package] for package in _PACKAGES if package in installed}
    return {"python": platform.python_version(), **packages}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
