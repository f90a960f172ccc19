"""Attention for CPUs: the same paged interface, out of torch's fused scaled_dot_product_attention.

A CPU has no use for a paged kernel of our own: copying rows of a few hundred bytes out of the pool runs at memory speed
and costs a few per cent of the attention itself.  So K and V are gathered through the table and torch's flash attention
does the rest; what matters is to call it rarely and with a shape it likes:

* decodes     one call for many sequences: their contexts are gathered side by side, padded to the longest.  Sequences
              of similar length go together (`_buckets`), so that padding at most doubles the work.
* extends     one call per sequence.  The G query heads that share a KV head become G rows of one query, so that K and V
              are read once for all of them:  q (n, KV * G, D)  ->  (KV, n * G, D).

A query's result here does not depend on which other queries share its call, in bfloat16 to the last bit: keys are
always those of its own sequence in order, then masked ones up to a multiple of `KEY_TILE`.  (Sums over 41 keys and over
41 keys and 49 masked ones are cut differently; over 128 and over 256 they are not.)  Several sequences behind one
prefix could share a call with a mask, about 6 % faster for few-shot prompts; it would cost exactly this, see `sizing`.

Works on any device and in any dtype; the tests compare it with `ReferenceAttention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from .attention import Attention, ForwardBatch, causal_attention

QUERY_BLOCK = 512  # queries per masked call: bounds the mask to 512 x context
KEY_TILE = 128  # keys per call are rounded up to a multiple of this
MASK_BYTES = 256 << 20  # masks that a sequence keeps from layer to layer; larger ones are made for each


@dataclass
class _Decodes:
    """Sequences of similar length that decode together."""

    members: torch.Tensor | None  # flat tokens, or None if they are simply first..last - 1
    cells: torch.Tensor  # (B * KV * L,) rows of the pool seen as (slots * KV, D)
    lengths: torch.Tensor  # (B,)
    longest: int
    masks: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Extend:
    """One sequence's new tokens start..end - 1 (flat) over `total` positions in `slots` (padded)."""

    start: int
    end: int
    total: int
    slots: torch.Tensor
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by first query and window


