"""Attention kernels in Triton: KV write, paged extend (prefill), split-KV decode.

All three follow the request table, so a token's K and V may sit in any slot of the pool. Two ideas do the
work:

*Online softmax* (FlashAttention, arXiv 2205.14135). A block of queries walks over blocks of keys and
carries, per row, the running maximum m, the sum l of 2**(score - m) and the weighted values acc; a larger
maximum rescales l and acc. Scores never reach memory. Two such results over different keys merge exactly by
their m and l, which is what lets decode cut one long sequence into splits (Flash-Decoding).

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

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .attention import Attention, ForwardBatch

if TYPE_CHECKING:
    from .pool import KVPool

LOG2E = 1.4426950408889634  # softmax in powers of two: e**x = 2**(x * LOG2E)
MAX_SPLITS = 128  # most pieces a sequence is cut into by decode


# ------------------------------------------------------------------------------------ building blocks


@triton.jit
def stable_tanh(x):
    """tanh from exp of a non-positive number only: exact +-1 for any large |x|, never inf / inf."""
    decay = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


@triton.jit
def _load_rows(
    ptr, slots, stride_slot, cols, live, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """(N, BLOCK_D) rows `slots` of one KV head's keys or values; columns past D, rows not live are 0."""
    offsets = ptr + slots.to(tl.int64)[:, None] * stride_slot + cols[None, :]
    if MASKED and D == BLOCK_D:
        return tl.load(offsets, mask=live[:, None], other=0.0)
    elif MASKED:
        return tl.load(offsets, mask=live[:, None] & (cols < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        return tl.load(offsets)
    else:
        return tl.load(offsets, mask=(cols < D)[None, :], other=0.0)


@triton.jit
def _attend_block(
    acc, m_i, l_i, q, k, v, visible, dot_scale, log2_scale, SOFTCAP: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """One step of the online softmax: state acc (M, D), m_i, l_i (M,); queries (M, D); keys, values (N, D).

    A score in powers of two is x * log2_scale with x = q.k, or tanh(q.k * dot_scale) under softcap.
    log2_scale > 0, so the maximum can be taken before the scaling, and the scaling fuses with the
    subtraction. A row that has seen no visible key yet has m_i = -inf; it subtracts 0 instead, because -inf
    - -inf is NaN.
    """
    x = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        x = stable_tanh(x * dot_scale)
    if MASKED:
        x = tl.where(visible, x, float("-inf"))
    m_next = tl.maximum(m_i, tl.max(x, 1) * log2_scale)
    if MASKED:
        shift = tl.where(m_next == float("-inf"), 0.0, m_next)
    else:
        shift = m_next
    p = tl.exp2(x * log2_scale - shift[:, None])
    rescale = tl.exp2(m_i - shift)
    l_i = l_i * rescale + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, m_next, l_i


# ------------------------------------------------------------------------------------ 1. KV write


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
        k = _load_rows(keys_ptr, slots, stride_slot, cols, live, D, BLOCK_D, MASKED)
        v = _load_rows(values_ptr, slots, stride_slot, cols, live, D, BLOCK_D, MASKED)
        slots = tl.load(slots_ptr + pos + BLOCK_N, mask=pos + BLOCK_N < end, other=0)
        acc, m_i, l_i = _attend_block(
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


# ------------------------------------------------------------------------------------ 3. decode


@triton.jit(do_not_specialize=["num_decodes", "max_splits"])
def _plan_kernel(
    seq_lens_ptr, split_len_ptr, num_decodes, max_splits, kv_heads, target_programs, min_split,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """One program, once per step: how many keys a decode program should walk. Reads 4 * B bytes.

    The aim is `target_programs` equal pieces of work over the whole batch, whatever the mix of lengths, but
    no piece shorter than min_split and no sequence in more than max_splits pieces (the grid, fixed when a
    graph is captured). The lengths are read on the device, so a replayed graph plans for the lengths of its
    step.
    """
    total = tl.zeros([BLOCK_B], tl.int64)
    longest = tl.zeros([BLOCK_B], tl.int32)
    for start in range(0, num_decodes, BLOCK_B):
        seq = start + tl.arange(0, BLOCK_B)
        seq_len = tl.load(seq_lens_ptr + seq, mask=seq < num_decodes, other=0)
        total += seq_len.to(tl.int64)
        longest = tl.maximum(longest, seq_len)
    even = tl.cdiv(tl.sum(total, 0) * kv_heads, target_programs).to(tl.int32)
    fits = tl.cdiv(tl.max(longest, 0), max_splits)
    split_len = tl.maximum(tl.maximum(even, fits), min_split)
    tl.store(split_len_ptr, tl.cdiv(split_len, BLOCK_N) * BLOCK_N)


@triton.jit
def _splits_of(seq_len, window, split_len, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """(first visible position, number of splits, keys per split): splits of whole blocks, about equal."""
    lo = 0
    if WINDOW:
        lo = tl.maximum(seq_len - window, 0)
    splits = tl.maximum(tl.cdiv(seq_len - lo, split_len), 1)
    return lo, splits, tl.cdiv(tl.cdiv(seq_len - lo, splits), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["stride_table", "window"])
def _decode_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, partial_ptr, lse_ptr, table_ptr, rows_ptr, seq_lens_ptr,
    split_len_ptr, stride_q, stride_qh, stride_out, stride_slot, stride_head, stride_table,
    window, dot_scale, log2_scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One new token against one split of its keys. Grid (kv_heads, max_splits, decodes).

        positions of a sequence   |--split 0--|--split 1--|--split 2--|     (max_splits - 3 programs exit)
        one program                 [N][N][N]   BLOCK_N keys and values at a time, for GROUP query heads at
        once

    A sequence in one piece is finished here; otherwise acc / l and its log2-sum-exp go to the workspace for
    `_combine_kernel`. The KV heads of a split are neighbours in the grid, as they are in a row of the pool.

    Must move: K and V once, 2 * sum(seq_len) * Hkv * D elements; q and out, 2 * B * Hq * D; and per split 4
    * Hq * D bytes, written and read again: in 16 bit a fraction 2 * GROUP / keys per split of the split's K
    and V.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    lo, splits, size = _splits_of(seq_len, window, tl.load(split_len_ptr), BLOCK_N, WINDOW)
    if split >= splits:
        return
    start = lo + split * size
    end = tl.minimum(start + size, seq_len)
    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    cols = tl.arange(0, BLOCK_D)
    mask = (row < GROUP)[:, None] & (cols < D)[None, :]
    seq64 = seq.to(tl.int64)
    q_ptrs = q_ptr + seq64 * stride_q + head[:, None] * stride_qh + cols[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    keys_ptr += kv_head * stride_head
    values_ptr += kv_head * stride_head
    slots_ptr = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * stride_table

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    block = tl.arange(0, BLOCK_N)
    slots = tl.load(slots_ptr + start + block, mask=start + block < end, other=0)
    for first in range(start, end, BLOCK_N):
        pos = first + block
        live = pos < end
        k = _load_rows(keys_ptr, slots, stride_slot, cols, live, D, BLOCK_D, True)
        v = _load_rows(values_ptr, slots, stride_slot, cols, live, D, BLOCK_D, True)
        slots = tl.load(slots_ptr + pos + BLOCK_N, mask=pos + BLOCK_N < end, other=0)  # of the next block
        acc, m_i, l_i = _attend_block(
            acc, m_i, l_i, q, k, v, live[None, :], dot_scale, log2_scale, SOFTCAP, True
        )  # fmt: skip
    out = acc / l_i[:, None]
    if splits == 1:
        dest = out_ptr + seq64 * stride_out + (head * D)[:, None] + cols[None, :]
        tl.store(dest, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        # workspace: partial (decodes, max_splits, Hq, D) and lse (decodes, max_splits, Hq)
        heads = tl.num_programs(0) * GROUP
        piece = (seq64 * tl.num_programs(1) + split) * heads + head
        tl.store(partial_ptr + piece[:, None] * D + cols[None, :], out, mask=mask)
        tl.store(lse_ptr + piece, m_i + tl.log2(l_i), mask=row < GROUP)


@triton.jit(do_not_specialize=["window", "max_splits"])
def _combine_kernel(
    partial_ptr, lse_ptr, out_ptr, seq_lens_ptr, split_len_ptr, stride_out, window, max_splits,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query head: out = sum_s 2**(lse_s - max) partial_s / sum_s 2**(lse_s - max).

        grid (Hq, decodes)        lse (splits,) -> weights;   partial (splits, D), BLOCK_S rows at a time ->
        out (D,)

    Moves 4 * (D + 2) bytes per split and head in, D elements out; nothing for sequences in one piece.
    """
    head = tl.program_id(0)
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    _, splits, _ = _splits_of(seq_len, window, tl.load(split_len_ptr), BLOCK_N, WINDOW)
    if splits == 1:
        return
    heads = tl.num_programs(0)
    base = seq.to(tl.int64) * max_splits * heads + head
    every = tl.arange(0, MAX_SPLITS)
    lse = tl.load(lse_ptr + base + every * heads, mask=every < splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    norm = tl.sum(tl.exp2(lse - peak), 0)
    cols = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        piece = base + s * heads
        weight = tl.exp2(tl.load(lse_ptr + piece, mask=s < splits, other=float("-inf")) - peak)
        mask = (s < splits)[:, None] & (cols < D)[None, :]
        partial = tl.load(partial_ptr + piece[:, None] * D + cols[None, :], mask=mask, other=0.0)
        acc += tl.sum(weight[:, None] * partial, 0)
    dest = out_ptr + seq.to(tl.int64) * stride_out + head * D + cols
    tl.store(dest, (acc / norm).to(out_ptr.dtype.element_ty), mask=cols < D)


# ------------------------------------------------------------------------------------ the backend


@dataclass(frozen=True)
class Tiles:
    """Block sizes of the kernels: everything there is to tune. Change with dataclasses.replace.

    extend_m x extend_n: (tokens x group) rows by keys per step, with extend_warps and extend_stages (loads
    in flight) decode_n: keys per step of decode, with decode_warps and decode_stages target_programs:
    pieces of equal work a decode step is cut into; a few waves over the GPU min_split: fewest keys worth a
    program of their own
    """

    extend_m: int = 128
    extend_n: int = 64
    extend_warps: int = 8
    extend_stages: int = 3
    decode_n: int = 64
    decode_warps: int = 4
    decode_stages: int = 3
    target_programs: int = 2112
    min_split: int = 128

    @staticmethod
    def choose(head_dim: int, dtype: torch.dtype, processors: int) -> Tiles:
        """Sizes for Hopper (sm_90: 227 KiB of shared memory and 65536 registers on each of `processors`).

        With head_dim 128 and 16 bits, extend holds 128 KiB and runs one program per multiprocessor; decode
        holds 70 KiB, so that three programs keep two blocks of 32 KiB each on their way from memory.
        """
        tiles = Tiles(target_programs=16 * processors)
        if dtype == torch.float32:  # no tensor cores at full precision: larger tiles spill registers
            return replace(tiles, extend_m=32, extend_n=16, extend_stages=2, decode_n=32, decode_warps=8)
        if head_dim > 128:
            return replace(tiles, extend_n=32, extend_stages=2, decode_n=32)
        return tiles


class TritonAttention(Attention):
    """The Triton backend. The pool's device is the current CUDA device, or a CPU under TRITON_INTERPRET=1.

    `begin` launches device work only, and `forward` allocates nothing but its output, so both may be
    captured in a CUDA graph: grids depend on the numbers of tokens, sequences and decodes and on the
    batch's two upper bounds; lengths, rows and slots are read on the device. Padding sequences (row 0, slot
    0, seq_len 1) are ordinary work.
    """

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
        # Decode workspace, for the batch size that needs most: every CUDA graph shares it.
        most = 4 * self.tiles.target_programs // num_kv_heads + 1  # from here on, sequences stay in one piece
        pieces = max(n * self.max_splits(n) for n in range(1, most + 1))
        self._partial = torch.empty((pieces, num_heads, head_dim), dtype=torch.float32, device=device)
        self._lse = torch.empty((pieces, num_heads), dtype=torch.float32, device=device)
        self._split_len = torch.empty(1, dtype=torch.int32, device=device)

    def max_splits(self, decodes: int) -> int:
        """Pieces that a sequence may be cut into in a batch of `decodes`: the grid, so no more than pay.

        Four times the even share, because lengths differ and a long sequence should get more pieces.
        """
        share = triton.cdiv(4 * self.tiles.target_programs, decodes * self.num_kv_heads)
        return min(MAX_SPLITS, share)

    def begin(self, batch: ForwardBatch) -> None:
        self._batch = batch
        if batch.num_decodes:
            self._plan_decode(batch)
        if batch.num_seqs > batch.num_decodes:
            self._plan_extend(batch)

    def _plan_decode(self, batch: ForwardBatch) -> None:
        tiles = self.tiles
        longest = triton.cdiv(batch.max_seq_len, tiles.min_split)
        self._splits = max(1, min(self.max_splits(batch.num_decodes), longest))
        _plan_kernel[(1,)](
            batch.seq_lens, self._split_len, batch.num_decodes, self._splits, self.num_kv_heads,
            tiles.target_programs, tiles.min_split, BLOCK_N=tiles.decode_n, BLOCK_B=1024,
        )  # fmt: skip

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
    ) -> torch.Tensor:
        if q.dtype != self.dtype:
            raise ValueError(f"q has dtype {q.dtype}, the KV pool {self.dtype}: they must be the same")
        batch = self._batch
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        self._write(keys, values, k, v)
        if q.stride(-1) != 1:
            q = q.contiguous()
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
            self._decode(tensors, strides, scalars, variant)
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

    def _decode(self, tensors, strides, scalars, variant) -> None:
        batch, tiles, out = self._batch, self.tiles, tensors[-1]
        _decode_kernel[(self.num_kv_heads, self._splits, batch.num_decodes)](
            *tensors, self._partial, self._lse, batch.table, batch.rows, batch.seq_lens, self._split_len,
            *strides, *scalars, **variant,
            BLOCK_M=max(16, triton.next_power_of_2(self.group)), BLOCK_N=tiles.decode_n,
            num_warps=tiles.decode_warps, num_stages=tiles.decode_stages,
        )  # fmt: skip
        if self._splits > 1:
            _combine_kernel[(self.num_heads, batch.num_decodes)](
                self._partial, self._lse, out, batch.seq_lens, self._split_len, out.stride(0), scalars[0],
                self._splits, D=self.head_dim, BLOCK_N=tiles.decode_n, BLOCK_D=self._block_d, BLOCK_S=8,
                MAX_SPLITS=MAX_SPLITS, WINDOW=variant["WINDOW"], num_warps=2,
            )  # fmt: skip

    def _extend(self, tensors, strides, scalars, variant) -> None:
        batch, tiles = self._batch, self.tiles
        _extend_kernel[(self.num_kv_heads, len(self._tile_seq))](
            *tensors, batch.table, batch.rows, batch.seq_lens, batch.q_start, self._tile_seq, self._tile_end,
            *strides, batch.num_decodes, batch.num_seqs - batch.num_decodes, *scalars, **variant,
            BLOCK_M=self._block_m, BLOCK_N=tiles.extend_n,
            num_warps=max(4, tiles.extend_warps * self._block_m // tiles.extend_m),
            num_stages=tiles.extend_stages,
        )  # fmt: skip


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(T, heads, head_dim) with each token's heads contiguous; tokens may be strided. Copies if need be."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
