"""Small automata as SVG, before and after compression: the picture that explains jump-forward.

    before      ( )--{-->( )--"-->( )--a-->( )--"-->( )--:-->(( ))        a forward step of the model each
    after       ( )---------{"a":--------->(( ))                          one edge, no step at all

States stand in columns by their distance from the start. An edge is labelled with the bytes that take it (`a-z`;
others in hex), a compressed edge with its text. Accepting states have a double ring.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from .automaton import START, Automaton
from .expressions import GrammarError

if TYPE_CHECKING:
    from .fsm import Grammar

_COLUMN, _ROW, _RADIUS, _CHAR = 92, 58, 13, 6.4


@dataclass(frozen=True)
class Edge:
    source: int
    label: str
    target: int
    forced: bool = False


def edges(
    automaton: Automaton, compressed: bool, max_states: int = 60, start: int = START, partial: bool = False
) -> list[Edge]:
    """The automaton's edges from `start` on; parallel bytes are one edge. With `compressed`, chains of states
    with a single way on are one edge too, and their inner states are gone. When more than `max_states` states can
    be reached: GrammarError, or with `partial` the edges between the nearest of them."""
    found, seen, queue = [], {start}, deque([start])
    while queue:
        state = queue.popleft()
        text, after = automaton.forced(state) if compressed else (b"", state)
        if len(text) > 1:
            steps = {after: Edge(state, _text_label(text), after, True)}
        else:
            targets: dict[int, list[int]] = {}
            for byte, target in automaton.ways(state):
                targets.setdefault(target, []).append(byte)
            steps = {target: Edge(state, _set_label(found_bytes), target) for target, found_bytes in targets.items()}
        for target, edge in steps.items():
            if target not in seen and len(seen) >= max_states and partial:
                continue
            found.append(edge)
            if target not in seen:
                seen.add(target)
                queue.append(target)
                if len(seen) > max_states:
                    raise GrammarError(f"draw: the automaton has more than {max_states} states")
    return found


def draw(grammar: Grammar, compressed: bool | None = None, max_states: int = 60) -> str:
    """SVG of a grammar's automaton: as it is (False), compressed (True), or both, one above the other (None).

    Raises GrammarError when the automaton has more than `max_states` states.
    """
    automaton = grammar.automaton
    parts, top, width = [], 0.0, 0.0
    for kind in (False, True) if compressed is None else (compressed,):
        title = "compressed: a forced run is one edge" if kind else "byte by byte"
        body, w, h = _layout(automaton, edges(automaton, kind, max_states), title)
        parts.append(f'<g transform="translate(0,{top:.0f})">{body}</g>')
        top, width = top + h, max(width, w)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{_SCOPE}" width="{width:.0f}" height="{top:.0f}" '
        f'viewBox="0 0 {width:.0f} {top:.0f}" font-family="monospace" font-size="11">{_STYLE}{"".join(parts)}</svg>'
    )


_SCOPE = "minisgl-fsm"  # a page's SVGs share one style sheet and one set of ids: ours are only about drawings like this
_RULES = (
    ("path.e", "fill:none;stroke:#556"),
    ("path.f", "fill:none;stroke:#c40;stroke-width:2"),
    ("circle", "fill:#fff;stroke:#223"),
    ("text", "fill:#223;text-anchor:middle"),
    ("text.t", "text-anchor:start;font-weight:bold"),
    ("text.f", "fill:#c40"),
)
_STYLE = (
    f'<defs><marker id="{_SCOPE}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#556"/></marker></defs>'
    f"<style>{''.join(f'.{_SCOPE} {what}{{{how}}}' for what, how in _RULES)}</style>"
)


def _layout(automaton: Automaton, arrows: list[Edge], title: str) -> tuple[str, float, float]:
    """(SVG elements, width, height)."""
    column, order = {START: 0}, [START]
    for edge in arrows:  # they come breadth first
        if edge.target not in column:
            column[edge.target] = column[edge.source] + 1
            order.append(edge.target)
    widths = [float(_COLUMN)] * (max(column.values()) + 1)
    for edge in arrows:
        if column[edge.target] == column[edge.source] + 1:
            needed = len(edge.label) * _CHAR + 3 * _RADIUS
            widths[column[edge.source]] = max(widths[column[edge.source]], needed)
    starts = [sum(widths[:n]) + 30 for n in range(len(widths))]
    rows: dict[int, int] = {}
    place = {}
    for state in order:
        row = rows.get(column[state], 0)
        rows[column[state]] = row + 1
        place[state] = (starts[column[state]], 62 + row * _ROW)
    body = [f'<text class="t" x="10" y="18">{escape(title)}</text>']
    body += [_arrow(edge, place) for edge in arrows]
    for state, (x, y) in place.items():
        body.append(f'<circle cx="{x:.0f}" cy="{y}" r="{_RADIUS}"/>')
        if automaton.accepting[state]:
            body.append(f'<circle cx="{x:.0f}" cy="{y}" r="{_RADIUS - 3}"/>')
    width = sum(widths) + 40
    return "".join(body), width, 62 + max(rows.values()) * _ROW


def _arrow(edge: Edge, place: dict[int, tuple[float, int]]) -> str:
    (x1, y1), (x2, y2) = place[edge.source], place[edge.target]
    kind = "f" if edge.forced else "e"
    if edge.source == edge.target:
        path = f"M{x1 - 6:.0f} {y1 - 12} C{x1 - 18:.0f} {y1 - 38} {x1 + 18:.0f} {y1 - 38} {x1 + 6:.0f} {y1 - 12}"
        at = (x1, y1 - 34)
    elif x2 > x1:
        path = f"M{x1 + _RADIUS:.0f} {y1} L{x2 - _RADIUS:.0f} {y2}"
        at = ((x1 + x2) / 2, (y1 + y2) / 2 - 5)
    else:  # backwards, or within a column: a bow below
        low = max(y1, y2) + 26
        path = f"M{x1:.0f} {y1 + _RADIUS} Q{(x1 + x2) / 2 - 20:.0f} {low + 12} {x2:.0f} {y2 + _RADIUS}"
        at = ((x1 + x2) / 2 - 14, low)
    return (
        f'<path class="{kind}" d="{path}" marker-end="url(#{_SCOPE}-tip)"/>'
        f'<text class="{kind}" x="{at[0]:.0f}" y="{at[1]:.0f}">{escape(edge.label)}</text>'
    )


def _text_label(text: bytes) -> str:
    shown = text.decode("utf-8", "backslashreplace").translate({10: "⏎", 9: "⇥", 32: "␣"})
    return shown if len(shown) <= 28 else shown[:25] + "…"


def _set_label(found: list[int]) -> str:
    """Bytes as ranges: a-z0-9; control characters and bytes over 0x7f in hex."""
    runs: list[list[int]] = []
    for byte in found:
        if runs and byte == runs[-1][1] + 1:
            runs[-1][1] = byte
        else:
            runs.append([byte, byte])
    parts = [_byte(low) if low == high else f"{_byte(low)}-{_byte(high)}" for low, high in runs]
    label = " ".join(parts)
    return label if len(label) <= 18 else label[:15] + "…"


def _byte(byte: int) -> str:
    return chr(byte) if 0x21 <= byte <= 0x7E else "␣" if byte == 0x20 else f"{byte:02x}"
