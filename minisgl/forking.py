"""What fork() leaves behind: a child process has the parent's objects and none of its threads.

    parent   program's thread | engine's thread | torch's OpenMP threads
                    |
                  fork()
                    |
    child    program's thread      (nobody takes what is posted to the engine; locks stay as other threads left them)

Whoever waited for such a thread would wait for ever.  So everything here that has a thread of its own asks to be told
of a fork, in the child, and then knows that its thread is gone: an engine says that it is dead, a pool starts new
threads when it needs them.  Nor can a child begin afresh: torch's own threads are gone too, and its next large
operation would wait for them.  That is refused with an error that says what works instead (`check`).
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

_things: WeakSet[Renewable] = WeakSet()
_computed = False  # an engine has run in this process: torch may have threads
_lost = False  # one has in the parent, or in its own parent: torch's threads are not here
_forks = 0  # how many of them lie between this process and the first one
_parent: int | None = None  # process id of the parent, after a fork


class Renewable(Protocol):
    """Something with threads or locks of its own."""

    def after_fork(self) -> None:
        """Called in the child, on its only thread: forget threads, make locks anew; run nobody's callbacks."""


def tell(thing: Renewable, *, computes: bool = False) -> None:
    """Have `thing.after_fork()` called in every child process that is made with fork() while it lives.

    computes: it uses torch's threads, after which no child process can.
    """
    global _computed
    _computed = _computed or computes
    _things.add(thing)


def message(what: str) -> str:
    """Why `what` does not work in this process."""
    return (
        f"{what} does not work in a process made with fork(): its threads stayed in the parent (process {_parent}); "
        "start processes with multiprocessing's 'spawn' method"
    )


def check(what: str) -> None:
    """Raises RuntimeError in a child of a process that had an engine."""
    if _lost:
        raise RuntimeError(message(what))


def born() -> int:
    """The number of this process, to be given to `stayed` by what is made here and waited for later."""
    return _forks


def stayed(where: int) -> str | None:
    """Why nobody will bring to its end what was begun in process number `where` (`born`): it was another one."""
    return None if where == _forks else message("waiting for what was begun before")


def _in_child() -> None:
    global _parent, _forks, _lost
    _parent, _forks, _lost = os.getppid(), _forks + 1, _lost or _computed
    for thing in list(_things):
        thing.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_in_child)
