"""The event log: order, the ring, readers' cursors, a writer and readers at once."""

from __future__ import annotations

import threading
import time

import pytest

from minisgl.events import Event, EventLog


def test_events_are_numbered_timed_and_kept_in_order():
    log = EventLog()
    before = time.perf_counter()
    log.emit("match", node=3, length=7)
    log.emit("evict", node=4)
    after = time.perf_counter()
    first, second = log
    assert (first.seq, first.kind, first.fields) == (0, "match", {"node": 3, "length": 7})
    assert (second.seq, second.kind) == (1, "evict")
    assert before <= first.time <= second.time <= after
    assert len(log) == 2 and log.next_seq == 2 and log.dropped == 0


def test_the_ring_keeps_the_newest_and_counts_the_rest():
    log = EventLog(capacity=3)
    for i in range(10):
        log.emit("alloc", i=i)
    assert [event.seq for event in log] == [7, 8, 9]
    assert [event.fields["i"] for event in log] == [7, 8, 9]
    assert (len(log), log.dropped, log.next_seq) == (3, 7, 10)


def test_since_gives_what_the_reader_has_not_seen():
    log = EventLog(capacity=4)
    cursor = log.next_seq
    assert log.since(cursor) == []
    for i in range(3):
        log.emit("batch", i=i)
    seen = log.since(cursor)
    assert [event.fields["i"] for event in seen] == [0, 1, 2]
    cursor = seen[-1].seq + 1
    assert log.since(cursor) == [] and log.since(100) == []
    for i in range(3, 9):
        log.emit("batch", i=i)
    assert [event.fields["i"] for event in log.since(cursor)] == [5, 6, 7, 8]  # 3 and 4 were overwritten
    assert [event.fields["i"] for event in log.since(7)] == [7, 8]


def test_clear_forgets_events_but_not_numbers():
    log = EventLog(capacity=2)
    for _ in range(5):
        log.emit("free")
    log.clear()
    assert len(log) == 0 and list(log) == [] and log.dropped == 0 and log.next_seq == 5
    log.emit("free")
    log.emit("alloc")
    assert [event.seq for event in log] == [5, 6] and log.dropped == 0
    log.emit("alloc")
    assert [event.seq for event in log] == [6, 7] and log.dropped == 1


def test_repr_says_what_there_is():
    log = EventLog(capacity=8)
    assert repr(log) == "EventLog(0 of 8 kept, 0 dropped: empty)"
    log.emit("split", node=2, upper=5)
    log.emit("match", node=5)
    log.emit("match", node=5)
    assert repr(log) == "EventLog(3 of 8 kept, 0 dropped: match 2, split 1)"
    assert repr(next(iter(log))) == "#0 split node=2 upper=5"


def test_events_are_read_only():
    event = Event(0, 0.0, "match")
    with pytest.raises(AttributeError):
        event.seq = 1  # type: ignore[misc]


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_is_refused(capacity):
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        EventLog(capacity)


def test_one_writer_and_readers_at_once():
    log = EventLog(capacity=64)
    stop, problems = threading.Event(), []

    def read() -> None:
        cursor = 0
        while not stop.is_set():
            events = log.since(cursor)
            if not events:
                continue
            numbers = [event.seq for event in events]
            if numbers[0] < cursor or numbers != list(range(numbers[0], numbers[-1] + 1)):
                problems.append(f"gap or repeat in {numbers}")
            if any(event.fields["i"] != event.seq for event in events):
                problems.append("an event has another's fields")
            cursor = numbers[-1] + 1

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(5000):
        log.emit("batch", i=i)
    stop.set()
    for reader in readers:
        reader.join()
    assert not problems
    assert log.next_seq == 5000 and len(log) == 64 and log.dropped == 5000 - 64
