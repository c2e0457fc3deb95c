"""The records that a run keeps of itself on S3: one `Attempt` for each start, and the `Receipt` over all of them."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from jobs.contract.queues import Capacity


class Attempt(BaseModel):
    """One start of a run by Batch, as `attempts/N.json` holds it. Times are UTC, in ISO 8601."""

    model_config = ConfigDict(extra="forbid")

    number: int
    """Counts on through all the Batch jobs that a run may come to have: Batch itself begins with 1 in each."""
    job_id: str | None = None
    """The Batch job whose attempt it was. None: it ran outside Batch."""
    started_at: datetime
    finished_at: datetime | None = None
    """The end; None while it runs, and for ever where the node was lost."""
    last_seen_at: datetime
    """The latest heartbeat; a lost attempt is billed up to it."""
    exit_code: int | None = None
    reason: str | None = None
    """Why it ended, where that was not its own exit."""
    instance_type: str
    capacity: Capacity | None = None
    """The capacity that its instances are priced at: what the main node's own says of itself, else what was submitted.
    On-Demand where one of several nodes on Spot is."""
    accelerator: str
    nnodes: int
    world_size: int
    waited_instance_seconds: float = 0.0
    """Time that its nodes, where each is a job of its own, waited for each other before it, added up."""
    resumed_from_step: int = 0
    last_step: int = 0
    changed: dict[str, tuple[Any, Any]] = {}
    """Arguments that are not those of the checkpoint it resumed, since that was asked for: theirs, and its own."""


class Receipt(BaseModel):
    """The account of a run over all its attempts so far. Costs are instance hours times a row's price: an estimate."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    team: str
    job: str
    state: Literal["running", "interrupted", "succeeded", "failed"]
    attempts: list[Attempt]
    duration_seconds: float
    """Sum of the attempts' durations."""
    instance_hours: float
    instance_type: str
    """The newest attempt's; a run may have gone on on another."""
    on_demand_usd: float
    """Cost of all attempts, each on its own instance type, at On-Demand prices."""
    spot_usd: float
    """Cost of all attempts at Spot prices."""
    estimated_usd: float | None = None
    """Cost of all attempts, each at the price of the capacity that it ran on."""
    budget: str = ""
    """The used part of max_usd and max_hours as text; empty where the spec sets neither."""
    price_date: str
    price_source: str
    estimate_note: str
    """The limits of the figures, to be read before they are quoted."""
    result: dict[str, Any]
    """The final metrics: of a fine-tuning, eval_accuracy, eval_f1, eval_majority_accuracy, train_samples_per_second."""
