"""The suite's figures as one SVG (`--plot FILE`), without any drawing library, readable in black and white.

    workload        hit rate, and the optimum as a mark      throughput over that without a cache
    tot             [##########        |]  0.91 of 0.95      [///////////////]  4.3x

and under it, with --ablate, a group of bars for each workload: its throughput with each mechanism off. What a bar
means is written beside it, in words and figures; filling (solid, hatched, outlined) tells kinds of bars apart, colour
does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any

LEFT, BAR, GAP, ROW = 150, 250, 150, 24
WIDTH = LEFT + 2 * (BAR + GAP) - 20
_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#fff"/><rect width="2.5" height="6" fill="#333"/></pattern>'
)


def svg(result: dict[str, Any]) -> str:
    """The picture of `suite_report.figures`' result."""
    workloads = result["workloads"]
    title = f"minisgl: {result['model']}, {result['dtype']}, {result['machine']}"
    parts: list[str] = []
    y = _header(parts, 60, "hit rate (mark: the optimum)", "throughput, times that without a cache")
    scale = _speed_scale(workloads)
    for name, found in workloads.items():
        _workload_row(parts, y, name, found, scale)
        y += ROW
    ablated = {name: found for name, found in workloads.items() if len(found["variants"]) > 2}
    if ablated:
        y = _header(parts, y + 30, "throughput with a mechanism off, as a share of everything on", "")
        for name, found in ablated.items():
            y = _ablation_rows(parts, y, name, found) + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 16}" viewBox="0 0 {WIDTH} {y + 16}" '
        f'role="img" font-family="sans-serif" font-size="13"><title>{escape(title)}</title><defs>{_HATCH}</defs>'
        f'<rect width="{WIDTH}" height="{y + 16}" fill="#fff"/>'
    )
    return "\n".join([head, _text(12, 26, title, size=15), *parts, "</svg>"]) + "\n"


def _header(parts: list[str], y: float, left: str, right: str) -> float:
    parts.append(_text(LEFT, y, left, weight="bold"))
    parts.append(_text(LEFT + BAR + GAP, y, right, weight="bold"))
    return y + 14


def _workload_row(parts: list[str], y: float, name: str, found: dict[str, Any], scale: Callable) -> None:
    full = found["full"]
    hit, best = max(full["hit_rate"], 0.0), full["optimal_hit_rate"]
    parts.append(_text(LEFT - 10, y + 13, name, anchor="end"))
    parts.append(_bar(LEFT, y, BAR, "none"))
    parts.append(_bar(LEFT, y, BAR * hit, "#777"))
    x = LEFT + BAR * best
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2}" y2="{y + 18}" stroke="#000" stroke-width="3"/>')
    parts.append(_text(LEFT + BAR + 8, y + 13, f"{hit:.3f} of {best:.3f}"))
    off = found["variants"].get("no cache")
    if off is not None:
        start = LEFT + BAR + GAP
        parts.append(_bar(start, y, scale(off["speedup"]), "url(#hatch)"))
        parts.append(_text(start + scale(off["speedup"]) + 8, y + 13, f"{off['speedup']:.2f}x"))


def _speed_scale(workloads: dict[str, Any]) -> Callable[[float], float]:
    """From a speed-up to a length: linear from 0, the largest fills the bar."""
    variants = [found["variants"] for found in workloads.values()]
    most = math.ceil(max((v["no cache"]["speedup"] for v in variants if "no cache" in v), default=1.0))
    return lambda speedup: (BAR - 40) * speedup / most


def _ablation_rows(parts: list[str], y: float, workload: str, found: dict[str, Any]) -> float:
    parts.append(_text(12, y + 13, workload, weight="bold"))
    shares = {"full": 1.0} | {name: 1 / variant["speedup"] for name, variant in found["variants"].items()}
    most = max(1.0, *shares.values())
    for name, share in shares.items():
        parts.append(_text(LEFT + 90, y + 13, name, anchor="end"))
        fill = "#777" if name == "full" else "url(#hatch)"
        parts.append(_bar(LEFT + 100, y, BAR * 1.5 * share / most, fill))
        parts.append(_text(LEFT + 108 + BAR * 1.5 * share / most, y + 13, f"{share:.2f}"))
        y += ROW - 4
    return y


def _bar(x: float, y: float, width: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{max(width, 0):.1f}" height="16" fill="{fill}" stroke="#000"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", size: int = 13) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
