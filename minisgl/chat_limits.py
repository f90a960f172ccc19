"""A chat template is a program that came with the model: what it may reach, and what it may cost.

Jinja's sandbox keeps it from reaching anything but its variables. It doesn't keep it from never ending (loops in loops,
a macro that calls itself twice) or from making a text that fills the memory (`'a' * 10 ** 10`, a text doubled forty
times). So here

    time     every block, call, filter, test and loop condition passes a gate that looks at the clock: SECONDS in all,
             of the thread's own work
    size     what multiplies (`*` `**` `+` `~` `%`, padding, replacing, joining) is worked out before it is done: up to
             LONGEST characters or items in one value, and in the rendered text

This is for templates that are wrong, and for most that are malicious. It is no wall: a list that contains a list ten
times that contains a list ten times ... has few items and endless text. Take models from people whom you trust.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

SECONDS = 2.0
LONGEST = 20_000_000  # characters of a text, items of a list
_DIGITS = 10_000  # of an integer
_WIDTH = 10_000  # of a column: `center`, `%9d`, `tojson(indent=...)`
_NUMBER = re.compile(r"\d{5,}")


class LimitError(Exception):
    """A template has had its share."""


class _Gated(jinja2.compiler.CodeGenerator):
    """Writes templates as Python that passes the environment's gate wherever it may be going round in circles."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: jinja2.compiler.Frame) -> None:
        self.writeline("environment.gate()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        if node.test is not None:
            gate = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("gate"), [], [], None, None)
            node.test = jinja2.nodes.And(gate, node.test)
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


_NEVER = float("inf")


class _Clock(threading.local):
    """Of what this thread renders: when it must be done, and how often it passed the gate (which asks the system for
    the time now and then only: that takes longer than most of what a template does)."""

    end = _NEVER
    passed = 0


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox with limits; one for any number of threads."""

    code_generator_class = _Gated
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any):
        super().__init__(**options)
        self._clock = _Clock()
        self.globals.pop("lipsum", None)  # as much nonsense as is asked for, without passing any gate
        self.tests.update({name: self._gated(test) for name, test in self.tests.items()})
        self.filters.update({name: self._filter(name, do) for name, do in {**self.filters, **filters}.items()})

    def limited(self, pieces: Callable[[], Iterable[str]]) -> str:
        """The text that a template's pieces make."""
        self._clock.end = time.thread_time() + SECONDS
        found, length = [], 0
        try:
            for piece in pieces():
                found.append(piece)
                length += len(piece)
                _check_length(length)
        finally:
            self._clock.end = _NEVER
        return "".join(found)

    def gate(self) -> bool:
        clock = self._clock
        clock.passed += 1
        if not clock.passed & 31 and time.thread_time() > clock.end:
            raise LimitError(f"it takes longer than {SECONDS:g} s")
        return True

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        self.gate()
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # Jinja wraps str.format
        if isinstance(owner, (str, bytes, int, list)):
            _check_method(owner, getattr(obj, "__name__", ""), (*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.gate()
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def concat(self, parts: tuple[Any, ...]) -> str:
        self.gate()
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def _gated(self, do: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(do)
        def gated(*args: Any, **kwargs: Any) -> Any:
            self.gate()
            return do(*args, **kwargs)

        return gated

    def _filter(self, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        skipped = 1 if hasattr(do, "jinja_pass_arg") else 0  # what Jinja passes before the value

        @functools.wraps(do)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.gate()
            given = (*args[skipped + 1 :], *kwargs.values())
            if any(isinstance(value, int) and abs(value) > _WIDTH for value in given) and name not in _NUMERIC:
                raise LimitError(f"{name} with a number over {_WIDTH}")
            value = args[skipped] if len(args) > skipped else None
            if name in ("replace", "join", "format", "indent") and isinstance(value, (str, list, tuple)):
                _check_growth(name, value, given)
            found = do(*args, **kwargs)
            if isinstance(found, (str, list, tuple)):
                _check_length(len(found))
            return found

        return limited


_NUMERIC = frozenset(  # filters whose numbers make nothing long
    ("abs", "d", "default", "filesizeformat", "float", "int", "max", "min", "round", "sum", "truncate")
)


def _check_length(length: int) -> None:
    if length > LONGEST:
        raise LimitError(f"it makes a value of more than {LONGEST} characters or items")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, Sized) and isinstance(times, int):
                _check_length(len(value) * times)
        if isinstance(left, int) and isinstance(right, int):
            _check_digits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_digits(left.bit_length() * max(right, 0))
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        _check_length(len(left) + len(right))
    elif operator == "%" and isinstance(left, (str, bytes)):
        _check_width(left if isinstance(left, str) else left.decode("latin-1"), right)


def _check_digits(bits: int) -> None:
    if bits > 4 * _DIGITS:
        raise LimitError(f"it makes a number of more than {_DIGITS} digits")


def _check_width(text: str, values: Any) -> None:
    """Format strings, `%99999d` or `{:99999}`, and their `*` or nested fields."""
    given = values if isinstance(values, tuple) else (values,)
    widest = max((abs(value) for value in given if isinstance(value, int)), default=0)
    if _NUMBER.search(text) or (widest > _WIDTH and ("*" in text or "{" in text)):
        raise LimitError(f"it formats to a width over {_WIDTH}")


def _check_method(owner: Any, name: str, given: tuple[Any, ...]) -> None:
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"):
        if any(isinstance(value, int) and value > _WIDTH for value in given):
            raise LimitError(f"{name} with a number over {_WIDTH}")
    elif name in ("replace", "join", "format", "format_map", "translate"):
        _check_growth(name, owner, given)


def _check_growth(name: str, value: Any, given: tuple[Any, ...]) -> None:
    """A text that is made of a text, or of several."""
    if name.startswith("format") and isinstance(value, str):
        inner = [v for v in given if isinstance(v, dict)]
        _check_width(value, (*given, *(w for v in inner for w in v.values())))
    elif name == "replace" and len(given) >= 2:
        old, new = str(given[0]), str(given[1])
        text = value if isinstance(value, (str, bytes)) else str(value)
        times = text.count(old) if isinstance(text, str) else len(text)
        _check_length(len(text) + times * len(new))
    elif name == "join":
        first = given[0] if given else ""
        parts, mark = (first, value) if isinstance(value, (str, bytes)) else (value, first)
        if isinstance(parts, (list, tuple)):
            _check_length(sum(len(p) if isinstance(p, str) else 1 for p in parts) + len(parts) * len(str(mark)))
    elif name == "indent" and isinstance(value, str):
        width = given[0] if given else 4
        _check_length(len(value) + (value.count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))
    elif name == "translate":
        tables = [table for table in given if isinstance(table, dict)]
        _check_length(len(value) * max((len(v) for t in tables for v in t.values() if isinstance(v, str)), default=1))
