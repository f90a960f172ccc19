"""The static picture of one step: the tree, the pool as a grid of slots, hit rate and occupancy, and the log.

    +----------------------------------------------+---------------------+
    |  tree, root on the left                      |  KV pool            |
    |                                              |  hit rate, occupancy|
    +----------------------------------------------+---------------------+
    |  4  p-3: 12 of 20 tokens are cached                     legend     |
    +--------------------------------------------------------------------+

Plain SVG 1.1 with the colours as attributes, so that any viewer shows it; a style block adds the dark theme where
media queries are known.  `role="img"` with title and description is the text alternative, and each node has a
tooltip with all its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from .visual_layout import CHAR, Box, Layout, choose, folded_at_root, place
from .visual_state import OWNERS, NodeView, Step, TreeState
from .visual_theme import GLYPHS, WORDS, both, fill, stroke, svg_style

Text = Callable[[Sequence[int]], str]

FONT = 'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"'
SANS = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif"'
SIDE = 250  # width of the panel with pool and curves
PILL = 24  # height of a pill


def document(width: float, height: float, title: str, description: str, body: str) -> str:
    """A whole SVG file around `body`, with the background and the text alternative.

    It has no ids, and its style names only `mv-` classes, the same in each: any number of them can stand in one page.
    """
    w, h = f"{width:.0f}", f"{height:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" '
        f'aria-label="{escape(title, True)}" style="max-width:100%;height:auto">'
        f"<title>{escape(clean(title))}</title><desc>{escape(clean(description))}</desc>{svg_style()}"
        f'<rect width="{w}" height="{h}" rx="8" {fill("paper")}/>{body}</svg>'
    )


def text(x: float, y: float, content: str, *, size: float = 11, colour: str = "ink", extra: str = "") -> str:
    """One line of sans-serif text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {SANS} font-size="{size:g}" {fill(colour)} {extra}>'
        f"{escape(clean(content))}</text>"
    )


def clean(value: str) -> str:
    """Without the characters that XML 1.0 cannot hold (a model may well produce them)."""
    return "".join(c if c in "\t\n\r" or " " <= c < "\ud800" or "\ue000" <= c <= "\ufffd" or c > "\uffff" else "\ufffd"
                   for c in value)  # fmt: skip


def visible(value: str) -> str:
    """Text for a label: spaces at the ends and line breaks are made visible."""
    value = clean(value).replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
    front = len(value) - len(value.lstrip(" "))
    value = "·" * front + value[front:]
    back = len(value) - len(value.rstrip(" "))
    return value[: len(value) - back] + "·" * back


def cut(value: str, most: int) -> str:
    """At most `most` characters: the beginning, and the end if there is room."""
    if len(value) <= most:
        return value
    tail = most // 3 if most >= 20 else 0
    return value[: most - tail - 1] + "…" + value[len(value) - tail :]


def label_of(node: NodeView, decode: Text | None) -> str:
    """What is written on the edge that leads to a node."""
    if not node.known:
        return "(before the log)"
    if decode is None:
        return " ".join(map(str, node.tokens[:40])) + ("…" if node.length > 40 else "")
    return visible(decode(node.tokens[:200])) + ("…" if node.length > 200 else "")


