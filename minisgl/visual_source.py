"""Where a view's steps come from: a reader polls a log and feeds a history.

    log only          since(0), and then what is new
    a Runtime         the log, if it goes back to the engine's first event and tells the same tree as the engine has;
                      otherwise a snapshot, taken on the engine's thread between two steps, and the log from there on

Reading never waits for the engine (but for the snapshot), and the engine never waits for a reader: one that was too
slow, so that events were overwritten, starts again from a snapshot.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from .events import EventLog
from .visual_history import TreeHistory
from .visual_state import TreeState, from_snapshot

if TYPE_CHECKING:
    from .runtime import Runtime


MOST_STEPS = 60_000  # a view that follows for hours forgets its beginning


class LogReader:
    """Feeds the events of a log to `history`; `poll` returns whether there were any."""

    def __init__(self, log: EventLog, detail: bool = False):
        self.log = log
        self.history = TreeHistory(detail=detail)
        self.cursor = 0

    @property
    def ended(self) -> bool:
        """Whether nothing can come any more."""
        return False

    def poll(self) -> bool:
        """Take in what is new.  A step that is still open when nothing is new is closed."""
        events = self.log.since(self.cursor)
        if not events:
            self.history.close()
            return False
        if events[0].seq > self.cursor and self.cursor:
            self.missed(events[0].seq - self.cursor)
            events = self.log.since(self.cursor)
        self.history.feed(events)
        if events:
            self.cursor = events[-1].seq + 1
        if len(self.history) > MOST_STEPS:
            self.history = self.history.tail(MOST_STEPS // 2)
        return True

    def missed(self, count: int) -> None:
        """Events were overwritten before they were read: go on from where the log goes on."""
        self.history.close()
        self.history.close(f"{count} events were overwritten before they were read", "note")
        self.history.partial = True
        self.cursor += count


class RuntimeReader(LogReader):
    """Feeds the events of a Runtime, which it does not keep alive.  ValueError if it records none."""

    def __init__(self, runtime: Runtime, detail: bool = False):
        if runtime.events is None:
            raise ValueError("source records no events: make it with Runtime(events=True)")
        super().__init__(runtime.events, detail)
        self.detail = detail
        self._runtime = weakref.ref(runtime)
        state, seq = self._snapshot(runtime)
        self.history = TreeHistory(TreeState(capacity=state.capacity), detail=detail)
        events = self.log.since(0)
        if seq == 0 or (events and events[0].seq == 0):
            self.history.feed(event for event in events if event.seq < seq)
            self.cursor = seq
        if self.cursor != seq or not self._same(state):  # it begins later, or with another engine's events
            self._restart(state, seq)

    @property
    def ended(self) -> bool:
        runtime = self._runtime()
        return (runtime is None or not runtime.engine.alive) and self.log.next_seq == self.cursor

    def _snapshot(self, runtime: Runtime) -> tuple[TreeState, int]:
        """The engine's state now, and the number of the first event after it."""
        s = runtime.scheduler

        def take() -> tuple[TreeState, int]:
            running = [request.rid for request in s.running]
            free = s.allocator.free_slots().copy()
            return from_snapshot(s.tree.snapshot(), free, s.allocator.capacity, running), self.log.next_seq

        if runtime.engine.alive:
            from .output import EngineError

            try:
                return runtime.engine.call(take)
            except EngineError:
                if runtime.engine.alive:
                    raise
        return take()  # its thread has ended

    def _same(self, state: TreeState) -> bool:
        """Whether the history ends with the engine's own tree."""
        ours = self.history.now.nodes
        return ours.keys() == state.nodes.keys() and all(
            (a.parent, a.tokens, a.slots, a.locks) == (b.parent, b.tokens, b.slots, b.locks)
            for a, b in ((ours[i], state.nodes[i]) for i in ours)
        )

    def _restart(self, state: TreeState, seq: int) -> None:
        self.history = TreeHistory(state, detail=self.detail)
        self.cursor = seq

    def missed(self, count: int) -> None:
        """Events were overwritten before they were read: start again from a snapshot."""
        runtime = self._runtime()
        if runtime is None:
            super().missed(count)
            return
        self._restart(*self._snapshot(runtime))
        self.history.steps[0].title += f" ({count} events before it were overwritten unread)"


def is_runtime(source: Any) -> bool:
    """Whether this is a Runtime (without importing torch to ask)."""
    return hasattr(source, "scheduler") and hasattr(source, "engine")
