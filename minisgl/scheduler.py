"""Which requests run next: continuous batching over a radix cache.

Each call of `next_batch` forms one flat batch, in three passes over one budget of KV slots:

    1. decode    every running request whose prompt is done gets one slot; if slots are short, evict, then retract
    2. continue  prompts that are being computed in chunks go on
    3. admit     waiting requests, in the policy's order, while the chunk budget and the memory last

and `commit` takes the sampled tokens of a batch back.  Between the two the batch is on the device; with the overlapped
loop the next `next_batch` comes before the `commit` of the last, which is why a request counts tokens `in_flight`.

Two rules make every distinct prefix be computed once, however many requests with it arrive together:

* A prompt's tokens enter the tree when the step that computes them is *formed*, not when it is done.  Within a step
  every layer writes all K and V before any attention reads them, and steps run in order, so whoever finds those tokens
  in the tree, in this batch or a later one, reads them after they are written.  Sixty-four questions behind the same
  examples fit one batch: the first computes the examples, the others already share them.
* A prompt longer than the chunk budget enters the tree chunk by chunk.  A request that shares more of it than is there
  yet waits until it is (`_waits_for_chunks`), instead of computing the rest a second time.

Ownership of a slot moves  free -> request -> tree -> free  and nowhere else; `check` recounts it (invariant 1).
The scheduler sees token ids and integers, never a logit or a string.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .policy import POLICIES, order_waiting
from .pool import DUMMY_SLOT, RequestTable, SlotAllocator
from .request import Request, Rows, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .events import EventLog
    from .radix import NullCache, RadixTree

MAX_PASSED_OVER = 32  # batches that may admit younger requests first before a waiting one goes to the front
RESERVE_CLIP = 4096  # a request's possible output counts at most this many tokens in the admission reserve


@dataclass
class Batch:
    """One step: the request in `rows[i]` computes its tokens [starts[i], ends[i]).  Decodes come first, then `extends`.

    rows, starts, ends: (B,) int64.  samples: (B,) bool, the sequences that reach their end and sample a token.
    from_device: (B,) bool, decodes whose input token was sampled by a step that the host has not read back yet.
    """

    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    samples: np.ndarray
    from_device: np.ndarray
    num_decodes: int
    generation: np.ndarray
    extends: list[Request]
    dropped: np.ndarray  # (B,) bool: sequences whose sample is not wanted any more (`Scheduler.force`)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int((self.ends - self.starts).sum())


@dataclass
class Progress:
    """What `commit` found.

    started: requests that got their first token.  finished: requests that ended.
    watched: (request, token id, index among the batch's samples) for those whose tokens are watched.
    """

    started: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    watched: list[tuple[Request, int, int]] = field(default_factory=list)
    tokens: int = 0


class Scheduler:
    """Owns the waiting queue, the running rows and every decision about KV slots.

    tree           RadixTree, or NullCache to run without sharing
    max_context    longest sequence, prompt and output, in tokens; never more than the pool holds
    chunk_size     most tokens in one step, and most prompt tokens; None: unlimited
    """

    def __init__(
        self,
        tree: RadixTree | NullCache,
        allocator: SlotAllocator,
        table: RequestTable,
        *,
        max_context: int,
        chunk_size: int | None = None,
        policy: str = "lpm",
        seed: int = 0,
        max_passed_over: int = MAX_PASSED_OVER,
        events: EventLog | None = None,
    ):
        if policy not in POLICIES:
            raise ValueError(f"schedule_policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
        self.tree, self.allocator, self.table = tree, allocator, table
        self.max_context = min(max_context, allocator.capacity, table.max_context)
        self.chunk_size = chunk_size
        self.policy = policy
        self.max_passed_over = max_passed_over
        self.events = events
        self.rng = np.random.default_rng(seed)
        self.rows = Rows(table.max_requests, table.max_context)
        self.waiting: list[Request] = []
        self.running: dict[Request, None] = {}  # a set in order of admission, from which any leaves at once
        self.reserve_ratio = 0.7  # share of the running requests' possible output that admission keeps free
        self.total_retractions = 0
        self.uncommitted = 0  # batches formed whose results have not come back
        self.needs_commit = False  # next_batch can do nothing before the results in flight come back

    # ---- the queue -----------------------------------------------------------------------------------------------

    def refusal(self, request: Request) -> str | None:
        """Why this request could never run, or None.  Asked before it is queued."""
        n, limit = request.prompt_len, self.max_context
        if n == 0:
            return "the prompt is empty: at least one token is needed"
        room = 0 if request.params.max_new_tokens == 0 else 1
        if n + room > limit:
            return (
                f"the prompt has {n} tokens; at most {limit - room} fit "
                f"(context {limit} tokens, KV capacity {self.allocator.capacity})"
            )
        return None

    def add(self, request: Request) -> None:
        """Queue a request.  Raises ValueError if it can never run."""
        why = self.refusal(request)
        if why is not None:
            raise ValueError(why)
        request.max_len = min(request.max_len, self.max_context)
        self.waiting.append(request)
        self._emit("submit", rid=request.rid, prompt_len=request.prompt_len, max_len=request.max_len)

    def abort(self, request: Request, message: str = "aborted") -> None:
        """End a request now, wherever it is; its slots are given back."""
        if request.status is Status.FINISHED:
            return
        self.finish(request, {"type": "abort", "message": message})

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    # ---- forming a batch -----------------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """The next step, or None if there is nothing to launch.

        None with `needs_commit` set means: commit what is in flight first, memory is too short to go on without.
        """
        self.needs_commit = False
        decodes = self._take_decodes()
        if decodes is None:
            return None
        budget = 1 << 60
        if self.chunk_size is not None:  # decodes count, but never keep prompts from going on
            budget = max(self.chunk_size - len(decodes), self.chunk_size // 4, 1)
        extends: list[tuple[Request, int, int]] = []
        budget = self._continue_prompts(extends, budget)
        if self.waiting:
            self._admit(extends, budget, decodes)
        if not len(decodes) and not extends:
            if self.running and not self.uncommitted:
                self._retract(self._victim())  # prompts hold the memory that they need to go on: one steps back
                return self.next_batch()
            self.needs_commit = bool(self.running)
            return None
        self.reserve_ratio = max(0.1, self.reserve_ratio - 0.002)
        return self._build(decodes, extends)

    def _take_decodes(self) -> np.ndarray | None:
        """Rows that decode in this step, each with a slot; None if results must be committed first."""
        state = self.rows
        while True:
            length = state.num_tokens + state.in_flight
            decodes = np.flatnonzero(state.active & (length - state.kv_len == 1) & (length < state.max_len))
            # a fresh one-token prompt also misses one token: it is an extend until it has sampled once
            decodes = decodes[state.kv_len[decodes] > 0]
            if self._reclaim(len(decodes)):
                break
            if self.uncommitted:
                self.needs_commit = True
                return None
            self._retract(self._victim())
        if len(decodes):
            slots = self.allocator.alloc(len(decodes))
            self.table.write_column(decodes, state.kv_len[decodes], slots)
        return decodes

    def _continue_prompts(self, extends: list[tuple[Request, int, int]], budget: int) -> int:
        """Give the running prompts (and forced tokens) their next chunk; returns what is left of the budget."""
        state = self.rows
        if not self.running:
            return budget
        missing = state.num_tokens - state.kv_len
        decodes = (missing == 1) & (state.kv_len > 0) & (state.num_tokens < state.max_len)
        extending = state.active & (state.in_flight == 0) & (missing > 0) & ~decodes
        if not extending.any():
            return budget
        for request in self.running:
            if not extending[request.row]:
                continue
            n = int(missing[request.row])
            n = min(n - self._skip_ahead(request), budget)
            if n < 1 or not self._reclaim(n):
                continue
            extends.append(self._extend(request, n))
            budget -= n
        return budget

    def _skip_ahead(self, request: Request) -> int:
        """Between two chunks somebody else may have put more of this prompt into the tree: take it, return how much."""
        row, state = request.row, self.rows
        kv_len = int(state.kv_len[row])
        if request.tree_len != kv_len or not self.tree.stores:
            return 0
        request.tokens = state.ids[row, : state.num_tokens[row]]
        limit = request.reusable
        if self.tree.match_length(request.tokens[:limit]) <= kv_len:
            return 0
        match = self.tree.match(request.tokens[:limit])
        self.tree.lock(match.node)
        if request.node is not None:
            self.tree.unlock(request.node)
        request.node, request.tree_len = match.node, match.length
        self.table.write(row, kv_len, match.slots[kv_len:])
        state.kv_len[row] = match.length
        return match.length - kv_len

    def _admit(self, extends: list[tuple[Request, int, int]], budget: int, decodes: np.ndarray) -> None:
        """Move waiting requests into the batch while chunk budget, rows and memory last."""
        if budget < 1 or not self.table.available_rows:
            return
        admitted: list[Request] = []
        state = self.rows
        reserve = self._reserve()
        chunking = self._in_chunks(decodes)
        for request in order_waiting(self.waiting, self.policy, self.tree, self.rng, self.max_passed_over):
            if budget < 1 or not self.table.available_rows:
                break
            match = self.tree.match(request.tokens[: request.reusable])
            if self._waits_for_chunks(request, match.length, chunking):
                continue
            total = len(request.tokens)
            own_reserve = self.reserve_ratio * min(request.max_len - total, RESERVE_CLIP)
            self.tree.lock(match.node)
            room = self.allocator.available + self.tree.evictable
            alone = not self.running
            if total - match.length + (0 if alone else own_reserve + reserve) > room:
                self.tree.unlock(match.node)
                break  # nobody overtakes: what is freed goes to the one that waits for it
            new = min(total - match.length, budget)
            row = self.table.take_row()
            state.occupy(row, request)
            request.status = Status.RUNNING
            request.node, request.tree_len = match.node, match.length
            if request.cached_tokens is None:
                request.cached_tokens = match.length
            self._emit("admit", rid=request.rid, cached=match.length, prompt=total)
            self.table.write(row, 0, match.slots)
            state.kv_len[row] = match.length
            self.running[request] = None
            self._reclaim(new)
            extends.append(self._extend(request, new))
            admitted.append(request)
            # the rest of a prompt that continues in a later chunk is spoken for as well
            reserve += own_reserve + (total - match.length - new)
            budget -= new
            if new < total - match.length:
                chunking.append(request)
        self._drop_from_waiting(admitted)

    def _extend(self, request: Request, n: int) -> tuple[Request, int, int]:
        """Allocate the slots of the next n tokens and put all that is computed by then into the tree."""
        row, state = request.row, self.rows
        start = int(state.kv_len[row])
        end = start + n
        self._emit("extend", rid=request.rid, start=start, end=end)
        self.table.write_new(row, start, self.allocator.alloc(n))
        state.kv_len[row] = end
        # One token, the last of a prompt that is cached, is not worth a node that its output will only lengthen.  And
        # a prompt whose log-probabilities are wanted may be computing again what the tree has: it shares when it ends.
        # Forced tokens (behind all that was known at admission) go to the tree with the rest of the output, at the end.
        known = len(request.tokens)
        if start < known and (n > 1 or end < known) and request.logprob_start is None:
            self._share(request, end)
        return request, start, end

    def _build(self, decodes: np.ndarray, extends: list[tuple[Request, int, int]]) -> Batch:
        state = self.rows
        k = len(decodes)
        rows = np.concatenate([decodes, np.array([r.row for r, _, _ in extends], np.int64)])
        starts = np.concatenate([state.kv_len[decodes], np.array([s for _, s, _ in extends], np.int64)])
        ends = np.concatenate([starts[:k] + 1, np.array([e for _, _, e in extends], np.int64)])
        state.kv_len[decodes] += 1
        from_device = np.zeros(len(rows), bool)
        from_device[:k] = state.in_flight[decodes] > 0
        length = state.num_tokens[rows] + state.in_flight[rows]
        samples = (ends == length) & (length < state.max_len[rows])
        state.in_flight[rows[samples]] += 1
        if self.events is not None:
            decoding = [r.rid for r in (state.request[row] for row in decodes) if r is not None]
            spans = [(r.rid, start, end) for r, start, end in extends]
            self.events.emit("batch", decodes=decoding, extends=spans, waiting=len(self.waiting))
        self.uncommitted += 1
        generation, dropped = state.generation[rows], np.zeros(len(rows), bool)
        prompts = [r for r, _, _ in extends]
        return Batch(rows, starts, ends, samples, from_device, k, generation, prompts, dropped)

    def _in_chunks(self, decodes: np.ndarray) -> list[Request]:
        """The running requests whose tokens are not all computed, or being computed, by the batch that is formed."""
        state = self.rows
        missing = state.active & (state.num_tokens > state.kv_len) & (state.in_flight == 0)
        missing[decodes] = False
        return [self._at(int(row)) for row in np.flatnonzero(missing)]

    def _waits_for_chunks(self, request: Request, matched: int, chunking: list[Request]) -> bool:
        """True if somebody is still computing, chunk by chunk, more of this request's prefix than the tree has."""
        if not self.tree.stores:
            return False
        state, limit = self.rows, request.reusable
        for other in chunking:
            row = other.row
            n = min(limit, int(state.num_tokens[row]))
            if n <= matched:
                continue
            same = request.tokens[:n] == state.ids[row, :n]
            common = n if same.all() else int(same.argmin())
            if not self.tree.partial and common < other.prompt_len:
                continue
            if common > max(matched, int(state.kv_len[row])):
                return True
        return False

    def _reserve(self) -> float:
        """Slots that admission leaves free: what running prompts still need, and a share of the possible output."""
        state = self.rows
        active = state.active
        left = np.minimum(state.max_len[active] - state.num_tokens[active], RESERVE_CLIP).sum()
        prompts = np.maximum(state.num_tokens[active] - state.kv_len[active] - 1, 0).sum()
        return self.reserve_ratio * float(left) + float(prompts)

    def _drop_from_waiting(self, admitted: list[Request]) -> None:
        if not admitted:
            return
        gone = set(map(id, admitted))
        youngest = max(r.order for r in admitted)
        self.waiting = [r for r in self.waiting if id(r) not in gone]
        for request in self.waiting:
            if request.order < youngest:
                request.passed_over += 1

    # ---- memory --------------------------------------------------------------------------------------------------

    def _reclaim(self, n: int) -> bool:
        """Make n slots free by eviction; False if that is impossible."""
        short = n - self.allocator.available
        if short > 0:
            if self.tree.evictable < short:
                return False
            self.allocator.free(self.tree.evict(short))
        return True

    def _share(self, request: Request, length: int) -> None:
        """Put the request's first `length` tokens into the tree and move it onto the tree's slots.

        If the tree already has some of them (somebody else computed the same), the request's table row is pointed at
        the tree's slots before the request's own duplicates are freed (invariant 4).
        """
        if not self.tree.stores or length <= request.tree_len:
            return
        row = request.row
        own = self.table.slots[row, :length].copy()
        inserted = self.tree.insert(self.rows.ids[row, :length], own, priority=request.priority)
        if inserted.matched > request.tree_len:
            span = slice(request.tree_len, inserted.matched)
            self.table.write(row, request.tree_len, inserted.slots[span])
            self.allocator.free(own[span])
        self.tree.lock(inserted.node)
        if request.node is not None:
            self.tree.unlock(request.node)
        request.node, request.tree_len = inserted.node, length
        if length >= request.prompt_len:
            self.tree.completed(inserted.node)

    def _release(self, request: Request, keep: bool) -> None:
        """Take a running request off its row.  `keep`: leave what it computed in the tree (unlocked)."""
        row, state = request.row, self.rows
        self._emit("release", rid=request.rid, keep=keep)
        # tokens sampled but not read back have no id yet and cannot be keys (the engine has read them all by now; a
        # caller who aborts between forming a step and committing the last one has not)
        known = min(int(state.kv_len[row]), int(state.num_tokens[row]))
        if keep:
            self._share(request, known)
        self.allocator.free(self.table.slots[row, request.tree_len : state.kv_len[row]].copy())
        if request.node is not None:
            self.tree.unlock(request.node)
        request.node, request.tree_len = None, 0
        state.vacate(row)
        self.table.give_row(row)
        del self.running[request]

    def _victim(self) -> Request:
        """The running request that loses least by stepping back; never the oldest, so that one always finishes."""
        oldest = min(self.running, key=lambda r: r.order)
        others = [r for r in self.running if r is not oldest]
        if not others:
            raise RuntimeError(
                f"request {oldest.rid} cannot go on: {self.allocator.available} slots free, {self.tree.evictable} "
                f"evictable of {self.allocator.capacity}; this is a defect in the bookkeeping of slots"
            )
        return min(others, key=lambda r: (int(self.rows.kv_len[r.row]) - r.tree_len, -r.order))

    def _retract(self, request: Request) -> None:
        """Send a running request back to the queue with its tokens; what it computed stays in the tree while it can."""
        self._emit("retract", rid=request.rid, num_tokens=int(self.rows.num_tokens[request.row]))
        self._release(request, keep=True)
        request.status = Status.WAITING
        request.retractions += 1
        self.total_retractions += 1
        at = next((i for i, r in enumerate(self.waiting) if r.order > request.order), len(self.waiting))
        self.waiting.insert(at, request)
        self.reserve_ratio = min(1.0, self.reserve_ratio + 0.1)

    # ---- taking results back -------------------------------------------------------------------------------------

    def commit(self, batch: Batch, sampled: np.ndarray) -> Progress:
        """Take in the tokens that `batch` sampled: (samples.sum(),) int, in batch order.

        Results for a row that changed hands meanwhile (finished a step earlier, aborted) are dropped.
        """
        state, progress = self.rows, Progress()
        self.uncommitted -= 1
        rows = batch.rows[batch.samples]
        wanted = (state.generation[rows] == batch.generation[batch.samples]) & ~batch.dropped[batch.samples]
        index = np.flatnonzero(wanted)
        rows, tokens = rows[index], np.asarray(sampled)[index]
        state.ids[rows, state.num_tokens[rows]] = tokens
        state.num_tokens[rows] += 1
        state.in_flight[rows] -= 1
        progress.tokens = len(rows)

        n = state.num_tokens[rows]
        stopped = (state.stop_ids[rows] == tokens[:, None]).any(1) & (n > state.min_len[rows])
        for i in np.flatnonzero(~state.started[rows]):
            progress.started.append(self._at(rows[i]))
        state.started[rows] = True
        for i in np.flatnonzero(state.watch[rows]):
            progress.watched.append((self._at(rows[i]), int(tokens[i]), int(index[i])))
        for i in np.flatnonzero(stopped | (n >= state.max_len[rows])):
            request = self._at(rows[i])
            self.finish(request, {"type": "stop", "matched": int(tokens[i])} if stopped[i] else {"type": "length"})
            progress.finished.append(request)
        self._finish_scored(batch, progress)
        return progress

    def force(self, request: Request, tokens: Sequence[int], launched: Batch | None) -> int:
        """Append tokens that need no sampling (jump-forward); returns how many fitted below the request's max_len.

        The next step computes them all.  `launched`: a batch formed since the request's last token was sampled; what
        it samples for the request is the first of these tokens or another spelling of it, and is dropped.
        """
        state, row = self.rows, request.row
        n = int(state.num_tokens[row])
        tokens = tokens[: int(state.max_len[row]) - n]
        if launched is not None:
            for i in np.flatnonzero((launched.rows == row) & launched.samples & ~launched.dropped):
                if launched.generation[i] == state.generation[row]:
                    launched.dropped[i] = True
                    state.in_flight[row] -= 1
        state.ids[row, n : n + len(tokens)] = tokens
        state.num_tokens[row] += len(tokens)
        request.forced_tokens += len(tokens)
        return len(tokens)

    def unforce(self, request: Request, n: int) -> None:
        """Take the last n forced tokens back: a stop string ended the output before them."""
        self.rows.num_tokens[request.row] -= n
        request.forced_tokens -= n

    def output_len(self, request: Request) -> int:
        """How many output tokens a running request has, forced ones included."""
        return int(self.rows.num_tokens[request.row]) - request.prompt_len

    def is_full(self, request: Request) -> bool:
        """Whether a running request has all the tokens that it may have."""
        return bool(self.rows.num_tokens[request.row] >= self.rows.max_len[request.row])

    def _at(self, row: int) -> Request:
        request = self.rows.request[row]
        assert request is not None, f"row {row} is nobody's"
        return request

    def _finish_scored(self, batch: Batch, progress: Progress) -> None:
        """Requests that only score their prompt end when it is computed, without sampling."""
        for i, request in enumerate(batch.extends, start=batch.num_decodes):
            current = self.rows.generation[batch.rows[i]] == batch.generation[i]
            if current and request.max_len <= request.prompt_len <= batch.ends[i]:
                self.finish(request, {"type": "length"})
                progress.finished.append(request)

    def finish(self, request: Request, reason: dict[str, Any]) -> None:
        """End a request (stop, length or abort): prompt and output go to the tree, the rest is freed."""
        if request.status is Status.RUNNING:
            self._release(request, keep=True)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        self._emit("finish", rid=request.rid, reason=reason["type"], tokens=len(request.tokens))

    def drop_all(self, message: str) -> list[Request]:
        """After a failed step nothing that was computed can be trusted: end every request, empty the cache.

        Nor can the books, if it failed while they were written: they are not settled but started anew.
        """
        ended = list(dict.fromkeys([*self.running, *self.waiting]))
        for row in np.flatnonzero(self.rows.active).tolist():
            self.rows.vacate(row)
        for request in ended:
            request.node, request.tree_len = None, 0
            request.status, request.finish_reason = Status.FINISHED, {"type": "abort", "message": message}
            self._emit("finish", rid=request.rid, reason="abort", tokens=len(request.tokens))
        self.running, self.waiting, self.uncommitted = {}, [], 0
        self.tree.reset()
        self.allocator.reset()
        self.table.reset()
        return ended

    def flush(self) -> int:
        """Forget every cached prefix that no running request uses; returns the number of tokens forgotten."""
        slots = self.tree.flush()
        self.allocator.free(slots)
        return len(slots)

    # ---- checking ------------------------------------------------------------------------------------------------

    def held(self) -> int:
        """Slots owned by running requests (computed, not in the tree)."""
        return sum(int(self.rows.kv_len[r.row]) - r.tree_len for r in self.running)

    def check(self) -> None:
        """Assert invariants 1, 2, 3 and 8 of the design; for tests and debugging (it walks the whole tree)."""
        self.tree.check()
        used = [self.allocator.free_slots()]
        for request in self.running:
            kv_len = int(self.rows.kv_len[request.row])
            used.append(self.table.slots[request.row, request.tree_len : kv_len])
        used += [node.slots for node in self.tree.nodes()]
        slots = np.concatenate(used) if used else np.zeros(0, np.int32)
        capacity = self.allocator.capacity
        assert len(slots) == capacity, (
            f"invariant 1: {self.allocator.available} free + {self.tree.total} in tree + {self.held()} held "
            f"!= {capacity}"
        )
        assert len(np.unique(slots)) == capacity, "invariant 1: a slot has two owners"
        assert DUMMY_SLOT not in slots, "invariant 1: the dummy slot was given away"
        for request in self.running:
            path: list[np.ndarray] = []
            node = request.node
            while node is not None:
                path.append(node.slots)
                node = node.parent
            theirs = np.concatenate(path[::-1]) if path else np.zeros(0, np.int32)
            assert len(theirs) == request.tree_len, f"request {request.rid} lost its locked prefix"
            row = self.table.slots[request.row, : request.tree_len]
            assert (theirs == row).all(), f"invariant 4: {request.rid} points at slots that are not the tree's"
        if not self.running:
            assert self.tree.locked == 0, "invariant 8: tokens are locked though nothing runs"
            assert self.held() == 0
        assert not (set(map(id, self.running)) & set(map(id, self.waiting)))

    def _emit(self, kind: str, **fields: Any) -> None:
        if self.events is not None:
            self.events.emit(kind, **fields)
