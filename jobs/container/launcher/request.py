"""The launcher's command line and Batch's variables become one `Launch`, checked before anything heavy loads."""

import argparse
import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jobs.aws import s3 as object_store
from jobs.container import hub
from jobs.container.accelerator import AUTO
from jobs.container.batch_job import attempt_number, job_id
from jobs.container.saving.interruption import DEFAULT_STOP_TIMEOUT_SECONDS
from jobs.container.store import LOOPBACK
from jobs.core.errors import INTERRUPTED_EXIT_CODE, ConfigurationError, NotFoundError, UsageError
from jobs.core.instance_types import STOP_TIMEOUT_SECONDS, InstanceType, instance_type
from jobs.core.locations import S3Location
from jobs.core.queues import Capacity
from jobs.spec.arguments import Arguments, JobKind, add_flags, from_flags, parse_flags
from jobs.spec.catalog import CATALOG
from jobs.spec.launcher_options import ACCELERATOR_VARIABLE, RUN_URI_VARIABLE, LauncherOptions


@dataclass(frozen=True, kw_only=True)
class Node:
    """This container among those of its job, as Batch's variables tell."""

    index: int
    """0 is the main node."""
    nnodes: int
    main_address: str
    """The address at which the ranks meet. Batch gives it to the others only: the main node of several looks for its
    own (jobs.container.launch), and has none before."""
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
            return cls(index=0, nnodes=1, main_address=LOOPBACK, port=0)
        main = int(environment.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0"))
        index = (int(environment["AWS_BATCH_JOB_NODE_INDEX"]) - main) % nnodes
        address = environment.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
        if index and not address:
            raise ConfigurationError("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is not set on a child node")
        # All nodes know the job and the attempt, so they agree on a port without a word; jobs side by side on one
        # machine (the emulator) get different ones.
        meeting = f"{job_id(environment) or ''}/{attempt_number(environment)}"
        port = 20_000 + zlib.crc32(meeting.encode()) % 10_000
        return cls(index=index, nnodes=nnodes, main_address=address or "", port=port)


@dataclass(frozen=True, kw_only=True)
class Gang:
    """Children of an array job that train together, each on a node of its own (jobs.container.launcher.gang)."""

    index: int
    size: int
    """Children of the job."""
    sizes: tuple[int, ...]
    """Numbers of nodes that it may train on, the smallest first."""
    wait_seconds: float
    """They wait so long for all; then they begin on fewer, where they may."""
    is_last: bool = False
    """True: Batch does not start this child again."""

    def most(self, count: int) -> int:
        """Return how many of so many nodes may train; 0: none."""
        return max((size for size in self.sizes if size <= count), default=0)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch, with all that is known of it before anything heavy starts."""

    kind: JobKind
    arguments: Arguments
    instance: InstanceType
    options: LauncherOptions
    node: Node
    """The node of this container; in a gang a node of its own, until they have met."""
    gang: Gang | None
    run: S3Location
    accelerator_asked: str
    attempt: int
    """Number of the Batch job's attempt; the run's own number goes on where another job of the run left off."""
    capacity: Capacity | None
    """The capacity that its instances are really priced at; what the options say, until the instance was asked."""
    stop_timeout_seconds: float
    """Time between SIGTERM and SIGKILL."""

    @property
    def nproc_per_node(self) -> int:
        return self.options.nproc_per_node

    @property
    def world_size(self) -> int:
        return self.node.nnodes * self.nproc_per_node

    @property
    def idle_limit_seconds(self) -> float:
        """Return for how long no card may do anything; 0: as long as they like."""
        minutes = self.options.stop_if_idle_minutes
        if minutes is None:
            minutes = self.kind.stop_if_idle_minutes if self.kind.accelerated else 0.0
        return 60 * minutes

    @property
    def on_instance(self) -> bool:
        """Return whether it runs on the instance that it asks for; on a laptop it takes whatever is there."""
        return self.accelerator_asked != AUTO


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return what is to be started. Raises TrainyardError or pydantic's ValidationError on what cannot work."""
    parser = _parser()
    given = parser.parse_args(list(argv))
    kind = CATALOG[given.kind]
    options = from_flags(LauncherOptions, vars(given))
    run = _run(environment)
    if options.arguments_file is None:
        arguments = parse_flags(kind.arguments, given.flags, program=f"{parser.prog} … {kind.name}")
    else:
        arguments = kind.arguments.model_validate_json(_stored(run / options.arguments_file))
    accelerator_asked = environment.get(ACCELERATOR_VARIABLE, AUTO)
    launch = Launch(
        kind=kind,
        arguments=arguments,
        instance=instance_type(options.instance_type),
        options=options,
        node=Node.from_environment(environment),
        gang=None,
        run=run,
        accelerator_asked=accelerator_asked,
        attempt=attempt_number(environment),
        capacity=options.capacity,
        stop_timeout_seconds=DEFAULT_STOP_TIMEOUT_SECONDS if accelerator_asked == AUTO else STOP_TIMEOUT_SECONDS,
    )
    launch = _checked(launch, environment)
    hub.check(arguments, is_first_attempt=launch.attempt == 1)
    return launch


def parse_worker(
    argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[LauncherOptions, JobKind, S3Location] | None:
    """Return what a worker of a sweep runs, and where the sweep lies; None where the container is no such worker."""
    given, _ = _parser().parse_known_args(list(argv))
    options = from_flags(LauncherOptions, vars(given))
    return (options, CATALOG[given.kind], _run(environment)) if options.sweep_attempts is not None else None


def _checked(launch: Launch, environment: Mapping[str, str]) -> Launch:
    """Return the launch with its gang, if it is part of one, once the arguments have accepted its ranks."""
    kind, world_size = launch.kind, launch.world_size
    if kind.one_process and world_size != 1:
        raise UsageError(f"{kind.name} is one process, not {world_size}", next_step="--nproc-per-node=1")
    if launch.options.gang_min_nnodes is None:
        launch.arguments.check(world_size)
        return launch
    gang = _gang(
        launch.options.gang_min_nnodes,
        launch.options,
        environment,
        lambda nnodes: launch.arguments.check(nnodes * launch.nproc_per_node),
    )
    if len(gang.sizes) > 1 and not launch.arguments.resumes_on_other_ranks:
        raise UsageError(
            f"a gang of {gang.size} nodes cannot go on with fewer: its checkpoints are of one number of ranks",
            next_step=f"set min_nnodes to {gang.size}",
        )
    return replace(launch, gang=gang)


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {kind.name:<26}{kind.summary}" for kind in CATALOG.values())
    parser = argparse.ArgumentParser(
        prog="python -m jobs.container.launch",
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
    add_flags(parser, LauncherOptions)
    parser.add_argument("kind", metavar="KIND", choices=sorted(CATALOG), help="what to run")
    parser.add_argument("flags", metavar="--flag=value", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _stored(file: S3Location) -> bytes:
    content = object_store.read(object_store.connect(), file)
    if content is None:
        raise NotFoundError(f"{file}, which holds the job's arguments, is gone", next_step="trainyard resume RUN")
    return content


def _run(environment: Mapping[str, str]) -> S3Location:
    if not environment.get(RUN_URI_VARIABLE):
        raise ConfigurationError(
            f"{RUN_URI_VARIABLE} is not set: there is no place for the run's files",
            next_step="set it to s3://bucket/team/run-id/, as `trainyard submit` does",
        )
    return S3Location.parse(environment[RUN_URI_VARIABLE])


def _gang(least: int, options: LauncherOptions, environment: Mapping[str, str], check: Callable[[int], None]) -> Gang:
    """Return the gang that this container is a child of.

    `check` raises UsageError on a number of nodes that the arguments do not work on.
    """
    try:
        index = int(environment["AWS_BATCH_JOB_ARRAY_INDEX"])
        size = int(environment["AWS_BATCH_JOB_ARRAY_SIZE"])
    except KeyError as missing:
        raise ConfigurationError(
            f"{missing.args[0]} is not set: the nodes of a gang are the children of an array job"
        ) from None
    if not 1 <= least <= size:
        raise UsageError(f"--gang-min-nnodes is {least}; it goes from 1 to {size}")
    check(size)
    sizes = [size]
    for fewer in range(least, size):
        with contextlib.suppress(UsageError):
            check(fewer)
            sizes.append(fewer)
    return Gang(
        index=index,
        size=size,
        sizes=tuple(sorted(sizes)),
        wait_seconds=options.gang_wait_seconds,
        is_last=options.gang_attempts is not None and attempt_number(environment) >= options.gang_attempts,
    )
