"""What `docker build --progress=plain` prints, read while it prints it: the steps of the Dockerfile and how they end.

BuildKit numbers whatever it does, from reading the Dockerfile (`#1`) to the last step (`#12`), and the lines of several
numbers may alternate. A step of the Dockerfile has its place in brackets: `#8 [3/7] RUN …`, with the name of the stage
before it where there are several.
"""

import re
from collections import deque
from dataclasses import dataclass, field

_NEW = re.compile(r"#(?P<id>\d+) (?P<name>\[.+)")
_STEP = re.compile(r"\[(?P<stage>[^]]*?) *(?P<number>\d+)/(?P<total>\d+)\] (?P<instruction>.+)")
_END = re.compile(r"#(?P<id>\d+) (?:DONE (?P<seconds>[\d.]+)s|(?P<how>CACHED|CANCELED|ERROR: (?P<error>.*)))")
_OUTPUT = re.compile(r"#(?P<id>\d+) [\d.]+ (?P<text>.*)")
_FLAGS = re.compile(r"^(\w+)(?: --\S+)+")

_TAIL_LINES = 15

_SLOW_SECONDS = 1.0
"""The duration of a longer step is reported."""

CONTEXT = "[internal] load build context"
"""What BuildKit calls the reading of the source files."""

_FROM = re.compile(r"^FROM (?P<base>\S+)(?: AS (?P<name>\S+))?", re.MULTILINE | re.IGNORECASE)
_BASE = re.compile(r"\[internal\] load metadata for (?P<base>\S+)|\[.*\] FROM (?P<pulled>\S+)")


@dataclass
class Vertex:
    """One thing that BuildKit does; a step of the Dockerfile has a number."""

    name: str
    number: int = 0
    total: int = 0
    """Steps of its stage."""
    stage: str = ""
    instruction: str = ""
    seconds: float = 0.0
    is_cached: bool = False
    is_done: bool = False
    error: str | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    """The last lines it printed."""

    @property
    def summary(self) -> str:
        """Return the instruction without its flags, on one line."""
        return " ".join(_FLAGS.sub(r"\1", self.instruction).split())

    @property
    def place(self) -> str:
        """Return `3/7`, after the name of its stage where there are several."""
        return f"{self.stage} {self.number}/{self.total}".lstrip()

    @property
    def progress(self) -> str:
        """Return the line that reports its newest change; empty if nobody needs one."""
        if not self.number or self.error is not None:
            return ""
        if not self.is_done:
            return f"{self.place} {self.summary}"
        took = f"{self.seconds:.1f} s" if self.seconds >= _SLOW_SECONDS else ""
        note = "cached" if self.is_cached else took
        return note and f"{self.place} {note}"

    @property
    def base(self) -> str | None:
        """Return the base image that it asks a registry for, if that is what it does."""
        found = _BASE.match(self.name)
        return (found["base"] or found["pulled"]) if found else None


class BuildOutput:
    """The progress of a build: it takes the output's lines one by one."""

    def __init__(self, dockerfile: str) -> None:
        """Begin with nothing done. `dockerfile` is the text that is built."""
        self._stages = _stages_of_the_image(dockerfile)
        self._vertices: dict[str, Vertex] = {}
        self.rest: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines that belong to no vertex: how the command itself says what went wrong."""

    @property
    def steps(self) -> list[Vertex]:
        """Return the steps of the Dockerfile, as far as they have begun."""
        return [vertex for vertex in self._vertices.values() if vertex.number]

    @property
    def layers(self) -> list[Vertex]:
        """Return the steps that make the image's own layers: of the last stage, and of those that it is built on."""
        return [step for step in self.steps if step.stage in self._stages and not step.instruction.startswith("FROM ")]

    @property
    def failed(self) -> Vertex | None:
        return next((vertex for vertex in self._vertices.values() if vertex.error is not None), None)

    def feed(self, line: str) -> Vertex | None:
        """Take one line, and return what began or ended with it."""
        line = line.rstrip("\r\n")
        if (end := _END.fullmatch(line)) and end["id"] in self._vertices:
            return self._end(self._vertices[end["id"]], end)
        if new := _NEW.fullmatch(line):
            return self._begin(new["id"], new["name"])
        if (output := _OUTPUT.fullmatch(line)) and output["id"] in self._vertices:
            self._vertices[output["id"]].tail.append(output["text"])
        elif line and not line.startswith("#"):
            self.rest.append(line)
        return None

    def _begin(self, key: str, name: str) -> Vertex | None:
        if key in self._vertices:  # its lines go on after those of another one
            return None
        step = _STEP.fullmatch(name)
        vertex = Vertex(name)
        if step:
            vertex.number, vertex.total = int(step["number"]), int(step["total"])
            vertex.stage, vertex.instruction = step["stage"], step["instruction"]
        self._vertices[key] = vertex
        return vertex

    @staticmethod
    def _end(vertex: Vertex, end: re.Match[str]) -> Vertex:
        vertex.is_done = True
        vertex.seconds = float(end["seconds"] or 0)
        vertex.is_cached = end["how"] == "CACHED"
        vertex.error = end["error"]
        return vertex


def _stages_of_the_image(dockerfile: str) -> frozenset[str]:
    """Return BuildKit's names of the last stage and of those that it is built on; a single stage has no name."""
    found = list(_FROM.finditer(dockerfile))
    names = [stage["name"] or (f"stage-{number}" if len(found) > 1 else "") for number, stage in enumerate(found)]
    bases = {name: stage["base"] for name, stage in zip(names, found, strict=True)}
    chain = names[-1:]
    while chain and (base := bases[chain[-1]]) in bases:
        chain.append(base)
    return frozenset(chain)
