"""The dataflow graph of a traced program, and its picture.

Every node belongs to a lane, which is one state; nodes of a lane follow each other.  A fork opens lanes, a join or a
variable used elsewhere draws an edge between them.

    node kinds: ConstantText, Argument, Gen, Select, Variable, Fork, GetForkItem, Join, Role, Image, Video, Call
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from .ir import Expr

_COLORS = {
    "ConstantText": "#eceff4", "Argument": "#cfe3fa", "Gen": "#c9efd0", "Select": "#d9f2bd", "Variable": "#e6dcf6",
    "Fork": "#fde2c4", "GetForkItem": "#fdeedd", "Join": "#fde2c4", "Role": "#f7f7dc",
}  # fmt: skip
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 190, 34, 36, 16


@dataclass
class Node:
    """One step of the program.  previous: the node before it in its lane; inputs: nodes whose values it uses."""

    id: int
    kind: str
    lane: int
    label: str
    item: Expr | None = None
    slot: int | None = None  # number of the placeholder that it puts into the text
    children: list[int] = field(default_factory=list)  # lanes of a Fork or Join
    assign: tuple[str, Any] | None = None
    previous: int | None = None
    inputs: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        label = self.label if len(self.label) <= 30 else self.label[:27] + "..."
        return f"%{self.id} = {self.kind}({label!r}, state {self.lane})"


class Graph:
    """The nodes of a program in the order in which it made them."""

    def __init__(self) -> None:
        self.name = ""
        self.nodes: list[Node] = []
        self.last: dict[int, int] = {}
        self.origins: list[Any] = []  # what each placeholder stands for (trace.Origin), by number
        self.returns: Any = None

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Any:
        return iter(self.nodes)

    def kinds(self) -> list[str]:
        return [node.kind for node in self.nodes]

    def __repr__(self) -> str:
        return "\n".join([f"Graph({self.name}, {len(self.nodes)} nodes)", *(f"  {node}" for node in self.nodes)])

    def draw(self, path: str | Path | None = None) -> Drawing:
        """The graph as SVG: shown by a notebook, written to `path` if one is given."""
        drawing = Drawing(_svg(self.nodes, self.name))
        if path is not None:
            Path(path).write_text(drawing.svg, encoding="utf-8")
        return drawing

    def _repr_svg_(self) -> str:
        return self.draw().svg


class Drawing:
    """A picture: `svg` is its text."""

    def __init__(self, svg: str):
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Drawing({len(self.svg)} characters of SVG)"


def _rows(nodes: list[Node]) -> dict[int, int]:
    """The row of each node: below everything that it needs."""
    rows: dict[int, int] = {}
    for node in nodes:
        before = [node.previous, *node.inputs]
        rows[node.id] = 1 + max((rows[b] for b in before if b is not None), default=-1)
    return rows


def _svg(nodes: list[Node], name: str) -> str:
    lanes = {lane: i for i, lane in enumerate(sorted({node.lane for node in nodes}))}
    rows = _rows(nodes)
    width = max(1, len(lanes)) * (_WIDTH + _GAP_X) + _GAP_X
    height = (max(rows.values(), default=0) + 1) * (_HEIGHT + _GAP_Y) + _GAP_Y
    left = {node.id: _GAP_X + lanes[node.lane] * (_WIDTH + _GAP_X) for node in nodes}
    top = {node.id: _GAP_Y + rows[node.id] * (_HEIGHT + _GAP_Y) for node in nodes}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{escape(name)}">',
        f"<title>{escape(name)}</title>",
        f'<path d="M0 0H{width}V{height}H0z" fill="#fff"/>',  # its own paper: a dark notebook shows the same
    ]
    for node in nodes:
        x, y = left[node.id], top[node.id]
        if node.previous is not None:
            parts.append(_follows(left[node.previous], top[node.previous], x, y))
        parts += [_uses(left[before], top[before], x, y) for before in node.inputs]
    for node in nodes:
        color = _COLORS.get(node.kind, "#ffffff")
        label = " ".join(node.label.split())
        label = label if len(label) <= 27 else label[:26] + "…"
        x, y = left[node.id], top[node.id]
        parts.append(
            f'<g><title>{escape(repr(node))}: {escape(node.label)}</title><rect x="{x}" y="{y}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" rx="6" fill="{color}" stroke="#99a"/>'
            f'<text x="{x + 8}" y="{y + 13}" fill="#556" font-size="9">{node.kind}</text>'
            f'<text x="{x + 8}" y="{y + 27}">{escape(label)}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def _follows(x1: float, y1: float, x2: float, y2: float) -> str:
    """From the foot of a node (its left and upper edge are given) to the head of the one that follows it."""
    x1, x2, y1 = x1 + _WIDTH / 2, x2 + _WIDTH / 2, y1 + _HEIGHT
    middle = (y1 + y2) / 2
    return (
        f'<path d="M{x1:g},{y1} C{x1:g},{middle:g} {x2:g},{middle:g} {x2:g},{y2 - 6}" fill="none" stroke="#667"/>'
        f'<path d="M{x2 - 4:g},{y2 - 8}h8l-4,8z" fill="#667"/>'
    )


def _uses(x1: float, y1: float, x2: float, y2: float) -> str:
    """Dashed, from a node's side to the right side of one that uses its value, through the gaps between the lanes."""
    y1, y2 = y1 + _HEIGHT / 2, y2 + _HEIGHT / 2
    leftwards = x1 > x2
    side, bend = (x1, x1 - 26) if leftwards else (x1 + _WIDTH, x1 + _WIDTH + 26)
    x2 += _WIDTH
    return (
        f'<path d="M{side:g},{y1:g} C{bend:g},{y1:g} {max(bend, x2 + 20):g},{y2:g} {x2 + 6:g},{y2:g}" fill="none" '
        f'stroke="#667" stroke-dasharray="4 3"/><path d="M{x2 + 8:g},{y2 - 4:g}v8l-8,-4z" fill="#667"/>'
    )
