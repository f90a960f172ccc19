"""Attention for CPUs: the same paged interface, out of torch's fused scaled_dot_product_attention.

A CPU has no use for a paged kernel of our own: copying rows of a few hundred bytes out of the pool runs at memory speed
and costs a few per cent of the attention itself.  So K and V are gathered through the table and torch's flash attention
does the rest; what matters is to call it rarely and with a shape it likes:

* decodes     one call for many sequences: their contexts are gathered side by side, padded to the longest.  Sequences
              of similar length go together (`_buckets`), so that padding at most doubles the work.
* extends     one call per sequence.  The G query heads that share a KV head become G rows of one query, so that K and V
              are read once for all of them:  q (n, KV * G, D)  ->  (KV, n * G, D).

Works on any device and in any dtype; the tests compare it with `ReferenceAttention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from .attention import Attention, ForwardBatch, causal_attention

QUERY_BLOCK = 512  # queries per masked call: bounds the mask to 512 x context


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
    """One sequence's new tokens start..end - 1 over `total` positions in `slots`."""

    start: int
    end: int
    total: int
    slots: torch.Tensor | slice
    masks: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)


class CpuAttention(Attention):
    """See the module."""

    def begin(self, batch: ForwardBatch) -> None:
        layout = batch.host_layout()
        self._out_slots = batch.out_slots
        lengths = np.asarray(layout.seq_lens)
        n = batch.num_decodes
        self._decodes = [
            self._gather_plan(batch.table, np.asarray(layout.rows), lengths, members, n)
            for members in _buckets(lengths[:n])
        ]
        self._extends = []
        for i in range(n, len(lengths)):
            total = int(lengths[i])
            slots = _as_slice(batch.table[int(layout.rows[i]), :total])
            self._extends.append(_Extend(int(layout.q_start[i]), int(layout.q_start[i + 1]), total, slots))

    def _gather_plan(
        self, table: torch.Tensor, rows: np.ndarray, lengths: np.ndarray, members: np.ndarray, n: int
    ) -> _Decodes:
        device, longest = table.device, int(lengths[members].max())
        slots = table[torch.from_numpy(rows[members]).to(device), :longest].long()
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
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        keys.index_copy_(0, self._out_slots, k)
        values.index_copy_(0, self._out_slots, v)
        out = torch.empty((len(q), self.num_heads, self.head_dim), dtype=q.dtype, device=q.device)
        for group in self._decodes:
            self._decode(group, keys, values, q, out, scale, window, softcap)
        for sequence in self._extends:
            sl = slice(sequence.start, sequence.end)
            k_all, v_all = keys[sequence.slots], values[sequence.slots]
            if softcap:
                out[sl] = causal_attention(
                    q[sl].float(), k_all.float(), v_all.float(), scale=scale, window=window, softcap=softcap
                ).to(q.dtype)
            else:
                self._extend(sequence, k_all, v_all, q[sl], out[sl], scale, window)
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

    def _extend(self, seq: _Extend, k, v, q, out, scale: float, window: int) -> None:
        n, total = len(q), seq.total
        if n == total and not window:  # no prefix: torch's own causal case skips the upper half
            heads_first = (q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
            result = F.scaled_dot_product_attention(
                *heads_first, is_causal=True, scale=scale, enable_gqa=self.group > 1
            )
            out.copy_(result[0].transpose(0, 1))
            return
        dim, kv_heads = self.head_dim, self.num_kv_heads
        for first in range(0, n, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, n)
            seen = total - n + last
            rows = q[first:last].reshape(last - first, kv_heads, self.group, dim)
            rows = rows.permute(1, 0, 2, 3).reshape(1, kv_heads, -1, dim)
            mask = seq.masks.get((first, last, window))
            if mask is None:
                mask = self._extend_mask(last - first, seen, window, q.dtype, q.device)
                seq.masks[first, last, window] = mask
            k_seen, v_seen = k[:seen].transpose(0, 1)[None], v[:seen].transpose(0, 1)[None]
            result = F.scaled_dot_product_attention(rows, k_seen, v_seen, attn_mask=mask, scale=scale)
            result = result.view(kv_heads, last - first, self.group, dim).permute(1, 0, 2, 3)
            out[first:last] = result.reshape(last - first, self.num_heads, dim)

    def _extend_mask(self, n: int, seen: int, window: int, dtype: torch.dtype, device) -> torch.Tensor:
        """(n * G, seen): the last n of `seen` positions look back; each row stands for G query heads."""
        query = torch.arange(seen - n, seen, device=device)[:, None]
        key = torch.arange(seen, device=device)
        hidden = key > query
        if window:
            hidden |= key <= query - window
        mask = torch.zeros((n, seen), dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(self.group, 0)


def _buckets(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices of sequences grouped so that the longest of a group is at most about twice the shortest."""
    if not len(lengths):
        return []
    if lengths.max() <= 2 * lengths.min() or lengths.max() <= 64:
        return [np.arange(len(lengths))]
    scale = np.frexp(np.maximum(lengths, 64).astype(np.float64))[1]
    return [np.flatnonzero(scale == s) for s in np.unique(scale)]


def _as_slice(slots: torch.Tensor) -> torch.Tensor | slice:
    """Slots that follow one another can be read as a view, without a copy."""
    first, n = int(slots[0]), len(slots)
    if int(slots[-1]) - first == n - 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, first + n)
    return slots.long()
