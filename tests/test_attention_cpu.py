"""`CpuAttention` against the reference: every kind of batch, in particular many behind a common prefix."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from minisgl import attention_cpu
from minisgl.attention import Attention, ForwardBatch, HostBatch, ReferenceAttention
from minisgl.attention_cpu import CpuAttention, _buckets
from minisgl.pool import KVPool

from .attention_batches import make_step

OPTIONS = [{}, {"window": 17}, {"window": 150}, {"softcap": 20.0}, {"window": 40, "softcap": 5.0}]


@dataclass
class Builder:
    """A batch of sequences, some of which begin with the same slots."""

    rng: np.random.Generator
    capacity: int = 4000
    context: int = 1200
    rows: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    news: list[int] = field(default_factory=list)
    decodes: int = 0

    def __post_init__(self):
        self.free = list(self.rng.permutation(np.arange(1, self.capacity + 1)))
        # what stands past a sequence's end may be anything, slots of others included
        self.table = self.rng.integers(0, self.capacity + 1, (64, self.context)).astype(np.int32)

    def take(self, n: int) -> np.ndarray:
        return np.array([self.free.pop() for _ in range(n)], np.int32)

    def add(self, new: int, own: int = 0, prefix: np.ndarray | tuple = ()) -> None:
        """A sequence: `prefix`, then `own` cached tokens of its own, then `new` ones."""
        row = len(self.rows) + 1
        slots = np.concatenate([np.asarray(prefix, np.int32), self.take(own + new)])
        self.table[row, : len(slots)] = slots
        self.rows.append(row)
        self.lens.append(len(slots))
        self.news.append(new)

    def decode(self, cached: int) -> None:
        assert len(self.rows) == self.decodes
        self.add(1, cached)
        self.decodes += 1

    def batch(self, on_host: bool = True) -> ForwardBatch:
        rows, lens, news = (np.array(x) for x in (self.rows, self.lens, self.news))
        q_start = np.concatenate([[0], np.cumsum(news)])
        positions = np.concatenate([np.arange(m - n, m) for m, n in zip(lens, news)])
        token_rows = np.repeat(rows, news)
        slots = self.table[token_rows, positions]
        return ForwardBatch(
            input_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=torch.from_numpy(positions),
            out_slots=torch.from_numpy(slots.astype(np.int64)),
            q_start=torch.from_numpy(q_start).int(),
            seq_lens=torch.from_numpy(lens).int(),
            rows=torch.from_numpy(rows).int(),
            table=torch.from_numpy(self.table),
            num_decodes=self.decodes,
            max_seq_len=int(lens.max()),
            max_new=int(news.max()),
            logit_rows=torch.from_numpy(q_start[1:] - 1),
            host=HostBatch(q_start, lens, rows) if on_host else None,
        )


def compare(batch: ForwardBatch, capacity: int, kv_heads: int, group: int, dim: int, options=OPTIONS, seed=0) -> None:
    """Both backends, two layers, every option; also that they leave the same pool behind."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    pools = [KVPool(2, capacity, kv_heads, dim, torch.float32, "cpu") for _ in range(2)]
    pools[0].kv[:, :, 1:] = random(*pools[0].kv[:, :, 1:].shape)
    pools[1].kv.copy_(pools[0].kv)
    backends: list[Attention] = [
        kind(pool, kv_heads * group, kv_heads, dim) for kind, pool in zip((CpuAttention, ReferenceAttention), pools)
    ]
    for backend in backends:
        backend.begin(batch)
    n = batch.num_tokens
    for layer in (0, 1):
        for more in options:
            # views with a row stride, as the model passes them
            qkv = random(n, (group + 2) * kv_heads, dim)
            q, k, v = qkv.split([group * kv_heads, kv_heads, kv_heads], 1)
            got, want = (b.forward(layer, q, k, v, scale=dim**-0.5, **more) for b in backends)
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4, msg=lambda m, more=more: f"{more}: {m}")
    assert torch.equal(pools[0].kv, pools[1].kv)


