"""`run_batch`: many programs at once, on few threads.

A program is Python and may block anywhere (in `s[name]`, in a tool), so while its body runs it needs a thread.  But
most of a program's life is waiting for the model, and that needs none: `gen` only queues (see `statequeue`).  So a
thread takes a program, runs its body to the end, and takes the next one, whether or not the first one's generations
are done.  A body that never reads what it generates, like a few-shot question, is over in a fraction of a
millisecond, and one thread starts a thousand of them while the engine works on the first; a body that waits keeps its
thread.

    thread 1   |body 1|body 3|body 4|..              states 1, 3, 4, ... wait for their generations as objects
    thread 2   |body 2 .... s["a"] waits ....|body 9|

How many threads?  As few as keep programs starting.  A batch begins with one and adds another when the bodies of all
that it has wait for the model; since a body may wait for things that nobody here knows of, a tool say, it also doubles
them when those there have begun fewer than `BRISK` programs each within a `TICK`.  num_threads="auto" puts the limit at
what the backend can run at once (more could only wait for the backend), at most `MAX_THREADS`.  So a batch of bodies
that only queue generations stays on one thread, instead of 256 that fight over the interpreter's lock with the engine.

`map` (in `batch_map`) is for jobs that outlive a process or a bad hour of a hosted model: limits, retries, checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from . import forking
from .batch_map import BatchError as BatchError
from .batch_map import Row as Row
from .batch_map import amap as amap
from .batch_map import map as map
from .state import ProgramState
from .statequeue import POLL

MAX_THREADS = 256
TICK = 0.02  # seconds between two looks at how fast programs begin
BRISK = 20  # programs begun by a thread in a tick: below that its bodies wait for something


def thread_count(num_threads: Any, parallelism: int, programs: int) -> int:
    """How many threads may run bodies.  Raises ValueError unless num_threads is "auto" or an integer >= 1."""
    if num_threads == "auto":
        num_threads = min(parallelism, MAX_THREADS)
    elif not isinstance(num_threads, int) or isinstance(num_threads, bool) or num_threads < 1:
        raise ValueError(f"num_threads must be 'auto' or an integer of at least 1, got {num_threads!r}")
    return max(1, min(num_threads, programs))


class Batch:
    """Runs `body(i)` for i in range(count); `states[i]` is program i's state from the beginning on."""

    def __init__(
        self,
        states: list[ProgramState],
        body: Callable[[int], None],
        threads: int,
        on_ended: Callable[[], Any] | None = None,
    ):
        self.states, self._body, self._on_ended = states, body, on_ended
        self._born = forking.born()
        self._new_lock()
        self._next = 0
        self._ended: set[int] = set()
        self._failed: BaseException | None = None
        self._stopped = False
        self._every = on_ended is not None  # someone wants to hear of each end, not only of the last
        self._limit = threads
        self._threads = self._waiting = 0  # threads, and those of them whose body waits for the model
        forking.tell(self)
        hook = self._body_waits
        for state in states:
            state._executor.program.on_wait = hook
        try:
            self._add_threads(1)
            if threads > 1:
                with suppress(RuntimeError):  # the system has no thread for it: the one there runs all bodies
                    threading.Thread(target=self._grow, name="minisgl-batch", daemon=True).start()
        except BaseException as error:  # Ctrl-C while a thread begins, or the system has none: nobody would wait
            self.abort(error)
            raise

    def _new_lock(self) -> None:
        self._lock = threading.Lock()
        self._cond = threading.Condition(self._lock)

    def after_fork(self) -> None:
        """In a child process there are no threads to run bodies; this one, if it ran one, is to run no other."""
        self._new_lock()
        self._stopped = True
        for state in self.states:
            state._executor.program.after_fork()

    def _add_threads(self, count: int) -> None:
        with self._lock:
            left = len(self.states) - self._next
            count = 0 if self._stopped else max(0, min(count, self._limit - self._threads, left))
            first = self._threads
            self._threads += count
        for number in range(first, first + count):
            try:
                threading.Thread(target=self._work, name=f"minisgl-batch-{number}", daemon=True).start()
            except RuntimeError:  # the system has no more: those there run all bodies
                with self._lock:
                    self._threads -= first + count - number
                    self._limit = self._threads
                if self._threads == 0:
                    raise
                return

    def _body_waits(self, change: int) -> None:
        """A body begins (1) or ends (-1) to wait for the model."""
        with self._lock:
            self._waiting += change
            stuck = change > 0 and self._waiting >= self._threads
        if stuck:
            self._add_threads(1)

    def _grow(self) -> None:
        """Add threads while those there do not begin programs briskly."""
        begun = 0
        while self._threads < self._limit and self._next < len(self.states) and not self._stopped:
            time.sleep(TICK)
            if self._next - begun < BRISK * self._threads:
                self._add_threads(self._threads)
            begun = self._next

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._stopped or self._next == len(self.states):
                    return
                index = self._next
                self._next += 1
            self._body(index)
            self._watch(index)

    def _watch(self, index: int) -> None:
        """Hear of the end of program `index`, whose body is over."""
        watch = _Watch(self, index)
        with watch.executor.lock:
            watch.executor.listeners.add(watch)
            watch()

    def _end(self, index: int, error: BaseException | None) -> None:
        with self._lock:
            self._ended.add(index)
            self._failed = self._failed or error
            if self._every or error is not None or len(self._ended) == len(self.states):
                self._cond.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        stayed = forking.stayed(self._born)
        if stayed is not None and not ready():
            raise RuntimeError(stayed)
        try:
            with self._cond:
                while not ready():
                    self._cond.wait(POLL)
        except BaseException as error:
            self.abort(error)
            raise

    def wait(self) -> list[ProgramState]:
        """All states, when all have ended; the first failure as soon as it happens (the other programs go on)."""
        try:
            return self._wait_for_all()
        except (KeyboardInterrupt, SystemExit) as error:
            if error is not self._failed:  # not a program's own: Ctrl-C, at whatever moment
                self.abort(error)
            raise

    def _wait_for_all(self) -> list[ProgramState]:
        told = 0
        while True:
            enough = told if self._every else len(self.states) - 1
            self._wait(lambda enough=enough: self._failed is not None or len(self._ended) > enough)
            if self._failed is not None:
                index = next(i for i, s in enumerate(self.states) if s._executor.error is self._failed)
                self.states[index]._executor.raise_error()
            done = len(self._ended)
            while told < done and self._on_ended is not None:
                self._on_ended()
                told += 1
            if done == len(self.states):
                return self.states

    def iterate(self) -> Iterator[ProgramState]:
        """The states in order, each as soon as it and those before it have ended; a failed one raises at its place."""
        self._every = True
        try:
            for index, state in enumerate(self.states):
                self._wait(lambda index=index: index in self._ended)
                if self._on_ended is not None:
                    self._on_ended()
                state._executor.raise_error()
                yield state
        except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """Start no more programs and stop those that run (in a child process, none does)."""
        if forking.stayed(self._born) is not None:
            return
        with self._lock:
            self._stopped = True
        for state in self.states:
            state._executor.fail(error)


class _Watch:
    """Tells a batch when one of its programs has ended.  A listener: called with the executor's lock held."""

    __slots__ = ("_batch", "_index", "executor")

    def __init__(self, batch: Batch, index: int):
        self._batch, self._index, self.executor = batch, index, batch.states[index]._executor

    def __call__(self) -> None:
        executor = self.executor
        if executor.error is not None or not executor.busy:
            executor.listeners.discard(self)
            self._batch._end(self._index, executor.error)
