"""What the launcher is asked to start: its command line and Batch's variables, checked before anything heavy loads."""

import argparse
import contextlib
import importlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jobs.contract.arguments import Arguments, parse_flags
from jobs.contract.budget import Budget
from jobs.contract.catalog import CATALOG
from jobs.contract.errors import INTERRUPTED_EXIT_CODE, ConfigurationError, UsageError
from jobs.contract.instance_types import STOP_TIMEOUT_SECONDS, InstanceType, instance_type
from jobs.contract.job_kind import JobKind
from jobs.contract.queues import MARKET, Capacity
from jobs.contract.runs import (
    ACCELERATOR_VARIABLE,
    ALLOW_CHANGES_FLAG,
    GANG_ATTEMPTS_FLAG,
    GANG_FLAG,
    GANG_WAIT_SECONDS,
    HANG_TIMEOUT_SECONDS,
    RUN_URI_VARIABLE,
    START_TIMEOUT_SECONDS,
    S3Location,
)
from jobs.train import hub
from jobs.train.accelerator import AUTO
from jobs.train.batch_job import attempt_number, job_id
from jobs.train.launcher.shutdown import DEFAULT_STOP_TIMEOUT_SECONDS


@dataclass(frozen=True, kw_only=True)
class Node:
    """This container among those of its job, as Batch's variables tell."""

    index: int
    """0 is the main node."""
    nnodes: int
    main_address: str
    """Where the ranks meet; the main node itself, to which Batch gives no address, meets on loopback."""
    port: int
    """0: any free one, which is enough for a single node."""

    @property
    def is_main(self) -> bool:
        return self.index == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Node":
        """Raises ConfigurationError where Batch's variables contradict each other."""
        nnodes = int(environment.get("AWS_BATCH_JOB_NUM_NODES", "1"))
        if nnodes == 1:
            return cls(index=0, nnodes=1, main_address="localhost", port=0)
        main = int(environment.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0"))
        index = (int(environment["AWS_BATCH_JOB_NODE_INDEX"]) - main) % nnodes
        address = environment.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
        if index and not address:
            raise ConfigurationError("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is not set on a child node")
        # All nodes know the job and the attempt, so they agree on a port without a word; jobs side by side on one
        # machine (the embedded AWS) get different ones.
        meeting = f"{job_id(environment) or ''}/{attempt_number(environment)}"
        port = 20_000 + zlib.crc32(meeting.encode()) % 10_000
        return cls(index=index, nnodes=nnodes, main_address=address or "localhost", port=port)


@dataclass(frozen=True, kw_only=True)
class Gang:
    """Children of an array job that train together, each on a node of its own (jobs.train.launcher.gang)."""

    index: int
    size: int
    """Children of the job."""
    sizes: tuple[int, ...]
    """Numbers of nodes that it may train on, the smallest first."""
    wait_seconds: float
    """That they wait for all; then they begin on fewer, where they may."""
    is_last: bool = False
    """Whether Batch does not start this one again."""

    def most(self, count: int) -> int:
        """Of so many nodes, how many may train; 0: none."""
        return max((size for size in self.sizes if size <= count), default=0)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All that is known before anything heavy starts."""

    kind: JobKind
    arguments: Arguments
    instance: InstanceType
    nproc_per_node: int
    node: Node
    """In a gang none of several, until they have met."""
    gang: Gang | None
    run: S3Location
    accelerator_asked: str
    attempt: int
    """Of the Batch job; the run's own number goes on where another job of the run left off."""
    capacity: Capacity | None
    """What its instances are priced at, where they do not say themselves; None: nobody said."""
    budget: Budget
    allow_changes: bool
    """Whether a checkpoint that was made with other arguments is resumed."""
    stop_timeout_seconds: float
    """Between SIGTERM and SIGKILL."""
    hang_timeout_seconds: float
    """Without a sign of life from a rank that trains, or from a node; 0: they are not watched."""
    start_timeout_seconds: float
    """That several nodes which do not meet as a gang wait for each other."""

    @property
    def world_size(self) -> int:
        return self.node.nnodes * self.nproc_per_node

    @property
    def on_instance(self) -> bool:
        """Whether it runs on the instance that it asks for; on a laptop it takes whatever is there."""
        return self.accelerator_asked != AUTO


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """What is to be started. Raises TrainyardError or pydantic's ValidationError on what cannot work."""
    kinds = "\n".join(f"  {kind.name:<26}{kind.summary}" for kind in CATALOG.values())
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train.launch",
        description="Start a job's ranks inside its container, and watch over them.",
        epilog=f"job kinds (KIND --help lists its flags):\n{kinds}\n\n"
        "environment:\n"
        f"  {RUN_URI_VARIABLE:<26}s3://bucket/team/run-id/: where the run reads and writes; required\n"
        f"  {ACCELERATOR_VARIABLE:<26}hpu, cuda, cpu or auto (the default)\n"
        "  AWS_BATCH_JOB_…           attempt, node and child, set by AWS Batch\n\n"
        f"exit codes: 0 done; 1 the job's own fault; {INTERRUPTED_EXIT_CODE} interrupted, to be resumed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--instance-type", required=True, help="EC2 instance type whose price the receipt counts")
    parser.add_argument("--nproc-per-node", type=int, required=True, metavar="N", help="ranks on this node")
    parser.add_argument("--capacity", choices=sorted(MARKET), help="what the receipt and a budget price it at")
    parser.add_argument("--max-usd", type=float, metavar="USD", help="budget over all attempts of the run")
    parser.add_argument("--max-hours", type=float, metavar="H", help="the same, in instance hours")
    parser.add_argument(
        "--hang-timeout-seconds",
        type=float,
        default=HANG_TIMEOUT_SECONDS,
        metavar="S",
        help="without a step, after which the attempt ends and is resumed; 0: never",
    )
    parser.add_argument(
        "--start-timeout-seconds",
        type=float,
        default=START_TIMEOUT_SECONDS,
        metavar="S",
        help="how long the nodes of a multi-node job wait for each other",
    )
    parser.add_argument(
        GANG_FLAG, type=int, metavar="M", help="the children of the array job train together, at least M"
    )
    parser.add_argument(
        GANG_ATTEMPTS_FLAG, type=int, metavar="N", help="how often Batch starts each of them; default: unknown"
    )
    parser.add_argument(
        "--gang-wait-seconds",
        type=float,
        default=GANG_WAIT_SECONDS,
        metavar="S",
        help="how long they wait for those that lack",
    )
    parser.add_argument(
        ALLOW_CHANGES_FLAG, action="store_true", help="resume a checkpoint though it was made with other arguments"
    )
    parser.add_argument("kind", metavar="KIND", choices=sorted(CATALOG), help="what to run")
    parser.add_argument("flags", metavar="--flag=value", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(list(argv))
    kind = CATALOG[given.kind]
    if given.nproc_per_node < 1:
        raise UsageError(f"--nproc-per-node is {given.nproc_per_node}; at least one rank is needed")
    if not given.hang_timeout_seconds >= 0:
        raise UsageError(f"--hang-timeout-seconds is {given.hang_timeout_seconds:g}; 0 is the least: no watch")
    if not given.start_timeout_seconds > 0:
        raise UsageError(f"--start-timeout-seconds is {given.start_timeout_seconds:g}; it is more than 0")
    arguments = parse_flags(kind.arguments, given.flags, program=f"{parser.prog} … {kind.name}")
    if not environment.get(RUN_URI_VARIABLE):
        raise ConfigurationError(
            f"{RUN_URI_VARIABLE} is not set: there is no place for the run's files",
            next_step="set it to s3://bucket/team/run-id/, as `trainyard submit` does",
        )
    accelerator_asked = environment.get(ACCELERATOR_VARIABLE, AUTO)
    launch = Launch(
        kind=kind,
        arguments=arguments,
        instance=instance_type(given.instance_type),
        nproc_per_node=given.nproc_per_node,
        node=Node.from_environment(environment),
        gang=None,
        run=S3Location.parse(environment[RUN_URI_VARIABLE]),
        accelerator_asked=accelerator_asked,
        attempt=attempt_number(environment),
        capacity=given.capacity,
        budget=Budget(max_usd=given.max_usd, max_hours=given.max_hours),
        allow_changes=given.allow_changes,
        stop_timeout_seconds=DEFAULT_STOP_TIMEOUT_SECONDS if accelerator_asked == AUTO else STOP_TIMEOUT_SECONDS,
        hang_timeout_seconds=given.hang_timeout_seconds,
        start_timeout_seconds=given.start_timeout_seconds,
    )
    check: Callable[[Arguments, int], None] = importlib.import_module(kind.entrypoint).check
    if given.gang_min_nnodes is None:
        check(arguments, launch.world_size)
    else:
        gang = _gang(given, environment, lambda nnodes: check(arguments, nnodes * launch.nproc_per_node))
        if len(gang.sizes) > 1 and not arguments.resumes_on_other_ranks:
            raise UsageError(
                f"a gang of {gang.size} nodes cannot go on with fewer: its checkpoints are of one number of ranks",
                next_step=f"set min_nnodes to {gang.size}, or deepspeed_zero_stage to 0",
            )
        launch = replace(launch, gang=gang)
    hub.check(arguments, is_first_attempt=launch.attempt == 1)
    return launch


def _gang(given: argparse.Namespace, environment: Mapping[str, str], check: Callable[[int], None]) -> Gang:
    """`check` raises UsageError on a number of nodes that the arguments do not work on."""
    try:
        index = int(environment["AWS_BATCH_JOB_ARRAY_INDEX"])
        size = int(environment["AWS_BATCH_JOB_ARRAY_SIZE"])
    except KeyError as missing:
        raise ConfigurationError(
            f"{missing.args[0]} is not set: the nodes of a gang are the children of an array job"
        ) from None
    if not 1 <= given.gang_min_nnodes <= size:
        raise UsageError(f"{GANG_FLAG} is {given.gang_min_nnodes}; it goes from 1 to {size}")
    check(size)
    sizes = [size]
    for fewer in range(given.gang_min_nnodes, size):
        with contextlib.suppress(UsageError):
            check(fewer)
            sizes.append(fewer)
    return Gang(
        index=index,
        size=size,
        sizes=tuple(sorted(sizes)),
        wait_seconds=given.gang_wait_seconds,
        is_last=given.gang_attempts is not None and attempt_number(environment) >= given.gang_attempts,
    )
