"""Tracing: run a program's Python once with placeholders and keep what it appended, as a dataflow graph.

    @function                                  ConstantText "Q: "
    def qa(s, question):                           |
        s += "Q: " + question + "\\nA:"         Argument question
        s += gen("answer", stop="\\n")              |
                                               ConstantText "\\nA:"
                                                   |
                                               Gen answer

A placeholder is a `str` whose characters are a mark that no text has ("\\ue000" number "\\ue001").  So it survives
everything that only moves text around: f-strings, `+`, `"\\n".join(...)`, `format`; the graph is cut at the marks.
What depends on the text itself (comparing it, its length, iterating, `.upper()`) cannot be a graph, and is refused
with a TraceError that names the line.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from .backends.base import Prompt
from .chat import Conversation, Render, plain_render
from .graph import Graph, Node
from .ir import (
    Expr,
    Gen,
    Image,
    Join,
    RoleBegin,
    RoleEnd,
    Select,
    Text,
    VarBegin,
    VarEnd,
    Video,
    as_expr,
)
from .state import CONCATENATE, GATHER, ForkGroup, ProgramState

_MARK = re.compile("\ue000([0-9]+)\ue001")
_PACKAGE = str(Path(__file__).parent)
_local = threading.local()


class TraceError(ValueError):
    """The program's Python depends on a value that is known only when it runs."""


def current_tracer() -> Tracer | None:
    """The tracer whose program is being traced on this thread."""
    return getattr(_local, "tracer", None)


