"""`run_batch`: many programs at once, on few threads.

A program is Python and may block anywhere (in `s[name]`, in a tool), so while its body runs it needs a thread.  But
most of a program's life is waiting for the model, and that needs none: `gen` only queues (see `statequeue`).  So a
thread takes a program, runs its body to the end, and takes the next one, whether or not the first one's generations
are done.  A body that never reads what it generates, like a few-shot question, is over in a fraction of a
millisecond, and one thread starts a thousand of them while the engine works on the first; a body that waits keeps its
thread.

    thread 1   |body 1|body 3|body 4|..              states 1, 3, 4, ... wait for their generations as objects
    thread 2   |body 2 .... s["a"] waits ....|body 9|

How many threads?  With num_threads="auto", one for each generation that the backend can run at once (more could only
wait for the backend), at most `MAX_THREADS`, and only while programs are left.  CPU seconds for 1,000 programs on a
backend that answers at once, so that all of it is the language's own work (2 cores, Python 3.11):

    threads                          1      4     16     64    256   1000
    body only queues a gen        0.14   0.23   0.21   0.18   0.20   0.32
    body reads between two gens   0.27   0.27   0.26   0.40   0.32   0.43

A thread for each program costs about half as much again as a pool; with a pool the number hardly matters, so it is
chosen by what keeps the backend full.

`map` (in `batch_map`) is for jobs that outlive a process or a bad hour of a hosted model: limits, retries, checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from .batch_map import BatchError as BatchError
from .batch_map import Row as Row
from .batch_map import amap as amap
from .batch_map import map as map
from .state import ProgramState
from .statequeue import POLL

MAX_THREADS = 256


def thread_count(num_threads: Any, parallelism: int, programs: int) -> int:
    """How many threads run bodies.  Raises ValueError unless num_threads is "auto" or an integer >= 1."""
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
        self._cond = threading.Condition()
        self._next = 0
        self._ended: set[int] = set()
        self._failed: BaseException | None = None
        self._stopped = False
        self._every = on_ended is not None  # someone wants to hear of each end, not only of the last
        for number in range(threads):
            threading.Thread(target=self._work, name=f"minisgl-batch-{number}", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._cond:
                if self._stopped or self._next == len(self.states):
                    return
                index = self._next
                self._next += 1
            self._body(index)
            self._watch(index)

    def _watch(self, index: int) -> None:
        """Hear of the end of program `index`, whose body is over."""
        executor = self.states[index]._executor

        def check() -> None:  # with the executor's lock held
            if executor.error is not None or not executor.busy:
                executor.listeners.discard(check)
                self._end(index, executor.error)

        with executor.cond:
            executor.listeners.add(check)
            check()

    def _end(self, index: int, error: BaseException | None) -> None:
        with self._cond:
            self._ended.add(index)
            self._failed = self._failed or error
            if self._every or error is not None or len(self._ended) == len(self.states):
                self._cond.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        try:
            with self._cond:
                while not ready():
                    self._cond.wait(POLL)
        except BaseException as error:
            self.abort(error)
            raise

    def wait(self) -> list[ProgramState]:
        """All states, when all have ended; the first failure as soon as it happens (the other programs go on)."""
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
        """Start no more programs and stop those that run."""
        with self._cond:
            self._stopped = True
        for state in self.states:
            state._executor.fail(error)
