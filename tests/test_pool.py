"""The slot allocator, the request table and the KV tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.events import EventLog
from minisgl.pool import DUMMY_ROW, DUMMY_SLOT, KVPool, OutOfSlots, RequestTable, SlotAllocator

from .scripted import ScriptedEngine


def test_slots_come_out_in_ascending_runs():
    allocator = SlotAllocator(10)
    assert allocator.alloc(3).tolist() == [1, 2, 3]
    assert allocator.alloc(0).tolist() == []
    more = allocator.alloc(4)
    assert more.tolist() == [4, 5, 6, 7] and more.dtype == np.int32
    allocator.free(more)
    assert allocator.alloc(4).tolist() == [4, 5, 6, 7]
    assert allocator.available == 3


def test_the_dummy_slot_is_never_given_out():
    allocator = SlotAllocator(5)
    assert DUMMY_SLOT not in allocator.alloc(5)
    with pytest.raises(OutOfSlots, match="1 KV slots wanted, 0 of 5 free"):
        allocator.alloc(1)


def test_a_refused_allocation_takes_nothing():
    allocator = SlotAllocator(5)
    allocator.alloc(3)
    with pytest.raises(OutOfSlots):
        allocator.alloc(3)
    assert allocator.available == 2 and sorted(allocator.free_slots().tolist()) == [4, 5]


def test_a_slot_freed_twice_is_noticed():
    allocator = SlotAllocator(4)
    slots = allocator.alloc(2)
    allocator.free(slots)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(slots)


def test_what_was_handed_out_is_the_callers_own_array():
    allocator = SlotAllocator(6)
    slots = allocator.alloc(2)
    slots[:] = 6
    assert sorted(allocator.free_slots().tolist()) == [3, 4, 5, 6]


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity):
    with pytest.raises(ValueError, match="kv capacity must be at least 1"):
        SlotAllocator(capacity)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_every_slot_is_free_or_taken_never_both(capacity, steps):
    log = EventLog()
    allocator = SlotAllocator(capacity, log)
    taken: list[np.ndarray] = []
    for take, n in steps:
        if take and n <= allocator.available:
            taken.append(allocator.alloc(n))
        elif not take and taken:
            allocator.free(taken.pop(n % len(taken)))
        together = np.concatenate([allocator.free_slots(), *taken])
        assert sorted(together.tolist()) == list(range(1, capacity + 1))
        assert allocator.available == len(allocator.free_slots())
    allocator.reset()
    free = set(range(1, capacity + 1))
    for event in log:  # the log tells the same story, the reset included
        slots = set(event.fields["slots"])
        assert slots and (slots <= free if event.kind == "alloc" else not slots & free)
        free = free - slots if event.kind == "alloc" else free | slots
    assert free == set(allocator.free_slots().tolist()) == set(range(1, capacity + 1))
    assert allocator.alloc(capacity).tolist() == list(range(1, capacity + 1))


def test_rows_are_given_once_and_row_0_never():
    table = RequestTable(3, 8)
    rows = [table.take_row() for _ in range(3)]
    assert sorted(rows) == [1, 2, 3] and DUMMY_ROW not in rows and table.available_rows == 0
    with pytest.raises(IndexError):
        table.take_row()
    table.give_row(2)
    assert table.take_row() == 2
    table.reset()
    assert table.available_rows == 3


def test_table_remembers_what_the_device_has_not_seen():
    table = RequestTable(2, 8)
    table.write(1, 0, np.array([7, 8, 9]))
    table.write(2, 3, np.array([], np.int32))  # nothing to replay
    table.write_new(2, 0, np.array([4, 5]))  # the step enters these itself
    table.write_column(np.array([1, 2]), np.array([3, 2]), np.array([10, 6]))
    assert table.slots[1].tolist() == [7, 8, 9, 10, 0, 0, 0, 0]
    assert table.slots[2].tolist() == [4, 5, 6, 0, 0, 0, 0, 0]
    assert table.slots[DUMMY_ROW].tolist() == [DUMMY_SLOT] * 8
    assert table.take_writes() == [(1, 0, 3)]
    assert table.take_writes() == []


def test_kv_tensor_has_a_dummy_slot_and_is_zero():
    pool = KVPool(3, 10, 2, 4, torch.float16, "cpu")
    assert pool.kv.shape == (3, 2, 11, 2, 4) and pool.kv.dtype == torch.float16
    assert not pool.kv.any()
    pool.keys(1)[5] = 1
    pool.values(2)[0] = 2
    assert pool.kv[1, 0, 5].eq(1).all() and pool.kv[2, 1, 0].eq(2).all()
    assert pool.kv.count_nonzero() == 16
    assert KVPool.bytes_per_token(3, 2, 4, 2) * 11 == pool.kv.nbytes


def test_radix_evict_units_page_size():
    """Pages of one token: what is asked for, evicted and freed is counted in the same unit, slots."""
    engine = ScriptedEngine(32, 4, 32)
    for i in range(4):
        engine.submit([i] * 8, 0)
        engine.run(check=True)
    scheduler = engine.scheduler
    assert scheduler.allocator.available == 0 and scheduler.tree.evictable == 32
    request = engine.submit([9] * 12, 0)
    engine.step()
    scheduler.check()
    freed = 32 - scheduler.tree.total + len(request.prompt)
    assert freed >= 12 and scheduler.allocator.available + scheduler.tree.total == 32
    assert len(set(scheduler.allocator.free_slots().tolist())) == scheduler.allocator.available
