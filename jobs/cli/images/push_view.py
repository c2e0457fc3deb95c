"""What a user sees of images that are pushed: a bar for each on a terminal, a line at its end elsewhere."""

from collections.abc import Sequence
from types import TracebackType

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from jobs.cli.tables import stderr
from jobs.contract.image_hierarchy import Image
from jobs.images.push import Pushed

_HAS_ARRIVED = ("Pushed", "Layer already exists", "Mounted")
"""How Docker's words begin for a layer that the registry has."""


class PushView:
    """Shows a push on stderr until it is closed."""

    def __init__(self, chosen: Sequence[Image]) -> None:
        self._console = stderr()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._layers: dict[str, tuple[int, int]] = {}
        """Of the image that is being pushed: bytes sent and in all."""
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                DownloadColumn(),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._tasks = {one.name: self._bars.add_task(one.name, start=False, total=None) for one in chosen}

    def __enter__(self) -> "PushView":
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def begins(self, image: Image, target: str) -> None:
        self._layers = {}
        if self._bars:
            self._bars.start_task(self._tasks[image.name])
        else:
            self._print(f"{image.name}: push to {target}")

    def goes_on(self, image: Image, layer: str, status: str, sent_bytes: int, total_bytes: int) -> None:
        sent, total = self._layers.get(layer, (0, 0))
        if total_bytes:
            # Docker counts on beyond its own total while it compresses.
            sent, total = min(sent_bytes, total_bytes), total_bytes
        elif status.startswith(_HAS_ARRIVED):
            sent = total
        else:
            return
        self._layers[layer] = (sent, total)
        if self._bars:
            done, all_bytes = (sum(part) for part in zip(*self._layers.values(), strict=True))
            self._bars.update(self._tasks[image.name], completed=done, total=all_bytes)

    def ends(self, pushed: Pushed) -> None:
        if self._bars:
            self._bars.stop_task(self._tasks[pushed.image.name])
        else:
            self._print(f"{pushed.image.name}: {'was there' if pushed.was_there else 'done'}, {pushed.uri}")

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
