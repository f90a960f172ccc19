"""Decode steps as CUDA graphs: a few hundred kernel launches, recorded once per batch size, replayed with one call.

A replay reads its inputs at fixed addresses.  All that a decode step needs of the host is five numbers per token
(`DecodeGraph.inputs`); what the requests want of the sampler lies on the device by table row and changes only with the
batch's composition (`RowSampling`), and so does the plan of shared prefixes (`sharing`).  The recorded step ends with
the draw, which writes each row's token where the next replay reads it: between two steps of one batch the host has
next to nothing to do.

A batch smaller than the recorded size is padded with the dummy row, which reads and writes the dummy slot.

A few tokens of one sequence (jump-forward's, or a prompt's short rest) fit into the same recording, as a decode each:

    request a   decodes token 9                  entries   row    a   b   b   b   dummy
    request b   computes forced tokens 4 5 6               pos    9   4   5   6     0
                                                           draws  a   -   -   b     -

In every layer all K and V are written before any are read, so token 6 sees 4 and 5 although they are in the same step.
Each reads the sequence's keys for itself, which costs little where they are few (`Runner._entries` decides), and saves
what is slow about a step that is not recorded: launching it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from .attention import ForwardBatch, SharedPrefixes
from .pool import DUMMY_ROW, DUMMY_SLOT

if TYPE_CHECKING:
    from .runner import Runner
    from .sampling_batch import SamplingBatch


_recording = threading.Lock()  # two engines that start at once must not record on one stream


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all warm-ups and recordings: cuBLAS keeps a workspace (32 MiB on Hopper) for each it has met."""
    return torch.cuda.Stream(device)


@dataclass
class Entries:
    """The tokens of a step, each as a decode.  (T,) int64.

    rows, positions, slots: of the token.  ids: the token, -1 if it is on the device.  draws: the row whose next token
    is drawn from this one's logits, DUMMY_ROW if none is.
    """

    rows: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    ids: np.ndarray
    draws: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


class RowSampling:
    """What the plain draw needs to know of each request, by row of the request table."""

    def __init__(self, rows: int, device: torch.device):
        self.inverse_temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.greedy = torch.ones(rows, dtype=torch.bool, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)

    def update(self, batch: SamplingBatch) -> None:
        """Enter the parameters of a batch's requests."""
        self.inverse_temperature[batch.rows] = batch.inverse_temperature
        self.greedy[batch.rows] = batch.greedy
        self.seed[batch.rows] = batch.seed


class DecodeGraph:
    """The recorded decode step, sampling included, for up to `size` tokens.

    inputs  (5, size) int64 at a fixed address: the fields of `Entries`; unused columns are the dummy row's position 0
    logits  (size, vocab), in a buffer that all graphs write, and tokens (size,) int64: valid until the next replay
    """

    def __init__(self, runner: Runner, size: int, shared: SharedPrefixes | None, logits: torch.Tensor, pool):
        self.runner, self.size, self.shared, self.logits = runner, size, shared, logits[:size]
        device = runner.device
        self.inputs = torch.zeros((5, size), dtype=torch.int64, device=device)
        assert DUMMY_ROW == DUMMY_SLOT == 0
        self.q_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.every_row = torch.arange(size, dtype=torch.int64, device=device)
        stream = _recording_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()  # compiles kernels and settles workspaces before recording
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: another engine of this process may be running on its own thread
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.tokens = self._step()

    def _step(self) -> torch.Tensor:
        from .sampler_triton import draw

        runner = self.runner
        rows, positions, slots, host_ids, draws = self.inputs
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
            shared=self.shared,
        )
        runner.attention.begin(batch)
        logits = runner.model.logits(runner.model.forward(batch, runner.attention))
        wants = runner.row_sampling
        tokens = draw(logits, wants.inverse_temperature[rows], wants.greedy[rows], wants.seed[rows], positions + 1)
        runner.last_token[draws] = tokens
        # a result that each graph kept for itself would be gigabytes over all sizes; this is one more pass over it
        self.logits.copy_(logits)
        return tokens

    def replay(self, entries: Entries) -> None:
        """Queue a step of at most `size` tokens."""
        inputs = torch.zeros((5, self.size), dtype=torch.int64, pin_memory=True)
        host, n = inputs.numpy(), len(entries)
        for column, values in enumerate(
            (entries.rows, entries.positions, entries.slots, entries.ids, entries.draws)
        ):
            host[column, :n] = values
        self.inputs.copy_(inputs, non_blocking=True)
        self.graph.replay()


class DecodeGraphs:
    """The recorded steps of all batch sizes, with and without shared prefixes."""

    def __init__(self, runner: Runner, sizes: list[int], shared: SharedPrefixes | None, shared_sizes: list[int]):
        """Record them, the largest first, so that smaller ones use its memory."""
        self._plain: dict[int, DecodeGraph] = {}
        self._shared: dict[int, DecodeGraph] = {}
        wanted = [(size, None, self._plain) for size in sizes]
        if shared is not None:
            wanted += [(size, shared, self._shared) for size in shared_sizes]
        most = max(size for size, _, _ in wanted)
        logits = torch.empty((most, runner.vocab_size), dtype=runner.model.dtype, device=runner.device)
        pool = None
        with _recording:
            for size, plan, into in sorted(wanted, key=lambda w: -w[0]):
                graph = DecodeGraph(runner, size, plan, logits, pool)
                pool = graph.graph.pool()
                into[size] = graph

    def find(self, tokens: int, shared: bool) -> DecodeGraph | None:
        """The smallest recorded step that holds so many tokens."""
        graphs = self._shared if shared else self._plain
        return graphs.get(min((size for size in graphs if size >= tokens), default=0))
