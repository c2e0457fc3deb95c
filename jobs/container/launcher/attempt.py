"""Prepare, connect and record one attempt of a job on this node."""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from jobs.aws import s3 as object_store
from jobs.container import accelerator as accelerators
from jobs.container.accelerator import Accelerator
from jobs.container.channel import read_heartbeats
from jobs.container.instance import billed_capacity, own_address, scratch_folder
from jobs.container.launcher.accounting import AttemptRecord, BudgetWatch
from jobs.container.launcher.nodes import Nodes, wait_for_all
from jobs.container.launcher.outcome import End
from jobs.container.launcher.rendezvous import Rendezvous
from jobs.container.launcher.request import Launch, Node
from jobs.container.launcher.utilization import Utilization
from jobs.container.rank import ATTEMPT_VARIABLE
from jobs.container.saving import interruption as shutdown
from jobs.core.words import counted
from jobs.spec.recipe import hpu_trainer

log = logging.getLogger("trainyard")


class Attempt:
    """One attempt on this node, from the choice of its accelerator to the end of its record. A context manager.

    `jobs.container.launch` calls the methods in the order of their definition.
    """

    accelerator: Accelerator
    """The accelerator of this node. `prepare` sets it, `scratch` and `utilization`."""
    scratch: Path
    """A local folder that is removed when the attempt ends."""
    utilization: Utilization

    def __init__(self, launch: Launch, disks: Path) -> None:
        self.launch = launch
        """The launch. Its node, attempt and capacity change when the nodes of a node group have met."""
        self.disks = disks
        """The folder of the instance's own disks. A file in it reports a bad node to the host."""
        self.rendezvous: Rendezvous | None = None
        """This node's part in the rendezvous of its node group, or None."""
        self.nodes: Nodes | None = None
        """The launchers of the other nodes while they are connected. None on a single node."""
        self._record: AttemptRecord | None = None
        self._budget: BudgetWatch | None = None
        self._resources = contextlib.ExitStack()

    @property
    def node(self) -> Node:
        return self.launch.node

    def __enter__(self) -> Self:
        launch = self.launch
        if launch.node.is_main:
            capacity = billed_capacity(launch.capacity, os.environ, on_instance=launch.on_instance)
            self.launch = launch = replace(launch, capacity=capacity)
        if launch.group is not None:
            self.rendezvous = self._resources.enter_context(Rendezvous.of(launch, launch.group))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, error, traceback)

    def prepare(self) -> End | None:
        """Choose the accelerator, meet the node group, and make the scratch folder.

        Returns how the attempt ends if it cannot continue, else None.
        """
        launch = self.launch
        with shutdown.signals_held_back():
            self.accelerator = accelerators.choose(
                launch.requested_accelerator,
                nproc_per_node=launch.nproc_per_node,
                cards=self._checked_cards(),
                hpu_trainer=hpu_trainer(launch.arguments),
            )
        if launch.node.is_main:
            log.info("accelerator: %s", self.accelerator)
        if self.rendezvous is not None:
            meeting = self.rendezvous.meet()
            if isinstance(meeting, End):
                return meeting
            node = self.rendezvous.node(meeting)
            self.launch = launch = replace(launch, node=node, attempt=meeting.number, capacity=meeting.capacity)
        self.scratch = self._resources.enter_context(
            scratch_folder(self.disks, launch.run, node=launch.node.index, on_instance=launch.on_instance)
        )
        self.utilization = Utilization(
            self.accelerator.name, node=launch.node.index, limit_seconds=launch.idle_limit_seconds
        )
        return None

    def open_record(self) -> None:
        """Write the first record on the main node. Raises TrainyardError if the run cannot be written to."""
        if not self.node.is_main:
            return
        self._record = AttemptRecord(
            self.launch,
            accelerator=self.accelerator.name,
            scratch=self.scratch,
            utilization=self.utilization,
            waited_instance_seconds=self.rendezvous.waited_seconds if self.rendezvous is not None else 0.0,
        )
        self._record.start()
        os.environ[ATTEMPT_VARIABLE] = str(self._record.number)

    def start(self) -> End | None:
        """Log the attempt's first line, and watch the budget. Returns how the attempt ends if the budget is used up."""
        if self._record is None:
            return None
        launch = self.launch
        log.info(
            "attempt %s of %s: %s, %s on %s over %s",
            self._record.number,
            launch.run,
            launch.kind.name,
            counted(launch.world_size, "rank"),
            counted(launch.node.nnodes, "node"),
            self.accelerator.backend,
        )
        self._budget = BudgetWatch(self._record, launch)
        return self._budget.start()

    def set_versions(self, versions: dict[str, str]) -> None:
        """Record the versions of the main packages of a script that does not use the image's."""
        if self._record is not None:
            self._record.set_versions(versions)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Connect the launchers of all nodes for the block. Does nothing on a single node."""
        if self.node.nnodes == 1:
            yield
            return
        if self.rendezvous is None and self.node.is_main:
            # Not the address in EC2's metadata: AWS Batch gives a multi-node container a separate network interface.
            address = own_address(None, object_store.connect().meta.endpoint_url)
            self.launch = replace(self.launch, node=replace(self.node, main_address=address))
        with shutdown.signals_held_back():
            import torch.distributed  # noqa: F401 - the nodes' store is part of it
        with Nodes(self.node, lambda: read_heartbeats(self.scratch), use=lambda: self.utilization.newest) as nodes:
            self.nodes = nodes
            self.utilization.other_nodes = lambda: list(nodes.uses.values())
            yield

    def wait_for_nodes(self) -> End | None:
        """Wait until all nodes have arrived. Returns how the attempt ends if some do not, else None."""
        if self.nodes is None:
            return None
        timeout = self.launch.options.start_timeout_seconds
        return wait_for_all(self.nodes, self.rendezvous, start_timeout_seconds=timeout)

    def agreed_end(self, end: End) -> End:
        """Return how the attempt ends for the whole node group, if this node's ranks ended with `end`."""
        if self.rendezvous is None or self.node.is_main:
            return end
        shutdown.raise_on_signals()
        return self.rendezvous.agreed_end(end)

    def fail(self, reason: str) -> None:
        """End the run for the other nodes of the node group after an unexpected error."""
        if self.rendezvous is not None:
            self.rendezvous.fail(reason)

    def close_record(self, end: End) -> End:
        """Write how the attempt ended. Returns the end, whose reason then includes what happens to the run next.

        Raises TrainyardError if the record of a successful run cannot be written.
        """
        if self._budget is not None:
            end = self._budget.stop(end)
        shutdown.ignore_signals()  # the ranks have ended; the rest takes a second and must complete
        if self._record is not None:
            end = self._record.with_outlook(end, rejoins=self.rendezvous is not None)
            self._record.finish(end)
        if self.rendezvous is not None and self.node.is_main:
            self.rendezvous.end_run(end.code, end.reason)
        return end

    def _checked_cards(self) -> int | None:
        """Return the number of cards that the health check will expect, or None if it will not count them."""
        launch = self.launch
        requested, row = launch.requested_accelerator, launch.instance
        checked = launch.options.health.seconds_on(requested, on_instance=launch.on_instance)
        return row.accelerators if checked and requested == row.accelerator else None
