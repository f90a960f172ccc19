"""A scripted model for scheduler tests: its "KV" is a rolling hash, its next token a function of that hash.

The K/V of position p is simulated as hash(KV of position p - 1, token p), read back through the request table.  A slot
that was freed too early, overwritten, shared wrongly or never written therefore changes the output of whoever reads
it, exactly as in a real model but in a few integer operations.
"""

from __future__ import annotations

import numpy as np

from minisgl.pool import RequestTable, SlotAllocator
from minisgl.radix import NullCache, RadixTree
from minisgl.request import Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler import Batch, Scheduler

MOD = (1 << 31) - 1


def mix(h: int, token: int) -> int:
    return (h * 1_000_003 + token * 7919 + 12345) % MOD


def next_token(h: int, vocab: int) -> int:
    return (h // 7) % vocab


def reference(prompt: list[int], n: int, vocab: int, stop_ids: tuple[int, ...] = (), min_new: int = 0) -> list[int]:
    """What the scripted model generates for a prompt on its own."""
    h = 1
    for token in prompt:
        h = mix(h, token)
    out: list[int] = []
    while len(out) < n:
        token = next_token(h, vocab)
        out.append(token)
        if token in stop_ids and len(out) > min_new:
            break
        h = mix(h, token)
    return out


class ScriptedModel:
    def __init__(self, scheduler: Scheduler, vocab: int):
        self.scheduler, self.vocab = scheduler, vocab
        self.kv = np.zeros(scheduler.allocator.capacity + 1, np.int64)
        self.last_token = np.zeros(scheduler.table.max_requests + 1, np.int64)

    def run(self, batch: Batch) -> np.ndarray:
        """Execute a step "on the device"; returns the sampled tokens in batch order."""
        table, ids = self.scheduler.table.slots, self.scheduler.rows.ids
        sampled = []
        for i, row in enumerate(batch.rows):
            start, end = int(batch.starts[i]), int(batch.ends[i])
            h = 1 if start == 0 else int(self.kv[table[row, start - 1]])
            for position in range(start, end):
                token = int(self.last_token[row]) if batch.from_device[i] else int(ids[row, position])
                h = mix(h, token)
                self.kv[table[row, position]] = h
            if batch.samples[i]:
                token = next_token(h, self.vocab)
                self.last_token[row] = token
                sampled.append(token)
        return np.array(sampled, np.int64)

    def poison_free(self) -> None:
        """Overwrite every free slot, so that whoever still reads one is found out."""
        self.kv[self.scheduler.allocator.free_slots()] = -(1 << 40)


class ScriptedEngine:
    """Scheduler and scripted model in lock step, results lagging one step behind when `overlap`."""

    def __init__(
        self,
        capacity: int = 64,
        max_requests: int = 8,
        max_context: int = 256,
        chunk_size: int | None = None,
        policy: str = "lpm",
        overlap: bool = False,
        radix: bool = True,
        vocab: int = 4,
        eviction: str = "lru",
        seed: int = 0,
    ):
        tree = RadixTree(eviction) if radix else NullCache()  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            tree,
            SlotAllocator(capacity),
            RequestTable(max_requests, max_context),
            max_context=max_context,
            chunk_size=chunk_size,
            policy=policy,
            seed=seed,
            max_passed_over=8,
        )
        self.model = ScriptedModel(self.scheduler, vocab)
        self.vocab, self.overlap = vocab, overlap
        self.pending: tuple[Batch, np.ndarray] | None = None
        self.finished: list[Request] = []
        self.batches: list[Batch] = []
        self.count = 0

    def submit(self, prompt: list[int], n: int, stop_ids: tuple[int, ...] = (), **params) -> Request:
        self.count += 1
        request = Request(
            rid=f"r{self.count}",
            prompt=np.array(prompt, np.int32),
            params=SamplingParams(max_new_tokens=n, **params),
            max_len=len(prompt) + n,
            stop_ids=stop_ids,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        batch = self.scheduler.next_batch()
        results = None
        if batch is not None:
            self.batches.append(batch)
            results = self.model.run(batch)
        lagging, self.pending = self.pending, None
        if batch is not None:
            assert results is not None
            if self.overlap:
                self.pending = (batch, results)
            else:
                lagging = (batch, results)
        if lagging is not None:
            self.finished += self.scheduler.commit(*lagging).finished
        elif batch is None:
            assert self.scheduler.idle, "invariant 7: no progress though something waits"
            return False
        return True

    def run(self, limit: int = 100_000, check: bool = False) -> None:
        for _ in range(limit):
            if not self.step():
                return
            if check:
                self.scheduler.check()
        raise AssertionError("did not finish")
