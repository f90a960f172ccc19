# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
"""The small element-wise steps of a block on a GPU, one kernel each.

On a GPU these steps cost what their memory traffic costs, and in a decode step, where the tensors are tiny, what their
launches cost.  Plain torch reads and writes the (T, N) activations about a dozen times per block here; fused, it is
once per step.  All accumulate in float32 and round where `ops` rounds, so results agree with it to the last bit or so.

    kernel             reads + writes (elements)             replaces
    _add_norm          x, residual, w -> residual, normed    add, square, mean, rsqrt, 2 multiplications, 2 casts
    _norm              x, w -> normed                        the same without the addition
    _rope              q, k (in place), cos, sin             2 multiplications, 2 fused adds, a copy
    _silu_mul          gate, up -> product                   silu, multiplication
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .ops import Ops

if TYPE_CHECKING:
    from .products import Products


@triton.jit
def _add_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, stride_x, stride_r, eps, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per token: residual += x, out = rms_norm(residual) * weight.  Moves 5 N elements (w is in cache)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    live = cols < N
    x = tl.load(x_ptr + row * stride_x + cols, mask=live, other=0.0)
    residual = tl.load(residual_ptr + row * stride_r + cols, mask=live, other=0.0)
    total = x + residual  # rounded to the tensors' dtype, like the sum that torch stores
    tl.store(residual_ptr + row * stride_r + cols, total, mask=live)
    exact = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / N + eps)
    normed = (exact * scale).to(total.dtype)
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0)
    tl.store(out_ptr + row * N + cols, normed * weight, mask=live)


@triton.jit
def _norm(
    x_ptr, weight_ptr, out_ptr, stride_t, stride_h, eps, H: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per (token, head): out = rms_norm(x) * weight[head].  H = 1 for a norm over the hidden size."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // H, row % H
    cols = tl.arange(0, BLOCK)
    live = cols < N
    x = tl.load(x_ptr + token * stride_t + head * stride_h + cols, mask=live, other=0.0)
    exact = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / N + eps)
    weight = tl.load(weight_ptr + head * N + cols, mask=live, other=0.0)
    tl.store(out_ptr + row * N + cols, (exact * scale).to(x.dtype) * weight, mask=live)


@triton.jit
def _rope(
    x_ptr, table_ptr, positions_ptr, stride_t, stride_h, stride_table,
    H: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token turns the pairs (x_i, x_{i + D/2}) of all its query and key heads, in place.

        x[token]   H heads x [ a_0 .. a_{D/2-1} | b_0 .. b_{D/2-1} ]  ->  [ a cos - b sin | b cos + a sin ]

    Moves 2 H D elements of x and the token's D cosines and sines.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    cols = tl.arange(0, BLOCK)
    live = cols < HALF
    position = tl.load(positions_ptr + token)
    cos = tl.load(table_ptr + position * stride_table + cols, mask=live, other=0.0)[None, :]
    sin = tl.load(table_ptr + position * stride_table + HALF + cols, mask=live, other=0.0)[None, :]
    at = x_ptr + token * stride_t + heads[:, None] * stride_h + cols[None, :]
    mask = (heads < H)[:, None] & live[None, :]
    a = tl.load(at, mask=mask, other=0.0)
    b = tl.load(at + HALF, mask=mask, other=0.0)
    exact_a, exact_b = a.to(tl.float32), b.to(tl.float32)
    tl.store(at, (exact_a * cos - exact_b * sin).to(a.dtype), mask=mask)
    tl.store(at + HALF, (exact_b * cos + exact_a * sin).to(a.dtype), mask=mask)


@triton.jit
def _silu_mul(x_ptr, out_ptr, stride_x, M: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block of columns): out = silu(gate) * up.  Moves 3 M elements per token."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < M
    gate = tl.load(x_ptr + row * stride_x + cols, mask=live, other=0.0)
    up = tl.load(x_ptr + row * stride_x + M + cols, mask=live, other=0.0)
    exact = gate.to(tl.float32)
    gated = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype)
    tl.store(out_ptr + row * M + cols, gated * up, mask=live)


class TritonOps(Ops):
    """`Ops` with the kernels above; products are cuBLAS's, in tiles of our choice where `products` has one."""

    def __init__(self, products: Products | None = None):
        self.products = products

    def linear(self, x, weight, bias=None):
        if self.products is None or bias is not None:
            return F.linear(x, weight, bias)
        return self.products.linear(x, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        heads, n = (1, x.shape[-1]) if x.dim() == 2 else (x.shape[1], x.shape[2])
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        stride_h = x.stride(1) if x.dim() == 3 else 0
        block = triton.next_power_of_2(n)
        _norm[(len(x) * heads,)](
            x, weight, out, x.stride(0), stride_h, eps, H=heads, N=n, BLOCK=block, num_warps=_warps(block)
        )
        return out

    def linear_add_norm(self, x, weight, bias, residual, norm, eps):
        x = self.linear(x, weight, bias)
        n = x.shape[-1]
        out = torch.empty_like(x)
        block = triton.next_power_of_2(n)
        _add_norm[(len(x),)](
            x, residual, norm, out, x.stride(0), residual.stride(0), eps, N=n, BLOCK=block, num_warps=_warps(block)
        )
        return out, residual

    def swiglu(self, x, weight, bias=None):
        x = self.linear(x, weight, bias)
        m = x.shape[-1] // 2
        out = torch.empty((len(x), m), dtype=x.dtype, device=x.device)
        block = min(1024, triton.next_power_of_2(m))
        _silu_mul[(len(x), triton.cdiv(m, block))](x, out, x.stride(0), M=m, BLOCK=block, num_warps=4)
        return out

    def rope_rows(self, table, positions, dtype):
        return table, positions

    def apply_rope(self, x, rows):
        table, positions = rows
        heads, half = x.shape[1], x.shape[2] // 2
        _rope[(len(x),)](
            x, table, positions, x.stride(0), x.stride(1), table.stride(0), H=heads, HALF=half,
            BLOCK_H=triton.next_power_of_2(heads), BLOCK=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip
        return x

    def attend(self, attn, layer, qk, v, rows, *, scale, window):
        if not attn.rotates:
            return super().attend(attn, layer, qk, v, rows, scale=scale, window=window)
        heads = attn.num_heads
        return attn.forward(layer, qk[:, :heads], qk[:, heads:], v, scale=scale, window=window, rope=rows)


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))
