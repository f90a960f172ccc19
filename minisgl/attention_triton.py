"""Attention kernels in Triton: KV write, with RoPE, and paged extend (prefill); those of decode are in `decode_triton`.

All of them follow the request table, so a token's K and V may sit in any slot of the pool. What they have in common,
the online softmax above all, is in `attention_tile`.

*GQA packing*. The query heads of one KV head read the same K and V. They become rows of one tile, so that K
and V are loaded once for the whole group and the product has enough rows for the tensor cores:

    extend tile, group 3, BLOCK_M 16                     decode tile, group 3, BLOCK_M 16
    row   0 1 2 | 3 4 5 | ... | 12 13 14 | 15            row   0 1 2 | 3 ... 15
    token 0 0 0 | 1 1 1 | ... |  4  4  4 | dead          token t t t | dead
    head  0 1 2 | 0 1 2 | ... |  0  1  2 |               head  0 1 2 |

Any group size and head_dim works: rows past the last whole token are dead, columns past head_dim are loaded
as zeros. Slots become 64-bit before they are multiplied by a stride, so a pool may exceed 2**31 elements.

The same code runs on a CPU when TRITON_INTERPRET=1 is set before triton is imported (float32 and float16
only: the interpreter's bfloat16 dot is wrong).
"""

# Triton makes constexprs of ints and gives every kernel num_warps and num_stages, unknown to type checkers:
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .attention import Attention, ForwardBatch
from .attention_tile import LOG2E, Tiles, attend_block, load_rows, stable_tanh
from .decode_triton import MAX_SPLITS, Decode
from .sharing import PrefixSharing

if TYPE_CHECKING:
    from .pool import KVPool

__all__ = ["MAX_SPLITS", "Tiles", "TritonAttention", "stable_tanh"]


# ---- KV write ----


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kernel(
    k_ptr, v_ptr, slots_ptr, keys_ptr, values_ptr, stride_k, stride_v, stride_slot, num_tokens,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Scatter the new rows into the pool: keys[slots[t]] = k[t], values[slots[t]] = v[t].

        program (i, j)            columns j*BLOCK_W ..            WIDTH = kv_heads * head_dim
        k, v   token i*BLOCK_T   [ . . . . ]  ->  pool row slots[token]
               token ..          [ . . . . ]  ->  pool row slots[token]   (any order)

    Moves 4 * T * WIDTH elements: K and V, each read once and written once.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    live = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=live, other=0).to(tl.int64)
    mask = live[:, None] & (col < WIDTH)[None, :]
    dest = slot[:, None] * stride_slot + col[None, :]
    k = tl.load(k_ptr + token[:, None] * stride_k + col[None, :], mask=mask)
    v = tl.load(v_ptr + token[:, None] * stride_v + col[None, :], mask=mask)
    tl.store(keys_ptr + dest, k, mask=mask)
    tl.store(values_ptr + dest, v, mask=mask)


@triton.jit
def _turn(ptr, cos, sin, mask, HALF: tl.constexpr):
    """The pairs (x_i, x_{i + D/2}) of each head, turned by the angles of their position and rounded: both halves."""
    a = tl.load(ptr, mask=mask, other=0.0)
    b = tl.load(ptr + HALF, mask=mask, other=0.0)
    exact_a, exact_b = a.to(tl.float32), b.to(tl.float32)
    return (exact_a * cos - exact_b * sin).to(a.dtype), (exact_b * cos + exact_a * sin).to(a.dtype)


