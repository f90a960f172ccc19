"""A grammar at work: the text so far, the automaton with the state it is in, and the tokens that may come next.

    {"name": "Ada|                                    text, what is forced after it, or where it went wrong
    (1)--{"name": "-->(10)--a-z-->(10)--",-->...      the automaton; compressed: a forced run is one edge
    212 of 49,152 tokens are legal: [a] [ada] ["] ... the mask of this state

Where the automaton is too big to draw, its part nearest to the current state is drawn, which is the part that
matters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .automaton import DEAD, START
from .fsm_draw import Edge, edges
from .token_masks import unpack
from .visual_svg import CHAR, FONT, clean, cut, document, text, visible
from .visual_theme import both, fill, stroke

if TYPE_CHECKING:
    from .fsm import Grammar, TokenGrammar

COLUMN, ROWS, RADIUS = 46.0, 46.0, 10.0
CHIPS = 30  # legal tokens that are written out


@dataclass
class Moment:
    """Where a grammar stands after a text.

    accepted: the longest beginning of the text that some accepted text has, as bytes; state: the automaton's after it.
    forced: the bytes that must follow.  legal: ids of the legal tokens, None without a tokenizer.
    """

    text: str
    accepted: bytes
    state: int
    accepting: bool
    forced: bytes
    legal: list[int] | None = None
    forced_tokens: list[int] | None = None
    vocab_size: int = 0

    @property
    def wrong(self) -> str:
        """The rest of the text, which the grammar does not allow."""
        return self.text.encode("utf-8", "surrogatepass")[len(self.accepted) :].decode("utf-8", "replace")


def moment(grammar: Grammar, tokens: TokenGrammar | None, value: str) -> Moment:
    """Read `value` byte by byte, as far as the grammar goes along."""
    automaton, state, accepted = grammar.automaton, START, bytearray()
    with automaton.lock, automaton.working():
        for byte in value.encode("utf-8", "surrogatepass"):
            after = automaton.step(state, bytes([byte]))
            if after == DEAD:
                break
            state = after
            accepted.append(byte)
    forced, _ = automaton.forced(state)
    found = Moment(value, bytes(accepted), state, bool(automaton.accepting[state]), forced)
    if tokens is not None:
        found.legal = unpack(tokens.mask(state), tokens.vocab_size).nonzero()[0].tolist()
        found.forced_tokens = tokens.forced_tokens(state)
        found.vocab_size = tokens.vocab_size
    return found


def grammar_picture(grammar: Grammar, tokens: TokenGrammar | None, at: Moment, width: int, max_states: int) -> str:
    """Text, automaton as it is and compressed, and the mask."""
    parts, y, full = [], 24.0, float(width)
    source = f": {cut(visible(grammar.source), int(width / 7.4) - 12)}" if grammar.source else ""
    parts.append(text(14, y, f"Grammar{source}", size=13, extra='font-weight="600"'))
    parts.append(_text_line(at, y + 30, width))
    y += 56
    for compressed in (False, True):
        arrows, partial = _arrows(grammar, at, compressed, max_states)
        title = "Compressed: a run without a choice is one edge" if compressed else "Byte by byte"
        if partial:
            title += f" (the {max_states} states nearest to this one)"
        body, w, h = _automaton(grammar, arrows, at, partial)
        parts.append(text(14, y + 4, title, size=12, extra='font-weight="600"'))
        parts.append(f'<g transform="translate(0,{y + 10:.0f})">{body}</g>')
        y += h + 26
        full = max(full, w)
    if at.legal is not None and tokens is not None:
        body, h = _mask(tokens, at, y, width)
        parts.append(body)
        y += h
    y += 8
    parts.append(_legend(14, y + 8))
    return document(full, y + 24, f"Grammar after {at.text!r}", _describe(at), "".join(parts))


def _describe(at: Moment) -> str:
    words = [f"After {at.text!r} the text may {'' if at.accepting else 'not '}end here."]
    if at.wrong:
        words.append(f"{at.wrong!r} is not allowed there.")
    if at.forced:
        words.append(f"{at.forced.decode('utf-8', 'replace')!r} must follow.")
    if at.legal is not None:
        words.append(f"{len(at.legal)} of {at.vocab_size} tokens are legal.")
    return " ".join(words)


def _text_line(at: Moment, y: float, width: int) -> str:
    """The text so far, and after the caret what is forced (underlined) or wrong (struck through)."""
    room = int((width - 40) / 7.3)
    accepted = visible(at.accepted.decode("utf-8", "replace"))
    tail = accepted if len(accepted) <= room - 24 else "…" + accepted[-(room - 25) :]
    x = 14.0
    parts = [
        f'<text x="{x}" y="{y}" {FONT} font-size="12" {fill("ink")} xml:space="preserve" '
        f'textLength="{max(len(tail), 0) * 7.2:.1f}">{_escape(tail)}</text>'
        if tail
        else ""
    ]
    x += len(tail) * 7.2 + 2
    parts.append(f'<path d="M{x:.1f} {y - 12}v16" {stroke("hit")} stroke-width="2"/>')
    x += 5
    if at.wrong:
        rest, name, note = cut(visible(at.wrong), 24), "evicted", "is not allowed here"
    elif at.forced:
        rest, name, note = cut(visible(at.forced.decode("utf-8", "replace")), 40), "new", "must follow"
    else:
        rest, name, note = "", "", "the text may end here" if at.accepting else "several ways on"
    if rest:
        w = len(rest) * 7.2 + 8
        dash = ' stroke-dasharray="4 2"' if name == "evicted" else ""
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 13}" width="{w:.1f}" height="19" rx="3" {both(name + "-tint", name)}{dash}/>'
            f'<text x="{x + 4:.1f}" y="{y}" {FONT} font-size="12" {fill("ink")} xml:space="preserve" '
            f'textLength="{len(rest) * 7.2:.1f}">{_escape(rest)}</text>'
        )
        if name == "evicted":
            parts.append(f'<path d="M{x + 3:.1f} {y - 4}h{w - 6:.1f}" {stroke("evicted")} stroke-width="1.5"/>')
        x += w + 8
    parts.append(text(x, y, note, size=11, colour="muted"))
    return "".join(parts)


def _escape(value: str) -> str:
    return clean(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _arrows(grammar: Grammar, at: Moment, compressed: bool, max_states: int) -> tuple[list[Edge], bool]:
    """The edges to draw, and whether they are only a part."""
    arrows = edges(grammar.automaton, compressed, max_states + 1, partial=True)
    if len({START, *(edge.target for edge in arrows)}) <= max_states:
        return arrows, False
    return edges(grammar.automaton, compressed, max_states, start=at.state, partial=True), True


def _automaton(grammar: Grammar, arrows: list[Edge], at: Moment, partial: bool) -> tuple[str, float, float]:
    """(SVG elements, width, height)."""
    current = at.state
    first = current if partial else START
    ascii_ = [edge for edge in arrows if not _OTHER.fullmatch(edge.label)]
    left_out = len(ascii_) < len(arrows)
    arrows = _reached(ascii_, first)
    place, column, width, height = _places(arrows, first)
    drawn = [_arrow(edge, place, column[edge.target] - column[edge.source], edge.source == current) for edge in arrows]
    parts = [line for line, _ in drawn] + [label for _, label in drawn]  # no line crosses a label
    for state, (x, y) in place.items():
        parts.append(_state(state, x, y, state == current, bool(grammar.automaton.accepting[state])))
    notes = []
    inside = _inside(grammar, at.accepted)
    if at.state not in place and inside in place:
        x, y = place[inside]
        ring = f'fill="none" {stroke("hit")} stroke-width="2" stroke-dasharray="4 3"'  # two full ones mean an end
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{RADIUS + 4}" {ring}/>')
        notes.append("the text is inside the forced run that begins at the state with the dashed ring")
    if left_out:
        notes.append("bytes of characters outside ASCII are left out")
    for note in notes:
        parts.append(text(14, height + 10, note, size=10, colour="muted"))
        height += 15
    return "".join(parts), width, height


_OTHER = re.compile(r"([89a-f][0-9a-f](-[89a-f][0-9a-f])?( |$))+")  # a label of bytes from 0x80 on


def _reached(arrows: list[Edge], first: int) -> list[Edge]:
    """The edges that a walk from `first` comes by."""
    seen, kept = {first}, []
    for edge in arrows:  # they come breadth first
        if edge.source in seen:
            seen.add(edge.target)
            kept.append(edge)
    return kept


def _places(arrows: list[Edge], first: int) -> tuple[dict[int, tuple[float, float]], dict[int, int], float, float]:
    """Places and columns of the states, width and height: a state is right of all that lead to it, but for loops."""
    after: dict[int, list[Edge]] = {}
    for edge in arrows:
        after.setdefault(edge.source, []).append(edge)
    order: list[int] = []
    open_, seen, loops = {first}, {first}, set()
    stack = [(first, iter(after.get(first, [])))]
    while stack:  # depth first: what leads to a state that is still open is a loop
        state, ways = stack[-1]
        for edge in ways:
            if edge.target in open_:
                loops.add(edge)
            elif edge.target not in seen:
                seen.add(edge.target)
                open_.add(edge.target)
                stack.append((edge.target, iter(after.get(edge.target, []))))
                break
        else:
            stack.pop()
            open_.discard(state)
            order.append(state)
    column = {first: 0}
    for state in reversed(order):
        for edge in after.get(state, []):
            if edge not in loops:
                column[edge.target] = max(column.get(edge.target, 0), column[state] + 1)
    widths = [COLUMN] * (max(column.values()) + 1)
    for edge in arrows:
        if column[edge.target] > column[edge.source]:
            last = column[edge.target] - 1
            widths[last] = max(widths[last], len(edge.label) * CHAR + 3 * RADIUS)
    row: dict[int, float] = {first: 0.0}
    for at in range(1, len(widths)):
        members = [state for state in column if column[state] == at]
        wish = {m: [row[e.source] for e in arrows if e.target == m and e.source in row] for m in members}
        members.sort(key=lambda m: sum(wish[m]) / max(len(wish[m]), 1))
        free = 0.0
        for member in members:
            row[member] = max(free, round(min(wish[member], default=0.0)))
            free = row[member] + 1
    place = {s: (26 + sum(widths[: column[s]]), 46 + row[s] * ROWS) for s in column}
    return place, column, 26 + sum(widths) + 8, 46 + max(row.values()) * ROWS + 34


def _state(state: int, x: float, y: float, now: bool, accepting: bool) -> str:
    paint = both("hit-tint", "hit") if now else both("paper", "line")
    title = f"state {state}{', the text may end here' if accepting else ''}{', now' if now else ''}"
    parts = [
        f'<g data-state="{state}"><title>{title}</title><circle cx="{x:.0f}" cy="{y:.0f}" r="{RADIUS}" {paint} '
        f'stroke-width="{3 if now else 1.3}"/>'
    ]
    if accepting:
        ring = stroke("hit" if now else "line")
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{RADIUS - 3.5}" fill="none" {ring}/>')
    if now:
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" {fill("hit")}/>')
    return "".join([*parts, "</g>"])


def _inside(grammar: Grammar, accepted: bytes) -> int:
    """The state at which the compressed edge begins that the text is on, or the state that it is in."""
    automaton, state = grammar.automaton, START
    while accepted:
        run, after = automaton.forced(state)
        if len(run) > 1 and len(accepted) < len(run):
            return state
        taken = len(run) if len(run) > 1 else 1
        state = after if len(run) > 1 else automaton.step(state, accepted[:1])
        accepted = accepted[taken:]
    return state


def _arrow(edge: Edge, place: dict[int, tuple[float, float]], columns: int, now: bool) -> tuple[str, str]:
    """(line and head, label) of an edge."""
    (x1, y1), (x2, y2) = place[edge.source], place[edge.target]
    colour, wide = ("evicted", 2.4) if edge.forced else ("hit", 2.0) if now else ("line", 1.3)
    r = RADIUS
    if edge.source == edge.target:
        top = y1 - 36
        path = f"M{x1 - 5:.0f} {y1 - r + 1:.0f}C{x1 - 17:.0f} {top:.0f} "
        path += f"{x1 + 17:.0f} {top:.0f} {x1 + 6:.0f} {y1 - r - 1:.0f}"
        at, tip = (x1, y1 - 32), (x1 + 5, y1 - r, 0.35, 0.94)
    elif x2 > x1:
        bend, end = (x2 - x1) * 0.45, x2 - r - 1
        lift = 30 if y1 == y2 and columns > 1 else 0  # over the states between
        t = 0.5 if y1 == y2 else 0.3 if y2 < y1 else 0.7  # the label stands where parallel ways are apart
        path = f"M{x1 + r:.0f} {y1:.0f}C{x1 + bend:.0f} {y1 - lift:.0f} {x2 - bend:.0f} {y2 - lift:.0f} "
        path += f"{end:.0f} {y2:.0f}"
        curve = (1 - t) ** 3 + 3 * t * (1 - t) ** 2  # weight of the first end's height
        at = (x1 + r + (end - x1 - r) * t, y1 * curve + y2 * (1 - curve) - 0.75 * lift - 5)
        tip = (x2 - r, y2, 0.85, 0.5) if lift else (x2 - r, y2, 1.0, 0.0)
    else:  # a loop over several states: a bow below
        low = max(y1, y2) + 24
        path = f"M{x1:.0f} {y1 + r:.0f}C{x1 - 6:.0f} {low + 8:.0f} {x2 + 6:.0f} {low + 8:.0f} {x2:.0f} {y2 + r + 1:.0f}"
        at, tip = ((x1 + x2) / 2, low + 6), (x2, y2 + r, -0.1, -0.99)
    x, y, dx, dy = tip
    left, right = (x - 7 * dx + 3.5 * dy, y - 7 * dy - 3.5 * dx), (x - 7 * dx - 3.5 * dy, y - 7 * dy + 3.5 * dx)
    head = f"M{x:.1f} {y:.1f}L{left[0]:.1f} {left[1]:.1f}L{right[0]:.1f} {right[1]:.1f}z"
    weight = ' font-weight="700"' if edge.forced else ""
    return (
        f'<path d="{path}" fill="none" {stroke(colour)} stroke-width="{wide}"/><path d="{head}" {fill(colour)}/>',
        f'<text x="{at[0]:.0f}" y="{at[1]:.0f}" {FONT} font-size="10.5" text-anchor="middle" '
        f'{both("ink", "paper")} stroke-width="3" style="paint-order:stroke"{weight}>'
        f"{_escape(edge.label)}</text>",
    )


def _mask(tokens: TokenGrammar, at: Moment, y: float, width: int) -> tuple[str, float]:
    """How many tokens are legal, a bar of their share, and the first of them."""
    assert at.legal is not None
    share = len(at.legal) / max(at.vocab_size, 1)
    title = f"{len(at.legal):,} of {at.vocab_size:,} tokens are legal"
    if at.forced_tokens:
        pieces = " ".join(visible(_piece(tokens, i)) for i in at.forced_tokens)
        title += f"; certain without asking the model: {cut(pieces, 50)}"
    parts = [text(14, y + 4, title, size=12, extra='font-weight="600"')]
    bar = min(width - 28, 600)
    parts.append(f'<rect x="14" y="{y + 12}" width="{bar}" height="9" {both("paper", "line")}/>')
    parts.append(f'<rect x="14" y="{y + 12}" width="{max(bar * share, 1.5):.1f}" height="9" {both("hit", "hit")}/>')
    x, line = 14.0, y + 42
    certain = set((at.forced_tokens or [])[:1])
    shown = sorted(at.legal, key=lambda i: (i not in certain, i in tokens.stop_ids, len(_piece(tokens, i)), i))[:CHIPS]
    for i in shown:
        label = "end of text" if i in tokens.stop_ids else cut(visible(_piece(tokens, i)), 18)
        w = len(label) * CHAR + 12
        if x + w > width - 14:
            x, line = 14.0, line + 25
        look = both("new-tint", "new") if i in certain else both("plain-tint", "line")
        box = f'<rect x="{x:.1f}" y="{line - 14}" width="{w:.1f}" height="20" rx="4" {look}/>'
        parts.append(
            f'<g data-token="{i}"><title>token {i}</title>{box}<text x="{x + 6:.1f}" y="{line}" {FONT} font-size="11" '
            f'{fill("ink")} xml:space="preserve">{_escape(label)}</text></g>'
        )
        x += w + 6
    if len(at.legal) > len(shown):
        parts.append(text(x + 4, line, f"and {len(at.legal) - len(shown):,} more", size=11, colour="muted"))
    return "".join(parts), line - y + 22


def _piece(tokens: TokenGrammar, token: int) -> str:
    return (tokens.tokenizer.token_bytes(token) or b"").decode("utf-8", "replace")


def _legend(x: float, y: float) -> str:
    def circle(at: float, radius: float, paint: str) -> str:
        return f'<circle cx="{at}" cy="{y - 4}" r="{radius}" {paint}/>'

    def word(at: float, content: str) -> str:
        return text(at, y, content, size=10, colour="muted")

    ring = f'fill="none" {stroke("line")}'
    return (
        circle(x + 7, 6, both("hit-tint", "hit") + ' stroke-width="2.4"') + circle(x + 7, 2, fill("hit"))
        + word(x + 20, "now") + circle(x + 65, 6, ring) + circle(x + 65, 3, ring) + word(x + 78, "the text may end")
        + f'<path d="M{x + 184} {y - 4}h24" {stroke("evicted")} stroke-width="2.4"/>'
        + word(x + 214, "forced: no choice") + word(x + 326, "␣ and ·  a space")
    )  # fmt: skip
