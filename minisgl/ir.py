"""What a program appends to its state: the small vocabulary that `gen`, `select`, roles and text are made of.

    s += user("Name a city. ") + assistant(gen("city", stop="."))

        ExprList: RoleBegin(user) Text("Name a city. ") RoleEnd(user) RoleBegin(assistant) Gen(city) RoleEnd(assistant)

An expression is inert data.  The interpreter executes a flat list of them on a state, the tracer records them, a
compiled program replays them; none of the three needs the others' classes.  `+` joins expressions and strings from
either side, and `flatten` gives the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The regular expression behind gen(dtype=...).  Optional sign; no leading zeros, which json and int literals refuse.
DTYPE_REGEX: dict[type, str] = {
    int: r"[+-]?(0|[1-9][0-9]*)",
    float: r"[+-]?(0|[1-9][0-9]*)(\.[0-9]+)?",
    bool: r"(True|False)",
    str: r'"[^"\\\n]*"',
}


class Expr:
    """Anything that can be appended to a state with `s += ...`."""

    def __add__(self, other: Any) -> ExprList:
        return ExprList([self, as_expr(other)])

    def __radd__(self, other: Any) -> ExprList:
        return ExprList([as_expr(other), self])

    def flatten(self) -> Iterator[Expr]:
        yield self


@dataclass(frozen=True)
class Text(Expr):
    value: str


@dataclass(frozen=True)
class Gen(Expr):
    """One generation.  `params`: what the call itself set, by SamplingParams' names; the rest comes from `run()`.

    options    return_logprob, logprob_start_len, top_logprobs_num, return_text_in_logprobs where set
    dtype      int, float, bool, str or None
    reasoning  model type of `separate_reasoning` around it, or None
    """

    name: str | None
    params: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: type | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class Select(Expr):
    """The best of `choices` under `method` (a choices method of `choices.py`)."""

    name: str | None
    choices: tuple[Any, ...]
    method: Any = None


@dataclass(frozen=True)
class Image(Expr):
    """path, URL, bytes or a PIL image"""

    source: Any


@dataclass(frozen=True)
class Video(Expr):
    path: Any
    num_frames: int


@dataclass(frozen=True)
class RoleBegin(Expr):
    role: str


@dataclass(frozen=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True)
class VarBegin(Expr):
    """From here on the state's text also goes to variable `name`, until VarEnd."""

    name: str


@dataclass(frozen=True)
class VarEnd(Expr):
    name: str


@dataclass(frozen=True)
class Reference(Expr):
    """The text of another state's variable; whoever executes it waits for the variable without blocking a thread."""

    state: Any
    name: str
    index: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Join(Expr):
    """`s += join(group)`."""

    group: Any


@dataclass(frozen=True)
class Action(Expr):
    """A function that the state's queue calls when it gets there (a fork hands its children over this way)."""

    function: Callable[[], None]


class ExprList(Expr):
    def __init__(self, items: Sequence[Expr] = ()):
        self.items: list[Expr] = []
        for item in items:
            self.items.extend(item.items if isinstance(item, ExprList) else [item])

    def flatten(self) -> Iterator[Expr]:
        for item in self.items:
            yield from item.flatten()

    def __repr__(self) -> str:
        return f"ExprList({self.items})"


def as_expr(value: Any) -> Expr:
    """A string, an expression or a list of them as an expression; TypeError for anything else."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, (list, tuple)):
        return ExprList([as_expr(item) for item in value])
    raise TypeError(
        f"a state takes text, expressions (gen, select, user, ...) or lists of them, got {type(value).__name__}; "
        "for a number or an object write str(value)"
    )


def role_expr(role: str, expr: Any) -> ExprList:
    return ExprList([RoleBegin(role), *([] if expr is None else [as_expr(expr)]), RoleEnd(role)])
