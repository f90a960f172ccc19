"""The Llama family's forward pass over a flat batch of tokens.

The tokens of all sequences lie one after another, without padding; a linear layer or a norm does not care
which sequence a token belongs to.  Only attention does, so it alone looks at the batch, through the
`Attention` interface:

    ids (T,) -> embed -> [ norm -> qkv -> rope -> ATTENTION -> o -> + -> norm -> gate,up -> silu* -> down -> +
    ] x L
             -> norm -> hidden (T, N);   the rows whose logits are wanted -> lm_head -> (L, vocab)

Q, K and V are one matrix product, gate and up another: fewer, larger products.  The checkpoint's separate
tensors are copied into slices of the fused ones as they are read (`Llama.load`), which is also all that
tensor parallelism would need to change: nothing here knows of ranks.

The forward pass never waits for the device and, for given shapes, always does the same work, so it can be
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from .attention import Attention, ForwardBatch
from .config import LlamaConfig, ModelError
from .ops import Ops
from .rope import RotaryTable

# Where a checkpoint's tensor goes: the slice that receives it, and the shape it must have.
Destinations = dict[str, tuple[torch.Tensor, tuple[int, ...]]]


@dataclass
class Layer:
    """One block's weights; N hidden, M intermediate, H / K query / KV heads, D head_dim.  None: the model has
    none."""

    input_norm: torch.Tensor  # (N,)
    qkv: torch.Tensor  # ((H + 2 K) D, N): rows of q, k, v
    o: torch.Tensor  # (N, H D)
    post_norm: torch.Tensor  # (N,)
    gate_up: torch.Tensor  # (2 M, N): rows of gate, up
    down: torch.Tensor  # (N, M)
    qkv_bias: torch.Tensor | None  # ((H + 2 K) D,)
    o_bias: torch.Tensor | None  # (N,)
    gate_up_bias: torch.Tensor | None  # (2 M,)
    down_bias: torch.Tensor | None  # (N,)
    qk_norm: torch.Tensor | None  # (H + K, D): q's norm H times, then k's K times, so that one call does both
    window: int  # sliding window in tokens, 0 for none


class Llama:
    """A model of the family on one device.  Weights are uninitialised until `load` or `init_dummy`."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device | str):
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.embed = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._new_layer(config.windows[i]) for i in range(config.num_layers)]
        self.final_norm = self._empty(config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = self.embed if tied else self._empty(config.vocab_size, config.hidden_size)
        self.rope = RotaryTable(config, self.device)
        self.ops = Ops()

    def __repr__(self) -> str:
        count = sum(t.numel() for t in self.tensors()) / 1e6
        return (
            f"Llama({self.config.model_type}, {self.config.num_layers} layers, {count:,.0f}M parameters, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.device})"
        )

    # ------------------------------------------------------------------ forward

    def forward(self, batch: ForwardBatch, attn: Attention) -> torch.Tensor:
        """Hidden states after the final norm, (T, N).  Writes every token's K and V into the pool.

        `attn.begin(batch)` has been called.  q, k and v reach `attn.forward` as views with a row stride of
        their own: the last two dimensions are contiguous, the first need not be.
        """
        done = self.ops.step(self, batch, attn)
        if done is not None:
            return done
        c = self.config
        qk_heads = c.num_heads + c.num_kv_heads
        scale = c.head_dim**-0.5
        ops, eps = self.ops, c.rms_norm_eps
        rows = ops.rope_rows(self.rope.rows(batch.max_seq_len), batch.positions, self.dtype)

        residual = F.embedding(batch.input_ids, self.embed)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            qkv = ops.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, c.head_dim)
            qk, v = qkv[:, :qk_heads], qkv[:, qk_heads:]
            if layer.qk_norm is not None:
                qk = ops.rms_norm(qk, layer.qk_norm, eps)
            x = ops.attend(attn, i, qk, v, rows, scale=scale, window=layer.window).reshape(len(x), -1)
            x, residual = ops.linear_add_norm(x, layer.o, layer.o_bias, residual, layer.post_norm, eps)
            x = ops.swiglu(x, layer.gate_up, layer.gate_up_bias)
            norm = self.layers[i + 1].input_norm if i + 1 < c.num_layers else self.final_norm
            x, residual = ops.linear_add_norm(x, layer.down, layer.down_bias, residual, norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(L, N) rows of `forward`'s result -> (L, vocab) in the model's dtype or float32, which the sampler needs."""
        return self.ops.logits(hidden, self.lm_head)

    def use(self, ops: Ops) -> None:
        """Compute with `ops` from now on (once, after loading): weights are brought into its layout.

        The embedding keeps its own layout; a tied lm_head gets a packed copy.
        """
        self.ops = ops
        with torch.inference_mode():
            for layer in self.layers:
                layer.qkv, layer.o = ops.pack(layer.qkv), ops.pack(layer.o)
                layer.gate_up, layer.down = ops.pack_gate_up(layer.gate_up), ops.pack(layer.down)
            self.lm_head = ops.pack(self.lm_head)

    # ------------------------------------------------------------------ weights

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every parameter tensor once (a tied lm_head is the embedding)."""
        yield self.embed
        for layer in self.layers:
            for f in fields(layer):
                value = getattr(layer, f.name)
                if isinstance(value, torch.Tensor):
                    yield value
        yield self.final_norm
        if self.lm_head is not self.embed:
            yield self.lm_head

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a checkpoint's tensors, named as Hugging Face names them, into the fused parameters.

        Raises ModelError naming a tensor of the wrong shape, the missing ones, or those left over.
        """
        wanted = self._destinations()
        left_over = []
        for name, tensor in weights:
            if name not in wanted:
                if not self._harmless(name):
                    left_over.append(name)
                continue
            destination, shape = wanted.pop(name)
            if tuple(tensor.shape) != shape:
                raise ModelError(
                    f"tensor {name} has shape {tuple(tensor.shape)}, the config asks for {shape}"
                )
            destination.copy_(tensor)
        if wanted:
            raise ModelError(f"the checkpoint lacks {_some(list(wanted))}")
        if left_over:
            raise ModelError(f"the checkpoint has tensors that this model does not use: {_some(left_over)}")

    def init_dummy(self, seed: int = 0) -> None:
        """Random weights, N(0, 0.02), the norms one: for benchmarks of shapes whose weights are not at
        hand."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for tensor in self.tensors():
            tensor.normal_(0.0, 0.02, generator=generator)
        for layer in self.layers:
            for norm in (layer.input_norm, layer.post_norm, layer.qk_norm):
                if norm is not None:
                    norm.fill_(1.0)
        self.final_norm.fill_(1.0)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _new_layer(self, window: int) -> Layer:
        c = self.config
        n, m, d = c.hidden_size, c.intermediate_size, c.head_dim
        qkv_rows = (c.num_heads + 2 * c.num_kv_heads) * d
        return Layer(
            input_norm=self._empty(n),
            qkv=self._empty(qkv_rows, n),
            o=self._empty(n, c.num_heads * d),
            post_norm=self._empty(n),
            gate_up=self._empty(2 * m, n),
            down=self._empty(n, m),
            qkv_bias=self._empty(qkv_rows) if c.qkv_bias else None,
            o_bias=self._empty(n) if c.o_bias else None,
            gate_up_bias=self._empty(2 * m) if c.mlp_bias else None,
            down_bias=self._empty(n) if c.mlp_bias else None,
            qk_norm=self._empty(c.num_heads + c.num_kv_heads, d) if c.qk_norm else None,
            window=window,
        )

    def _destinations(self) -> Destinations:
        """Hugging Face tensor name -> the slice of a parameter it is copied to."""
        wanted: Destinations = {}

        def want(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...] | None = None) -> None:
            if tensor is not None:
                wanted[name] = (tensor, shape or tuple(tensor.shape))

        def want_rows(prefix: str, names: list[str], sizes: list[int], weight, bias) -> None:
            """Several of the checkpoint's linear layers, stacked in one."""
            for tensor, kind in ((weight, "weight"), (bias, "bias")):
                for name, part in zip(names, () if tensor is None else tensor.split(sizes)):
                    want(f"{prefix}{name}.{kind}", part)

        c = self.config
        q, kv, m = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
        want("model.embed_tokens.weight", self.embed)
        want("model.norm.weight", self.final_norm)
        if not c.tie_word_embeddings:
            want("lm_head.weight", self.lm_head)
        for i, layer in enumerate(self.layers):
            at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            want(f"model.layers.{i}.input_layernorm.weight", layer.input_norm)
            want(f"model.layers.{i}.post_attention_layernorm.weight", layer.post_norm)
            want_rows(at, ["q_proj", "k_proj", "v_proj"], [q, kv, kv], layer.qkv, layer.qkv_bias)
            want_rows(at, ["o_proj"], [c.hidden_size], layer.o, layer.o_bias)
            want_rows(mlp, ["gate_proj", "up_proj"], [m, m], layer.gate_up, layer.gate_up_bias)
            want_rows(mlp, ["down_proj"], [c.hidden_size], layer.down, layer.down_bias)
            if layer.qk_norm is not None:  # one (D,) weight, copied to the row of each head
                want(f"{at}q_norm.weight", layer.qk_norm[: c.num_heads], (c.head_dim,))
                want(f"{at}k_norm.weight", layer.qk_norm[c.num_heads :], (c.head_dim,))
        return wanted

    def _harmless(self, name: str) -> bool:
        """Tensors that old exporters wrote and nobody needs: RoPE's frequencies, a copy of a tied
        embedding."""
        tied_copy = name == "lm_head.weight" and self.config.tie_word_embeddings
        return tied_copy or name.endswith("rotary_emb.inv_freq")


def _some(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
