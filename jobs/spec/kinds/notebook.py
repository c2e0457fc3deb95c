"""notebook: JupyterLab and TensorBoard on an instance of the stage."""

import re

from pydantic import Field, field_validator

from jobs.spec.arguments import Arguments, Folder, JobKind


class Notebook(Arguments):
    """Run JupyterLab and TensorBoard on an instance with all its cards; open them with `trainyard connect`."""

    files: Folder | None = None
    """Folder to start with, from an earlier run (s3://…/<run id>/notebook/) or elsewhere. Default: an empty folder.
    Later attempts of the run continue with the files that the first one saved."""
    tensorboard_logdir: str = "."
    """Folder that TensorBoard shows: below the notebook's folder, or on S3, such as a run's tensorboard/."""
    idle_timeout_hours: float = Field(default=2.0, gt=0)
    """End the job after this many hours in which no cell or command ran and no file was saved."""

    @field_validator("tensorboard_logdir")
    @classmethod
    def _check_logdir(cls, logdir: str) -> str:
        if not logdir.startswith("s3://") and (re.match(r"/|\w+://", logdir) or ".." in logdir.split("/")):
            raise ValueError(f"'{logdir}' is neither a folder below the notebook's folder nor s3://…")
        return logdir


KIND = JobKind(
    name="notebook",
    summary="JupyterLab and TensorBoard on the instance",
    entrypoint="jobs.container.kinds.notebook",
    arguments=Notebook,
    accelerated=True,
    timeout_hours=12,
    stop_if_idle_minutes=0,  # cards are idle while people read and type; idle_timeout_hours applies instead
    one_process=True,
    image="notebook",
)
