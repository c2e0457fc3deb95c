"""The optional push of what a run made to the Hugging Face Hub, with a card that says what it is: a model with its
tokenizer, or an artifact (a corpus or packed tokens as a data set, a tokenizer as a model repository).

The token is HF_TOKEN of the environment, which huggingface_hub reads there itself: it is in no argument, so in no list
of processes, and in no log. A push comes last, when all is safe on S3, and a failing one costs a warning that
says how to repeat it, not the run: the exit code stays 0.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.contract.arguments import Arguments
from jobs.contract.errors import ConfigurationError, UsageError
from jobs.contract.recipe import Recipe
from jobs.contract.runs import MANIFEST, MODEL, S3Location
from jobs.train.data.artifacts import OpenArtifact, open_artifact
from jobs.train.hub_card import CARD, artifact_card, model_card, run_id

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of a variable


def check(arguments: Arguments, *, is_first_attempt: bool) -> None:
    """Called by the launcher of each node before any rank starts; makes the repository, if there is none.

    Raises ConfigurationError or UsageError where the push could not succeed; where the hub does not answer now, it only
    warns, since it may later. So it does in a later attempt: a token that has expired meanwhile must not end what has
    been trained.
    """
    repository = arguments.hub_repository
    if repository is None:
        return
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigurationError(
            f"push_to_hub: there is no {TOKEN_VARIABLE} here to push to {repository} with",
            next_step="put the team's token into its secret (huggingface_token in infra/settings.py makes one), or "
            "leave push_to_hub out",
        )
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        _create(HfApi(), repository, arguments.HUB_REPOSITORY_TYPE)
    except OfflineModeIsEnabled:
        raise ConfigurationError(
            f"push_to_hub: HF_HUB_OFFLINE is set, so nothing can be pushed to {repository}",
            next_step="unset it, or leave push_to_hub out",
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if is_first_attempt and status in (400, 401, 403, 404):
            raise UsageError(
                f"push_to_hub: the token may not write to {repository}: {_first_line(error)}",
                next_step="check the name, and that the token is valid and has the right to write there",
            ) from None
        log.warning("warning: push_to_hub: the hub does not answer as it should: %s", _first_line(error))
    except OSError as error:
        log.warning("warning: push_to_hub: the hub cannot be reached now: %s", _first_line(error))


def write_card(
    folder: Path, *, run: S3Location, recipe: Recipe, result: Mapping[str, Any], world_size: int, accelerator: str
) -> None:
    """The model's card into its folder, from which it goes to S3 and to the hub."""
    environment = {"ranks": world_size, "accelerator": accelerator}
    (folder / CARD).write_text(model_card(run, recipe, result, environment), encoding="utf-8")


def push(folder: Path, *, run: S3Location, repository: str) -> None:
    """The model in `folder`, all of it in one commit. A failure is a warning: the model is on S3."""
    import transformers
    from huggingface_hub import HfApi

    try:
        transformers.logging.disable_progress_bar()  # huggingface_hub's too: the log is read by lines
        api = HfApi()
        _create(api, repository, "model")
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Run {run_id(run)}")
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


def push_artifact(
    location: S3Location, *, kind: str, arguments: Arguments, run: S3Location, s3: "S3Client", scratch: Path
) -> None:
    """A complete artifact, where `arguments` say so: all its files and a card in one commit.

    A file is fetched, uploaded and removed before the next one, so that neither memory nor disk grows with the
    artifact; only files that the hub keeps in git itself, which are small, stay until the commit. A failure is a
    warning: the artifact is on S3, and a run that finds it there pushes it too.
    """
    repository = arguments.hub_repository
    if repository is None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    try:
        disable_progress_bars()  # the log is read by lines
        api = HfApi()
        repository_type = arguments.HUB_REPOSITORY_TYPE
        _create(api, repository, repository_type)
        artifact = open_artifact(str(location), kind=kind, s3=lambda: s3, scratch=scratch / "push")
        api.create_commit(
            repository,
            [*_additions(api, artifact, repository, repository_type), *_records(repository, location, artifact)],
            commit_message=f"Run {run_id(run)}",
            repo_type=repository_type,
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost the artifact
        log.warning(
            "warning: the %s was not pushed to %s: %s. To repeat it: submit the same job once more, which finds %s and "
            "pushes it",
            kind,
            repository,
            _first_line(error),
            location,
        )
    else:
        log.info("hub: pushed to %s/%s", api.endpoint, _path(repository, repository_type))


def _additions(
    api: "HfApi", artifact: OpenArtifact, repository: str, repository_type: str
) -> Iterator["CommitOperationAdd"]:
    """The artifact's files, of which the large ones are on the hub already."""
    from huggingface_hub import CommitOperationAdd

    for name in artifact.manifest.files:
        path = artifact.path(name)
        addition = CommitOperationAdd(name, path)
        api.preupload_lfs_files(repository, [addition], repo_type=repository_type)
        if addition.path_or_fileobj == b"":  # how huggingface_hub leaves what it has uploaded
            path.unlink()
        yield addition


def _records(repository: str, location: S3Location, artifact: OpenArtifact) -> Iterator["CommitOperationAdd"]:
    """The manifest, with which a downloaded copy is an artifact too, and the card."""
    from huggingface_hub import CommitOperationAdd

    yield CommitOperationAdd(MANIFEST, artifact.manifest.model_dump_json(indent=2).encode() + b"\n")
    yield CommitOperationAdd(CARD, artifact_card(repository, location, artifact.manifest).encode())


def _create(api: "HfApi", repository: str, repository_type: str) -> None:
    api.create_repo(repository, repo_type=repository_type, private=True, exist_ok=True)


def _path(repository: str, repository_type: str) -> str:
    return repository if repository_type == "model" else f"{repository_type}s/{repository}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
