"""Error messages for people: one line, of a length that fits a log, whatever a caller's value in it looks like."""

from __future__ import annotations

LONGEST = 400  # characters


def one_line(message: object) -> str:
    """`message` in one line; of a long one the beginning, which says what is wrong, and the end."""
    text = " ".join(str(message).split("\n")).strip()
    text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate could not even be printed
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 100]} ... {text[-80:]}"
