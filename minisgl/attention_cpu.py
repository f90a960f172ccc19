"""Attention for CPUs: the same paged interface, out of torch's fused scaled_dot_product_attention.

A CPU has no use for a paged kernel of our own: copying rows of a few hundred bytes out of the pool runs at memory speed
and costs a few per cent of the attention itself.  So K and V are gathered through the table and torch's flash attention
does the rest; what matters is to call it rarely and with a shape it likes:

* decodes     one call for many sequences: their contexts are gathered side by side, padded to the longest.  Sequences
              of similar length go together (`_buckets`), so that padding at most doubles the work.
* extends     one call per sequence, or per few sequences with a long common prefix.  The G query heads that share a KV
              head become G rows of one query, so that K and V are read once for all of them:
              q (n, KV * G, D)  ->  (KV, n * G, D).  Sequences behind one prefix (`_families`) read it once: their
              queries stand below one another, and a mask keeps each to its own continuation:

                           keys:   prefix ........   own a   own b   own c
                  queries of a     x x x x x x x x   causal    -       -
                  queries of b     x x x x x x x x     -     causal    -
                  queries of c     x x x x x x x x     -       -     causal

Works on any device and in any dtype; the tests compare it with `ReferenceAttention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from .attention import Attention, ForwardBatch, causal_attention

QUERY_BLOCK = 512  # queries per masked call: bounds the mask to 512 x context
MIN_COMMON = 128  # shortest common prefix worth sharing, in tokens


@dataclass
class _Decodes:
    """Sequences of similar length that decode together."""

    members: torch.Tensor | None  # flat tokens, or None if they are simply first..last - 1
    cells: torch.Tensor  # (B * KV * L,) rows of the pool seen as (slots * KV, D)
    lengths: torch.Tensor  # (B,)
    longest: int
    masks: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Member:
    """One sequence's new tokens start..end - 1 (flat) over `total` positions."""

    start: int
    end: int
    total: int
    row: int


