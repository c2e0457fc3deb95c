"""The record by which a running notebook says how it is reached."""

from pydantic import BaseModel, ConfigDict


class NotebookServer(BaseModel):
    """The record of a notebook that runs, as `notebook.json` holds it.

    Whoever has the token can run any code there, with the rights of the team's jobs.
    """

    model_config = ConfigDict(extra="forbid")

    job_id: str | None
    """The Batch job, and which attempt of it: one that was lost leaves its file behind."""
    attempt: int
    port: int
    """The port on the instance's loopback."""
    token: str

    def url(self, port: int | None = None, *, path: str = "lab") -> str:
        """Return the address for a browser. `port`: where the notebook's is forwarded to; None: it is here."""
        return f"http://127.0.0.1:{port or self.port}/{path}?token={self.token}"
