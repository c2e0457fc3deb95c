"""Parse and check the launcher's command line and Batch's variables, before anything heavy is imported."""

import argparse
import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jobs.aws import s3 as object_store
from jobs.container import hub
from jobs.container.accelerator import AUTO
from jobs.container.channel import LOOPBACK
from jobs.container.environment import attempt_number, job_id
from jobs.container.instance import found_type
from jobs.container.saving.interruption import DEFAULT_STOP_TIMEOUT_SECONDS
from jobs.core.errors import INTERRUPTED_EXIT_CODE, ConfigurationError, NotFoundError, UsageError
from jobs.core.instance_types import STOP_TIMEOUT_SECONDS, InstanceType, instance_type
from jobs.core.locations import S3Location
from jobs.core.queues import Capacity
from jobs.spec.arguments import Arguments, JobKind, add_flags, from_flags, parse_flags
from jobs.spec.catalog import CATALOG
from jobs.spec.launcher_options import ACCELERATOR_VARIABLE, RUN_URI_VARIABLE, LauncherOptions


@dataclass(frozen=True, kw_only=True)
class Node:
    """This container's place among the nodes of its job."""

    index: int
    """0 is the main node."""
    nnodes: int
    main_address: str
    """The address at which the ranks meet. Batch passes it to the other nodes only. On the main node of several, it is
    empty until the attempt has determined it."""
    port: int
    """The port at which the ranks meet. 0 on a single node: any free port."""

    @property
    def is_main(self) -> bool:
        return self.index == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Node":
        """Read Batch's variables. Raises ConfigurationError if a child node has no address of the main node."""
        nnodes = int(environment.get("AWS_BATCH_JOB_NUM_NODES", "1"))
        if nnodes == 1:
            return cls(index=0, nnodes=1, main_address=LOOPBACK, port=0)
        main = int(environment.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0"))
        index = (int(environment["AWS_BATCH_JOB_NODE_INDEX"]) - main) % nnodes
        address = environment.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
        if index and not address:
            raise ConfigurationError("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is not set on a child node")
        # All nodes derive the same port from the ids of the job and the attempt. Jobs that share a machine (on the
        # emulator) get different ports.
        meeting = f"{job_id(environment) or ''}/{attempt_number(environment)}"
        port = 20_000 + zlib.crc32(meeting.encode()) % 10_000
        return cls(index=index, nnodes=nnodes, main_address=address or "", port=port)


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Children of an array job that train together, one per node (jobs.container.launcher.rendezvous)."""

    index: int
    size: int
    """The number of children of the job."""
    sizes: tuple[int, ...]
    """The numbers of nodes that may train, in ascending order."""
    wait_seconds: float
    """Time to wait for all nodes before starting on fewer."""
    is_last: bool = False
    """Whether this is the last attempt that Batch allows this child."""

    def most(self, count: int) -> int:
        """Return how many of `count` nodes may train, or 0."""
        return max((size for size in self.sizes if size <= count), default=0)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch: the parsed and checked command line and variables."""

    kind: JobKind
    arguments: Arguments
    instance: InstanceType
    options: LauncherOptions
    node: Node
    """The node of this container. In a node group it is a single node until the nodes have met."""
    group: NodeGroup | None
    """The node group of this container, or None."""
    run: S3Location
    requested_accelerator: str
    attempt: int
    """The number of the Batch job's attempt. The attempts of a run are numbered over all its jobs."""
    capacity: Capacity | None
    """How the job's instances are priced: as in the options, later as in the instance's metadata."""
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
        """The time that all cards may be idle, in seconds. 0 disables the limit."""
        minutes = self.options.stop_if_idle_minutes
        if minutes is None:
            minutes = self.kind.stop_if_idle_minutes if self.kind.accelerated else 0.0
        return 60 * minutes

    @property
    def on_instance(self) -> bool:
        """Whether the job runs on the requested instance type. On a laptop, the accelerator is `auto`."""
        return self.requested_accelerator != AUTO


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Parse and check a launch. Raises TrainyardError or pydantic's ValidationError if it cannot work."""
    parser = _parser()
    given = parser.parse_args(list(argv))
    kind = CATALOG[given.kind]
    options = _options(given, environment)
    run = _run(environment)
    if options.arguments_file is None:
        arguments = parse_flags(kind.arguments, given.flags, program=f"{parser.prog} … {kind.name}")
    else:
        arguments = kind.arguments.model_validate_json(_read_arguments(run / options.arguments_file))
    requested_accelerator = environment.get(ACCELERATOR_VARIABLE, AUTO)
    launch = Launch(
        kind=kind,
        arguments=arguments,
        instance=instance_type(options.instance_type),
        options=options,
        node=Node.from_environment(environment),
        group=None,
        run=run,
        requested_accelerator=requested_accelerator,
        attempt=attempt_number(environment),
        capacity=options.capacity,
        stop_timeout_seconds=DEFAULT_STOP_TIMEOUT_SECONDS if requested_accelerator == AUTO else STOP_TIMEOUT_SECONDS,
    )
    launch = _checked(launch, environment)
    hub.check(arguments, is_first_attempt=launch.attempt == 1)
    return launch


def parse_worker(
    argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[LauncherOptions, JobKind, S3Location] | None:
    """Return the options, kind and location of a sweep if this container is one of its workers, else None."""
    given, _ = _parser().parse_known_args(list(argv))
    options = _options(given, environment)
    return (options, CATALOG[given.kind], _run(environment)) if options.sweep_attempts is not None else None


def _options(given: argparse.Namespace, environment: Mapping[str, str]) -> LauncherOptions:
    """Return the launcher's options, with the instance type on which the job really runs."""
    options = from_flags(LauncherOptions, vars(given))
    on_instance = environment.get(ACCELERATOR_VARIABLE, AUTO) != AUTO
    return options.on(found_type(options.planned_types, environment, on_instance=on_instance))


def _checked(launch: Launch, environment: Mapping[str, str]) -> Launch:
    """Check the number of ranks. Returns the launch with its node group, if it has one."""
    kind, world_size = launch.kind, launch.world_size
    if kind.one_process and world_size != 1:
        raise UsageError(f"{kind.name} runs in one process, not {world_size}", next_step="--nproc-per-node=1")
    if launch.options.rendezvous_min_nnodes is None:
        launch.arguments.check(world_size)
        return launch
    group = _node_group(
        launch.options.rendezvous_min_nnodes,
        launch.options,
        environment,
        lambda nnodes: launch.arguments.check(nnodes * launch.nproc_per_node),
    )
    if len(group.sizes) > 1 and not launch.arguments.resumes_on_other_ranks:
        raise UsageError(
            f"{kind.name} cannot train on fewer than {group.size} nodes: its checkpoints need the same number of ranks",
            next_step=f"set min_nnodes to {group.size}",
        )
    return replace(launch, group=group)


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {kind.name:<26}{kind.summary}" for kind in CATALOG.values())
    parser = argparse.ArgumentParser(
        prog="python -m jobs.container.launch",
        description="Start a job's ranks inside its container, and watch them.",
        epilog=f"job kinds (KIND --help lists its flags):\n{kinds}\n\n"
        "environment:\n"
        f"  {RUN_URI_VARIABLE:<26}s3://bucket/team/run-id/, the folder of the run; required\n"
        f"  {ACCELERATOR_VARIABLE:<26}hpu, cuda, cpu or auto (the default)\n"
        "  AWS_BATCH_JOB_…           attempt, node and child, set by AWS Batch\n\n"
        f"exit codes: 0 done; 1 error of the job; {INTERRUPTED_EXIT_CODE} interrupted, to be retried",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, LauncherOptions)
    parser.add_argument("kind", metavar="KIND", choices=sorted(CATALOG), help="the kind of job")
    parser.add_argument("flags", metavar="--flag=value", nargs=argparse.REMAINDER, help="the arguments of the kind")
    return parser


def _read_arguments(file: S3Location) -> bytes:
    content = object_store.read(object_store.connect(), file)
    if content is None:
        raise NotFoundError(f"{file}, the file of the job's arguments, is missing", next_step="trainyard resume RUN")
    return content


def _run(environment: Mapping[str, str]) -> S3Location:
    if not environment.get(RUN_URI_VARIABLE):
        raise ConfigurationError(
            f"{RUN_URI_VARIABLE} is not set, so the run has no folder on S3",
            next_step="set it to s3://bucket/team/run-id/, as `trainyard submit` does",
        )
    return S3Location.parse(environment[RUN_URI_VARIABLE])


def _node_group(
    min_nnodes: int, options: LauncherOptions, environment: Mapping[str, str], check: Callable[[int], None]
) -> NodeGroup:
    """Return the node group of this container.

    `check` raises UsageError for a number of nodes that the arguments do not support.
    """
    try:
        index = int(environment["AWS_BATCH_JOB_ARRAY_INDEX"])
        size = int(environment["AWS_BATCH_JOB_ARRAY_SIZE"])
    except KeyError as missing:
        raise ConfigurationError(
            f"{missing.args[0]} is not set: the nodes of a node group are the children of an array job"
        ) from None
    if not 1 <= min_nnodes <= size:
        raise UsageError(f"--rendezvous-min-nnodes is {min_nnodes}; it must be from 1 to {size}")
    check(size)
    sizes = [size]
    for fewer in range(min_nnodes, size):
        with contextlib.suppress(UsageError):
            check(fewer)
            sizes.append(fewer)
    return NodeGroup(
        index=index,
        size=size,
        sizes=tuple(sorted(sizes)),
        wait_seconds=options.rendezvous_wait_seconds,
        is_last=options.rendezvous_attempts is not None and attempt_number(environment) >= options.rendezvous_attempts,
    )
