"""Small charts as SVG for the tutorials: bars, lines, and a timeline. No dependency, no state.

Each function returns a `Sketch`, which a notebook shows when it is the last value of a cell. Pictures carry their own
white background, so that they read the same in a light and in a dark theme. Colours are the Okabe-Ito palette, and
whatever is coloured is labelled too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#555555")
_INK, _GRID, _CHAR = "#222222", "#dddddd", 6.3


class Sketch:
    """A picture; `svg` is its text."""

    def __init__(self, body: Sequence[str], width: float, height: float, title: str):
        self.title = title
        self.svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="12" role="img">'
            f'<title>{escape(title)}</title><rect width="100%" height="100%" fill="#ffffff"/>'
            f'<text x="12" y="20" font-weight="bold" fill="{_INK}">{escape(title)}</text>{"".join(body)}</svg>'
        )

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Sketch({self.title!r})"


def bars(values: Mapping[str, float], title: str, unit: str = "", limit: tuple[str, float] | None = None) -> Sketch:
    """Horizontal bars, one for each name. `limit`: (name, value) of a dashed line, an optimum or a bound, say."""
    left = 24 + max(len(name) for name in values) * _CHAR
    most = max([*values.values(), limit[1] if limit else 0.0]) or 1.0
    span, body = 420.0, []
    for i, (name, value) in enumerate(values.items()):
        y, length = 36 + 26 * i, span * value / most
        body.append(_text(left - 8, y + 13, name, "end"))
        body.append(f'<rect x="{left:.0f}" y="{y}" width="{length:.1f}" height="18" fill="{PALETTE[0]}"/>')
        inside = length > span / 2
        color = "#ffffff" if inside else _INK
        at = left + length + (-6 if inside else 6)
        body.append(_text(at, y + 13, _number(value) + unit, "end" if inside else "start", color))
    bottom = 36 + 26 * len(values)
    if limit:
        x = left + span * limit[1] / most
        body.append(f'<path d="M{x:.1f} 30V{bottom}" stroke="{PALETTE[1]}" stroke-width="2" stroke-dasharray="5 3"/>')
        body.append(_text(x, bottom + 14, f"{limit[0]} {_number(limit[1])}{unit}", "middle", "#A84800"))
        bottom += 18
    return Sketch(body, left + span + 90, bottom + 8, title)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], title: str, x: str, y: str, log: str = ""
) -> Sketch:
    """Points joined by lines, a marker shape and a dash pattern for each series. `log`: "x", "y" or "xy"."""
    points = [point for line in series.values() for point in line]
    x_axis = _Axis([p[0] for p in points], 70, 470, "x" in log)
    y_axis = _Axis([p[1] for p in points], 270, 40, "y" in log)
    body = []
    for value in x_axis.ticks():
        at = x_axis(value)
        body.append(f'<path d="M{at:.1f} 40V270" stroke="{_GRID}"/>' + _text(at, 285, _number(value), "middle"))
    for value in y_axis.ticks():
        at = y_axis(value)
        body.append(f'<path d="M70 {at:.1f}H470" stroke="{_GRID}"/>' + _text(64, at + 4, _number(value), "end"))
    body += [_text(270, 304, x, "middle"), _text(12, 36, y, "start", "#555555")]
    for i, (name, line) in enumerate(series.items()):
        color, dash = PALETTE[i % len(PALETTE)], ("", "6 3", "2 3", "8 3 2 3")[i % 4]
        places = [(x_axis(a), y_axis(b)) for a, b in line]
        path = "M" + " L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        body.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>')
        body += [_marker(i, a, b, color) for a, b in places]
        at = 50 + 20 * i
        body.append(f'<path d="M486 {at}h26" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>')
        body.append(_marker(i, 499, at, color) + _text(518, at + 4, name))
    width = 530 + max(len(name) for name in series) * _CHAR
    return Sketch(body, width, 314, title)


def timeline(
    lanes: Mapping[str, Sequence[tuple[float, float, str, str]]], title: str, unit: str = "", width: float = 760
) -> Sketch:
    """Lanes of spans (start, end, kind, label): each kind has a colour and a height, named in a legend below."""
    kinds = list(dict.fromkeys(kind for spans in lanes.values() for _, _, kind, _ in spans))
    left = 24 + max(len(name) for name in lanes) * _CHAR
    end = max((span[1] for spans in lanes.values() for span in spans), default=1.0)
    scale = (width - left - 16) / end
    height = 22 if len(lanes) <= 12 else 16
    body = []
    for i, (name, spans) in enumerate(lanes.items()):
        top = 32 + i * (height + 4)
        body.append(_text(left - 8, top + height - 7, name, "end"))
        for start, stop, kind, label in spans:
            number = kinds.index(kind) % len(PALETTE)
            at, size = left + start * scale, (stop - start) * scale
            tall = _tall(number, height)
            body.append(
                f'<rect x="{at:.1f}" y="{top + (height - tall) / 2:g}" width="{max(size, 0.5):.1f}" height="{tall}" '
                f'fill="{PALETTE[number]}" stroke="#ffffff" stroke-width="0.7"/>'
            )
            if label and len(label) * _CHAR < size:
                ink = _INK if number in (4, 5, 6) else "#ffffff"
                body.append(_text(at + size / 2, top + height - 7, label, "middle", ink))
    bottom = 36 + len(lanes) * (height + 4)
    for value in _Axis([0.0, end], 0, 1, False).ticks():
        at = left + value * scale
        body.append(f'<path d="M{at:.1f} {bottom}v5" stroke="{_INK}"/>')
        body.append(_text(at, bottom + 17, _number(value), "middle"))
    body.append(_text(width - 10, bottom + 30, unit, "end"))
    at = left
    for i, kind in enumerate(kinds):
        tall = _tall(i, 16)
        body.append(
            f'<rect x="{at:.0f}" y="{bottom + 34 - tall / 2:g}" width="12" height="{tall}" '
            f'fill="{PALETTE[i % len(PALETTE)]}"/>'
        )
        body.append(_text(at + 17, bottom + 38, kind))
        at += 34 + len(kind) * _CHAR
    return Sketch(body, width, bottom + 50, title)


def _tall(number: int, height: int) -> int:
    """The height of a kind's bars: it tells neighbouring kinds apart where colour does not."""
    return height if number % 2 == 0 else round(height * 0.62)


class _Axis:
    """Values to pixels, linear from 0 or logarithmic."""

    def __init__(self, values: Sequence[float], begin: float, end: float, log: bool):
        self.log, self.begin, self.end = log, begin, end
        self.low = min(values) if log else min(0.0, min(values))
        self.high = max(values) if max(values) > self.low else self.low + 1

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log2(self.low)), math.ceil(math.log2(self.high))
            step = max(1, (last - first) // 6)
            return [2.0**n for n in range(first, last + 1, step) if self.low <= 2.0**n <= self.high]
        raw = (self.high - self.low) / 5
        size = 10 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)]


def _marker(number: int, x: float, y: float, color: str) -> str:
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>',
        f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{color}"/>',
        f'<path d="M{x:.1f} {y - 5:.1f}l5 9h-10z" fill="{color}"/>',
        f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" fill="{color}"/>',
    )
    return shapes[number % len(shapes)]


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = _INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
