"""Runs that `trainyard fetch` has brought here: named by their folders, they are read without AWS."""

import os
from pathlib import Path

from jobs.aws.connection import Aws
from jobs.cli.options import RUNS_FOLDER, user_path
from jobs.client.batch import read_stage
from jobs.contract.errors import ConfigurationError, TrainyardError
from jobs.contract.run import RECEIPT, is_latest, is_run_id, spec_name
from jobs.contract.stage import DeployedStage


def folder_of(text: str) -> Path | None:
    """Return the folder that a run is named by, `runs/RUN`; None if the text is a run's id or a name."""
    return user_path(text) if os.sep in text and not is_latest(text) else None


def read_stage_or_offer(aws: Aws, stage_name: str, text: str, *, command: str) -> DeployedStage:
    """Read the stage. Raises ConfigurationError if it cannot be read, which names the run's folder if it is here."""
    try:
        return read_stage(aws, stage_name)
    except Exception as error:
        from jobs.aws.errors import explain

        told = error if isinstance(error, TrainyardError) else explain(error)
        here = _newest_folder(text)
        if not isinstance(told, ConfigurationError) or here is None:
            raise
        raise ConfigurationError(
            str(told.args[0]), next_step=f"trainyard {command} {here} reads what was fetched; or: {told.next_step}"
        ) from error


def _newest_folder(text: str) -> Path | None:
    """Return the folder of the newest fetched run of that id or name."""
    found = [path.parent for path in RUNS_FOLDER.glob(f"*/{RECEIPT}") if is_run_id(path.parent.name)]
    named = [folder for folder in found if is_latest(text) or text in (folder.name, spec_name(folder.name))]
    return max(named, key=lambda folder: folder.name[-20:], default=None)
