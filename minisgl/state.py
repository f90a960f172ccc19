"""`ProgramState` and `ForkGroup`: what a program's body holds while it builds its text.

Appending never waits, reading does:

    s += "Tip: " + gen("tip", stop=".")      returns at once
    s["tip"]                                 waits until that variable is there

    a, b = s.fork(2)                         two states that go on from s, in parallel
    a += gen("x");  b += gen("x")
    group.join()                             s["x"] is the list of both
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .interpreter import Executor
from .ir import Expr, Join, RoleBegin, RoleEnd, Text, VarBegin, VarEnd, as_expr, role_expr
from .statequeue import Chunk

GATHER, CONCATENATE = "gather_variable", "concate_and_append"


class ProgramState:
    """The state of a running program.  After the run, `ret_value` is what its Python function returned."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self.ret_value: Any = None

    # ---- writing -------------------------------------------------------------------------------------------------

    def __iadd__(self, other: Any) -> ProgramState:
        if isinstance(other, str):
            self._executor.append((Text(other),))
            return self
        items: list[Expr] = []
        for item in as_expr(other).flatten():
            if isinstance(item, Join):
                self._executor.append(items)
                items = []
                item.group.join_into(self, CONCATENATE)
            else:
                items.append(item)
        self._executor.append(items)
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def set_var(self, name: str, value: Any) -> None:
        """Give a variable a value from Python."""
        self._executor.set(name, value)

    def system(self, expr: Any = None) -> Any:
        """`with s.system(): ...`, or with an expression: append it in that role."""
        return self._role("system", expr)

    def user(self, expr: Any = None) -> Any:
        """`with s.user(): ...`, or with an expression: append it in that role."""
        return self._role("user", expr)

    def assistant(self, expr: Any = None) -> Any:
        """`with s.assistant(): ...`, or with an expression: append it in that role."""
        return self._role("assistant", expr)

    def _role(self, role: str, expr: Any) -> Any:
        if expr is not None:
            self.__iadd__(role_expr(role, expr))
            return self
        return self._scope(RoleBegin(role), RoleEnd(role))

    def var_scope(self, name: str) -> Any:
        """`with s.var_scope("x"): ...`: the text appended in the block becomes s["x"]."""
        return self._scope(VarBegin(name), VarEnd(name))

    @contextmanager
    def _scope(self, begin: Expr, end: Expr) -> Iterator[None]:
        self._executor.append([begin])
        yield
        self._executor.append([end])

    # ---- forking -------------------------------------------------------------------------------------------------

    def fork(self, size: int = 1) -> ForkGroup:
        """`size` states that go on from here in parallel; the common prefix is computed once.  Returns at once."""
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"size must be an integer of at least 1, got {size!r}")
        return ForkGroup(self, [ProgramState(child) for child in self._executor.fork(size)])

    @contextmanager
    def copy(self) -> Iterator[ProgramState]:
        """`with s.copy() as c: ...`: a state to try something on; `s` stays as it is."""
        yield self.fork(1)[0]

    # ---- reading -------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __contains__(self, name: str) -> bool:
        return self._executor.has(name)

    def get_var(self, name: str) -> Any:
        """The variable's value, waiting for it; KeyError if no such variable is coming."""
        return self._executor.get(name)

    def get_meta_info(self, name: str) -> Any:
        """What the backend reported with the variable (a list of it for n > 1): prompt_tokens, completion_tokens,
        cached_tokens, finish_reason, log-probabilities.  KeyError for a variable that was not generated."""
        self._executor.get(name)
        if name not in self._executor.meta:
            raise KeyError(f"variable {name!r} was not generated: it has no meta info")
        return self._executor.meta[name]

    def text(self) -> str:
        """The whole text, once all that was appended is done."""
        self.sync()
        return self._executor.text

    def messages(self) -> list[dict[str, Any]]:
        """The finished chat messages, once all that was appended is done."""
        self.sync()
        return [dict(message) for message in self._executor.chat.messages]

    def sync(self) -> None:
        """Wait until all that was appended is done."""
        self._executor.sync()

    def error(self) -> BaseException | None:
        """What stopped this state, once it has ended; None if all went well."""
        try:
            self._executor.sync()
        except Exception as error:
            return error
        return None

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text as it grows, or one variable's; ends with the program.  Run with stream=True for small pieces."""
        index, last = 0, False
        while not last:
            new, last = self._wait_chunks(var_name, index)
            index += len(new)
            for text, _ in new:
                if text:
                    try:
                        yield text
                    except (KeyboardInterrupt, SystemExit) as error:  # raised in the caller's frame by throw()
                        self._executor.fail(error)
                        raise

    def _wait_chunks(self, name: str | None, index: int) -> tuple[list[Chunk], bool]:
        found: list[tuple[list[Chunk], bool]] = []

        def ready() -> bool:
            new, last = self._executor.chunks(name, index)
            if new or last:
                found.append((new, last))
            return bool(found)

        self._executor.wait(ready)
        return found[0]

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for coroutines.  return_meta_data: pairs of (text, meta info so far).

        Cancelling the task that iterates stops the program.
        """
        executor, loop, changed = self._executor, asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        index, last = 0, False
        with executor.lock:
            executor.listeners.add(listener)
        try:
            while not last:
                changed.clear()
                with executor.lock:
                    new, last = executor.chunks(var_name, index)
                index += len(new)
                for text, meta in new:
                    if text:
                        yield (text, meta) if return_meta_data else text
                if not new and not last:
                    await changed.wait()
        except asyncio.CancelledError as error:
            executor.fail(error)
            raise
        finally:
            executor.listeners.discard(listener)

    def __repr__(self) -> str:
        executor = self._executor
        status = "failed" if executor.error is not None else "running" if executor.busy else "done"
        names = [name for name in executor.variables if not name.startswith("_unnamed_")]
        text = executor.text if len(executor.text) <= 200 else f"{executor.text[:120]}...{executor.text[-70:]}"
        return f"ProgramState({status}, variables={names}, text={text!r})"


class ForkGroup:
    """The states of a fork: index it, iterate it, append to all of them."""

    def __init__(self, parent: ProgramState, states: list[ProgramState]):
        self._parent = parent
        self.states = states

    def __getitem__(self, index: Any) -> Any:
        return self.states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """`group[i] += expr` assigns the state to its own place; nothing else may be put there."""
        if state is not self.states[index]:
            raise TypeError("the states of a fork group cannot be replaced")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __iadd__(self, other: Any) -> ForkGroup:
        """One expression for all, a list with one for each, or a function from the index to one."""
        if isinstance(other, (list, tuple)):
            if len(other) != len(self.states):
                raise ValueError(f"a list of {len(other)} expressions for a fork of {len(self.states)} states")
            each = list(other)
        elif callable(other) and not isinstance(other, Expr):
            function: Callable[[int], Any] = other
            each = [function(i) for i in range(len(self.states))]
        else:
            each = [other] * len(self.states)
        for state, expr in zip(self.states, each):
            state.__iadd__(expr)
        return self

    def join(self, mode: str = GATHER) -> None:
        """Wait for all states, then bring what they made back to the state they were forked from.

        "gather_variable": each variable they newly set becomes a list there, one item per state (None where one has
        not set it).  "concate_and_append": their texts are appended there, in order.
        Raises the first state's error, if any has failed.
        """
        self.join_into(self._parent, mode)

    def join_into(self, parent: ProgramState, mode: str) -> None:
        if mode not in (GATHER, CONCATENATE):
            raise ValueError(f"mode must be {GATHER!r} or {CONCATENATE!r}, got {mode!r}")
        for state in self.states:
            state.sync()
        if mode == GATHER:
            self._gather(parent)
        else:
            for state in self.states:
                parent.__iadd__(_added(state._executor))

    def _gather(self, parent: ProgramState) -> None:
        children = [state._executor for state in self.states]
        new = [n for child in children for n in child.variables if n not in child.inherited]
        for name in dict.fromkeys(new):
            if not name.startswith("_unnamed_"):
                parent.set_var(name, [child.variables.get(name) for child in children])

    def __repr__(self) -> str:
        return f"ForkGroup({len(self.states)} states)"


def _added(child: Executor) -> list[Expr]:
    """What a forked state has added to its parent's text: whole messages where it is made of these, else the text."""
    added = child.text[child.begin :]
    messages = child.chat.messages[child.begin_messages :]
    if messages and child.chat.role is None and child.chat.text[child.begin_chat :] == added:
        return [item for m in messages for item in role_expr(m["role"], m["content"]).flatten()]
    return [Text(added)]


def join(group: ForkGroup) -> Join:
    """`s += join(group)`: append the texts of the group's states to `s`, as in the paper's listing."""
    return Join(group)
