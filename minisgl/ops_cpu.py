"""Matrix products on a CPU through oneDNN, with the element-wise work done on the way out.

oneDNN (the library under torch's CPU products) multiplies with a weight in a blocked layout of its own.  F.linear
reorders the weight on every call; here it is reordered once, when the model is loaded.  The same call can apply an
activation to the result, or add or multiply another tensor, while it is still in registers.  A block then needs no
separate pass for the residual addition or for SwiGLU's gating:

    residual + x @ o.T                    one call ("add")
    silu(x @ gate.T) * (x @ up.T)         two calls ("swish", then "mul" with the first one's result)

The entry points are the ones torch's own compiler emits for CPUs; `can_pack` says whether this torch has them.
"""

from __future__ import annotations

import torch

from .ops import Ops, rms_norm


def can_pack() -> bool:
    """Whether this torch was built with oneDNN and the operators used here."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


class PackedOps(Ops):
    """Weights in oneDNN's layout; see the module."""

    def pack(self, weight):
        return torch.ops.mkldnn._reorder_linear_weight(weight)

    def pack_gate_up(self, weight):
        return tuple(self.pack(part.contiguous()) for part in weight.chunk(2))

    def linear(self, x, weight, bias=None):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    def swiglu(self, x, weight, bias=None):
        gate, up = weight
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        gated = torch.ops.mkldnn._linear_pointwise(x, gate, gate_bias, "swish", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, gated, up, up_bias, "mul")

    def linear_add_norm(self, x, weight, bias, residual, norm, eps):
        residual = torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")
        return rms_norm(residual, norm, eps), residual
