"""A view as one HTML file: the player and its data inline, nothing fetched, no build step."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from .visual_data import dumps
from .visual_theme import css_variables

_EXPORT = "export default player;"


@cache
def asset(name: str) -> str:
    """The text of a file in minisgl/assets."""
    return (files("minisgl") / "assets" / name).read_text(encoding="utf-8")


def stylesheet() -> str:
    """The player's style, palette included."""
    return css_variables() + "\n" + asset("visual.css")


def player_page(title: str, script: str, data: dict[str, Any], fallback: str) -> str:
    """A page that plays `data` with the module in assets/`script`; `fallback` is shown where scripts are off."""
    module = asset(script)
    assert module.rstrip().endswith(_EXPORT), f"{script} must end with its default export"
    module = module.rstrip()[: -len(_EXPORT)].replace("</script", "<\\/script")
    body = (
        f'<div id="view"></div><noscript>{fallback}</noscript>'
        f'<script type="application/json" id="data">{dumps(data)}</script>'
        f'<script type="module">{module}\nplayer.mount(document.getElementById("view"), '
        'JSON.parse(document.getElementById("data").textContent));</script>'
    )
    return _document(title, body)


def picture_page(title: str, svg: str) -> str:
    """A page that shows a picture."""
    return _document(title, f'<div class="mv mv-page">{svg}</div>')


def _document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{stylesheet()}\n"
        "html,body{margin:0;background:#fff}@media (prefers-color-scheme: dark){html,body{background:#14181d}}"
        f"body{{padding:12px;box-sizing:border-box}}</style></head><body>{body}</body></html>\n"
    )
