"""Whole pictures from the parts in `visual_svg`: one step of a history, and the sheet of all states of a story."""

from __future__ import annotations

from .visual_history import TreeHistory
from .visual_state import Step
from .visual_svg import (
    SIDE,
    Text,
    curves,
    cut,
    describe,
    document,
    mark_legend,
    owner_legend,
    pool,
    text,
    tree,
)
from .visual_theme import fill, stroke

POINTS = 400  # most points of a curve


def radix_picture(history: TreeHistory, position: int, width: int, decode: Text | None, max_nodes: int) -> str:
    """The picture of one position: tree, pool, curves, the last steps in words, and the legend."""
    state, step = history.state(position), history.steps[position]
    beside = width >= 640
    tree_width = width - SIDE - 20 if beside else width - 16
    body, layout = tree(state, step, tree_width, decode, max_nodes)
    if layout.width > tree_width and beside:  # a deep tree takes the whole width, the panel goes below
        beside = False
        body, layout = tree(state, step, width - 16, decode, max_nodes)
    full = max(width, layout.width + 16)
    grid, grid_height = pool(state, 0, 0, SIDE - 30)
    panel_height = 44 + grid_height + 22 + 32 + 24 + 76
    top = 34.0
    heading = step.title if history.manual else f"Step {position} of {len(history) - 1}: {step.title}"
    parts = [text(14, 22, cut(heading, int(full / 7.4)), size=13, extra='font-weight="600"')]
    parts.append(f'<g transform="translate(4,{top})">{body}</g>')
    tree_bottom = top + layout.height
    px, py = (width - SIDE - 8, top) if beside else (8, tree_bottom + 8)
    parts.append(f'<rect x="{px}" y="{py:.1f}" width="{SIDE}" height="{panel_height:.0f}" rx="8" {fill("panel")}/>')
    parts.append(f'<g transform="translate({px + 15},{py:.1f})">{_panel(history, position, grid, grid_height)}</g>')
    bottom = max(tree_bottom, py + panel_height) + 14
    parts.append(f'<path d="M12 {bottom:.1f}H{full - 12:.0f}" {stroke("faint")}/>')
    log, bottom = _log(history, position, bottom + 20, full)
    parts.append(log)
    parts.append(mark_legend(14, bottom + 12))
    title = f"Radix tree and KV pool, step {position} of {len(history) - 1}"
    return document(full, bottom + 24, title, describe(state, step, decode), "".join(parts))


def _panel(history: TreeHistory, position: int, grid: str, grid_height: float) -> str:
    step = history.steps[position]
    series = history.steps[: position + 1]
    if len(series) > POINTS:
        series = [*series[:: -(-len(series) // POINTS)], step]
    size = history.start.capacity or max((s.busy for s in history.steps), default=1) or 1
    y = 38 + grid_height + 22
    lines = [("occupancy", [s.busy / size for s in series]), ("hit rate so far", [s.hit_rate for s in series])]
    return (
        text(0, 22, "KV pool", size=12, extra='font-weight="600"')
        + f'<g transform="translate(0,34)">{grid}</g>'
        + owner_legend(0, y - 4)
        + curves(lines, 0, y + 26, SIDE - 30, 50)
    )


def _log(history: TreeHistory, position: int, y: float, width: float) -> tuple[str, float]:
    """The steps before this one, newest last, and the last line's place."""
    parts = []
    for i in range(max(position - 3, 0), position):
        if not history.manual:
            parts.append(text(14, y, str(i), size=11, colour="muted"))
        line = cut(history.steps[i].title, int((width - 70) / 6.1))
        parts.append(text(14 if history.manual else 52, y, line, size=11, colour="muted"))
        y += 17
    return "".join(parts), y


def story_sheet(history: TreeHistory, width: int, decode: Text | None, columns: int = 2) -> str:
    """All states of a story side by side, as in a paper; the legend takes the place after the last."""
    gap = 14.0
    each = (width - gap * (columns + 1)) / columns
    cells = [(step, *tree(history.state(i), step, each - 16, decode, 60)) for i, step in enumerate(history.steps)]
    parts, y, x = [], gap, gap
    for start in range(0, len(cells), columns):
        row = cells[start : start + columns]
        captions = [_caption(step, each - 24) for step, _, _ in row]
        top = 14 * max(map(len, captions)) + 14
        height = top + max(layout.height for _, _, layout in row) + 8
        for k, (lines, (_, body, _)) in enumerate(zip(captions, row)):
            x = gap + k * (each + gap)
            size = f'width="{each:.1f}" height="{height:.1f}"'
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="8" {fill("panel")}/>')
            parts += [text(x + 12, y + 19 + 14 * i, line, extra='font-weight="600"') for i, line in enumerate(lines)]
            parts.append(f'<g transform="translate({x + 4:.1f},{y + top:.1f})">{body}</g>')
        y += height + gap
    if len(cells) % columns:
        x, at = x + each + gap + 12, y - gap - 30
    else:
        x, at, y = gap, y + 8, y + 36
    parts.append(mark_legend(x, at))
    if history.start.capacity:
        parts.append(text(x, at + 20, f"The pool holds {history.start.capacity} tokens.", size=10, colour="muted"))
    words = " ".join(step.title for step in history.steps)
    return document(width, y, f"A story in {len(cells)} states", words, "".join(parts))


def _caption(step: Step, width: float) -> list[str]:
    """The step's title as lines."""
    lines, most = [""], int(width / 6.6)
    for word in step.title.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines
