"""Executes what a program appends: one queue per state, served by one worker at a time, and no thread of its own.

    program's thread            s += "Q: ..." + gen("a") + "B: " + gen("b")      s["b"]
                                     |                                             | waits
    queue of the state          [Text][Gen a][Text][Gen b]                         |
                                     |                                             |
    whoever makes it runnable   Text, submit a --.      .-- Text, submit b --.   .-'
                                                 v      |                    v   |
    backend                                   a runs, done               b runs, done

A state needs a worker only while it can do something.  Appending to an idle state runs the queue on the appending
thread, up to the first generation, which is submitted and not waited for; when the backend reports its end, the
backend's thread runs on from there.  Nothing in between blocks, so a thousand states that wait for a thousand
generations cost a thousand small objects.  What does need a thread is a program's Python body while it runs or waits
for `s[name]` (see `batch`).

An error stops the state: its queue is dropped, what it has running is cancelled, and every waiter gets the exception
with the traceback it was first raised with.  Forked states fail with their parent; a parent hears of a child's failure
when it reads or joins it.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from . import forking
from .backends.base import Job, WorkerPool
from .ir import Expr, Gen, Select, Text, VarBegin

POLL = None if os.name == "posix" else 0.2  # elsewhere Ctrl-C cannot interrupt a wait without a timeout
Chunk = tuple[str, dict[str, Any]]


class Program:
    """What the states of one run share: who runs the body, and whether it has ended."""

    def __init__(self, ended: bool = True):
        self.ended = ended
        self.owner: int | None = None  # the thread that runs the body, while it does
        self.on_wait: Callable[[int], None] | None = None  # told when the body begins (1) and ends (-1) to wait
        self._states: list[StateQueue] = []  # of a program that has not ended; nobody waits for more after that

    def add(self, executor: StateQueue) -> None:
        if not self.ended:
            self._states.append(executor)

    def after_fork(self) -> None:
        """In a child process: a lock may be held by a thread that stayed in the parent."""
        for executor in self._states:
            executor.lock, executor._changed = threading.RLock(), None

    def end(self) -> None:
        self.ended, self.owner, self.on_wait = True, None, None
        states, self._states = self._states, []
        for executor in states:
            with executor.lock:
                executor.wake()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait: whoever runs the body may want its thread's place filled."""
        on_wait = self.on_wait if self.owner == threading.get_ident() else None
        if on_wait is not None:
            on_wait(1)
        try:
            yield
        finally:
            if on_wait is not None:
                on_wait(-1)

    @property
    def more_may_come(self) -> bool:
        """Whether this thread may wait for something that nobody has appended yet."""
        return not self.ended and self.owner != threading.get_ident()


class Turn:
    """A step of the queue that ends elsewhere.  Whoever comes second, the end or `_advance`, goes on with the queue."""

    def __init__(self, executor: StateQueue):
        self.executor = executor
        self._left = self._done = False

    def passed(self) -> bool:
        with self.executor.lock:
            self._left = True
            return self._done

    def finish(self, apply: Callable[[], None]) -> None:
        executor = self.executor
        if executor.error is not None:
            return
        try:
            apply()
        except BaseException as error:  # on the backend's thread: it belongs to whoever waits for the state
            executor.fail(error)
            return
        with executor.lock:
            self._done = True
            left = self._left
        if left:
            executor.advance()