@triton.jit
def _turn_and_write_kernel(
    q_ptr, k_ptr, v_ptr, angles_ptr, positions_ptr, slots_ptr, keys_ptr, values_ptr, stride_q, stride_qh, stride_k,
    stride_kh, stride_v, stride_vh, stride_angles, stride_slot, stride_head,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """RoPE and the KV write in one: program t turns token t's heads by its position. Grid (T,).

        q[t]  H heads   [ a | b ]  ->  the same place, turned
        k[t]  K heads   [ a | b ]  ->  keys[slots[t]], turned
        v[t]  K heads   [   .   ]  ->  values[slots[t]]

    Moves 2 * (H + 2 * K) * D elements per token and its D cosines and sines: turned keys do not go to memory twice,
    and a decode step, where launches are what costs, has one launch less in each layer.
    """
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    narrow = (cols < HALF)[None, :]
    angles = angles_ptr + tl.load(positions_ptr + token) * stride_angles + cols
    cos = tl.load(angles, mask=cols < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=cols < HALF, other=0.0)[None, :]
    slot = tl.load(slots_ptr + token).to(tl.int64) * stride_slot

    head = tl.arange(0, BLOCK_H)[:, None]
    mask = (head < H) & narrow
    at = q_ptr + token * stride_q + head * stride_qh + cols[None, :]
    low, high = _turn(at, cos, sin, mask, HALF)
    tl.store(at, low, mask=mask)
    tl.store(at + HALF, high, mask=mask)

    head = tl.arange(0, BLOCK_K)[:, None]
    mask = (head < K) & narrow
    low, high = _turn(k_ptr + token * stride_k + head * stride_kh + cols[None, :], cos, sin, mask, HALF)
    dest = keys_ptr + slot + head * stride_head + cols[None, :]
    tl.store(dest, low, mask=mask)
    tl.store(dest + HALF, high, mask=mask)
    at = v_ptr + token * stride_v + head * stride_vh + cols[None, :]
    dest = values_ptr + slot + head * stride_head + cols[None, :]
    tl.store(dest, tl.load(at, mask=mask, other=0.0), mask=mask)
    tl.store(dest + HALF, tl.load(at + HALF, mask=mask, other=0.0), mask=mask)


# ------------------------------------------------------------------------------------ 2. extend


@triton.jit
def _extend_range(
    acc, m_i, l_i, slots, q, q_pos, keys_ptr, values_ptr, slots_ptr, lo, hi, end, window, stride_slot, cols,
    dot_scale, log2_scale, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Walk key positions lo..hi in blocks of BLOCK_N. Without MASKED every query sees every one of them.

    `slots` are those of the first block; each turn loads the next block's, so that addresses are never
    waited for.
    """
    for start in range(lo, hi, BLOCK_N):
        pos = start + tl.arange(0, BLOCK_N)
        live = pos < end
        visible = pos[None, :] <= q_pos[:, None]
        if WINDOW:
            visible = visible & (pos[None, :] > q_pos[:, None] - window)
        k = load_rows(keys_ptr, slots, stride_slot, cols, live, D, BLOCK_D, MASKED)
        v = load_rows(values_ptr, slots, stride_slot, cols, live, D, BLOCK_D, MASKED)
        slots = tl.load(slots_ptr + pos + BLOCK_N, mask=pos + BLOCK_N < end, other=0)
        acc, m_i, l_i = attend_block(
            acc, m_i, l_i, q, k, v, visible, dot_scale, log2_scale, SOFTCAP, MASKED
        )  # fmt: skip
    return acc, m_i, l_i, slots


@triton.jit(do_not_specialize=["stride_table", "num_decodes", "num_extends", "window"])
def _extend_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, table_ptr, rows_ptr, seq_lens_ptr, q_start_ptr, tile_seq_ptr,
    tile_end_ptr, stride_q, stride_qh, stride_out, stride_slot, stride_head, stride_table,
    num_decodes, num_extends, window, dot_scale, log2_scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Causal attention of a tile of new tokens over their sequence's slots. Grid (kv_heads, tiles).

        key position  0         lo           a                b          end
                      |--skipped-|--masked----|---unmasked-----|--masked--|---skipped (future)---
        first token of the tile  [==========================]
        last token of the tile               [============================]
                      \\________ window only ________/            diagonal

    A tile is BLOCK_M rows = BLOCK_M // GROUP tokens x GROUP heads of one sequence; `tile_seq` says which
    sequence, and the tiles of a sequence run last to first, so that those with most keys start first. Only
    blocks at the window's lower edge and on the diagonal are masked.

    Must move: q and out once, 2 * T * Hq * D elements, and K and V once per tile. The tiles of one sequence
    run side by side and find them in L2, so that HBM sees about 2 * seq_len * Hkv * D elements per
    sequence. Arithmetic: 4 * D flops per query head and visible key.
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    extend = tl.load(tile_seq_ptr + tile).to(tl.int32)
    if extend >= num_extends:  # the grid is an upper bound
        return
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    seq = num_decodes + extend
    q_begin = tl.load(q_start_ptr + seq)
    new = tl.load(q_start_ptr + seq + 1) - q_begin
    prefix = tl.load(seq_lens_ptr + seq) - new
    first = (tl.load(tile_end_ptr + extend).to(tl.int32) - 1 - tile) * TOKENS
    row = tl.arange(0, BLOCK_M)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    cols = tl.arange(0, BLOCK_D)
    live = (row < TOKENS * GROUP) & (token < new)
    flat = (q_begin + token).to(tl.int64)
    mask = live[:, None] & (cols < D)[None, :]
    q_ptrs = q_ptr + flat[:, None] * stride_q + head[:, None] * stride_qh + cols[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)

    q_pos = prefix + token
    first_pos = prefix + first
    last_pos = prefix + tl.minimum(first + TOKENS, new) - 1
    end = last_pos + 1
    lo = 0
    a = 0
    if WINDOW:
        lo = tl.maximum(first_pos - window + 1, 0)
        a = lo + tl.cdiv(tl.maximum(last_pos - window + 1 - lo, 0), BLOCK_N) * BLOCK_N
    b = tl.maximum(lo + (first_pos + 1 - lo) // BLOCK_N * BLOCK_N, a)
    keys_ptr += kv_head * stride_head
    values_ptr += kv_head * stride_head
    slots_ptr = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * stride_table

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    block = tl.arange(0, BLOCK_N)
    slots = tl.load(slots_ptr + lo + block, mask=lo + block < end, other=0)
    if WINDOW:
        acc, m_i, l_i, slots = _extend_range(
            acc, m_i, l_i, slots, q, q_pos, keys_ptr, values_ptr, slots_ptr, lo, a, end, window, stride_slot,
            cols, dot_scale, log2_scale, D, BLOCK_D, BLOCK_N, WINDOW, SOFTCAP, True,
        )  # fmt: skip
    acc, m_i, l_i, slots = _extend_range(
        acc, m_i, l_i, slots, q, q_pos, keys_ptr, values_ptr, slots_ptr, a, b, end, window, stride_slot,
        cols, dot_scale, log2_scale, D, BLOCK_D, BLOCK_N, WINDOW, SOFTCAP, False,
    )  # fmt: skip
    acc, m_i, l_i, slots = _extend_range(
        acc, m_i, l_i, slots, q, q_pos, keys_ptr, values_ptr, slots_ptr, b, end, end, window, stride_slot,
        cols, dot_scale, log2_scale, D, BLOCK_D, BLOCK_N, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_ptrs = out_ptr + flat[:, None] * stride_out + (head * D)[:, None] + cols[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------ the backend


class TritonAttention(Attention):
    """The Triton backend. The pool's device is the current CUDA device, or a CPU under TRITON_INTERPRET=1.

    `begin` launches device work only, and `forward` allocates nothing but its output, so both may be
    captured in a CUDA graph: grids depend on the numbers of tokens, sequences and decodes and on the
    batch's two upper bounds; lengths, rows and slots are read on the device. Padding sequences (row 0, slot
    0, seq_len 1) are ordinary work.
    """

    shares_prefixes = True
    rotates = True

    def __init__(
        self, pool: KVPool, num_heads: int, num_kv_heads: int, head_dim: int, tiles: Tiles | None = None
    ):
        super().__init__(pool, num_heads, num_kv_heads, head_dim)
        keys = pool.keys(0)
        device = keys.device
        if keys.shape[1:] != (num_kv_heads, head_dim):
            raise ValueError(
                f"pool has (kv_heads, head_dim) {tuple(keys.shape[1:])}, the model {(num_kv_heads, head_dim)}"
            )
        self.dtype = keys.dtype
        processors = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.tiles = tiles or Tiles.choose(head_dim, keys.dtype, processors)
        self._block_d = max(16, triton.next_power_of_2(head_dim))
        self.decode = Decode(num_heads, num_kv_heads, head_dim, self.tiles, processors, device)

    def max_splits(self, decodes: int) -> int:
        """Pieces that a sequence may be cut into in a batch of `decodes` (`Decode.max_splits`)."""
        return self.decode.max_splits(decodes)

    def prefix_sharing(self, max_decodes: int) -> PrefixSharing:
        self.decode.reserve(max_decodes)
        return PrefixSharing(
            max_decodes,
            width=self.decode.width,
            programs=4 * self.decode.shared_programs,
            max_pieces=self.decode.max_shared_pieces,
            device=self.pool.kv.device,
        )

    def begin(self, batch: ForwardBatch) -> None:
        self._batch = batch
        if batch.num_decodes:
            self.decode.begin(batch)
        if batch.num_seqs > batch.num_decodes:
            self._plan_extend(batch)

    def _plan_extend(self, batch: ForwardBatch) -> None:
        """Give each tile of the extend grid its sequence.

        tile_end (E,): running total of the sequences' tiles; tile_seq (tiles,): the sequence of each tile,
        E for none. The grid is an upper bound that the host knows; the rest is device work.
        """
        rows = 64 if batch.max_new * self.group <= 64 else self.tiles.extend_m
        self._block_m = max(min(self.tiles.extend_m, rows), triton.next_power_of_2(self.group))
        tokens = self._block_m // self.group
        starts = batch.q_start[batch.num_decodes :]
        self._tile_end = torch.cumsum((starts[1:] - starts[:-1] + (tokens - 1)) // tokens, 0)
        extends = batch.num_seqs - batch.num_decodes
        tiles = (batch.num_tokens - batch.num_decodes) // tokens + extends  # each sequence rounds up once
        index = torch.arange(tiles, device=starts.device)
        self._tile_seq = torch.searchsorted(self._tile_end, index, right=True, out_int32=True)

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
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As `Attention.forward`.  rope: ((positions, head_dim) cosines then sines, float32; (T,) positions) by which
        to turn q, in place, and k first."""
        if q.dtype != self.dtype:
            raise ValueError(f"q has dtype {q.dtype}, the KV pool {self.dtype}: they must be the same")
        batch = self._batch
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        if q.stride(-1) != 1:
            q = q.contiguous()
        if rope is None:
            self._write(keys, values, k, v)
        else:
            self._turn_and_write(keys, values, q, k, v, *rope)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # Under softcap q.k * dot_scale goes into tanh; log2_scale makes powers of two of what comes out.
        dot_scale, log2_scale = (scale / softcap, softcap * LOG2E) if softcap else (1.0, scale * LOG2E)
        tensors = (q, keys, values, out)
        scalars = (window, dot_scale, log2_scale)
        strides = (*q.stride()[:2], out.stride(0), *keys.stride()[:2], batch.table.stride(0))
        variant = dict(
            GROUP=self.group, D=self.head_dim, BLOCK_D=self._block_d, WINDOW=window > 0, SOFTCAP=softcap > 0
        )  # fmt: skip
        if batch.num_decodes:
            self.decode.run(tensors, strides, scalars, variant)
        if batch.num_seqs > batch.num_decodes:
            self._extend(tensors, strides, scalars, variant)
        return out

    def _write(self, keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        width = self.num_kv_heads * self.head_dim
        block_w = min(1024, triton.next_power_of_2(width))
        block_t = max(1, 1024 // block_w)
        k, v = _rows(k), _rows(v)
        _write_kernel[(triton.cdiv(len(k), block_t), triton.cdiv(width, block_w))](
            k, v, self._batch.out_slots, keys, values, k.stride(0), v.stride(0), keys.stride(0), len(k),
            WIDTH=width, BLOCK_T=block_t, BLOCK_W=block_w, num_warps=4,
        )  # fmt: skip

    def _turn_and_write(self, keys, values, q, k, v, angles: torch.Tensor, positions: torch.Tensor) -> None:
        k, v = _rows(k), _rows(v)
        half = self.head_dim // 2
        _turn_and_write_kernel[(len(q),)](
            q, k, v, angles, positions, self._batch.out_slots, keys, values, *q.stride()[:2], *k.stride()[:2],
            *v.stride()[:2], angles.stride(0), *keys.stride()[:2], H=self.num_heads, K=self.num_kv_heads, HALF=half,
            BLOCK_H=triton.next_power_of_2(self.num_heads), BLOCK_K=triton.next_power_of_2(self.num_kv_heads),
            BLOCK=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip

    def _extend(self, tensors, strides, scalars, variant) -> None:
        batch, tiles = self._batch, self.tiles
        whole = self._block_m == tiles.extend_m  # smaller tiles leave room enough for two programs as they are
        _extend_kernel[(self.num_kv_heads, len(self._tile_seq))](
            *tensors, batch.table, batch.rows, batch.seq_lens, batch.q_start, self._tile_seq, self._tile_end,
            *strides, batch.num_decodes, batch.num_seqs - batch.num_decodes, *scalars, **variant,
            BLOCK_M=self._block_m, BLOCK_N=tiles.extend_n,
            num_warps=max(4, tiles.extend_warps * self._block_m // tiles.extend_m),
            num_stages=tiles.extend_stages, maxnreg=tiles.extend_registers if whole else None,
        )  # fmt: skip


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(T, heads, head_dim) with each token's heads contiguous; tokens may be strided. Copies if need be."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
