"""The reference attention against torch's own and against arithmetic done by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minisgl.attention import ReferenceAttention, causal_attention
from minisgl.pool import KVPool
from tests.attention_batches import make_step


def sdpa(q, k, v, scale):
    """Causal attention of a whole prompt by torch: q (n, Hq, D), k and v (n, Hkv, D)."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)


def by_hand(q, k, v, scale, window=0, softcap=0.0):
    """The definition, one query head and one key at a time."""
    n, heads, _ = q.shape
    m, kv_heads, _ = k.shape
    out = torch.zeros_like(q)
    for i in range(n):
        p = m - n + i
        for h in range(heads):
            kv = h // (heads // kv_heads)
            seen = range(max(0, p - window + 1) if window else 0, p + 1)
            scores = [float(q[i, h] @ k[j, kv]) * scale for j in seen]
            if softcap:
                scores = [softcap * math.tanh(s / softcap) for s in scores]
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            out[i, h] = sum(w * v[j, kv] for w, j in zip(weights, seen)) / sum(weights)
    return out


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (9, 3), (7, 1)])
def test_whole_prompt_equals_sdpa(heads, kv_heads):
    step = make_step([(37, 37)], heads, kv_heads, 16)
    torch.testing.assert_close(step.run(ReferenceAttention), sdpa(step.q, step.k, step.v, 0.25))


@pytest.mark.parametrize("window, softcap", [(0, 0.0), (3, 0.0), (0, 2.0), (1, 0.0), (5, 1.5)])
def test_window_and_softcap_equal_the_definition(window, softcap):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn((4, 4, 8), generator=generator)
    k, v = torch.randn((2, 9, 2, 8), generator=generator)
    got = causal_attention(q, k, v, scale=0.7, window=window, softcap=softcap)
    torch.testing.assert_close(got, by_hand(q, k, v, 0.7, window, softcap))


def test_mixed_batch_equals_each_sequence_alone():
    """Decodes, a fresh prompt and a continued one in a flat batch: only their own slots matter."""
    step = make_step([(1, 12), (1, 1), (6, 6), (4, 15)], 6, 2, 8, decodes=2, poison=True)
    out = step.run(ReferenceAttention)
    assert torch.isfinite(out).all()
    host = step.batch.host
    for b, row in enumerate(host.rows):
        slots = step.batch.table[row, : host.seq_lens[b]].long()
        span = slice(host.q_start[b], host.q_start[b + 1])
        keys, values = step.pool.keys(0)[slots], step.pool.values(0)[slots]
        torch.testing.assert_close(out[span], by_hand(step.q[span], keys, values, 8**-0.5))


def test_chunks_equal_the_whole_prompt(monkeypatch):
    """Computing a prompt in pieces, and queries in blocks, changes nothing."""
    whole = make_step([(20, 20)], 4, 2, 8)
    want = whole.run(ReferenceAttention)
    monkeypatch.setattr(ReferenceAttention, "query_block", 3)
    attention = ReferenceAttention(KVPool(1, 30, 2, 8, torch.float32, "cpu"), 4, 2, 8)
    for start, end in ((0, 7), (7, 8), (8, 20)):
        span = slice(start, end)
        batch = replace(
            whole.batch,
            input_ids=whole.batch.input_ids[span],
            out_slots=whole.batch.out_slots[span],
            q_start=torch.tensor([0, end - start]),
            seq_lens=torch.tensor([end]),
            host=None,
        )
        attention.begin(batch)
        got = attention.forward(0, whole.q[span], whole.k[span], whole.v[span], scale=8**-0.5)
        torch.testing.assert_close(got, want[span])


def test_prefix_written_in_the_same_step_is_read():
    """Sequence b reads, through the table, slots that sequence a fills in this very step."""
    step = make_step([(6, 6), (2, 8)], 2, 2, 8, poison=True)
    a, b = step.batch.rows.tolist()
    step.batch.table[b, :6] = step.batch.table[a, :6]
    out = step.run(ReferenceAttention)
    together = sdpa(step.q, step.k, step.v, 8**-0.5)  # a's 6 tokens and b's 2 are one prompt of 8
    torch.testing.assert_close(out, together)


def test_layers_do_not_touch_each_other():
    step = make_step([(3, 3)], 2, 1, 8, layers=3)
    before = step.pool.kv.clone()
    step.run(ReferenceAttention, 1)
    assert torch.equal(step.pool.kv[[0, 2]], before[[0, 2]])
    assert torch.equal(step.pool.keys(1)[step.batch.out_slots], step.k)
    assert torch.equal(step.pool.values(1)[step.batch.out_slots], step.v)


def test_reference_accumulates_in_float32():
    step = make_step([(1, 300)], 2, 1, 16, dtype=torch.bfloat16, decodes=1)
    want = step.reference()
    got = step.run(ReferenceAttention)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want.to(torch.bfloat16))


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(5, 2, 8), (4, 0, 8), (0, 1, 8), (4, 2, 0)])
def test_impossible_shapes_are_refused(heads, kv_heads, head_dim):
    pool = KVPool(1, 4, 2, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"num_heads|head_dim"):
        ReferenceAttention(pool, heads, kv_heads, head_dim)
