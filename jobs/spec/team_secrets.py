"""What a job sends elsewhere needs a key from its team's secret: asked for before anything is paid for.

The emulator hands no key of its own environment to jobs either.
"""

from jobs.core.errors import UsageError
from jobs.core.stage import DeployedStage
from jobs.spec.arguments import Arguments
from jobs.spec.recipe import TRACKER_VARIABLES, Recipe


def check_push(arguments: Arguments, team: str, stage: DeployedStage) -> None:
    """Raise UsageError where the arguments push to the Hugging Face Hub and the team has no secret for a token."""
    repository = arguments.hub_repository
    if repository is not None and team not in stage.huggingface_teams:
        raise UsageError(
            f"arguments.push_to_hub: team '{team}' has no secret for a Hugging Face token in stage '{stage.name}', so "
            f"nothing can be pushed to {repository}",
            next_step="set the team's huggingface_token in infra/settings.py, deploy, and put a token into the secret; "
            "or leave push_to_hub out",
        )


def check_trackers(arguments: Arguments, team: str, stage: DeployedStage) -> None:
    """Raise UsageError where the arguments name a tracker and the team's secret has no key or address for it."""
    missing = [
        f"{tracker} ({TRACKER_VARIABLES[tracker]})"
        for tracker in ((isinstance(arguments, Recipe) and arguments.report_to) or ())
        if TRACKER_VARIABLES[tracker] not in stage.secret_variables.get(team, ())
    ]
    if missing:
        raise UsageError(
            f"arguments.report_to: team '{team}' has no secret in stage '{stage.name}' with what it takes for "
            f"{' and '.join(missing)}",
            next_step="name it in the team's secret_variables in infra/settings.py, deploy, and put its value into the "
            "secret; or leave report_to out",
        )
