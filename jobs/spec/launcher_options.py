"""The options of the launcher in a job's container, its environment variables, and the health check of nodes.

A plan passes the options as flags. The launcher (jobs.container.launch) takes these options, the job's kind, and the
kind's arguments as flags or as the name of a file.
"""

from typing import Annotated, Any

from pydantic import Field, PlainSerializer

from jobs.core.instance_types import InstanceType
from jobs.core.queues import Capacity
from jobs.money.budget import Budget
from jobs.spec.arguments import Strict, Switch, to_flags
from jobs.spec.sweep import Comparison

HEALTH_SECONDS = 10.0
"""Default duration of the health check on instances with accelerators, not counting the start of its processes."""

MATMUL_FLOOR = 0.5
"""Share of its published peak that a healthy card must reach. In a large multiplication, a healthy card exceeds this
share; a hot or throttled card does not."""

LINK_FLOOR = 0.1
"""Share of their published speed that healthy links between cards must reach. Traffic that falls back to the host's
memory is slower."""

BAD_NODE_FILE = ".trainyard-bad-node"
"""Name of the file that a job writes to /scratch if its node failed the check; the host then shuts down
(infra/compute/boot/bad_node.sh)."""


class Health(Strict):
    """The health check of each node before the first step."""

    seconds: float | None = Field(default=None, ge=0, le=600)
    """Seconds to measure multiplications and all-reduces; 0 disables the check. Default: 10 on HPUs and GPUs, else
    0."""
    min_teraflops: float | None = Field(default=None, ge=0)
    """Minimum speed of each card's matrix multiplication, in TFLOP/s. Default: half of its published peak, or of the
    node's median card if no peak is published."""
    min_gigabytes_per_second: float | None = Field(default=None, ge=0)
    """Minimum bus bandwidth of an all-reduce between the node's cards, in GB/s. Default: a tenth of the links'
    published speed."""

    def seconds_on(self, accelerator: str, *, on_instance: bool) -> float:
        """Return how many seconds to measure; 0 means no check."""
        if self.seconds is not None:
            return self.seconds
        return HEALTH_SECONDS if on_instance and accelerator != "cpu" else 0.0

    def with_floors_of(self, row: InstanceType, accelerator: str) -> "Health":
        """Return the check, with the instance type's minimums where the spec sets none."""
        if accelerator != row.accelerator:
            return self  # running on a laptop instead of the instance type
        update: dict[str, float] = {}
        if self.min_teraflops is None and row.card_teraflops is not None:
            update["min_teraflops"] = MATMUL_FLOOR * row.card_teraflops
        if self.min_gigabytes_per_second is None and row.link_gigabytes_per_second is not None:
            update["min_gigabytes_per_second"] = LINK_FLOOR * row.link_gigabytes_per_second
        return self.model_copy(update=update)


RUN_URI_VARIABLE = "TRAINYARD_RUN_URI"
ACCELERATOR_VARIABLE = "TRAINYARD_ACCELERATOR"

TORCHRUN_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_")
"""Prefixes of the variables that describe a rank's peers, by which Trainer, accelerate and torchrun detect a rank."""

_PLATFORM_VARIABLES = ("TRAINYARD_", "AWS_", "ECS_", *TORCHRUN_VARIABLES)

_IMAGE_VARIABLES = (
    "PATH",
    "HOME",
    "TMPDIR",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "HF_DATASETS_TRUST_REMOTE_CODE",
)


def reserved_variable(name: str) -> str | None:
    """Return why a spec cannot set the environment variable `name`, or None if it can."""
    if name.startswith(_PLATFORM_VARIABLES):
        return "the platform sets it for each job"
    if name == "PYTHONPATH":
        return "the platform sets it; the folder of a script's code and its src/ are on the path anyway"
    return "the image or the launcher sets it" if name in _IMAGE_VARIABLES else None


RENDEZVOUS_WAIT_SECONDS = 900.0
"""Default seconds that a node group waits for all its nodes; then it trains if at least min_nnodes have arrived."""

START_TIMEOUT_SECONDS = 900.0
"""Default seconds that the nodes of a multi-node job wait for each other; EC2 may start them minutes apart."""

HANG_TIMEOUT_SECONDS = 120.0
"""Default seconds without a step after which a training is considered hung."""


Seconds = Annotated[
    float, PlainSerializer(lambda seconds: int(seconds) if seconds.is_integer() else seconds, when_used="json")
]