@dataclass
class _Family:
    """Sequences whose first `common` positions are the same slots; `slots` are those, then each one's own."""

    members: list[_Member]
    common: int
    slots: torch.Tensor | slice
    tokens: torch.Tensor | None  # flat tokens of all members; None: one contiguous range
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
        members = [
            _Member(int(layout.q_start[i]), int(layout.q_start[i + 1]), int(lengths[i]), int(layout.rows[i]))
            for i in range(n, len(lengths))
        ]
        self._families = [self._family(batch.table, *family) for family in _families(members, batch.table)]

    @staticmethod
    def _family(table: torch.Tensor, members: list[_Member], common: int) -> _Family:
        if len(members) == 1:
            return _Family(members, 0, _as_slice(table[members[0].row, : members[0].total]), None)
        parts = [table[members[0].row, :common]] + [table[m.row, common : m.total] for m in members]
        tokens = torch.cat([torch.arange(m.start, m.end, device=table.device) for m in members])
        return _Family(members, common, torch.cat(parts).long(), tokens)

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
        for family in self._families:
            k_seen, v_seen = _take(keys, family.slots), _take(values, family.slots)
            if family.tokens is None:
                only = slice(family.members[0].start, family.members[0].end)
                self._extend(family, k_seen, v_seen, q[only], out[only], scale, window, softcap)
            else:
                mine = q.index_select(0, family.tokens)
                result = torch.empty_like(mine)
                self._extend(family, k_seen, v_seen, mine, result, scale, window, softcap)
                out.index_copy_(0, family.tokens, result)
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

    def _extend(self, family: _Family, k, v, q, out, scale: float, window: int, softcap: float) -> None:
        n, total = len(q), len(k)
        if softcap:
            for m, queries, results in self._of_each(family, q, out):
                mine = self._own_keys(family, m)
                results.copy_(
                    causal_attention(
                        queries.float(), k[mine].float(), v[mine].float(), scale=scale, window=window, softcap=softcap
                    )
                )
            return
        if n == total and not window:  # no prefix: torch's own causal case skips the upper half
            heads_first = (q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
            result = F.scaled_dot_product_attention(
                *heads_first, is_causal=True, scale=scale, enable_gqa=self.group > 1
            )
            out.copy_(result[0].transpose(0, 1))
            return
        dim, kv_heads = self.head_dim, self.num_kv_heads
        alone = len(family.members) == 1
        for first in range(0, n, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, n)
            seen = total - n + last if alone else total
            rows = q[first:last].reshape(last - first, kv_heads, self.group, dim)
            rows = rows.permute(1, 0, 2, 3).reshape(1, kv_heads, -1, dim)
            mask = family.masks.get((first, last, window))
            if mask is None:
                mask = self._extend_mask(family, n, total, window, q)[first:last, :seen]
                mask = mask.repeat_interleave(self.group, 0)
                family.masks[first, last, window] = mask
            k_seen, v_seen = k[:seen].transpose(0, 1)[None], v[:seen].transpose(0, 1)[None]
            result = F.scaled_dot_product_attention(rows, k_seen, v_seen, attn_mask=mask, scale=scale)
            result = result.view(kv_heads, last - first, self.group, dim).permute(1, 0, 2, 3)
            out[first:last] = result.reshape(last - first, self.num_heads, dim)

    @staticmethod
    def _extend_mask(family: _Family, n: int, total: int, window: int, like: torch.Tensor) -> torch.Tensor:
        """(n, total): 0 where a query sees a key, -inf elsewhere."""
        device, common = like.device, family.common
        position = torch.empty(total, dtype=torch.int64, device=device)  # of each key in its own sequence
        owner = torch.full((total,), -1, dtype=torch.int64, device=device)  # -1: the common prefix
        query = torch.empty(n, dtype=torch.int64, device=device)
        asker = torch.empty(n, dtype=torch.int64, device=device)
        position[:common] = torch.arange(common, device=device)
        key_at, query_at = common, 0
        for i, m in enumerate(family.members):
            own, new = m.total - common, m.end - m.start
            position[key_at : key_at + own] = torch.arange(common, m.total, device=device)
            owner[key_at : key_at + own] = i
            query[query_at : query_at + new] = torch.arange(m.total - new, m.total, device=device)
            asker[query_at : query_at + new] = i
            key_at, query_at = key_at + own, query_at + new
        hidden = position > query[:, None]
        if window:
            hidden |= position <= query[:, None] - window
        if len(family.members) > 1:
            hidden |= (owner >= 0) & (owner != asker[:, None])
        mask = torch.zeros((n, total), dtype=like.dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf"))

    @staticmethod
    def _of_each(family: _Family, q: torch.Tensor, out: torch.Tensor):
        """(member, its queries, its results) of a family."""
        at = 0
        for m in family.members:
            yield m, q[at : at + m.end - m.start], out[at : at + m.end - m.start]
            at += m.end - m.start

    @staticmethod
    def _own_keys(family: _Family, member: _Member) -> torch.Tensor | slice:
        """Which of the family's gathered keys are this member's."""
        if len(family.members) == 1:
            return slice(0, member.total)
        at = family.common
        for m in family.members:
            if m is member:
                break
            at += m.total - family.common
        own = torch.arange(at, at + member.total - family.common)
        return torch.cat([torch.arange(family.common), own])


def _families(members: list[_Member], table: torch.Tensor) -> list[tuple[list[_Member], int]]:
    """Sequences to attend together, with the length of their common prefix.

    Worth it while what the members would read of each other and mask away stays small beside the prefix.  Only few new
    tokens behind a long cached prefix qualify.  Compares slots, on the host: the table is there on a CPU.
    """
    alone: list[tuple[list[_Member], int]] = []
    open_families: dict[int, tuple[list[_Member], int, int]] = {}  # by the slot of position 0
    if table.device.type != "cpu":
        return [([m], 0) for m in members]
    slots = table.numpy()
    for m in members:
        prefix = m.total - (m.end - m.start)
        if prefix < MIN_COMMON or prefix < 4 * (m.end - m.start):
            alone.append(([m], 0))
            continue
        key = int(slots[m.row, 0])
        if key in open_families:
            family, common, own = open_families[key]
            same = slots[m.row, : min(common, prefix)] == slots[family[0].row, : min(common, prefix)]
            shared = len(same) if same.all() else int(same.argmin())
            grown = own + (m.total - shared) + len(family) * (common - shared)
            if shared >= MIN_COMMON and grown * 4 <= shared:
                open_families[key] = ([*family, m], shared, grown)
                continue
            alone.append((family, common if len(family) > 1 else 0))
        open_families[key] = ([m], prefix, m.end - m.start)
    return alone + [(family, common if len(family) > 1 else 0) for family, common, _ in open_families.values()]


def _take(pool: torch.Tensor, slots: torch.Tensor | slice) -> torch.Tensor:
    return pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)


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