@pytest.mark.parametrize("trial", range(24))
def test_random_batches(trial):
    rng = np.random.default_rng(trial)
    build = Builder(rng)
    prefixes = [build.take(rng.integers(130, 400)) for _ in range(2)]
    for _ in range(rng.integers(0, 6)):
        build.decode(int(rng.choice([2, 50, 200])))
    for _ in range(rng.integers(0 if build.rows else 1, 9)):
        if rng.random() < 0.7:
            prefix = prefixes[rng.integers(2)]
            prefix = prefix[: len(prefix) - rng.choice([0, 0, 10])]
            build.add(int(rng.integers(1, 20)), int(rng.integers(0, 20)), prefix)
        else:
            build.add(int(rng.integers(1, 60)), int(rng.choice([0, 5])))
    kv_heads, group, dim = int(rng.choice([1, 2, 3])), int(rng.choice([1, 3, 4])), int(rng.choice([16, 64]))
    options = OPTIONS if trial % 3 == 0 else [OPTIONS[0], OPTIONS[1 + trial % 4]]
    compare(build.batch(), build.capacity, kv_heads, group, dim, options, trial)


def piece(step, first: int, last: int, **more) -> ForwardBatch:
    """The flat tokens first..last - 1 of a step as a batch of their own."""
    span = slice(first, last)
    batch = replace(step.batch, host=None, q_start=torch.tensor([0, last - first]), **more)
    return replace(batch, out_slots=batch.out_slots[span], input_ids=batch.input_ids[span])


SHAPES = [(6, 2, 16), (9, 3, 64), (4, 2, 80), (4, 4, 128)]  # query heads, KV heads, head_dim


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_companions_do_not_change_a_bit(dtype, shape):
    sequences = [(1, 90), (1, 400), (1, 41), (7, 207), (30, 30)]
    step = make_step(sequences, *shape, dtype=dtype, decodes=3)
    together = step.run(CpuAttention)
    starts = step.batch.q_start.tolist()
    for i, (first, last) in enumerate(pairwise(starts)):
        only = slice(i, i + 1)
        batch = piece(
            step,
            first,
            last,
            seq_lens=step.batch.seq_lens[only],
            rows=step.batch.rows[only],
            num_decodes=int(i < 3),
        )
        attention = CpuAttention(step.pool, *shape)
        attention.begin(batch)
        span = slice(first, last)
        got = attention.forward(0, step.q[span], step.k[span], step.v[span], scale=shape[2] ** -0.5)
        assert torch.equal(got, together[span]), sequences[i]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_in_pieces_equals_the_whole(dtype, shape):
    """In bfloat16 to the last bit; in float32 a product of one row may be summed in another order."""
    step = make_step([(300, 300)], *shape, dtype=dtype)
    whole = step.run(CpuAttention)
    slots = step.batch.out_slots
    for first, last in ((0, 130), (0, 20), (20, 40), (130, 299), (299, 300), (250, 300)):
        pool = KVPool(1, step.pool.capacity, *shape[1:], dtype, "cpu")
        pool.keys(0)[slots[:first]], pool.values(0)[slots[:first]] = step.k[:first], step.v[:first]
        attention = CpuAttention(pool, *shape)
        attention.begin(piece(step, first, last, seq_lens=torch.tensor([last])))
        span = slice(first, last)
        got = attention.forward(0, step.q[span], step.k[span], step.v[span], scale=shape[2] ** -0.5)
        bound = 1e-6 if dtype == torch.float32 else 0
        torch.testing.assert_close(got, whole[span], atol=bound, rtol=bound)


