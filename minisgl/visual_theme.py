"""Colours and glyphs of the pictures: Okabe and Ito's palette, told apart without colour as well.

Every state has a colour, a glyph and a border of its own, so that a picture survives printing in grey and any kind
of colour vision:

    new       bluish green   +   thick border              running   orange      diagonal stroke
    accessed  blue           •   thick border, lit path    locked    blue        dot
    evicted   vermillion     ×   dashed border, hatching   tree      sky blue    plain
    split     purple         ÷   dashed border             free      (paper)     outline only

Text is ink on paper or ink on a pale tint of the state's colour: a contrast of at least 4.5 to 1 in both themes,
lines at least 3 to 1 (`contrast` computes it; the tests check every pair that is drawn).
"""

from __future__ import annotations

# class name -> colour, in both themes.  Okabe and Ito (2008): E69F00 orange, 56B4E9 sky blue, 009E73 bluish green,
# 0072B2 blue, D55E00 vermillion, CC79A7 reddish purple; the tints are mixtures of these with the paper.
LIGHT = {
    "paper": "#ffffff", "panel": "#f4f6f8", "ink": "#1d2730", "muted": "#55626f", "line": "#7c8894", "faint": "#d5dbe1",
    "new": "#009e73", "new-tint": "#d6f1e8", "hit": "#0072b2", "hit-tint": "#d8eaf6", "evicted": "#d55e00",
    "evicted-tint": "#fbe4d5", "split": "#a8517f", "split-tint": "#f7e6ef", "plain-tint": "#f4f6f8",
    "tree": "#56b4e9", "locked": "#0072b2", "running": "#e69f00", "on-tree": "#0b2b3f", "on-locked": "#ffffff",
    "on-running": "#3d2a00",
}  # fmt: skip
DARK = {
    "paper": "#14181d", "panel": "#1d232a", "ink": "#e6ebf0", "muted": "#a3afbb", "line": "#74818e", "faint": "#333c46",
    "new": "#1fbf90", "new-tint": "#0c3a2e", "hit": "#56b4e9", "hit-tint": "#10344c", "evicted": "#f0803a",
    "evicted-tint": "#4a230c", "split": "#cc79a7", "split-tint": "#40213a", "plain-tint": "#1d232a",
    "tree": "#2f7fb0", "locked": "#7cc7f2", "running": "#e69f00", "on-tree": "#e6ebf0", "on-locked": "#08202f",
    "on-running": "#2e2000",
}  # fmt: skip
GLYPHS = {"new": "+", "hit": "•", "evicted": "×", "split": "÷", "": ""}
WORDS = {"new": "new", "hit": "accessed", "evicted": "evicted", "split": "split", "": "cached"}
# (text, on what): every pair that a picture may draw
TEXT_PAIRS = [
    ("ink", "paper"), ("muted", "paper"), ("ink", "panel"), ("muted", "panel"), ("ink", "new-tint"),
    ("ink", "hit-tint"), ("ink", "evicted-tint"), ("ink", "split-tint"), ("ink", "plain-tint"),
]  # fmt: skip
LINE_PAIRS = [(name, "paper") for name in ("line", "new", "hit", "evicted", "split", "locked")]


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two #rrggbb colours, from 1 to 21 (WCAG 2.2)."""
    lighter, darker = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def svg_style() -> str:
    """The dark theme of a static picture: its colours are attributes, which these rules override.

    A viewer that knows neither classes nor media queries (a converter to PDF, say) shows the light one.
    """
    rules = "".join(
        f".mv-{kind[0]}-{name}{{{kind}:{colour}}}" for name, colour in DARK.items() for kind in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"


def css_variables() -> str:
    """The palette for the player: light, dark by the system, and dark by a notebook's own theme."""

    def block(colours: dict[str, str]) -> str:
        return "".join(f"--mv-{name}:{colour};" for name, colour in colours.items())

    dark_page = (
        'body[data-jp-theme-light="false"] .mv,body.vscode-dark .mv,body.vscode-high-contrast .mv,'
        '.mv[data-theme="dark"]'
    )
    light_page = 'body[data-jp-theme-light="true"] .mv,body.vscode-light .mv,.mv[data-theme="light"]'
    return (
        f".mv{{{block(LIGHT)}color-scheme:light}}"
        f"@media (prefers-color-scheme: dark){{.mv{{{block(DARK)}color-scheme:dark}}}}"
        f"{light_page}{{{block(LIGHT)}color-scheme:light}}{dark_page}{{{block(DARK)}color-scheme:dark}}"
    )


def fill(name: str) -> str:
    """SVG attributes: this colour as fill."""
    return f'class="mv-f-{name}" fill="{LIGHT[name]}"'


def stroke(name: str) -> str:
    """SVG attributes: this colour as stroke."""
    return f'class="mv-s-{name}" stroke="{LIGHT[name]}"'


def both(inside: str, outline: str) -> str:
    """SVG attributes: fill and stroke."""
    classes = f"mv-f-{inside} mv-s-{outline}"
    return f'class="{classes}" fill="{LIGHT[inside]}" stroke="{LIGHT[outline]}"'
