"""The fused kernels against plain torch; float32 in Triton's interpreter here, bf16 and fp16 on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported; nothing else uses Triton on a CPU

pytest.importorskip("triton", reason="Triton is installed on Linux only")

from minisgl.attention_triton import TritonAttention
from minisgl.ops import Ops
from minisgl.ops_triton import TritonOps
from minisgl.rope import RotaryTable

from .attention_batches import make_step

CASES = [
    pytest.param(("cpu", torch.float32, 1e-6), id="cpu-fp32"),
    pytest.param(("cuda", torch.float16, 2e-3), id="gpu-fp16", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16, 1.6e-2), id="gpu-bf16", marks=pytest.mark.gpu),
]


@pytest.fixture(params=CASES)
def setting(request):
    device, dtype, tolerance = request.param
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton is not in interpreter mode where there is a GPU")
    torch.manual_seed(0)
    return lambda *shape: torch.randn(shape, device=device).to(dtype), tolerance


def close(got, want, tolerance):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [64, 96, 576])
def test_norms(setting, n):
    make, tolerance = setting
    plain, fused = Ops(), TritonOps()
    x, weight = make(5, n), make(n)
    close(fused.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5), tolerance)
    heads, weights = make(5, 4, 3 * n)[:, :3, :n], make(3, n)  # strided, one weight per head
    close(fused.rms_norm(heads, weights, 1e-5), plain.rms_norm(heads, weights, 1e-5), tolerance)
    w, residual = make(n, 32) * 0.1, make(5, n)
    want = plain.linear_add_norm(x[:, :32], w, None, residual.clone(), weight, 1e-5)
    got = fused.linear_add_norm(x[:, :32], w, None, residual.clone(), weight, 1e-5)
    for g, e in zip(got, want):
        close(g, e, tolerance)


@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_rope(setting, head_dim):
    make, tolerance = setting
    plain, fused = Ops(), TritonOps()
    x = make(6, 5, head_dim)
    positions = torch.tensor([0, 1, 7, 100, 2000, 3], device=x.device)
    angles = torch.arange(4096, device=x.device)[:, None] / 10000 ** (
        torch.arange(head_dim // 2, device=x.device) / (head_dim // 2)
    )
    table = torch.cat((angles.cos(), angles.sin()), -1).float()
    want = plain.apply_rope(x.float(), plain.rope_rows(table, positions, torch.float32)).to(x.dtype)
    inside = torch.cat((x, make(6, 2, head_dim)), 1)  # q and k are a view of the fused product
    got = fused.apply_rope(inside[:, :5], fused.rope_rows(table, positions, x.dtype))
    close(got, want, tolerance)
    assert got.data_ptr() == inside.data_ptr()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (9, 3, 80), (3, 1, 96), (2, 2, 128)])
def test_turning_and_writing_at_once_is_turning_then_writing(setting, heads, kv_heads, head_dim):
    """The same bits in q, in the pool and in the output, for decodes and prompts, whatever the layout of q, k and v."""
    make, _ = setting
    step = make_step(
        [(1, 30), (1, 1), (5, 20), (3, 3)], heads, kv_heads, head_dim, dtype=make(1).dtype, device=make(1).device.type,
        decodes=2,
    )  # fmt: skip
    batch, tokens = step.batch, step.batch.num_tokens
    angles = torch.rand((64, head_dim // 2), device=batch.positions.device) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1)
    qkv = make(tokens, heads + 2 * kv_heads, head_dim)
    results = []
    for rotates in (True, False):
        attention = TritonAttention(step.pool, heads, kv_heads, head_dim)
        attention.rotates = rotates
        attention.begin(batch)
        step.pool.kv[:, :, batch.out_slots] = 0.0
        mine = qkv.clone()
        qk, v = mine[:, : heads + kv_heads], mine[:, heads + kv_heads :]
        ops = TritonOps()
        rows = ops.rope_rows(table, batch.positions, qkv.dtype)
        out = ops.attend(attention, 0, qk, v, rows, scale=head_dim**-0.5, window=0)
        results.append((out, mine[:, :heads].clone(), step.pool.kv[:, :, batch.out_slots].clone()))
    for fused, apart in zip(*results):
        assert torch.equal(fused, apart) and fused.abs().sum() > 0


def test_swiglu(setting):
    make, tolerance = setting
    x, weight = make(7, 32), make(2 * 1100, 32) * 0.2
    close(TritonOps().swiglu(x, weight), Ops().swiglu(x, weight), 2 * tolerance)


def test_the_rotary_table_is_what_the_kernel_expects():
    """cos then sin, half the head each."""
    from minisgl.config import LlamaConfig

    config = LlamaConfig.from_hf(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 8,
         "max_position_embeddings": 32, "rms_norm_eps": 1e-5}
    )  # fmt: skip
    table = RotaryTable(config, "cpu").rows(4)
    assert table.shape[1] == 64
    torch.testing.assert_close(table[:, :32] ** 2 + table[:, 32:] ** 2, torch.ones(len(table), 32))
