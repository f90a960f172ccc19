"""Attention over a paged KV pool: what one step of the engine asks for, and a plain-torch answer.

A step is a *flat* batch: the new tokens of all sequences stand in one row, without padding, the decodes (one
new token each) first. Keys and values live in the pool, one *slot* per token, in no particular order; the
request table says where. Attention is three steps: write the new K and V into their slots, follow the table,
and do softmax(q k) v with position p seeing positions 0..p of its own sequence:

    flat tokens    | d3 | e8 | a5 a6 a7 | b2 b3 |     q_start  = 0 1 2 5 7    num_decodes = 2
                                  |                   seq_lens = 4 9 8 4      (new tokens included)
    request table       row 3: [17 4 90 91 33 | 8 9 10]   slots of positions 0..7 of sequence a;
                                cached prefix   new       out_slots of a5 a6 a7 = 8 9 10
                                  |
    pool                keys[slot, kv_head, :], values[slot, kv_head, :]

Every K and V of a layer is written before any is read. A sequence may therefore point, through the table, at
slots that another sequence of the same batch is filling in this very step: requests that share a prefix can
be computed together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from .pool import KVPool
    from .sharing import PrefixSharing


@dataclass
class HostBatch:
    """The host's copy of a batch's layout, so that CPU code need not read tensors back.

    q_start (B+1,), seq_lens (B,), rows (B,): integer arrays, as in `ForwardBatch`.
    """

    q_start: np.ndarray
    seq_lens: np.ndarray
    rows: np.ndarray


@dataclass
class SharedPrefixes:
    """Positions that several decodes have in common, to be read once for all of them (`sharing.SharedPlan`).

    int32 on the device: items (I, 6), members (M,), own_start (B,), pieces (B,), count (1,), how many of the items are
    in use.  In a replayed CUDA graph I and M are what there is room for.
    """

    items: torch.Tensor
    members: torch.Tensor
    own_start: torch.Tensor
    pieces: torch.Tensor
    count: torch.Tensor


@dataclass
class ForwardBatch:
    """One forward step over T new tokens of B sequences. Tensors are on the device; decodes come first.

    input_ids  (T,) int64: the new tokens
    positions  (T,) int64: each token's position in its sequence
    out_slots  (T,) int64: the pool slot that receives each token's K and V
    q_start    (B+1,) int32: sequence b's new tokens are q_start[b]:q_start[b+1]; tokens past the last one, if
               any, are padding: their results are finite and of no use
    seq_lens   (B,) int32: KV length of each sequence, its new tokens included
    rows       (B,) int32: each sequence's row of the request table
    table      (R, C) int32: table[row, p] is the slot of position p; row 0 and slot 0 are dummies for padding
    num_decodes: the first num_decodes sequences have exactly one new token each
    max_seq_len, max_new: over all sequences, host integers; upper bounds will do (CUDA graphs)
    logit_rows (L,) int64: flat indices of the tokens whose logits are wanted
    host: the layout as numpy arrays, or None (in a replayed CUDA graph the host does not know it)
    shared: prefixes that decodes share; a backend without `shares_prefixes` never gets any
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    q_start: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    table: torch.Tensor
    num_decodes: int
    max_seq_len: int
    max_new: int
    logit_rows: torch.Tensor
    host: HostBatch | None = None
    shared: SharedPrefixes | None = None

    @property
    def num_tokens(self) -> int:
        """T, the number of new tokens in the batch."""
        return self.input_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        """B, the number of sequences in the batch."""
        return self.seq_lens.shape[0]

    def host_layout(self) -> HostBatch:
        """The layout on the host: `host` if there, else read back from the device (a synchronisation)."""
        if self.host is not None:
            return self.host
        return HostBatch(
            q_start=self.q_start.cpu().numpy(),
            seq_lens=self.seq_lens.cpu().numpy(),
            rows=self.rows.cpu().numpy(),
        )


class Attention(ABC):
    """Attention of one model over one KV pool: `begin` once per step, then `forward` once per layer.

    shares_prefixes: whether `prefix_sharing` is there and `ForwardBatch.shared` understood.
    rotates: whether `forward` takes `rope`.
    num_heads must be a multiple of num_kv_heads; query head h reads KV head h // (num_heads // num_kv_heads).
    """

    shares_prefixes = False
    rotates = False

    def __init__(self, pool: KVPool, num_heads: int, num_kv_heads: int, head_dim: int):
        if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
        if head_dim < 1:
            raise ValueError(f"head_dim must be positive, got {head_dim}")
        self.pool = pool
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.group = num_heads // num_kv_heads  # query heads that share one KV head (GQA)

    def prefix_sharing(self, max_decodes: int) -> PrefixSharing:
        """Prepare for batches of up to `max_decodes` that share prefixes; ValueError if the backend cannot."""
        raise ValueError(f"{type(self).__name__} cannot read a shared prefix once")

    @abstractmethod
    def begin(self, batch: ForwardBatch) -> None:
        """Prepare what all layers of this step share. With CUDA graphs, call it inside the captured part."""

    @abstractmethod
    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Write k and v into the pool's `layer`, then attend.

        q (T, num_heads, head_dim); k, v (T, num_kv_heads, head_dim). Returns (T, num_heads, head_dim).
        The token at position p sees positions max(0, p - window + 1)..p, or 0..p where window is 0.
        Scores are q.k * scale (scale > 0), then softcap * tanh(score / softcap) where softcap is not 0.
        """


class ReferenceAttention(Attention):
    """Plain torch, one sequence after another, in float32: the CPU path, and the oracle of the tests."""

    # Queries per score matrix: bounds it to num_heads x 512 x seq_len floats, however long the prompt.
    query_block = 512

    def begin(self, batch: ForwardBatch) -> None:
        layout = batch.host_layout()
        self._out_slots = batch.out_slots
        # (first new token, end, slots of positions 0..seq_len-1) of each sequence, for all layers.
        self._sequences = [
            (int(start), int(end), batch.table[int(row), : int(length)].long())
            for start, end, length, row in zip(
                layout.q_start[:-1], layout.q_start[1:], layout.seq_lens, layout.rows, strict=True
            )
        ]

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        keys.index_copy_(0, self._out_slots, k.to(keys.dtype))
        values.index_copy_(0, self._out_slots, v.to(values.dtype))
        out = torch.zeros_like(q)
        for start, end, slots in self._sequences:
            seq_keys, seq_values = keys[slots].float(), values[slots].float()
            prefix = len(slots) - (end - start)
            for first in range(start, end, self.query_block):
                last = min(first + self.query_block, end)
                seen = prefix + last - start  # later positions are in the future of all these queries
                out[first:last] = causal_attention(
                    q[first:last].float(),
                    seq_keys[:seen],
                    seq_values[:seen],
                    scale=scale,
                    window=window,
                    softcap=softcap,
                ).to(q.dtype)
        return out


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """Attention of the last n of m positions: q (n, Hq, D), k and v (m, Hkv, D) -> (n, Hq, D).

    Query head h reads KV head h // (Hq // Hkv). `scale`, `window` and `softcap` as in `Attention.forward`.
    """
    n, num_heads, head_dim = q.shape
    m, num_kv_heads, _ = k.shape
    grouped = q.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    query_pos = torch.arange(m - n, m, device=q.device)[:, None]
    key_pos = torch.arange(m, device=q.device)[None, :]
    visible = key_pos <= query_pos
    if window:
        visible &= key_pos > query_pos - window
    probs = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hgnm,mhd->nhgd", probs, v).reshape(n, num_heads, head_dim)