def tree(state: TreeState, step: Step | None, width: float, decode: Text | None, max_nodes: int) -> tuple[str, Layout]:
    """The tree as SVG elements, and its layout."""
    boxes = choose(state, step, max_nodes)
    labels = {i: label_of(box.node, decode) for i, box in boxes.items()}
    layout = place(boxes, labels, width, folded_at_root(state, step, boxes))
    lit = {i for i in step.hit} | set(step.new) if step else set()
    parts = []
    for i, box in boxes.items():
        parent = boxes.get(box.node.parent)
        x0, y0 = (parent.x + parent.width + 19, parent.y) if parent else (24.0, layout.root_y)
        mark = "evicted" if box.ghost else (step.mark(i) if step else "")
        colour, wide = (mark or "line", 2.4) if i in lit or box.ghost else ("line", 1.3)
        dash = ' stroke-dasharray="4 3"' if box.ghost else ""
        bend = min(max((box.x - x0) * 0.5, 8), 40)
        parts.append(
            f'<path d="M{x0:.1f} {y0:.1f}C{x0 + bend:.1f} {y0:.1f} {box.x - bend:.1f} {box.y:.1f} {box.x:.1f} '
            f'{box.y:.1f}M{box.x + box.width:.1f} {box.y:.1f}h10" fill="none" {stroke(colour)} '
            f'stroke-width="{wide}"{dash}/>'
        )
    parts.append(f'<circle cx="19" cy="{layout.root_y:.1f}" r="6" {both("ink", "ink")}><title>root</title></circle>')
    for i, box in boxes.items():
        mark = "evicted" if box.ghost else (step.mark(i) if step else "")
        parts.append(_node(box, mark, labels[i], layout.row))
        if box.hidden:
            parts.append(_stub(box.x + box.width + 18, box.y, box.stub_y, box.hidden, box.hidden_tokens))
    if layout.hidden:
        parts.append(_stub(24, layout.root_y, layout.stub_y, layout.hidden, layout.hidden_tokens))
    return "".join(parts), layout


def _stub(x: float, y: float, at: float, nodes: int, tokens: int) -> str:
    return (
        f'<path d="M{x:.1f} {y:.1f}C{x + 10:.1f} {y:.1f} {x:.1f} {at:.1f} {x + 12:.1f} {at:.1f}" fill="none" '
        f'{stroke("line")} stroke-dasharray="2 3"/>'
        + text(x + 16, at + 3.5, f"+{nodes} node{'s' * (nodes != 1)}, {tokens} tokens", size=10, colour="muted")
    )


def _node(box: Box, mark: str, label: str, row: float) -> str:
    node = box.node
    tint, border = (f"{mark}-tint", mark) if mark else ("plain-tint", "line")
    wide = 2 if mark else 1.2
    dash = ' stroke-dasharray="5 3"' if mark in ("evicted", "split") else ""
    x, y, w = box.x, box.y, box.width
    left = 20 if mark else 8
    room = int((w - left - 6) / CHAR)
    shown = cut(label, max(room, 1))
    tokens = f"{node.length} token" + "s" * (node.length != 1) if node.known else "tokens not seen"
    state = WORDS[mark] + (f", {node.locks} lock{'s' * (node.locks != 1)}" if node.locks else "")
    about = f"#{node.id} ({state}): {tokens}, last use {node.last_access}\n{label}"
    parts = [
        f'<g data-node="{node.id}" data-state="{mark or "cached"}"><title>{escape(about)}</title>',
        f'<rect x="{x:.1f}" y="{y - PILL / 2:.1f}" width="{w:.1f}" height="{PILL}" rx="6" {both(tint, border)} '
        f'stroke-width="{wide}"{dash}/>',
    ]
    if mark == "evicted":
        parts.append(
            f'<path d="{_hatching(x, y, w)}" fill="none" {stroke("evicted")} stroke-width="1.1" stroke-opacity="0.35"/>'
        )
    if mark:
        parts.append(text(x + 7, y + 4, GLYPHS[mark], size=13, extra='font-weight="700"'))
    parts.append(
        f'<text x="{x + left:.1f}" y="{y + 3.8:.1f}" {FONT} font-size="11" {fill("ink")} xml:space="preserve">'
        f"{escape(shown)}</text>"
    )
    at = x + w + 14
    ring = "ink" if node.locks else border
    paint = both(border if mark else "paper", ring)
    parts.append(f'<circle cx="{at:.1f}" cy="{y:.1f}" r="4.5" {paint} stroke-width="1.6"/>')
    if node.locks:
        parts.append(lock(at - 4.5, y - 18))
        parts.append(text(at + 6, y - 9.5, str(node.locks), size=9.5))
    if row > 34:
        words = [f"#{node.id}", tokens, f"last use {node.last_access}"]
        below = " · ".join(words[: 3 if w > 140 else 2 if w > 76 else 1])
        parts.append(text(x + 2, y + PILL / 2 + 10.5, below, size=9.5, colour="muted"))
    parts.append("</g>")
    return "".join(parts)


