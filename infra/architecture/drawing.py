"""The picture as SVG: stacks below each other in the order of deployment, and lines from each to those that take of it.

Each stack that gives has a colour and a lane on the left; where another takes of it, an arrow leaves the lane and ends
beside the words for what flows. Whom the stacks deal with stands on the right. Placing follows from the reading alone.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from infra.architecture.reading import Edge, Node, Picture

_COLOURS = (
    "#2f81b7",
    "#c2651a",
    "#3d8f58",
    "#a1549c",
    "#b5443c",
    "#7a7230",
    "#4b6ec4",
    "#2a8c8c",
    "#8a6a4a",
    "#6c6f7a",
)
"""Mid-tones that stand out from white and from near-black alike."""

_LINE = 17
_MARGIN = 24
_LANE = 18
_BOX_WIDTH = 700
_TAKES_WIDTH = 270
_BOX_GAP = 26
_HEADER = 34
_OUTSIDE_GAP = 190
_OUTSIDE_WIDTH = 150
_OUTSIDE_HEIGHT = 34
_TAKES_CHARACTERS = 38
_HOLDS_CHARACTERS = 54
_FLOW_CHARACTERS = 27

_LEGEND = (
    "Solid: a reference that CloudFormation guards. Dashed: a parameter in SSM, read at each deployment. "
    "→ SSM: names that the command line finds."
)

_STYLE = """
text { font: 13px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-size: 16px; font-weight: 600; }
.soft { fill: #59636e; }
.small { font-size: 12px; }
.page { fill: #ffffff; }
.box { fill: #f6f8fa; stroke: #d1d9e0; }
.outside { fill: none; stroke: #818b98; stroke-dasharray: 5 4; }
.outward { stroke: #818b98; fill: none; stroke-width: 1.5; }
.head { fill: #818b98; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .soft { fill: #9198a1; }
  .page { fill: #0d1117; }
  .box { fill: #151b23; stroke: #3d444d; }
}
"""


@dataclass(frozen=True, kw_only=True)
class _Box:
    """A stack where it stands."""

    node: Node
    top: float
    height: float
    takes: Sequence[tuple[Edge, float, Sequence[str]]]
    """Each with the height of its first line, and its lines."""
    holds: Sequence[str]


def draw(picture: Picture, *, title: str) -> str:
    """The picture as an SVG document."""
    stacks = [node for node in picture.nodes if not node.outside]
    names = [node.name for node in stacks]
    givers = [name for name in names if any(edge.source == name and edge.target in names for edge in picture.edges)]
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(givers)}
    left = _MARGIN + _LANE * len(givers) + 14
    # The lane of the stack deployed last is the nearest, so that its short line crosses no other.
    lanes = {name: left - 18 - _LANE * index for index, name in enumerate(reversed(givers))}
    boxes = list(_placed(picture, stacks))
    right = left + _BOX_WIDTH
    width = right + _OUTSIDE_GAP + _OUTSIDE_WIDTH + _MARGIN
    outsiders = list(_outsiders(picture, {box.node.name: box for box in boxes}))
    bottom = max([box.top + box.height for box in boxes] + [top + _OUTSIDE_HEIGHT for _, top, _ in outsiders])
    parts = [
        *(part for box in boxes for part in _box(box, colours, left)),
        *_lines_of_lanes(boxes, lanes, colours, left),
        *(part for outsider in outsiders for part in _outside(outsider, right)),
        f'<text class="small soft" x="{left}" y="{bottom + 30:g}">{_LEGEND}</text>',
    ]
    height = bottom + 30 + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width:g}" height="{height:g}"/>',
            f'<text class="title" x="{left}" y="{_MARGIN + 12}">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _placed(picture: Picture, stacks: Sequence[Node]) -> Iterator[_Box]:
    top = float(_MARGIN + 34)
    order = {node.name: index for index, node in enumerate(stacks)}
    for node in stacks:
        taken = [edge for edge in picture.edges if edge.target == node.name and edge.source in order]
        takes = []
        line = top + _HEADER + _LINE
        for edge in sorted(taken, key=lambda edge: (order[edge.source], edge.read_when_deployed)):
            words = _wrapped(f"{edge.source}: {', '.join(edge.labels)}", _TAKES_CHARACTERS)
            takes.append((edge, line, words))
            line += _LINE * len(words) + 4
        holds = [words for text in node.lines for words in _wrapped(text, _HOLDS_CHARACTERS, indent="\u2003")]
        height = max(line - top - _LINE + 12, _HEADER + _LINE * len(holds) + 16)
        yield _Box(node=node, top=top, height=height, takes=takes, holds=holds)
        top += height + _BOX_GAP


def _lines_of_lanes(
    boxes: Sequence[_Box], lanes: Mapping[str, float], colours: Mapping[str, str], left: float
) -> Iterator[str]:
    """For each stack that gives: from its box into its lane, down, and an arrow to each that takes."""
    for box in boxes:
        if box.node.name not in lanes:
            continue
        lane, colour, start = lanes[box.node.name], colours[box.node.name], box.top + 17
        taps = [(edge, line - 4) for other in boxes for edge, line, _ in other.takes if edge.source == box.node.name]
        stroke = f'stroke="{colour}" stroke-width="2" stroke-linecap="round" fill="none"'
        ends = [start, *(height for _, height in taps)]
        yield f'<path {stroke} d="M{left} {start:g}H{lane:g}M{lane:g} {min(ends):g}V{max(ends):g}"/>'
        for edge, height in taps:
            dashes = ' stroke-dasharray="4 3"' if edge.read_when_deployed else ""
            yield f'<path {stroke}{dashes} d="M{lane:g} {height:g}H{left + 8:g}"/>'
            yield f'<path fill="{colour}" d="M{left + 15:g} {height:g}l-9 -4.5v9z"/>'


def _box(box: _Box, colours: Mapping[str, str], left: float) -> Iterator[str]:
    colour = colours.get(box.node.name, "#818b98")
    yield f'<rect class="box" x="{left}" y="{box.top:g}" width="{_BOX_WIDTH}" height="{box.height:g}" rx="8"/>'
    yield f'<rect x="{left}" y="{box.top + 8:g}" width="5" height="18" rx="2" fill="{colour}"/>'
    yield f'<text class="title" x="{left + 18}" y="{box.top + 23:g}">{escape(box.node.name)}</text>'
    yield (f'<text class="soft" x="{left + _TAKES_WIDTH + 30}" y="{box.top + 22:g}">{escape(box.node.title)}</text>')
    for edge, line, words in box.takes:
        for index, text in enumerate(words):
            yield (
                f'<text class="small" x="{left + 20}" y="{line + index * _LINE:g}" '
                f'style="fill:{colours[edge.source]}">{escape(text)}</text>'
            )
    for index, text in enumerate(box.holds):
        x, y = left + _TAKES_WIDTH + 30, box.top + _HEADER + _LINE * (index + 1)
        yield f'<text x="{x}" y="{y:g}" xml:space="preserve">{escape(text)}</text>'


def _outsiders(picture: Picture, boxes: dict[str, _Box]) -> Iterator[tuple[Node, float, list[tuple[Edge, float]]]]:
    """Each with its top, and its arrows with their heights at the stacks' right rims."""
    lowest = 0.0
    used: dict[str, int] = {}
    order = list(boxes)
    outsiders = {node.name: node for node in picture.nodes if node.outside}
    edges = [edge for edge in picture.edges if edge.source in outsiders or edge.target in outsiders]
    edges.sort(key=lambda edge: order.index(edge.target if edge.source in outsiders else edge.source))
    for edge in edges:
        inward = edge.source in outsiders
        box = boxes[edge.target if inward else edge.source]
        place = used.get(box.node.name, 0)
        used[box.node.name] = place + 1
        height = max(box.top + 24 + place * (_OUTSIDE_HEIGHT + 22), lowest)
        lowest = height + _OUTSIDE_HEIGHT + 22
        yield outsiders[edge.source if inward else edge.target], height - _OUTSIDE_HEIGHT / 2, [(edge, height)]


def _outside(outsider: tuple[Node, float, list[tuple[Edge, float]]], right: float) -> Iterator[str]:
    node, top, arrows = outsider
    x = right + _OUTSIDE_GAP
    yield (
        f'<rect class="outside" x="{x}" y="{top:g}" width="{_OUTSIDE_WIDTH}" height="{_OUTSIDE_HEIGHT}" rx="17"/>'
        f'<text x="{x + _OUTSIDE_WIDTH / 2:g}" y="{top + 22:g}" text-anchor="middle">{escape(node.title)}</text>'
    )
    for edge, height in arrows:
        inward = edge.source == node.name
        yield f'<path class="outward" d="M{right + 2} {height:g}H{x - 2}"/>'
        tip, direction = (right + 1, 8) if inward else (x - 1, -8)
        yield f'<path class="head" d="M{tip} {height:g}l{direction} -4v8z"/>'
        words = _wrapped(", ".join(edge.labels), _FLOW_CHARACTERS)
        for index, text in enumerate(words):
            y = height - 7 - (len(words) - 1 - index) * 14
            yield (
                f'<text class="small soft" x="{right + _OUTSIDE_GAP / 2:g}" y="{y:g}" '
                f'text-anchor="middle">{escape(text)}</text>'
            )


def _wrapped(text: str, characters: int, *, indent: str = "") -> list[str]:
    # Names such as gaudi-spot stay whole.
    return textwrap.wrap(text, characters, subsequent_indent=indent, break_on_hyphens=False)
