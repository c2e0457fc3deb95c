"""One attempt on this node: what is started, and all that it has for that."""

from dataclasses import dataclass
from pathlib import Path

from jobs.container.accelerator import Accelerator
from jobs.container.launcher.gang import GangMember
from jobs.container.launcher.request import Launch, Node
from jobs.container.launcher.utilization import Utilization


@dataclass(frozen=True, kw_only=True)
class NodeAttempt:
    """An attempt as one node makes it, once it has met the other members of its gang."""

    launch: Launch
    accelerator: Accelerator
    scratch: Path
    """A local folder, removed when the attempt ends."""
    disks: Path
    """The folder of the instance's own disks, where the host finds the report of a bad node."""
    gang: GangMember | None
    utilization: Utilization

    @property
    def node(self) -> Node:
        return self.launch.node