class Limits(Strict):
    """Limits that the launcher enforces: keys of a spec and options of the launcher."""

    max_usd: float | None = Field(default=None, gt=0)
    """Limit on the estimated cost of all attempts, in US dollars. Default: no limit. The run saves and stops before it
    reaches the limit; `trainyard resume` continues it."""
    max_hours: float | None = Field(default=None, gt=0)
    """Limit on the instance hours of all attempts. Default: no limit. One minute on four nodes counts as four
    minutes."""
    hang_timeout_seconds: Seconds = Field(default=HANG_TIMEOUT_SECONDS, ge=0)
    """End the attempt after this many seconds without a step, or without a heartbeat from a node; 0 disables the limit.
    The next attempt continues. Startup, saves and batches that need compiling get at least 15 minutes."""
    stop_if_idle_minutes: float | None = Field(default=None, ge=0)
    """Stop the run after this many idle minutes of all cards and log every rank's stack; 0 disables the limit. Default:
    30 on accelerator instances. A notebook has idle_timeout_hours instead."""
    start_timeout_seconds: Seconds = Field(default=START_TIMEOUT_SECONDS, gt=0)
    """End the attempt if one of several On-Demand nodes has not started after this many seconds. The log names the
    node."""
    health: Health = Health()
    """Health check of each node before the first step. A bad node ends the attempt, is named in the log, and is shut
    down."""

    @property
    def budget(self) -> Budget:
        return Budget(max_usd=self.max_usd, max_hours=self.max_hours)

    def limits(self) -> dict[str, Any]:
        """Return only the limits, by name."""
        return {name: getattr(self, name) for name in Limits.model_fields}


class _Instance(Strict):
    """Options about the launcher's instance."""

    instance_type: str
    """EC2 instance type whose price the receipt uses."""
    other_instance_types: dict[str, float | None] | None = None
    """Other types on which the job may start, each with EC2's price of one Spot instance for one hour in US dollars, or
    null for the recorded price. The launcher asks the instance which type it has. Default: none."""
    nproc_per_node: int = Field(ge=1)
    """Number of ranks on this node."""
    capacity: Capacity | None = None
    """Price that the receipt and the budget use: spot or on-demand. Default: unknown."""
    spot_usd_per_hour: float | None = None
    """EC2's price of one Spot instance for one hour, in US dollars. Default: the recorded price."""


class LauncherOptions(Limits, _Instance):  # the fields of the last base come first
    """All options of the launcher, except the job's kind and that kind's arguments."""

    rendezvous_min_nnodes: int | None = None
    """Train as a node group, the children of an array job, on at least this many nodes. Default: the job is not a node
    group."""
    rendezvous_attempts: int | None = None
    """Maximum attempts of each child of a node group. The others do not wait for a child without attempts left.
    Default: unknown."""
    rendezvous_wait_seconds: Seconds = RENDEZVOUS_WAIT_SECONDS
    """Seconds that the nodes of a node group wait for missing nodes."""
    sweep_attempts: int | None = None
    """Run as a worker of a sweep, with at most this many attempts of each point. Default: the job is not a sweep."""
    sweep_timeout_seconds: Seconds | None = None
    """Wall-clock limit of one attempt of a sweep's point, in seconds; after it, the point has failed. Default: no
    limit."""
    halving: Comparison | None = None
    """How to compare a point of a sweep with the others, to stop it early. Default: points are not compared."""
    arguments_file: str | None = None
    """Name of a file in the run's folder with the kind's arguments. Default: the arguments are flags."""
    allow_changes: Annotated[bool, Switch()] = False
    """Resume a checkpoint even if it was saved with other arguments."""

    @property
    def planned_types(self) -> list[str]:
        """Return all instance types on which the job may start, the expected one first."""
        return [self.instance_type, *(self.other_instance_types or {})]

    def on(self, found: str) -> "LauncherOptions":
        """Return the options for the planned type that was found."""
        update: dict[str, object] = {"other_instance_types": None}
        if found != self.instance_type:
            update |= {"instance_type": found, "spot_usd_per_hour": (self.other_instance_types or {})[found]}
        return self.model_copy(update=update)

    def to_flags(self) -> list[str]:
        """Return the options that differ from the defaults as flags."""
        return to_flags(self, exclude_defaults=True)