class StateQueue(ABC):
    """The queue and the variables of one state, and everything that waits for them.

    `execute` (of `interpreter.Executor`) says what an item does.
    """

    def __init__(self, program: Program | None, started: bool, waits: bool):
        self.program = program or Program()
        self.program.add(self)
        self.waits = waits
        self._born = forking.born()
        self.lock = threading.RLock()
        self._changed: threading.Condition | None = None  # of `lock`, made for the first thread that waits
        self.error: BaseException | None = None
        self.started = started  # a forked state starts when its parent's queue has come to the fork
        self.busy = not started
        self.queue: deque[Expr] = deque()
        self.jobs: set[Job] = set()
        self.children: WeakSet[StateQueue] | tuple[()] = ()  # most states never fork
        self.listeners: set[Callable[[], None]] = set()
        self.variables: dict[str, Any] = {}
        self.meta: dict[str, Any] = {}
        self.pending: dict[str, int] = {}  # values that the queue will still give a name
        self.streams: dict[str, list[Chunk]] = {}
        self.shown: list[str] = []
        self._traceback: Any = None
        self._unnamed = 0

    @abstractmethod
    def execute(self, item: Expr) -> Turn | None:
        """Do one item; returns a Turn if it ends elsewhere."""

    # ---- the queue -----------------------------------------------------------------------------------------------

    def append(self, items: Iterable[Expr]) -> None:
        with self.lock:
            if self.error is not None:
                return  # whoever waits for this state is told
            for item in items:
                self.queue.append(item if isinstance(item, Text) else self._declare(item))
            runnable = not self.busy and bool(self.queue)
            self.busy = self.busy or runnable
        if runnable:
            self.advance()
        if self.waits and self.started:
            self.sync()

    def _declare(self, item: Expr) -> Expr:
        """Note which variable will come, so that a reader knows what to wait for; name the unnamed."""
        if isinstance(item, (Gen, Select)):
            if item.name is None:
                self._unnamed += 1
                item = replace(item, name=f"_unnamed_{self._unnamed}")
            self._expect(item.name)  # type: ignore[arg-type]
            if isinstance(item, Gen) and item.reasoning:
                self._expect(f"{item.name}_reasoning_content")
        elif isinstance(item, VarBegin):
            self._expect(item.name)
        return item

    def _expect(self, name: str) -> None:
        self.pending[name] = self.pending.get(name, 0) + 1

    def advance(self) -> None:
        """Run the queue until it is empty, has failed, or waits for the backend.  For the holder of `busy` only."""
        while True:
            with self.lock:
                if self.error is not None:
                    return
                if not self.queue:
                    self.busy = False
                    self.wake()
                    return
                item = self.queue.popleft()
            try:
                turn = self.execute(item)
            except Exception as error:
                self.fail(error)
                return
            except BaseException as error:  # Ctrl-C on the program's own thread
                self.fail(error)
                raise
            if turn is not None and not turn.passed():
                return

    def fail(self, error: BaseException) -> None:
        """Stop with this error: drop the queue, cancel what runs, tell the waiters and the children."""
        with self.lock:
            if self.error is not None:
                return
            self.error, self._traceback = error, error.__traceback__
            self.queue.clear()
            self.pending.clear()
            self.busy = False
            jobs, self.jobs = self.jobs, set()
            self.wake()
        for job in jobs:
            job.cancel()
        for child in list(self.children):
            child.fail(error)

    def wake(self) -> None:
        """Tell everyone who waits that something changed (with `lock` held)."""
        if self._changed is not None:
            self._changed.notify_all()
        if self.listeners:
            for listener in list(self.listeners):
                listener()

    # ---- waiting -------------------------------------------------------------------------------------------------

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block until ready(), or raise the state's error.  Ctrl-C while waiting stops the state."""
        stayed = forking.stayed(self._born)
        if stayed is not None:  # nor is there any other thread here, and the lock may be one's of the parent
            if not ready():
                self.raise_error()
                raise RuntimeError(stayed)
            return
        try:
            with self.lock:
                if ready():
                    return
            with self.program.waiting(), self.lock:
                while not ready():
                    self.raise_error()
                    if self._changed is None:
                        self._changed = threading.Condition(self.lock)
                    self._changed.wait(POLL)
        except (KeyboardInterrupt, SystemExit) as error:
            self.fail(error)
            raise

    def sync(self) -> None:
        """Wait until all that was appended (seen from outside: all that will be) is done."""
        self.wait(lambda: not self.busy and not self.program.more_may_come)
        self.raise_error()

    def has(self, name: str) -> bool:
        return name in self.variables or self.pending.get(name, 0) > 0

    def settled(self, name: str) -> bool:
        """Nothing more is coming for this name."""
        if not self.started or self.pending.get(name, 0) > 0:
            return False
        return name in self.variables or not self.program.more_may_come

    def get(self, name: str) -> Any:
        self.wait(lambda: self.settled(name))
        if name not in self.variables:
            self.raise_error()
            known = ", ".join(sorted(n for n in self.variables if not n.startswith("_unnamed_"))) or "none"
            raise KeyError(f"the program has no variable {name!r} (it has: {known})")
        return self.variables[name]

    def set(self, name: str, value: Any, meta: Any = None) -> None:
        with self.lock:
            self.variables[name] = value
            if meta is not None:
                self.meta[name] = meta
            self.wake()

    def when_settled(self, name: str, then: Callable[[], None]) -> None:
        """Call `then` once, from whatever thread, when `name` has its value or this state has failed."""

        def check() -> None:
            if self.error is not None or self.settled(name):
                self.listeners.discard(check)
                calls.append(1)

        calls: list[int] = []
        once = threading.Lock()

        def listener() -> None:  # `wake` holds `lock`: hand over to a thread that may run queues
            check()
            if calls and once.acquire(blocking=False):
                _later.run(then)

        with self.lock:
            self.listeners.add(listener)
            check()
            now = bool(calls) and once.acquire(blocking=False)
            if calls:
                self.listeners.discard(listener)
        if now:
            then()

    # ---- streaming -----------------------------------------------------------------------------------------------

    def chunks(self, name: str | None, index: int) -> tuple[list[Chunk], bool]:
        """Chunks from number `index` on, and whether these are the last.  Raises the state's error.  Holds `lock`."""
        if name is None:
            new: list[Chunk] = [(text, {}) for text in self.shown[index:]]
            last = self.error is None and not self.busy and not self.program.more_may_come
        else:
            new = self.streams.get(name, [])[index:]
            last = self.settled(name) and (self.error is None or name in self.variables)
            if last and not index and not new and name in self.variables:
                new = [(str(self.variables[name]), {})]  # set by hand
        if not new:
            self.raise_error()
        return new, last


_later = WorkerPool(8, "minisgl-reference", idle=1.0)  # for functions found runnable while a lock is held
