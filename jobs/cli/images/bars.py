"""What the views of a build and of a push have in common: a bar for each image on a terminal, lines elsewhere."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text
from typing_extensions import Self

from jobs.cli.tables import stderr
from jobs.contract.image_hierarchy import Image


class ImageBars:
    """Shows what is done with images on stderr, until it is closed."""

    def __init__(self, images: Sequence[Image], amount: ProgressColumn, *more: ProgressColumn, **fields: Any) -> None:
        """`amount` says how much of an image is done; what is in `more` stands behind the time, and shows `fields`."""
        self._console = stderr()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                amount,
                TimeElapsedColumn(),
                *more,
                console=self._console,
                expand=bool(more),
            )
            self._tasks = {one.name: self._bars.add_task(one.name, start=False, total=None, **fields) for one in images}

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
