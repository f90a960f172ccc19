"""Where keys and values live: a slot allocator, the KV tensor, and the table from request positions to slots.

Paged attention with pages of one token.  Three small things, one on top of the other:

    RequestTable   row r, position p  ->  slot        "where is token p of request r?"
    SlotAllocator  which slots are free               "who may write where?"
    KVPool         (layer, 2, slot, head, dim)        "the numbers themselves"

        request A  [The][cat][sat] ----> table row 1:  7  8  9
        request B  [The][cat][ran] ----> table row 2:  7  8 12      slots 7 and 8 are shared: no copy was made

A *slot* is the storage of one token's K and V in every layer.  Because attention finds keys only through the table,
sharing a prefix is writing the same slot numbers into two rows.  Who owns a slot (the free list, the radix tree or a
running request) is bookkeeping on integers, which is why nothing here but `KVPool` touches a tensor.

Slot 0 and row 0 are dummies: padding reads and writes them, nobody is ever given them.
(vLLM's PagedAttention, arXiv 2309.06180, uses pages of 16 tokens; a page of one token makes every prefix shareable to
the last token, as in SGLang, arXiv 2312.07104.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from .events import EventLog

DUMMY_SLOT = 0
DUMMY_ROW = 0


class OutOfSlots(RuntimeError):
    """The allocator was asked for more slots than are free (the scheduler evicts or retracts first)."""


class SlotAllocator:
    """Free list of the slots 1..capacity, as one array used as a stack.

    Slots come out in ascending runs while nothing was freed, so that a prompt's slots are neighbours in memory.
    """

    def __init__(self, capacity: int, events: EventLog | None = None):
        if capacity < 1:
            raise ValueError(f"kv capacity must be at least 1 token, got {capacity}")
        self.capacity = capacity
        self.events = events
        self._stack = np.arange(capacity, 0, -1, dtype=np.int32)  # the top of the stack is slot 1
        self.available = capacity

    def reset(self) -> None:
        """Make every slot free again, whoever owns it."""
        every = np.arange(self.capacity, 0, -1, dtype=np.int32)
        taken = np.setdiff1d(every, self.free_slots())
        self._stack[:] = every
        self.available = self.capacity
        if self.events is not None and len(taken):
            self.events.emit("free", slots=taken.tolist())

    def alloc(self, n: int) -> np.ndarray:
        """Take `n` slots: (n,) int32.  Raises OutOfSlots, taking nothing, if fewer are free."""
        if n > self.available:
            raise OutOfSlots(f"{n} KV slots wanted, {self.available} of {self.capacity} free")
        top = self.available
        self.available = top - n
        slots = self._stack[top - n : top][::-1].copy()
        if self.events is not None and n:
            self.events.emit("alloc", slots=slots.tolist())
        return slots

    def free(self, slots: np.ndarray) -> None:
        """Give slots back.  The caller owned them: neither the tree nor another request may still use them."""
        n = len(slots)
        if self.available + n > self.capacity:
            raise AssertionError("more slots freed than exist: a slot was freed twice")
        self._stack[self.available : self.available + n] = slots[::-1]
        self.available += n
        if self.events is not None and n:
            self.events.emit("free", slots=np.asarray(slots).tolist())

    def free_slots(self) -> np.ndarray:
        """The free slots, for checkers."""
        return self._stack[: self.available]


class RequestTable:
    """(max_requests + 1, max_context) int32: the slot of every token of every request that holds a row.

    The scheduler writes the host array; `device` is what attention reads.  On a CPU they are the same memory.  On a
    GPU the runner replays onto the device exactly the ranges that changed (`take_writes`), in launch order, so a
    batch in flight never sees a later batch's edits.
    """

    def __init__(self, max_requests: int, max_context: int):
        self.max_requests, self.max_context = max_requests, max_context
        self.slots = np.zeros((max_requests + 1, max_context), np.int32)  # zeros: DUMMY_SLOT, committed when written
        self.reset()

    def reset(self) -> None:
        """Make every row free, whoever holds it."""
        self._free_rows = list(range(self.max_requests, DUMMY_ROW, -1))
        self._writes: list[tuple[int, int, int]] = []

    @property
    def available_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self) -> int:
        """A free row; IndexError if every row is taken."""
        return self._free_rows.pop()

    def give_row(self, row: int) -> None:
        self._free_rows.append(row)

    def write(self, row: int, start: int, slots: np.ndarray) -> None:
        """Positions start, start+1, ... of `row` are found in `slots`, which hold (or will hold) them already."""
        self.write_new(row, start, slots)
        if len(slots):
            self._writes.append((row, start, start + len(slots)))

    def write_new(self, row: int, start: int, slots: np.ndarray) -> None:
        """The same for positions that the next step computes.

        That step carries (row, position, slot) of each of its tokens and enters them on the device itself, so these
        are not logged for replay.
        """
        self.slots[row, start : start + len(slots)] = slots

    def write_column(self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        """`write_new` of one token for each of several rows (a decode step)."""
        self.slots[rows, positions] = slots

    def take_writes(self) -> list[tuple[int, int, int]]:
        """The (row, start, end) ranges written since the last call."""
        writes, self._writes = self._writes, []
        return writes


class KVPool:
    """`kv`: (layers, 2, capacity + 1, kv_heads, head_dim); [:, 0] are keys, [:, 1] values, slot 0 is the dummy.

    Zeroed at start: padding may read the dummy slot, and garbage that decodes to NaN would poison real rows
    (0 * NaN is NaN, masked or not).
    """

    def __init__(
        self,
        layers: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        import torch

        self.capacity = capacity
        self.kv = torch.zeros((layers, 2, capacity + 1, kv_heads, head_dim), dtype=dtype, device=device)

    def release(self) -> None:
        """Give the memory back, whoever still refers to this object.  It is of no use afterwards."""
        del self.kv

    def keys(self, layer: int) -> torch.Tensor:
        """(capacity + 1, kv_heads, head_dim) view."""
        return self.kv[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """(capacity + 1, kv_heads, head_dim) view."""
        return self.kv[layer, 1]

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, element_size: int) -> int:
        """Bytes of one slot: K and V of one token in every layer."""
        return layers * 2 * kv_heads * head_dim * element_size
