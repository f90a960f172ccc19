"""Checks of arguments: each raises a one-line ValueError that names the argument."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """One of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """None, or an integer of at least 1."""
    if value is not None:
        check_int(name, value, 1)


def check_int(name: str, value: Any, least: int | None = None) -> None:
    """An integer, of at least `least`; True and False are none."""
    integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)  # numpy's count
    if not integer or (least is not None and value < least):
        limit = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be an integer{limit}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_switch(name: str, value: Any, auto: bool) -> bool:
    """True, False, or "auto", which is what `auto` says; returns what was chosen."""
    if value == "auto":
        return auto
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True, False or 'auto', got {value!r}")
    return value
