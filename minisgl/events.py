"""The log of what the engine did: tree, pool and scheduler write it, a visualiser or a test reads it.

A cache is hard to trust when its work is invisible. With a log attached, every match, split, insertion, lock
and eviction is one small record, so that "why was this prefix computed twice?" is a question you can answer
by reading:

    >>> log = EventLog()
    >>> tree = RadixTree(events=log)
    >>> tree.insert([1, 2, 3], [10, 11, 12])
    >>> list(log)
    [#0 insert node=1 parent=0 length=3 matched=0 tokens=[1 2 3] slots=[10 11 12]]

The log is a ring buffer: the newest `capacity` events are kept, older ones are overwritten and counted in
`dropped`, so it never grows with the length of a run. Nobody is called back: readers poll `since` with the
number of the first event that they have not seen, which keeps their work off the engine's thread.

                    since(seq)
                        |
        [ 3 | 4 | 5 | 6 | 7 | 8 | 9 ]   <- next_seq (10): the number that the next event gets
          ^ the oldest kept; 0, 1 and 2 were overwritten: dropped == 3

It is off by default, at no cost: whoever may write holds `events: EventLog | None` and asks `if events is not
None` before it builds a record.

Kinds, by writer. The tree: match, split, insert, lock, unlock, evict (fields in `radix.RadixTree`). The pool:
alloc, free. The scheduler: batch, and of a request submit, admit, extend, release, finish (its reason may be
abort), retract: what tree and pool do between two of these, they do for the request named by the first. The
engine, of each step: launch, results, commit, each with the time at which that work `began` (it ended at the
event's own time), launch also with the time at which forming the batch began (`formed`), and with whether it only
`queued` work for the device, as on a GPU, or did it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Fields hold ids, counts and arrays: nothing that changes later."""

    seq: int
    """Number of the event in its log, counted from 0 and never used again."""
    time: float
    """Seconds, of `time.perf_counter`: good for differences, not a date."""
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        fields = [f"{name}={value}" for name, value in self.fields.items()]
        return " ".join([f"#{self.seq} {self.kind}", *fields])


class EventLog:
    """Ring buffer of the newest `capacity` events. One thread may write while others read.

    Raises ValueError for a capacity below 1.
    """

    def __init__(self, capacity: int = 65536) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.next_seq = 0
        """Number that the next event will get; what to pass to `since` to see only what comes from now on."""
        self.dropped = 0
        """Events overwritten before anybody cleared them."""
        self._ring: list[Event | None] = [None] * capacity  # event `seq` lives at seq % capacity
        self._oldest = 0
        self._lock = threading.Lock()

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        now = time.perf_counter()
        with self._lock:
            seq = self.next_seq
            if seq - self._oldest == self.capacity:
                self._oldest += 1
                self.dropped += 1
            self._ring[seq % self.capacity] = Event(seq, now, kind, fields)
            self.next_seq = seq + 1

    def since(self, seq: int) -> list[Event]:
        """The events numbered `seq` and later, oldest first; those no longer kept are left out.

        A reader's loop: `for event in log.since(cursor): ...; cursor = event.seq + 1`. Costs time in
        proportion to what it returns, not to the capacity.
        """
        with self._lock:
            numbers = range(max(seq, self._oldest), self.next_seq)
            return [event for i in numbers if (event := self._ring[i % self.capacity]) is not None]

    def clear(self) -> None:
        """Forget the events. Numbers go on from where they were, so that a reader's cursor stays valid."""
        with self._lock:
            self._ring = [None] * self.capacity
            self._oldest = self.next_seq
            self.dropped = 0

    def __len__(self) -> int:
        return self.next_seq - self._oldest

    def __iter__(self) -> Iterator[Event]:
        return iter(self.since(0))

    def __repr__(self) -> str:
        kinds = Counter(event.kind for event in self)
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        kept = f"{len(self)} of {self.capacity} kept, {self.dropped} dropped"
        return f"EventLog({kept}: {counts or 'empty'})"
