"""A chat template is a program that came with the model: what it may reach, and what it may cost.

Jinja's sandbox keeps it from reaching anything but its variables. It doesn't keep it from never ending (loops in loops,
a macro that calls itself twice) or from making a text that fills the memory (`'a' * 10 ** 10`, a text doubled forty
times). So here

    time     every block, call, filter, test and loop condition passes a gate that looks at the clock: SECONDS in all,
             of the thread's own work
    size     what multiplies (`*` `**` `+` `~` `%`, padding, replacing, joining) is worked out before it is done: up to
             LONGEST characters or items in one value, and in the rendered text. Lists in lists count as often as they
             would be printed: one that contains a list twice that contains a list twice ... has few items and endless
             text. So whatever makes a list, tuple or dict is told what it weighs (`weighed`), which is quick, since
             its parts have been weighed before

This is for templates that are wrong, and for most that are malicious. It is no wall; take models from people whom you
trust.
"""

from __future__ import annotations

import functools
import itertools
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
import jinja2.utils

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

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:
        self.write("(environment.gate() and ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:
        self._weighed(node, super().visit_List, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        self._weighed(node, super().visit_Dict, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        if node.ctx == "load":
            self._weighed(node, super().visit_Tuple, frame)
        else:  # the names that something is assigned to
            super().visit_Tuple(node, frame)

    def _weighed(self, node: Any, visit: Callable[[Any, Any], None], frame: jinja2.compiler.Frame) -> None:
        self.write("environment.weighed(")
        visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


_CONTAINERS = (list, tuple, set, frozenset, dict, type({}.keys()), type({}.values()), type({}.items()))
_NEVER = float("inf")
_SMALL = 256  # what weighs less is weighed anew each time


class _Clock(threading.local):
    """Of what this thread renders: when it must be done, how often it passed the gate (which asks the system for the
    time now and then only: that takes longer than most of what a template does), and what its larger values weigh."""

    end = _NEVER
    passed = 0

    def __init__(self) -> None:
        self.weights: dict[int, tuple[Any, int]] = {}  # by id, with the value itself, so that the id remains its own


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, less that it prints what it contains: it may change at any time, and contain itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox with limits; one for any number of threads."""

    code_generator_class = _Gated
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any):
        super().__init__(**options)
        self._clock = _Clock()
        self.globals["namespace"] = _Namespace
        self.globals.pop("lipsum", None)  # as much nonsense as is asked for, without passing any gate
        self.tests.update({name: self._gated(test) for name, test in self.tests.items()})
        self.filters.update({name: self._filter(name, do) for name, do in {**self.filters, **filters}.items()})

    def limited(self, pieces: Callable[[], Iterable[str]]) -> str:
        """The text that a template's pieces make."""
        self._clock.end = time.thread_time() + SECONDS
        try:
            return self.joined(pieces())
        finally:
            self._clock.end = _NEVER
            self._clock.weights.clear()

    def joined(self, pieces: Iterable[str]) -> str:
        """Texts that are made one after the other, with a look at the clock and the length each time."""
        found, length = [], 0
        for piece in pieces:
            self.gate()
            found.append(piece)
            length += len(piece)
            _check_length(length)
        return "".join(found)

    def gate(self) -> bool:
        clock = self._clock
        clock.passed += 1
        if not clock.passed & 31 and time.thread_time() > clock.end:
            raise LimitError(f"it takes longer than {SECONDS:g} s")
        return True

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        self.gate()
        self.check(*args, *kwargs.values())
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # Jinja wraps str.format
        if isinstance(owner, (str, bytes, int, list)):
            self._check_method(owner, getattr(obj, "__name__", ""), (*args, *kwargs.values()))
        found = super().call(context, obj, *args, **kwargs)
        return found if isinstance(owner, str) else self.weighed(found)  # a text's pieces are no more than the text

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.gate()
        _check_operation(operator, left, right)
        weight = 0
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                weight = self.weight(value) * times if isinstance(times, int) and _is_container(value) else weight
        elif operator == "+" and _is_container(left):
            weight = self.weight(left) + self.weight(right)
        elif operator == "%" and isinstance(left, str):
            weight = len(left) + left.count("%") * self.weight(right)
        _check_length(weight)
        found = super().call_binop(context, operator, left, right)
        if _is_container(found):
            self._remember(found, weight)
        return found

    def concat(self, parts: tuple[Any, ...]) -> str:
        self.gate()
        self.check(*parts)
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    # ---- weights -------------------------------------------------------------------------------------------------

    def weighed(self, value: Any) -> Any:
        """The value itself, unless it is too much."""
        if _is_container(value):
            _check_length(self.weight(value))
        return value

    def check(self, *values: Any) -> None:
        """Refuse values that are too much together."""
        _check_length(sum(self.weight(value) for value in values))

    def weight(self, value: Any) -> int:
        """About how many characters and items there are to print, compare or copy."""
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, int):
            return 1 + value.bit_length() // 4
        if not _is_container(value):
            return 1
        known = self._clock.weights.get(id(value))
        if known is not None:
            return known[1]
        self.gate()
        self._clock.weights[id(value)] = value, 1  # should it contain itself
        total = 1
        try:
            for i, part in enumerate(_parts(value)):
                total += 1 + (len(part) if type(part) is str else self.weight(part))
                if not i & 1023:
                    self.gate()
        finally:
            del self._clock.weights[id(value)]
        self._remember(value, total)
        return total

    def _remember(self, value: Any, weight: int) -> None:
        if weight > _SMALL:
            self._clock.weights[id(value)] = value, weight

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
            self.check(value, *given)
            if name in ("replace", "join", "format", "indent") and isinstance(value, (str, list, tuple)):
                self._check_growth(name, value, given)
            elif name == "pprint" and self.weight(value) > _WIDTH:
                raise LimitError(f"pprint of more than {_WIDTH} characters or items")
            found = do(*args, **kwargs)
            if isinstance(found, str):
                _check_length(len(found))
            return self.weighed(found)

        return limited

    def _check_method(self, owner: Any, name: str, given: tuple[Any, ...]) -> None:
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"):
            if any(isinstance(value, int) and value > _WIDTH for value in given):
                raise LimitError(f"{name} with a number over {_WIDTH}")
        elif name in ("replace", "join", "format", "format_map", "translate"):
            self._check_growth(name, owner, given)

    def _check_growth(self, name: str, value: Any, given: tuple[Any, ...]) -> None:
        """A text that is made of a text, or of several."""
        if name.startswith("format") and isinstance(value, str):
            inner = [v for v in given if isinstance(v, dict)]
            _check_width(value, (*given, *(w for v in inner for w in v.values())))
            _check_length(len(value) + (value.count("{") + value.count("%")) * self.weight(given))
        elif name == "replace" and len(given) >= 2:
            old, new = str(given[0]), str(given[1])
            text = value if isinstance(value, (str, bytes)) else str(value)
            times = text.count(old) if isinstance(text, str) else len(text)
            _check_length(len(text) + times * len(new))
        elif name == "join":
            first = given[0] if given else ""
            parts, mark = (first, value) if isinstance(value, (str, bytes)) else (value, first)
            if isinstance(parts, (list, tuple)):
                _check_length(self.weight(parts) + len(parts) * len(str(mark)))
        elif name == "indent" and isinstance(value, str):
            width = given[0] if given else 4
            _check_length(len(value) + (value.count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))
        elif name == "translate":
            tables = [table for table in given if isinstance(table, dict)]
            longest = max((len(v) for t in tables for v in t.values() if isinstance(v, str)), default=1)
            _check_length(len(value) * longest)


_NUMERIC = frozenset(  # filters whose numbers make nothing long
    ("abs", "d", "default", "filesizeformat", "float", "int", "max", "min", "round", "sum", "truncate")
)


def _is_container(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)


def _parts(value: Any) -> Iterable[Any]:
    return itertools.chain(value.keys(), value.values()) if isinstance(value, dict) else value


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
