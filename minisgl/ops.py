"""The small element-wise steps between the matrix products, in plain torch.

They move far more memory than they compute, so what counts is how often a tensor is read and written, and,
for a handful of tokens, how many operations are launched.  Each is one function with one shape contract, so
that a device can bring its own (see `attention_triton` for the fused CUDA ones).  No op synchronises with the
host.

    T tokens, N = hidden size, H heads, D = head_dim
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from .attention import Attention, ForwardBatch
    from .model_llama import Llama


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467) over the last dimension: x / sqrt(mean(x^2) + eps) * weight.

    `weight` broadcasts against x: (N,), or (H, D) for one norm per head.  Accumulates in float32 and rounds
    to x's dtype before the weight is applied, the order of Hugging Face's LlamaRMSNorm.
    """
    exact = x.float()  # x itself if it is float32 already
    norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = exact * scale if exact is x else exact.mul_(scale).to(x.dtype)
    return normed.mul_(weight)


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


class Ops:
    """The steps of a block as the model calls them, each the place where a device may fuse more.

    This one is plain torch.  `PackedOps` (ops_cpu) keeps weights in oneDNN's layout and lets its products do the
    element-wise work on the way out, `AmxOps` (ops_amx) does whole steps in one call; `TritonOps`
    (ops_triton) fuses norms, rotation and gating on a GPU.  Weights are those of `model_llama.Layer`, or what
    `pack` made of them.
    """

    def step(self, model: Llama, batch: ForwardBatch, attn: Attention) -> torch.Tensor | None:
        """What `model.forward` is to return, if this object can do this whole step at once; else None."""
        return None

    def logits(self, hidden: torch.Tensor, weight: Any) -> torch.Tensor:
        """hidden (T, N) @ lm_head.T -> (T, vocab), in their dtype or float32."""
        return self.linear(hidden, weight)

    def pack(self, weight: torch.Tensor) -> Any:
        """A linear layer's weight (out, in) in the layout that this object multiplies with."""
        return weight

    def pack_gate_up(self, weight: torch.Tensor) -> Any:
        """The same for gate over up, (2 M, N)."""
        return self.pack(weight)

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (T, in) @ weight.T + bias -> (T, out)."""
        return F.linear(x, weight, bias)

    def swiglu(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """silu(x @ gate.T) * (x @ up.T): (T, N) -> (T, M)."""
        return silu_mul(self.linear(x, weight, bias))

    def linear_add_norm(
        self,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(s), s) with s = residual + x @ weight.T + bias; may overwrite `residual`."""
        return add_rms_norm(self.linear(x, weight, bias), residual, norm, eps)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def rope_rows(
        self, table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_rows(table, positions, dtype)

    def apply_rope(self, x: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return apply_rope(x, rows)

    def attend(
        self,
        attn: Attention,
        layer: int,
        qk: torch.Tensor,
        v: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor],
        *,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """Turn q and k, (T, H + K, D) together, by their positions, then attend (`Attention.forward`): (T, H, D)."""
        qk = self.apply_rope(qk, rows)
        heads = attn.num_heads
        return attn.forward(layer, qk[:, :heads], qk[:, heads:], v, scale=scale, window=window)
