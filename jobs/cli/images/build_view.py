"""The view of images that are being built: a bar for each on a terminal, a line for each step elsewhere."""

from collections.abc import Sequence

from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Column

from jobs.cli.images.bars import ImageBars
from jobs.contract.image_hierarchy import Image
from jobs.contract.words import duration
from jobs.images.build import BuiltImage
from jobs.images.build_output import BuildOutput, Vertex

_SLOW_SECONDS = 1.0
"""A step that took longer says how long, where there is no bar."""


class BuildView(ImageBars):
    """Shows a build on stderr until it is closed."""

    def __init__(self, planned: Sequence[Image]) -> None:
        note = TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, ratio=1))
        super().__init__(planned, MofNCompleteColumn(), note, note="")

    def begins(self, image: Image) -> None:
        if self._bars:
            self._bars.start_task(self._tasks[image.name])
        else:
            self._print(f"{image.name}: build")

    def goes_on(self, image: Image, vertex: Vertex, output: BuildOutput) -> None:
        if self._bars:
            done = sum(step.is_done and step.error is None for step in output.steps)
            current = output.current or vertex
            self._bars.update(
                self._tasks[image.name],
                total=output.total or None,
                completed=done,
                note=current.summary or current.name,
            )
        elif vertex.number and not vertex.is_done:
            self._print(f"{image.name}: {vertex.place} {vertex.summary}")
        elif vertex.number and vertex.error is None:
            took = f"{vertex.seconds:.1f} s" if vertex.seconds >= _SLOW_SECONDS else ""
            if note := "cached" if vertex.is_cached else took:
                self._print(f"{image.name}: {vertex.place} {note}")

    def ends(self, built: BuiltImage) -> None:
        if self._bars:
            task = self._tasks[built.image.name]
            total = self._bars.tasks[task].total  # less may have begun: BuildKit runs only the stages that it needs
            self._bars.update(task, completed=total, note=built.name)
            self._bars.stop_task(task)
        else:
            self._print(f"{built.image.name}: {built.name} in {duration(built.seconds)}")
