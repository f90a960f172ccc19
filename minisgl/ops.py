"""The small element-wise steps between the matrix products, in plain torch.

They move far more memory than they compute, so what counts is how often a tensor is read and written, and,
for a handful of tokens, how many operations are launched.  Each is one function with one shape contract, so
that a device can bring its own (see `attention_triton` for the fused CUDA ones).  No op synchronises with the
host.

    T tokens, N = hidden size, H heads, D = head_dim
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467) over the last dimension: x / sqrt(mean(x^2) + eps) * weight.

    `weight` broadcasts against x: (N,), or (H, D) for one norm per head.  Accumulates in float32 and rounds
    to x's dtype before the weight is applied, the order of Hugging Face's LlamaRMSNorm.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).to(x.dtype).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual + x), residual + x); may overwrite `residual`.  All (T, N)."""
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def rope_rows(
    table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of `RotaryTable` at `positions`, once per step, in the form `apply_rope` wants: opaque to the
    model."""
    rows = table[positions].to(dtype).unsqueeze(1)  # (T, 1, D): broadcasts over the heads
    cos, sin = rows.chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), sin


def apply_rope(x: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the pairs (x_i, x_{i + D/2}) of x (T, H, D), queries and keys alike, by the angles in `rows`.

    The result may or may not share memory with x.  Two passes over memory instead of the textbook's five:
    out = x * cos, then each half takes the other half times the sine.
    """
    cos, sin = rows
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's (arXiv 2002.05202) gating: (T, 2 M), gate beside up -> silu(gate) * up, (T, M)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