def _line() -> str:
    """file:line of the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "the program"


@dataclass(frozen=True)
class Origin:
    """Where a placeholder's value comes from: an argument, or with a lane that state's variable; then down a path."""

    what: str  # for errors
    name: str
    lane: int | None = None
    path: tuple[Any, ...] = ()


class Placeholder(str):
    """A value of run time, standing in text as a mark."""

    _origin: Origin
    _tracer: Tracer

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TraceError(
            f"{_line()}: the program's Python depends on the value of {self._origin.what}, which is known only when "
            "it runs; a traced or compiled program can only put it into text"
        )

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            self._refuse()
        origin = self._origin
        return self._tracer.placeholder(replace(origin, what=f"{origin.what}[{key!r}]", path=(*origin.path, key)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # pyright: ignore
    __bool__ = __len__ = __iter__ = __contains__ = __int__ = __float__ = __index__ = _refuse  # pyright: ignore
    __mul__ = __rmul__ = __mod__ = _refuse  # pyright: ignore

    def __hash__(self) -> int:
        self._refuse()


for _name in dir(str):  # what a text method returns depends on the text
    if not _name.startswith("_"):
        setattr(Placeholder, _name, Placeholder._refuse)


def split_marks(text: str) -> Iterator[str | int]:
    """The constant pieces of a text and, between them, the numbers of its placeholders."""
    pieces = _MARK.split(text)
    for i, piece in enumerate(pieces):
        if i % 2:
            yield int(piece)
        elif piece:
            if "\ue000" in piece or "\ue001" in piece:
                raise TraceError(f"{_line()}: a text was cut in the middle of a value that is known only at run time")
            yield str(piece)


def has_mark(value: Any) -> bool:
    if isinstance(value, str):
        return _MARK.search(str.__str__(value)) is not None
    if isinstance(value, dict):
        return any(has_mark(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(has_mark(item) for item in value)


class Tracer:
    """Records the nodes of one program.  `known`: arguments that are constants."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.values: list[Placeholder] = []
        self.states: list[TracerState] = []

    def placeholder(self, origin: Origin) -> Placeholder:
        value = Placeholder(f"\ue000{len(self.values)}\ue001")
        value._origin, value._tracer = origin, self
        self.values.append(value)
        return value

    def argument(self, name: str) -> Placeholder:
        return self.placeholder(Origin(f"argument {name!r}", name))

    def variable(self, lane: int, name: str) -> Placeholder:
        return self.placeholder(Origin(f"variable {name!r}", name, lane))

    def state(self) -> TracerState:
        state = TracerState(self, len(self.states))
        self.states.append(state)
        return state

    def add(self, kind: str, lane: int, label: str, **fields: Any) -> Node:
        node = Node(len(self.graph.nodes), kind, lane, label, **fields)
        node.previous = self.graph.last.get(lane)
        self.graph.last[lane] = node.id
        self.graph.nodes.append(node)
        return node

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracerState:
        """Trace a program on a new state."""
        state = self.state()
        outer, _local.tracer = current_tracer(), self
        try:
            bound = function.signature.bind_partial(*args, **{**function.bound, **kwargs})
            for name, parameter in function.signature.parameters.items():
                if name not in bound.arguments and parameter.kind in (
                    parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY, parameter.POSITIONAL_ONLY
                ):  # fmt: skip
                    bound.arguments[name] = self.argument(name)
            state.ret_value = function.func(state, *bound.args, **bound.kwargs)
        finally:
            _local.tracer = outer
        return state

    def inline(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracerState:
        """A program called by the traced one: its nodes join the graph, on a state of its own."""
        self.add("Call", len(self.states), function.__name__)
        return self.run(function, args, kwargs)


class TracerState(ProgramState):
    """Looks like a ProgramState to the program, and records."""

    def __init__(self, tracer: Tracer, lane: int):
        self.tracer, self.lane = tracer, lane
        self.ret_value = None
        self.producers: dict[str, int] = {}  # variable -> node
        self.lists: dict[str, list[Placeholder]] = {}
        self.set_here: dict[str, Any] = {}

    # ---- writing -------------------------------------------------------------------------------------------------

    def __iadd__(self, other: Any) -> TracerState:
        for item in as_expr(other).flatten():
            self._record(item)
        return self

    def _record(self, item: Expr) -> None:
        add = self.tracer.add
        if isinstance(item, Text):
            for piece in split_marks(item.value):
                if isinstance(piece, str):
                    add("ConstantText", self.lane, piece, item=Text(piece))
                else:
                    self._record_value(self.tracer.values[piece], piece)
        elif isinstance(item, (Gen, Select)):
            node = add(type(item).__name__, self.lane, item.name or "", item=item)
            if item.name is not None:
                self.producers[item.name] = node.id
                if isinstance(item, Gen) and item.reasoning:
                    self.producers[f"{item.name}_reasoning_content"] = node.id
        elif isinstance(item, (RoleBegin, RoleEnd)):
            add("Role", self.lane, f"{item.role} {'begin' if isinstance(item, RoleBegin) else 'end'}", item=item)
        elif isinstance(item, (VarBegin, VarEnd)):
            edge = "begin" if isinstance(item, VarBegin) else "end"
            node = add("Variable", self.lane, f"{item.name} {edge}", item=item)
            self.producers[item.name] = node.id
        elif isinstance(item, Join):
            item.group.join_into(self, CONCATENATE)
        elif isinstance(item, (Image, Video)):
            add(type(item).__name__, self.lane, "", item=item)
        else:
            raise TraceError(f"{_line()}: {type(item).__name__} cannot be traced")

    def _record_value(self, value: Placeholder, number: int) -> None:
        origin = value._origin
        if origin.lane is None:
            self.tracer.add("Argument", self.lane, origin.what[len("argument ") :], slot=number)
        else:
            producer = self.tracer.states[origin.lane].producers.get(origin.name)
            inputs = [] if producer is None else [producer]
            self.tracer.add("Variable", self.lane, origin.name, slot=number, inputs=inputs)

    def set_var(self, name: str, value: Any) -> None:
        self.set_here[name] = value
        node = self.tracer.add("Variable", self.lane, f"{name} =", assign=(name, value))
        self.producers[name] = node.id

    @contextmanager
    def _scope(self, begin: Expr, end: Expr) -> Iterator[None]:
        self._record(begin)
        yield
        self._record(end)

    # ---- forking -------------------------------------------------------------------------------------------------

    def fork(self, size: int = 1) -> ForkGroup:
        if isinstance(size, Placeholder):
            size._refuse()
        if not isinstance(size, int) or isinstance(size, (bool, Placeholder)) or size < 1:
            raise ValueError(f"size must be an integer of at least 1, got {size!r}")
        states = [self.tracer.state() for _ in range(size)]
        fork = self.tracer.add("Fork", self.lane, str(size), children=[state.lane for state in states])
        for i, state in enumerate(states):
            state.producers = dict(self.producers)
            state.lists, state.set_here = dict(self.lists), dict(self.set_here)
            node = self.tracer.add("GetForkItem", state.lane, str(i))
            node.previous = fork.id
        return TracerForkGroup(self, states)  # type: ignore[arg-type]

    # ---- reading -------------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self.producers or name in self.lists

    def get_var(self, name: str) -> Any:
        if name in self.set_here:
            return self.set_here[name]
        if name in self.lists:
            return list(self.lists[name])
        if name not in self.producers:
            raise KeyError(f"the program has no variable {name!r} here (it has: {', '.join(self.producers) or 'none'})")
        return self.tracer.variable(self.lane, name)

    def sync(self) -> None:
        """Nothing runs while tracing."""

    def error(self) -> None:
        return None

    def _unknown(self, *_: Any, **__: Any) -> NoReturn:
        raise TraceError(f"{_line()}: what the state holds is known only when the program runs")

    text = messages = get_meta_info = text_iter = text_async_iter = _unknown  # pyright: ignore

    def __repr__(self) -> str:
        return f"TracerState({self.lane})"


class TracerForkGroup(ForkGroup):
    states: list[Any]

    def join_into(self, parent: Any, mode: str) -> None:
        if mode not in (GATHER, CONCATENATE):
            raise ValueError(f"mode must be {GATHER!r} or {CONCATENATE!r}, got {mode!r}")
        lanes = [state.lane for state in self.states]
        tracer: Tracer = parent.tracer
        ends = [tracer.graph.last[lane] for lane in lanes if lane in tracer.graph.last]
        tracer.add("Join", parent.lane, mode, children=lanes, inputs=ends)
        if mode == GATHER:
            new = dict.fromkeys(n for s in self.states for n in s.producers if n not in parent.producers)
            for name in new:
                parent.lists[name] = [tracer.variable(s.lane, name) for s in self.states]


def trace_program(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The graph of a program; arguments that are not given become Argument nodes."""
    tracer = Tracer()
    state = tracer.run(function, args, kwargs)
    graph = tracer.graph
    graph.origins = [value._origin for value in tracer.values]
    graph.returns = state.ret_value
    graph.name = function.__name__
    return graph


# ---- the constant leading text -------------------------------------------------------------------------------------


class _Enough(BaseException):
    """Not an Exception, so that the program's own `except Exception` lets it pass."""


class _LeadingTracer(Tracer):
    """Stops the program at the first thing that is not constant text or a role."""

    def add(self, kind: str, lane: int, label: str, **fields: Any) -> Node:
        if kind not in ("ConstantText", "Role") or lane:
            raise _Enough
        return super().add(kind, lane, label, **fields)


def leading_text(function: Any, render: Render | None, known: dict[str, Any]) -> Prompt:
    """What every run of the program begins with when its arguments `known` are these.

    The program's Python runs up to the first gen or use of another argument.
    """
    tracer = _LeadingTracer()
    with contextlib.suppress(_Enough, Exception):  # an error in the program belongs to its real run
        tracer.run(function, (), known)
    return leading_prompt(tracer.graph.nodes, render)


def leading_prompt(nodes: list[Node], render: Render | None) -> Prompt:
    chat, text, parts, templated = Conversation(render or plain_render), "", "", False
    for node in nodes:
        item = node.item
        if node.kind not in ("ConstantText", "Role") or node.lane:
            break
        try:
            if isinstance(item, RoleBegin):
                templated = templated or (not text and render is not None)
                parts = ""
                text += chat.begin(item.role)
            elif isinstance(item, RoleEnd):
                drop, piece = chat.end(parts)
                text = text[: len(text) - drop] + piece
            elif isinstance(item, Text):
                parts += item.value
                text += chat.add(item.value) if chat.role is not None else item.value
        except Exception:
            break
    return Prompt(text, templated=templated)


def fill(value: Any, lookup: Any) -> Any:
    """`value` with its placeholders replaced by lookup(number), inside of texts, containers and expressions."""
    if isinstance(value, str):
        pieces = list(split_marks(str.__str__(value)))
        if len(pieces) == 1 and isinstance(pieces[0], int):
            return lookup(pieces[0])
        return "".join(piece if isinstance(piece, str) else str(lookup(piece)) for piece in pieces)
    if isinstance(value, dict):
        return {key: fill(item, lookup) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(fill(item, lookup) for item in value)
    if is_dataclass(value) and not isinstance(value, type) and isinstance(value, Expr):
        changes = {f.name: fill(getattr(value, f.name), lookup) for f in fields(value)}
        return replace(value, **changes)
    return value
