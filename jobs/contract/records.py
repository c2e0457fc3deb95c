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
    """None while it runs, and for ever where the node was lost."""
    last_seen_at: datetime
    """The latest sign of life; a lost attempt is billed up to it."""
    exit_code: int | None = None
    reason: str | None = None
    """Why it ended, where that was not its own exit."""
    instance_type: str
    capacity: Capacity | None = None
    """What its instances are priced at: what the main node's own says of itself, else what was submitted. On-Demand
    where one of several nodes on Spot is."""
    accelerator: str
    nnodes: int
    world_size: int
    waited_instance_seconds: float = 0.0
    """That its nodes, where each is a job of its own, waited for each other before it, added up."""
    resumed_from_step: int = 0
    last_step: int = 0
    changed: dict[str, tuple[Any, Any]] = {}
    """Arguments that are not those of the checkpoint it resumed, since that was asked for: theirs, and its own."""


class Receipt(BaseModel):
    """What a run took, over all its attempts so far. Costs are instance hours times a row's price: an estimate."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    team: str
    job: str
    state: Literal["running", "interrupted", "succeeded", "failed"]
    attempts: list[Attempt]
    duration_seconds: float
    """Sum over the attempts."""
    instance_hours: float
    instance_type: str
    """Of the newest attempt; a run may have gone on on another."""
    on_demand_usd: float
    """All attempts, each on its own instance type, at On-Demand prices."""
    spot_usd: float
    """The same at Spot prices."""
    estimated_usd: float | None = None
    """Each attempt at the price of the capacity that it ran on."""
    budget: str = ""
    """What was used of max_usd and max_hours; empty where the spec sets neither."""
    price_date: str
    price_source: str
    estimate_note: str
    """What the figures are not: read before they are quoted."""
    result: dict[str, Any]
    """The final metrics: of a fine-tuning, eval_accuracy, eval_f1, eval_majority_accuracy, train_samples_per_second."""