def test_padding_is_finite_and_harmless():
    """Tokens past the last sequence belong to nobody; their K and V go to the dummy slot."""
    build = Builder(np.random.default_rng(6))
    build.decode(20)
    build.add(5, 9)
    batch = build.batch()
    zeros = torch.zeros(10, dtype=torch.int64)
    padded = replace(
        batch,
        input_ids=torch.cat([batch.input_ids, zeros]),
        positions=torch.cat([batch.positions, zeros]),
        out_slots=torch.cat([batch.out_slots, zeros]),
    )
    pool = KVPool(1, build.capacity, 1, 16, torch.float32, "cpu")
    q, k = torch.randn(16, 2, 16), torch.randn(16, 1, 16)
    outputs = []
    for kind in (CpuAttention, ReferenceAttention):
        attention = kind(pool, 2, 1, 16)
        for each in (batch, padded):
            n = each.num_tokens
            attention.begin(each)
            outputs.append(attention.forward(0, q[:n], k[:n], k[:n], scale=0.25))
            assert torch.isfinite(outputs[-1]).all()
    assert torch.equal(outputs[0], outputs[1][:6]) and torch.equal(outputs[2], outputs[3][:6])
    torch.testing.assert_close(outputs[0], outputs[2])


@pytest.mark.parametrize("keep_masks", [True, False])
def test_long_extends_go_in_blocks_of_queries(monkeypatch, keep_masks):
    monkeypatch.setattr(attention_cpu, "QUERY_BLOCK", 7)
    if not keep_masks:
        monkeypatch.setattr(attention_cpu, "MASK_BYTES", 0)
    build = Builder(np.random.default_rng(3))
    prefix = build.take(200)
    build.add(30, 40)
    build.add(25)
    for _ in range(4):
        build.add(9, 1, prefix)
    compare(build.batch(), build.capacity, 2, 3, 16)


def test_masks_of_a_long_prompt_are_not_kept(monkeypatch):
    """8,192 new tokens behind 8,192 cached ones would keep gigabytes of masks from layer to layer."""
    monkeypatch.setattr(attention_cpu, "QUERY_BLOCK", 16)
    step = make_step([(40, 300)], 6, 2, 16)
    for limit, kept in ((1 << 30, 3), (1000, 0)):
        monkeypatch.setattr(attention_cpu, "MASK_BYTES", limit)
        attention = CpuAttention(step.pool, 6, 2, 16)
        attention.begin(step.batch)
        attention.forward(0, step.q, step.k, step.v, scale=0.25)
        (extend,) = attention._extends
        assert [m.shape for m in extend.masks.values()] == [(48, 384), (48, 384), (24, 384)][:kept]


def test_nothing_else_in_the_pool_is_read():
    """Slots that are nobody's hold NaN; so do, at first, the slots that the step fills."""
    step = make_step([(1, 40), (1, 3), (6, 6), (4, 150), (5, 160)], 6, 2, 16, decodes=2, poison=True)
    got = step.run(CpuAttention)
    step = make_step([(1, 40), (1, 3), (6, 6), (4, 150), (5, 160)], 6, 2, 16, decodes=2, poison=True)
    torch.testing.assert_close(got, step.reference())


def test_prefix_written_in_the_same_step_is_read():
    """Sequences whose prefix another one of the batch computes in this very step."""
    build = Builder(np.random.default_rng(4))
    build.add(200)
    prefix = build.table[1, :200].copy()
    for _ in range(3):
        build.add(4, 0, prefix)
    compare(build.batch(), build.capacity, 2, 2, 16)


def test_layout_is_read_back_when_the_host_has_none():
    build = Builder(np.random.default_rng(5))
    build.decode(30)
    build.add(5, 9)
    compare(build.batch(on_host=False), build.capacity, 1, 3, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    sequences = [(1, 30), (1, 400), (9, 9), (7, 180), (3, 200)]
    step = make_step(sequences, 9, 3, 64, dtype=dtype, decodes=2)
    want = step.reference()
    got = step.run(CpuAttention)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)


def test_decodes_are_bucketed_by_length():
    assert _buckets(np.array([], np.int64)) == []
    groups = _buckets(np.array([3, 1000, 60, 900, 200, 64]))
    assert sorted(np.concatenate(groups).tolist()) == list(range(6))
    lengths = np.array([3, 1000, 60, 900, 200, 64])
    for group in groups:
        assert lengths[group].max() <= 2 * max(lengths[group].min(), 64)
    assert len(_buckets(np.array([100, 200, 150]))) == 1
    assert len(_buckets(np.array([1, 64]))) == 1  # short ones cost little