def _hatching(x: float, y: float, width: float) -> str:
    """Slanted lines inside a pill (a path, not a pattern: that would need an id)."""
    path, top, height = [], y - PILL / 2 + 1, PILL - 2
    for left in range(int(5 - height), int(width), 8):
        x0, x1 = max(left, 1), min(left + height, width - 1)  # along left + height - (y - top), cut off at the sides
        path.append(f"M{x + x0:.1f} {top + height - (x0 - left):.1f}L{x + x1:.1f} {top + height - (x1 - left):.1f}")
    return "".join(path)


def lock(x: float, y: float) -> str:
    """A small padlock, 9 by 10, with its upper left corner at (x, y)."""
    return (
        f'<path d="M{x + 2.2:.1f} {y + 4.5:.1f}v-1.6a2.3 2.3 0 0 1 4.6 0v1.6" fill="none" {stroke("ink")} '
        f'stroke-width="1.3"/><rect x="{x + 1:.1f}" y="{y + 4.3:.1f}" width="7" height="5.4" rx="1" {fill("ink")}/>'
    )


def pool(state: TreeState, x: float, y: float, width: float, cells: int = 600) -> tuple[str, float]:
    """The pool as a grid of slots; returns (elements, height).

    Only slots up to the highest that was ever used are drawn; if these are more than `cells`, a cell is a run of
    slots and shows the owner of most of them.
    """
    owners = state.owners()
    capacity = state.capacity or len(owners)
    used = max(_used_part(owners), 1)
    each = max(1, -(-used // cells))
    shown = capacity if capacity <= cells else max(used, 40)
    count = -(-shown // each)
    side = 10 if count > 200 else 13
    columns = max(int(width // side), 1)
    shapes: dict[str, list[str]] = {owner: [] for owner in OWNERS}
    glyphs: dict[str, list[str]] = {owner: [] for owner in OWNERS}
    for i in range(count):
        part = owners[i * each : (i + 1) * each]
        busy = [owner for owner in part if owner != "free"]
        owner = max(set(busy), key=busy.count) if busy else "free"
        cx, cy, a = x + i % columns * side, y + i // columns * side, side - 2
        shapes[owner].append(f"M{cx:.1f} {cy:.1f}h{a}v{a}h{-a}z")
        if owner == "locked":
            glyphs[owner].append(f"M{cx + a / 2 - 1.2:.1f} {cy + a / 2:.1f}h2.4")
        elif owner == "running":
            glyphs[owner].append(f"M{cx + 1.5:.1f} {cy + a - 1.5:.1f}L{cx + a - 1.5:.1f} {cy + 1.5:.1f}")
    parts = []
    for owner in OWNERS:
        if not shapes[owner]:
            continue
        paint = both("paper", "line") if owner == "free" else both(owner, "on-" + owner if owner == "tree" else owner)
        parts.append(f'<path data-owner="{owner}" d="{"".join(shapes[owner])}" {paint} stroke-width="0.7"/>')
        if glyphs[owner]:
            parts.append(
                f'<path d="{"".join(glyphs[owner])}" fill="none" {stroke("on-" + owner)} '
                f'stroke-width="{2.4 if owner == "locked" else 1.4}" stroke-linecap="round"/>'
            )
    height = -(-count // columns) * side
    note = f"slots 1 to {shown:,} of {capacity:,}" if shown < capacity else f"{capacity:,} slots"
    if each > 1:
        note += f", {each} a cell"
    return "".join(parts) + text(x, y + height + 11, note, size=9.5, colour="muted"), height + 16


def _used_part(owners: list[str]) -> int:
    """The highest slot that is not free."""
    end = len(owners)
    while end and owners[end - 1] == "free":
        end -= 1
    return end


def owner_legend(x: float, y: float) -> str:
    """free, in the tree, locked, running: two rows of two."""
    words = {"free": "free", "tree": "cached in the tree", "locked": "locked", "running": "held by a request"}
    parts = []
    for k, owner in enumerate(("free", "locked", "tree", "running")):
        at, line = x + (k // 2) * 82, y + (k % 2) * 16
        paint = both("paper", "line") if owner == "free" else both(owner, "on-tree" if owner == "tree" else owner)
        parts.append(f'<rect x="{at}" y="{line - 9}" width="10" height="10" {paint} stroke-width="0.8"/>')
        if owner == "locked":
            parts.append(f'<circle cx="{at + 5}" cy="{line - 4}" r="1.6" {fill("on-locked")}/>')
        if owner == "running":
            parts.append(f'<path d="M{at + 2} {line - 1}l6 -6" {stroke("on-running")} stroke-width="1.3"/>')
        parts.append(text(at + 15, line, words[owner], size=10, colour="muted"))
    return "".join(parts)


def curves(series: Sequence[tuple[str, Sequence[float]]], x: float, y: float, width: float, height: float) -> str:
    """Up to two series of shares from 0 to 1, one value a step: the first solid, the second dashed."""
    parts = [
        f'<path d="M{x} {y}h{width}M{x} {y + height / 2}h{width}" fill="none" {stroke("faint")} stroke-width="1"/>'
        f'<path d="M{x} {y + height}h{width}" fill="none" {stroke("line")} stroke-width="1"/>'
    ]
    for k, (name, values) in enumerate(series):
        colour, dash = (("hit", ""), ("new", ' stroke-dasharray="5 3"'))[k]
        last = max(len(values) - 1, 1)
        points = " ".join(f"{x + width * i / last:.1f},{y + height * (1 - v):.1f}" for i, v in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" {stroke(colour)} stroke-width="1.8"{dash}/>')
        line = y + height + 15 + 14 * k
        parts.append(
            f'<path d="M{x} {line - 3.5}h18" fill="none" {stroke(colour)} stroke-width="1.8"{dash}/>'
            + text(x + 24, line, f"{name} {values[-1] if values else 0:.0%}", size=10, colour="muted")
        )
    return "".join(parts)


def mark_legend(x: float, y: float) -> str:
    """new, accessed, evicted, split, and the padlock, in one row."""
    parts = []
    for mark in ("new", "hit", "evicted", "split"):
        dash = ' stroke-dasharray="4 2"' if mark in ("evicted", "split") else ""
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="16" height="13" rx="3" {both(mark + "-tint", mark)} '
            f'stroke-width="1.5"{dash}/>' + text(x + 4.5, y + 1, GLYPHS[mark], size=11, extra='font-weight="700"')
        )
        parts.append(text(x + 21, y, WORDS[mark], size=10, colour="muted"))
        x += 36 + len(WORDS[mark]) * 5.6
    parts.append(lock(x, y - 9) + text(x + 13, y, "locks", size=10, colour="muted"))
    return "".join(parts)


def describe(state: TreeState, step: Step | None, decode: Text | None, most: int = 12) -> str:
    """The picture in words."""
    lines = [f"{len(state.nodes)} nodes, {state.tokens} tokens in the tree, {state.locked} of them locked."]
    if step is not None:
        lines.insert(0, step.title + ".")
        for what, ids in (("New", step.new), ("Accessed", step.hit), ("Evicted", step.evicted)):
            if ids:
                lines.append(f"{what}: " + ", ".join(f"#{i}" for i in ids) + ".")
    for node in sorted(state.nodes.values(), key=lambda n: (-n.last_access, n.id))[:most]:
        lines.append(f"#{node.id} below #{node.parent}: {cut(label_of(node, decode), 60)!r}, {node.length} tokens.")
    return " ".join(lines)
