"""Random paged batches for the attention tests: sequences scattered over a pool, the tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minisgl.attention import Attention, ForwardBatch, HostBatch, ReferenceAttention
from minisgl.pool import KVPool


@dataclass
class Step:
    """One attention step: the prefixes in `pool`, and the new tokens' q (T, Hq, D), k and v (T, Hkv, D)."""

    pool: KVPool
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def run(self, backend: type[Attention], layer: int = 0, *backend_args, **options) -> torch.Tensor:
        """The output (T, Hq, D) of a fresh `backend`; the pool's `layer` then holds k and v."""
        attention = backend(self.pool, self.q.shape[1], self.k.shape[1], self.q.shape[2], *backend_args)
        attention.begin(self.batch)
        options.setdefault("scale", self.q.shape[2] ** -0.5)
        return attention.forward(layer, self.q, self.k, self.v, **options)

    def in_float32(self) -> Step:
        """The same numbers in float32, in a pool of its own: what the oracle computes on."""
        layers, _, slots, kv_heads, head_dim = self.pool.kv.shape
        pool = KVPool(layers, slots - 1, kv_heads, head_dim, torch.float32, self.pool.kv.device)
        pool.kv.copy_(self.pool.kv)
        return Step(pool, self.batch, self.q.float(), self.k.float(), self.v.float())

    def reference(self, layer: int = 0, **options) -> torch.Tensor:
        """The oracle's output in float32; leaves this step's own pool alone."""
        return self.in_float32().run(ReferenceAttention, layer, **options)


def make_step(
    sequences: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    decodes: int = 0,
    layers: int = 1,
    seed: int = 0,
    poison: bool = False,
    dummies: int = 0,
) -> Step:
    """A step of `sequences` = [(new tokens, KV length), ...] at random slots of a pool that they nearly fill.

    decodes: how many of the first sequences go in as decodes. dummies: padding decodes after them (row 0,
    slot 0, seq_len 1). poison: every slot that holds no prefix is NaN, so that reading one shows.
    """
    rng = np.random.default_rng(seed)
    new = np.array([n for n, _ in sequences[:decodes]] + [1] * dummies + [n for n, _ in sequences[decodes:]])
    lens = np.array([m for _, m in sequences[:decodes]] + [1] * dummies + [m for _, m in sequences[decodes:]])
    real = np.array([True] * decodes + [False] * dummies + [True] * (len(sequences) - decodes))
    capacity = int(lens.sum()) + 7
    context = int(lens.max()) + 5
    rows = np.where(real, rng.permutation(len(lens)) + 1, 0)
    table = np.zeros((len(lens) + 1, context), np.int32)
    free = list(rng.permutation(np.arange(1, capacity + 1)))
    out_slots, positions, prefix_slots = [], [], [0]
    for row, n, m in zip(rows, new, lens):
        slots = [free.pop() for _ in range(m)] if row else [0] * m
        table[row, :m] = slots
        prefix_slots += slots[: m - n]
        out_slots += slots[m - n :]
        positions += range(m - n, m)
    q_start = np.concatenate([[0], np.cumsum(new)])
    host = HostBatch(q_start=q_start, seq_lens=lens, rows=rows)

    generator = torch.Generator(device).manual_seed(seed)
    pool = KVPool(layers, capacity, kv_heads, head_dim, dtype, device)
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=generator, device=device))
    if poison:
        pool.kv[:, :, sorted(set(range(capacity + 1)) - set(map(int, prefix_slots)))] = float("nan")

    def tensor(array, kind):
        return torch.tensor(np.asarray(array), dtype=kind, device=device)

    total = int(q_start[-1])
    batch = ForwardBatch(
        input_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=tensor(positions, torch.int64),
        out_slots=tensor(out_slots, torch.int64),
        q_start=tensor(q_start, torch.int32),
        seq_lens=tensor(lens, torch.int32),
        rows=tensor(rows, torch.int32),
        table=tensor(table, torch.int32),
        num_decodes=decodes + dummies,
        max_seq_len=int(lens.max()),
        max_new=int(new.max()),
        logit_rows=tensor(q_start[1:] - 1, torch.int64),
        host=host,
    )

    def random(count):
        return torch.randn((total, count, head_dim), generator=generator, device=device).to(dtype)

    return Step(pool, batch, random(heads), random(kv_heads), random(kv_heads))
