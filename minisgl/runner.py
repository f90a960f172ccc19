"""One forward step: a `Batch` of integers in, sampled token ids out.

    Batch (host)  --launch-->  ForwardBatch (device)  --model-->  logits  --sample-->  tokens  --results-->  host
                                     ^                                          |
                                     '------------- last_token[row] <-----------'

`launch` and `sample` only queue work on the device; `results` waits.  Between them the host is free, which is what
the overlapped loop lives on.  What makes it possible is `last_token`: the sampler writes each row's token there and the
next step's decodes read it from there, so the host need not know a token to have its successor computed.

Decode steps run as CUDA graphs: the whole forward pass, a few hundred kernel launches, is recorded once per batch
size and replayed with one call.  A replay reads its inputs at fixed addresses (`_Graph`), and a batch smaller than the
recorded size is padded with the dummy row, which reads and writes the dummy slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .attention import Attention, ForwardBatch, HostBatch
from .constraint import Guide, masks
from .model_llama import Llama
from .pool import DUMMY_ROW, DUMMY_SLOT, RequestTable
from .request import Request, Rows
from .sampler import Logprobs, PenaltyState, SamplingBatch, output_logprobs, prompt_logprobs, sample
from .scheduler import Batch

SMALL_STEP = 32  # rows of logits per product on a CPU, see `sizing`

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
    logits: torch.Tensor  # (R, vocab) float32 of the sequences that sample
    sampling: SamplingBatch | None  # of those sequences, as they were when the batch was formed
    guides: list[Guide | None] | None = None  # of those sequences, if any of them has a grammar
    top_logprobs: int = -1  # most alternatives that any of them wants beside its log-probability; -1: none wants any
    prompt_scores: list[PromptScores] = field(default_factory=list)
    tokens: torch.Tensor | None = None  # (R,) int64 on the device
    logprobs: Logprobs | None = None  # of all R rows, if any of them wants some
    host_tokens: torch.Tensor | None = None
    done: torch.cuda.Event | None = None


class Runner:
    """Runs the model over batches formed by a scheduler whose `table` and `rows` it reads.

    max_requests   rows of the request table, the dummy not counted
    graph_sizes    decode batch sizes to record as CUDA graphs (empty: none)
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
        self._graphs: dict[int, _Graph] = {}
        self.graph_replays = 0
        if graph_sizes:
            self._capture(sorted(graph_sizes, reverse=True))

    # ---- the three calls of a step ---------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> Step:
        """Queue the forward pass of `batch`."""
        sampling, guides, top_logprobs = self._sampling_batch(batch)
        graph = self._graph_for(batch)
        if graph is not None:
            self._sync_table()
            self.graph_replays += 1
            return Step(batch, graph.replay(batch), sampling, guides, top_logprobs)
        forward = self._forward_batch(batch)
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
        grammar_mask = None
        if step.guides is not None:
            packed = torch.from_numpy(masks(step.guides, self.vocab_size))
            grammar_mask = packed.pin_memory().to(self.device, non_blocking=True) if self.cuda else packed
        positions = self._to_device(step.batch.ends[step.batch.samples])
        tokens = sample(step.logits, step.sampling, positions, grammar_mask, self.penalties)
        self.last_token[step.sampling.rows] = tokens
        self._count_sampled(step, tokens)
        if step.top_logprobs >= 0:
            step.logprobs = output_logprobs(step.logits, tokens, step.top_logprobs)
        step.tokens = step.host_tokens = tokens
        if self.cuda:
            step.host_tokens = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
            step.host_tokens.copy_(tokens, non_blocking=True)
            step.done = torch.cuda.Event()
            step.done.record()

    def _count_sampled(self, step: Step, tokens: torch.Tensor) -> None:
        """Note the tokens for penalties, less those that `Scheduler.force` has dropped already."""
        assert step.sampling is not None
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
        """Drop the recorded graphs, which refer to this object: its memory then goes when it does."""
        self._graphs.clear()

    # ---- building the device's batch ---------------------------------------------------------------------------------

    def _forward_batch(self, batch: Batch) -> ForwardBatch:
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
            num_decodes=batch.num_decodes,
            max_seq_len=int(ends.max()),
            max_new=int(lengths.max()),
            logit_rows=logit_rows_,
            host=HostBatch(q_start, ends, rows),
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(L, N) -> (L, vocab) float32; on a CPU in pieces of few rows, which are all multiplied alike."""
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

    # ---- CUDA graphs -----------------------------------------------------------------------------------------------

    def _graph_for(self, batch: Batch) -> _Graph | None:
        """The smallest recorded step that holds this batch, if it is all decodes."""
        if batch.num_decodes < len(batch) or not batch.samples.all():
            return None
        return next((graph for size, graph in self._graphs.items() if size >= len(batch)), None)

    def _capture(self, sizes: Sequence[int]) -> None:
        """Record the decode step for each batch size, the largest first so that smaller ones share its memory."""
        pool = None
        for size in sizes:
            graph = _Graph(self, size, pool)
            pool = graph.graph.pool()
            self._graphs[size] = graph
        self._graphs = dict(sorted(self._graphs.items()))


class _Graph:
    """The recorded decode step for up to `size` sequences.

    inputs: (4, size) int64 at a fixed address: rows, positions, out slots, and whether the host supplies the token
    (then its id, else -1).  Unused columns hold the dummy row at position 0.
    """

    def __init__(self, runner: Runner, size: int, pool):
        self.runner, self.size = runner, size
        device = runner.device
        self.inputs = torch.zeros((4, size), dtype=torch.int64, device=device)
        self.inputs[0].fill_(DUMMY_ROW)
        self.inputs[2].fill_(DUMMY_SLOT)
        self.q_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.every_row = torch.arange(size, dtype=torch.int64, device=device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and settles workspaces before recording
                self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits = self._forward()

    def _forward(self) -> torch.Tensor:
        runner = self.runner
        rows, positions, slots, host_ids = self.inputs
        runner.device_table[rows, positions] = slots.int()
        batch = ForwardBatch(
            input_ids=torch.where(host_ids < 0, runner.last_token[rows], host_ids),
            positions=positions,
            out_slots=slots,
            q_start=self.q_start,
            seq_lens=(positions + 1).int(),
            rows=rows.int(),
            table=runner.device_table,
            num_decodes=self.size,
            max_seq_len=runner.table.max_context,
            max_new=1,
            logit_rows=self.every_row,
        )
        runner.attention.begin(batch)
        return runner.model.logits(runner.model.forward(batch, runner.attention))

    def replay(self, batch: Batch) -> torch.Tensor:
        """(len(batch), vocab) float32 logits; valid until the next replay of any graph."""
        n, runner = len(batch), self.runner
        inputs = torch.zeros((4, self.size), dtype=torch.int64, pin_memory=True)
        host = inputs.numpy()
        host[0, :n], host[1, :n] = batch.rows, batch.starts
        host[2, :n] = runner.table.slots[batch.rows, batch.starts]
        host[3, :n] = np.where(batch.from_device, -1, runner.rows.ids[batch.rows, batch.starts])
        self.inputs.copy_(inputs, non_blocking=True)
        self.graph.replay()
        return self.logits[:n]
