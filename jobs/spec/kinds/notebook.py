"""notebook: JupyterLab and TensorBoard on an instance of the stage."""

import re

from pydantic import Field, field_validator

from jobs.spec.arguments import Arguments, Folder, JobKind


class Notebook(Arguments):
    """JupyterLab and TensorBoard on an instance with all its cards, reached with `trainyard connect`."""

    files: Folder | None = None
    """A folder to begin with, of an earlier run (s3://…/<run id>/notebook/) or any other. A run's own second attempt
    continues with what the first has saved."""
    tensorboard_logdir: str = "."
    """The folder that TensorBoard shows: below the notebook's, or s3://…, such as a run's tensorboard/."""
    idle_timeout_hours: float = Field(default=2.0, gt=0)
    """Hours after which the job ends if no cell and no command has run, and no file was saved."""

    @field_validator("tensorboard_logdir")
    @classmethod
    def _below_the_notebooks(cls, logdir: str) -> str:
        if not logdir.startswith("s3://") and (re.match(r"/|\w+://", logdir) or ".." in logdir.split("/")):
            raise ValueError(f"'{logdir}' is neither a folder below the notebook's nor s3://…")
        return logdir


KIND = JobKind(
    name="notebook",
    summary="JupyterLab and TensorBoard on the instance",
    entrypoint="jobs.container.kinds.notebook.entrypoint",
    arguments=Notebook,
    accelerated=True,
    timeout_hours=12,
    stop_if_idle_minutes=0,  # somebody reads and types: idle_timeout_hours knows better
    one_process=True,
    image="notebook",
)