class CpuAttention(Attention):
    """See the module."""

    def begin(self, batch: ForwardBatch) -> None:
        self._batch: ForwardBatch | None = batch

    def _plan(self, batch: ForwardBatch) -> None:
        """What all layers share; made when the first one asks, since a step may be computed without (`ops_amx`)."""
        layout = batch.host_layout()
        self._out_slots = batch.out_slots
        lengths = np.asarray(layout.seq_lens)
        n = batch.num_decodes
        self._decodes = [
            self._gather_plan(batch.table, np.asarray(layout.rows), lengths, members, n)
            for members in _buckets(lengths[:n])
        ]
        bounds = zip(*(x[n:].tolist() for x in (layout.q_start[:-1], layout.q_start[1:], lengths, layout.rows)))
        self._extends = [
            _Extend(start, end, total, _padded(batch.table[row, :total].long()))
            for start, end, total, row in bounds
        ]
        self._padding = int(layout.q_start[-1])  # tokens from here on belong to no sequence

    def _gather_plan(
        self, table: torch.Tensor, rows: np.ndarray, lengths: np.ndarray, members: np.ndarray, n: int
    ) -> _Decodes:
        device, longest = table.device, _up(int(lengths[members].max()))
        slots = _padded(table[torch.from_numpy(rows[members]).to(device), :longest].long())
        own = torch.from_numpy(lengths[members].astype(np.int64)).to(device)
        # what stands in the table past a sequence's end may be anything: read the dummy slot instead
        slots = slots.masked_fill(torch.arange(longest, device=device) >= own[:, None], 0)
        heads = torch.arange(self.num_kv_heads, device=device)
        cells = (slots[:, None, :] * self.num_kv_heads + heads[:, None]).reshape(-1)
        whole = len(members) == n
        return _Decodes(None if whole else torch.from_numpy(members).to(device), cells, own, longest)

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
        if self._batch is not None:
            self._plan(self._batch)
            self._batch = None
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        keys.index_copy_(0, self._out_slots, k)
        values.index_copy_(0, self._out_slots, v)
        out = torch.empty((len(q), self.num_heads, self.head_dim), dtype=q.dtype, device=q.device)
        for group in self._decodes:
            self._decode(group, keys, values, q, out, scale, window, softcap)
        out[self._padding :] = 0
        for sequence in self._extends:
            mine = slice(sequence.start, sequence.end)
            k_seen, v_seen = keys.index_select(0, sequence.slots), values.index_select(0, sequence.slots)
            self._extend(sequence, k_seen, v_seen, q[mine], out[mine], scale, window, softcap)
        return out

    # ---- decodes -------------------------------------------------------------------------------------------------

    def _decode(self, group: _Decodes, keys, values, q, out, scale: float, window: int, softcap: float) -> None:
        count, kv_heads, dim = len(group.lengths), self.num_kv_heads, self.head_dim
        shape = (count, kv_heads, group.longest, dim)
        k = keys.view(-1, dim).index_select(0, group.cells).view(shape)
        v = values.view(-1, dim).index_select(0, group.cells).view(shape)
        mine = q[:count] if group.members is None else q.index_select(0, group.members)
        mine = mine.reshape(count, kv_heads, self.group, dim)
        mask = group.masks.get(window)
        if mask is None:
            mask = group.masks[window] = self._decode_mask(group, window, q.dtype)
        if softcap:
            scores = torch.matmul(mine.float(), k.float().transpose(2, 3)) * scale
            scores = softcap * torch.tanh(scores / softcap) + mask.float()
            result = torch.matmul(torch.softmax(scores, -1), v.float()).to(q.dtype)
        else:
            result = F.scaled_dot_product_attention(mine, k, v, attn_mask=mask, scale=scale)
        result = result.reshape(count, self.num_heads, dim)
        if group.members is None:
            out[:count] = result
        else:
            out.index_copy_(0, group.members, result)

    @staticmethod
    def _decode_mask(group: _Decodes, window: int, dtype: torch.dtype) -> torch.Tensor:
        """(B, 1, 1, L): 0 where a sequence sees the position, -inf elsewhere."""
        positions = torch.arange(group.longest, device=group.lengths.device)
        hidden = positions >= group.lengths[:, None]
        if window:
            hidden |= positions < group.lengths[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]

    # ---- extends -------------------------------------------------------------------------------------------------

    def _extend(self, seq: _Extend, k, v, q, out, scale: float, window: int, softcap: float) -> None:
        n, total = len(q), seq.total
        if softcap:
            exact = (q.float(), k[:total].float(), v[:total].float())
            out.copy_(causal_attention(*exact, scale=scale, window=window, softcap=softcap))
            return
        dim, kv_heads = self.head_dim, self.num_kv_heads
        for first in range(0, n, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, n)
            known = total - n + last
            seen = _up(known)
            rows = q[first:last].reshape(last - first, kv_heads, self.group, dim)
            rows = rows.permute(1, 0, 2, 3).reshape(1, kv_heads, -1, dim)
            mask = seq.masks.get((first, window))
            if mask is None:
                mask = self._extend_mask(last - first, known, window, q)
                if n * self.group * total * q.element_size() <= MASK_BYTES:
                    seq.masks[first, window] = mask
            k_seen, v_seen = k[:seen].transpose(0, 1)[None], v[:seen].transpose(0, 1)[None]
            result = F.scaled_dot_product_attention(rows, k_seen, v_seen, attn_mask=mask, scale=scale)
            result = result.view(kv_heads, last - first, self.group, dim).permute(1, 0, 2, 3)
            out[first:last] = result.reshape(last - first, self.num_heads, dim)

    def _extend_mask(self, n: int, known: int, window: int, like: torch.Tensor) -> torch.Tensor:
        """(n * G, known, padded): the last n of `known` positions look back; each row stands for G query heads."""
        query = torch.arange(known - n, known, device=like.device)[:, None]
        key = torch.arange(_up(known), device=like.device)
        hidden = key > query
        if window:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(hidden, float("-inf")).repeat_interleave(self.group, 0)


def _up(keys: int) -> int:
    return -(-keys // KEY_TILE) * KEY_TILE


def _padded(slots: torch.Tensor) -> torch.Tensor:
    """(..., keys) with the dummy slot for the keys that are masked."""
    return F.pad(slots, (0, _up(slots.shape[-1]) - slots.shape[-1]))


def _buckets(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices of sequences grouped so that the longest of a group is at most about twice the shortest."""
    if not len(lengths):
        return []
    if lengths.max() <= 2 * lengths.min() or lengths.max() <= 64:
        return [np.arange(len(lengths))]
    scale = np.frexp(np.maximum(lengths, 64).astype(np.float64))[1]
    return [np.flatnonzero(scale == s) for s in np.unique(scale)]
