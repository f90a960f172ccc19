"""One forward step: a `Batch` of integers in, sampled token ids out.

    Batch (host)  --launch-->  ForwardBatch (device)  --model-->  logits  --sample-->  tokens  --results-->  host
                                     ^                                          |
                                     '------------- last_token[row] <-----------'

`launch` and `sample` only queue work on the device; `results` waits.  Between them the host is free, which is what
the overlapped loop lives on.  What makes it possible is `last_token`: the sampler writes each row's token there and the
next step's decodes read it from there, so the host need not know a token to have its successor computed.

On a GPU, decode steps are replayed CUDA graphs (`graphs`), and prefixes that decodes share are read once (`sharing`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .attention import Attention, ForwardBatch, HostBatch, SharedPrefixes
from .constraint import Guide, MaskClock, masks
from .graphs import DecodeGraphs, Entries, RowSampling
from .model_llama import Llama
from .pool import DUMMY_ROW, RequestTable
from .request import Request, Rows
from .sampler import Logprobs, PenaltyState, SamplingBatch, output_logprobs, prompt_logprobs, sample
from .scheduler import Batch
from .sharing import PrefixSharing

SMALL_STEP = 32  # rows of logits per product on a CPU, see `sizing`
APART = 1 << 16  # positions that tokens of one sequence may read more than once for being computed as decodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass
class PromptScores:
    """Log-probabilities of the prompt tokens at positions first, first + 1, ... of one request."""

    request: Request
    first: int
    logprobs: Logprobs


@dataclass
class Step:
    """A batch on its way through the device."""

    batch: Batch
    logits: torch.Tensor  # (R, vocab) in the model's dtype, of the sequences that sample
    sampling: SamplingBatch | None  # of those sequences, as they were when the batch was formed
    guides: list[Guide | None] | None = None  # of those sequences, if any of them has a grammar
    top_logprobs: int = -1  # most alternatives that any of them wants beside its log-probability; -1: none wants any
    prompt_scores: list[PromptScores] = field(default_factory=list)
    tokens: torch.Tensor | None = None  # (R,) int64 on the device
    drawn: bool = False  # `tokens` were drawn in the recorded step already
    logprobs: Logprobs | None = None  # of all R rows, if any of them wants some
    host_tokens: torch.Tensor | None = None
    done: torch.cuda.Event | None = None

    @property
    def jumps(self) -> bool:
        """Whether at least half of the sequences may have tokens appended by their grammar once these are known."""
        return self.guides is not None and 2 * sum(g is not None and g.jump for g in self.guides) >= len(self.guides)


class Runner:
    """Runs the model over batches formed by a scheduler whose `table` and `rows` it reads.

    max_requests   rows of the request table, the dummy not counted
    graph_sizes    decode batch sizes to record as CUDA graphs (empty: none)
    shared_sizes   the same for decodes that share prefixes
    share_prefixes read prefixes that decodes share once; the attention must be able to (`shares_prefixes`)
    pad_rows       (tokens of a step, decodes among them) -> rows to compute, the rest padding (`sizing.ComputePlan`)
    """

    def __init__(
        self,
        model: Llama,
        attention: Attention,
        table: RequestTable,
        rows: Rows,
        *,
        eos_ids: Sequence[int] = (),
        graph_sizes: Sequence[int] = (),
        shared_sizes: Sequence[int] = (),
        share_prefixes: bool = False,
        pad_rows: Callable[[int, int], int] = lambda tokens, decodes: tokens,
    ):
        self.pad_rows = pad_rows
        self.model, self.attention, self.table, self.rows = model, attention, table, rows
        self.device = model.device
        self.cuda = self.device.type == "cuda"
        self.vocab_size = model.config.vocab_size
        self.eos_ids = tuple(eos_ids)
        self.last_token = torch.zeros(table.max_requests + 1, dtype=torch.int64, device=self.device)
        # On a CPU the device's table is the host's: no copies, no replay.
        host_table = torch.from_numpy(table.slots)
        self.device_table = host_table.to(self.device) if self.cuda else host_table
        self.penalties = PenaltyState(table.max_requests + 1, self.vocab_size, self.device)
        self._sampling: tuple[Any, ...] | None = None  # rows, generations, and `_sampling_batch`'s result for them
        self._penalised: dict[int, int] = {}  # row -> generation for which its penalty state was made
        self.graph_replays = self.shared_steps = 0
        self.mask_clock = MaskClock(self.cuda)
        self._sharing: PrefixSharing | None = None
        if share_prefixes:
            self._sharing = attention.prefix_sharing(max(table.max_requests, *shared_sizes, 1))
        self.row_sampling = RowSampling(table.max_requests + 1, self.device)
        self._graphs: DecodeGraphs | None = None
        if graph_sizes:
            shared = self._sharing.tensors if self._sharing is not None else None
            self._graphs = DecodeGraphs(self, list(graph_sizes), shared, list(shared_sizes))

    # ---- the three calls of a step ---------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> Step:
        """Queue the forward pass of `batch`."""
        step = self._launch(batch)
        if step.guides is not None:
            self.mask_clock.launched()
        return step

    def _launch(self, batch: Batch) -> Step:
        sampling, guides, top_logprobs = self._sampling_batch(batch)
        entries = self._entries(batch) if self._graphs is not None and sampling is not None else None
        shared = self._shared_prefixes(batch, entries)
        graph = self._graphs.find(len(entries), shared is not None) if entries is not None and self._graphs else None
        if graph is not None and entries is not None and sampling is not None:
            self._sync_table()
            graph.replay(entries)
            self.graph_replays += 1
            logits, tokens = graph.logits[: len(entries)], graph.tokens[: len(entries)]
            if len(entries) > sampling.size:
                where = self._to_device(np.flatnonzero(entries.draws))
                logits, tokens = logits.index_select(0, where), tokens.index_select(0, where)
            plain = guides is None and sampling.plain and sampling.unfiltered
            return Step(
                batch, logits, sampling, guides, top_logprobs, tokens=tokens if plain else None, drawn=plain
            )
        forward = self._forward_batch(batch, shared)
        self.attention.begin(forward)
        hidden = self.model.forward(forward, self.attention)
        scores = self._score_prompts(batch, hidden)
        logits = self._logits(hidden.index_select(0, forward.logit_rows))
        return Step(batch, logits, sampling, guides, top_logprobs, scores)

    def sample(self, step: Step) -> None:
        """Queue sampling and the copy of the tokens to the host.

        Sequences under a grammar are masked by where their guides stand: their last token must have been taken.
        """
        if step.sampling is None:
            return
        tokens = step.tokens if step.drawn else self._draw(step, step.sampling)
        assert tokens is not None
        self._count_sampled(step, tokens)
        if step.top_logprobs >= 0:
            step.logprobs = output_logprobs(step.logits, tokens, step.top_logprobs)
        step.tokens = step.host_tokens = tokens
        if self.cuda:
            step.host_tokens = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
            step.host_tokens.copy_(tokens, non_blocking=True)
            step.done = torch.cuda.Event()
            step.done.record()

    def _draw(self, step: Step, sampling: SamplingBatch) -> torch.Tensor:
        grammar_mask = None
        if step.guides is not None:
            with self.mask_clock:
                packed = torch.from_numpy(masks(step.guides, self.vocab_size))
            grammar_mask = packed.pin_memory().to(self.device, non_blocking=True) if self.cuda else packed
        positions = self._to_device(step.batch.ends[step.batch.samples])
        tokens = sample(step.logits, sampling, positions, grammar_mask, self.penalties)
        self.last_token[sampling.rows] = tokens
        return tokens

    def _count_sampled(self, step: Step, tokens: torch.Tensor) -> None:
        """Note the tokens for penalties, less those that `Scheduler.force` has dropped already."""
        assert step.sampling is not None
        if not self.penalties.allocated:
            return
        rows, dropped = step.sampling.rows, step.batch.dropped[step.batch.samples]
        if dropped.any():
            kept = self._to_device(np.flatnonzero(~dropped))
            rows, tokens = rows[kept], tokens[kept]
        self.penalties.add(rows, tokens)

    def count_forced(self, request: Request, tokens: Sequence[int]) -> None:
        """Tokens that jump-forward appended count for penalties as sampled ones do."""
        if self._penalised.get(request.row) == int(self.rows.generation[request.row]):
            ids = self._to_device(np.array(tokens, np.int64))
            self.penalties.add(torch.full_like(ids, request.row), ids)

    def results(self, step: Step) -> np.ndarray:
        """The sampled tokens, (R,) int64; waits for the device."""
        if step.host_tokens is None:
            if self.cuda:
                torch.cuda.current_stream().synchronize()
            return np.zeros(0, np.int64)
        if step.done is not None:
            step.done.synchronize()
        return step.host_tokens.numpy()

    def close(self) -> None:
        """Give up what is large.  The object is of no use afterwards.

        Not left to the garbage collector: recorded graphs refer to this object, and so may whoever keeps an error of
        the engine: clearing a frame drops its variables, but not those that its function closes over.
        """
        self._graphs = None
        self.attention.pool.release()
        del self.model, self.attention

    # ---- building the device's batch ---------------------------------------------------------------------------------

    def _shared_prefixes(self, batch: Batch, entries: Entries | None) -> SharedPrefixes | None:
        """What this batch's decodes share, if it pays to read it once."""
        if self._sharing is None or batch.num_decodes < 2:
            return None
        k = batch.num_decodes
        graph = self._graphs.find(len(entries), True) if self._graphs is not None and entries is not None else None
        size = graph.size if graph is not None else k
        shared = self._sharing.plan(batch.rows[:k], batch.generation[:k], self.rows, size)
        self.shared_steps += shared is not None
        return shared

    def _entries(self, batch: Batch) -> Entries | None:
        """The step's tokens, each as a decode, or None if that is not possible or costs too much."""
        rows, starts, ends = batch.rows, batch.starts, batch.ends
        lengths = ends - starts
        more = lengths > 1
        # token i of n of a sequence reads the positions before it again: n * end - (their sum) - end
        repeated = ((lengths - 1) * (starts + ends) // 2)[more].sum()
        if repeated > APART or any(r.logprob_start is not None for r in batch.extends):
            return None
        draws = np.where(batch.samples, rows, DUMMY_ROW)
        if more.any():
            last = np.cumsum(lengths) - 1
            positions = np.arange(last[-1] + 1) + np.repeat(starts - last + lengths - 1, lengths)
            rows = np.repeat(rows, lengths)
            spread = np.full(len(rows), DUMMY_ROW)
            spread[last] = draws
            draws = spread
        else:
            positions = starts
        ids = self.rows.ids[rows, positions].astype(np.int64)
        ids[: batch.num_decodes][batch.from_device[: batch.num_decodes]] = -1
        return Entries(rows, positions, self.table.slots[rows, positions], ids, draws)

    def _forward_batch(self, batch: Batch, shared: SharedPrefixes | None = None) -> ForwardBatch:
        """Flatten a batch; all of it goes to the device in one copy."""
        rows, starts, ends = batch.rows, batch.starts, batch.ends
        lengths = ends - starts
        q_start = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=q_start[1:])
        token_rows = np.repeat(rows, lengths)
        positions = np.arange(q_start[-1]) + np.repeat(starts - q_start[:-1], lengths)
        ids = self.rows.ids[token_rows, positions].astype(np.int64)
        slots = self.table.slots[token_rows, positions].astype(np.int64)
        logit_rows = q_start[1:][batch.samples] - 1
        tokens = int(q_start[-1])
        # jump-forward's tokens are output: only prompts ask for a step of fixed shape
        prompts = any(s < r.prompt_len for s, r in zip(starts[batch.num_decodes :], batch.extends))
        padding = np.zeros(self.pad_rows(tokens, batch.num_decodes if prompts else tokens) - tokens, np.int64)
        num_decodes = batch.num_decodes
        apart = (positions[num_decodes:] + 1).sum() < APART
        if not prompts and num_decodes < tokens and not self.cuda and shared is None and apart:
            # on a CPU a forced token is computed as the decode that it stands for: the same bits, and quicker code
            num_decodes, rows, ends = tokens, token_rows, positions + 1
            lengths, q_start = np.ones_like(rows), np.arange(tokens + 1)
        if len(padding):  # dummy tokens: row 0, position 0, slot 0
            ids, positions, slots = (np.concatenate((a, padding)) for a in (ids, positions, slots))
            token_rows = np.concatenate((token_rows, padding))
        from_device = np.flatnonzero(batch.from_device)  # decodes come first: token i belongs to sequence i

        self._sync_table()
        parts = (ids, positions, slots, token_rows, rows, ends, q_start, logit_rows, from_device)
        ids, positions, slots, token_rows, rows_, seq_lens, q_start_, logit_rows_, late = self._to_device_all(parts)
        if len(late):
            ids.index_copy_(0, late, self.last_token.index_select(0, rows_.index_select(0, late)))
        if self.cuda:
            self.device_table[token_rows, positions] = slots.int()
        return ForwardBatch(
            input_ids=ids,
            positions=positions,
            out_slots=slots,
            q_start=q_start_.int(),
            seq_lens=seq_lens.int(),
            rows=rows_.int(),
            table=self.device_table,
            num_decodes=num_decodes,
            max_seq_len=int(ends.max()),
            max_new=int(lengths.max()),
            logit_rows=logit_rows_,
            host=HostBatch(q_start, ends, rows),
            shared=shared,
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(L, N) -> (L, vocab); on a CPU in pieces of few rows, which are all multiplied alike."""
        if self.cuda or len(hidden) <= SMALL_STEP:
            return self.model.logits(hidden)
        return torch.cat([self.model.logits(piece) for piece in hidden.split(SMALL_STEP)])

    def _sync_table(self) -> None:
        """Replay the host's edits of cached prefixes onto the device's table."""
        writes = self.table.take_writes()
        if not self.cuda or not writes:
            return
        lengths = np.array([end - start for _, start, end in writes])
        rows = np.repeat(np.array([row for row, _, _ in writes]), lengths)
        positions = np.concatenate([np.arange(start, end) for _, start, end in writes])
        # distinct cells only: a cell written twice would be two racing stores of (by then) the same value
        cells = rows * self.table.max_context + positions
        where, what = self._to_device_all((cells, self.table.slots[rows, positions].astype(np.int64)))
        self.device_table.view(-1)[where] = what.int()

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return self._to_device_all((array,))[0]

    def _to_device_all(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """int64 arrays to the device in one asynchronous copy: ten small ones would cost ten launches."""
        if not self.cuda:
            return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        packed = torch.from_numpy(np.concatenate(arrays)).pin_memory().to(self.device, non_blocking=True)
        return list(packed.split([len(a) for a in arrays]))

    # ---- sampling ------------------------------------------------------------------------------------------------

    def _sampling_batch(self, batch: Batch) -> tuple[SamplingBatch | None, list[Guide | None] | None, int]:
        """The sampling rows' parameters on the device, made anew only when the composition changes, and
        `Step.guides` and `Step.top_logprobs`."""
        rows, generation = batch.rows[batch.samples], batch.generation[batch.samples]
        if not len(rows):
            return None, None, -1
        if self._sampling is not None:
            cached_rows, cached_generation, *cached = self._sampling
            if np.array_equal(rows, cached_rows) and np.array_equal(generation, cached_generation):
                return tuple(cached)
        requests = [r for r in (self.rows.request[row] for row in rows) if r is not None]
        sampling = SamplingBatch.build(
            [r.params for r in requests],
            [r.seed for r in requests],
            rows,
            [r.prompt_len for r in requests],
            self.vocab_size,
            self.device,
            self.eos_ids,
        )
        if len(sampling.penalised):
            self._start_penalties(rows, generation)
        if self._graphs is not None:
            self.row_sampling.update(sampling)
        top_logprobs = max(r.top_logprobs if r.return_logprob else -1 for r in requests)
        guides = [r.guide for r in requests] if any(r.guide for r in requests) else None
        self._sampling = (rows, generation, sampling, guides, top_logprobs)
        return sampling, guides, top_logprobs

    def _start_penalties(self, rows: np.ndarray, generation: np.ndarray) -> None:
        """Count what a request with penalties has said already (its prompt; its output, if it was retracted)."""
        for row, gen in zip(rows.tolist(), generation.tolist()):
            request = self.rows.request[row]
            if request is None or self._penalised.get(row) == gen:
                continue
            p = request.params
            if p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty:
                said = self.rows.ids[row, request.prompt_len : self.rows.num_tokens[row]]
                self.penalties.reset(row, request.prompt, said)
                self._penalised[row] = gen

    def _score_prompts(self, batch: Batch, hidden: torch.Tensor) -> list[PromptScores]:
        """Log-probabilities of the prompt tokens that this batch's hidden states predict, where they are wanted."""
        scores: list[PromptScores] = []
        offset = batch.num_decodes
        for i, request in enumerate(batch.extends, start=batch.num_decodes):
            start, end = int(batch.starts[i]), int(batch.ends[i])
            if request.logprob_start is not None:
                # position p predicts token p + 1
                first = max(start, request.logprob_start - 1, 0)
                last = min(end, request.prompt_len - 1)
                if first < last:
                    states = hidden[offset + first - start : offset + last - start]
                    targets = self._to_device(request.prompt[first + 1 : last + 1].astype(np.int64))
                    logprobs = prompt_logprobs(
                        states, targets, self._logits, self.vocab_size, request.top_logprobs
                    )
                    scores.append(PromptScores(request, first + 1, logprobs))
            offset += end - start
        return scores
