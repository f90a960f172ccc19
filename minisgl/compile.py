"""Compiled programs: the graph of a trace, run again with other arguments and without the program's Python.

Knowing the whole graph allows what an interpreter cannot do:

* Nothing waits in Python.  `b += a["x"]` makes an interpreter stop until x is there before it can issue what comes
  later; here the text is a reference that b's queue waits for, and all independent gens are issued together.
* Constant text can be moved (`reorder=True`): paragraphs without arguments go before those with some, which lengthens
  the prefix that all runs share (SGLang paper, "code movement for improving prefix sharing").  It changes the prompt,
  so it is only done when asked for; the last paragraph, which leads up to the generation, stays where it is.
* The shared prefix is read off the graph instead of running the program to find it.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from .backends.base import Backend
from .graph import Drawing, Graph, Node
from .interpreter import Executor
from .ir import Reference, Text
from .lang import SglFunction, as_backend
from .state import ForkGroup, ProgramState
from .trace import fill, leading_prompt, trace_program


class CompiledProgram(SglFunction):
    """Runs like the program it was made from: `run`, `run_batch`, `cache`; `graph` and `draw()` show it."""

    def __init__(self, source: SglFunction, backend: Any = None, reorder: bool = False):
        self.graph: Graph = trace_program(source, (), {})
        if reorder:
            self.graph.nodes = move_constants(self.graph.nodes)
        self._backend = backend

        def replay(state: ProgramState, *args: Any, **kwargs: Any) -> Any:
            return self._replay(state, source.signature.bind(*args, **{**source.bound, **kwargs}))

        free = [p for name, p in source.signature.parameters.items() if name not in source.bound]
        first = inspect.Parameter("s", inspect.Parameter.POSITIONAL_ONLY)
        replay.__signature__ = inspect.Signature([first, *free])  # type: ignore[attr-defined]
        replay.__name__, replay.__doc__ = source.__name__, source.__doc__
        super().__init__(replay, source.num_api_spec_tokens)

    def run(self, *args: Any, backend: Any = None, **kwargs: Any) -> ProgramState:
        return super().run(*args, backend=self._backend if backend is None else backend, **kwargs)

    def run_batch(self, batch_kwargs: Any, *, backend: Any = None, **kwargs: Any) -> Any:
        return super().run_batch(batch_kwargs, backend=self._backend if backend is None else backend, **kwargs)

    def draw(self, path: Any = None) -> Drawing:
        """The graph as SVG."""
        return self.graph.draw(path)

    def cache(self, backend: Any = None) -> str:
        backend = as_backend(self._backend if backend is None else backend)
        prompt = leading_prompt(self.graph.nodes, backend.render())
        if prompt.text:
            backend.precompute(prompt)
        return prompt.text

    def __repr__(self) -> str:
        return f"CompiledProgram({self.__name__}{self.signature}, {len(self.graph)} nodes)"

    # ---- inside --------------------------------------------------------------------------------------------------

    def _prefill(self, backend: Backend, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        common = self._common_arguments(calls)
        nodes: list[Node] = []
        for node in self.graph.nodes:
            origin = self.graph.origins[node.slot] if node.slot is not None else None
            if origin is not None and origin.lane is None and origin.name in common:
                text = str(_walk(common[origin.name], origin.path))
                node = replace(node, kind="ConstantText", item=Text(text))
            nodes.append(node)
        prompt = leading_prompt(nodes, backend.render())
        if prompt.text:
            backend.prefill(prompt)

    def _replay(self, root: ProgramState, bound: inspect.BoundArguments) -> Any:
        bound.apply_defaults()
        run = _Run(self.graph, root, bound.arguments)
        for node in self.graph.nodes:
            run.step(node)
        return fill(self.graph.returns, run.value)


class _Run:
    """One execution of a graph: a state for each lane."""

    def __init__(self, graph: Graph, root: ProgramState, arguments: dict[str, Any]):
        self.graph, self.arguments = graph, arguments
        self.states: dict[int, ProgramState] = {0: root}

    def step(self, node: Node) -> None:
        if node.kind == "Call":
            root = self.states[0]._executor
            self.states[node.lane] = ProgramState(
                Executor(root.backend, root.params, root.options, stream=root.stream, program=root.program)
            )
            return
        state = self.states[node.lane]
        if node.slot is not None:
            state += self.text(node.slot)
        elif node.kind == "Fork":
            self.states.update(zip(node.children, state.fork(len(node.children))))
        elif node.kind == "Join":
            ForkGroup(state, [self.states[lane] for lane in node.children]).join(node.label)
        elif node.assign is not None:
            name, value = node.assign
            state.set_var(name, fill(value, self.value))
        elif node.item is not None:
            state += fill(node.item, self.value)

    def text(self, slot: int) -> Any:
        """What a placeholder puts into the text: the argument, or a reference to the variable."""
        origin = self.graph.origins[slot]
        if origin.lane is not None:
            return Reference(self.states[origin.lane]._executor, origin.name, origin.path)
        found = self.value(slot)
        return found if isinstance(found, (list, tuple)) else Text(str(found))

    def value(self, slot: int) -> Any:
        """What a placeholder stands for; a variable is waited for."""
        origin = self.graph.origins[slot]
        if origin.lane is not None:
            return _walk(self.states[origin.lane].get_var(origin.name), origin.path)
        return _walk(self.arguments[origin.name], origin.path)


def _walk(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def move_constants(nodes: list[Node]) -> list[Node]:
    """Move constant paragraphs of the first run of text before those with placeholders (the last one stays)."""
    begin = 0
    while begin < len(nodes) and nodes[begin].kind == "Role":
        begin += 1
    end = begin
    while end < len(nodes) and nodes[end].kind in ("ConstantText", "Argument") and nodes[end].lane == 0:
        end += 1
    paragraphs: list[list[Node]] = [[]]
    for node in nodes[begin:end]:
        if not isinstance(node.item, Text):
            paragraphs[-1].append(node)
            continue
        pieces = node.item.value.split("\n\n")
        for i, piece in enumerate(pieces):
            text = piece + "\n\n" * (i < len(pieces) - 1)
            if text:
                paragraphs[-1].append(replace(node, item=Text(text), label=text))
            if i < len(pieces) - 1:
                paragraphs.append([])
    *movable, last = paragraphs
    constant = [p for p in movable if all(node.kind == "ConstantText" for node in p)]
    other = [p for p in movable if any(node.kind != "ConstantText" for node in p)]
    moved = [node for paragraph in [*constant, *other, last] for node in paragraph]
    return _renumber([*nodes[:begin], *moved, *nodes[end:]])


def _renumber(nodes: list[Node]) -> list[Node]:
    """Ids in order again, lanes linked in their new order."""
    number: dict[int, int] = {}
    lanes = {node.id: node.lane for node in nodes}
    last: dict[int, int] = {}
    fresh: list[Node] = []
    for new, node in enumerate(nodes):
        number[node.id] = new  # a split node's later pieces take its place
        previous = last.get(node.lane)
        if previous is None and node.previous is not None and lanes[node.previous] != node.lane:
            previous = number[node.previous]
        fresh.append(replace(node, id=new, previous=previous, inputs=[number[i] for i in node.inputs]))
        last[node.lane] = new
    return fresh
