"""Decode kernels in Triton: one new token per sequence against all the keys before it.

Decode reads every key and value once and does next to nothing with them, so it is as fast as memory is, if all
multiprocessors have something to read at all times.  Sequences differ in length by a factor of a hundred, hence:

*Split-KV* (Flash-Decoding).  A sequence is cut into splits of about equal length over the whole batch, and each split
is a program of its own; partial results merge by their log-sum-exp.

*Shared prefixes* (`sharing`).  Where the radix tree says that several sequences have positions a..b in common, those
are read once, for the query heads of all of them at a time:

    shared   item (a..b of one row, members 0 2 5)    tile rows: member 0 heads, member 2 heads, member 5 heads
    own      sequence 0 from own_start[0] on          tile rows: its heads of one KV head, dead rows up to 16
    combine  sequence 0: its shared pieces, then its own splits

Everything that changes from step to step (lengths, rows, items and how many there are) is read on the device, so that
one recorded CUDA graph serves all steps of a batch size.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention import ForwardBatch
from .attention_tile import Tiles, attend_block, load_rows

MAX_SPLITS = 128  # most pieces, shared ones included, that a sequence is cut into
NARROW = 16  # rows of the smallest tile that the tensor cores take
MIN_SHARED_PIECES = 8  # room for a chain of this many shared segments in the largest batches


@triton.jit(do_not_specialize=["num_decodes", "max_splits"])
def _plan_kernel(
    seq_lens_ptr, own_start_ptr, split_len_ptr, num_decodes, max_splits, kv_heads, target_programs, min_split,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, SHARED: tl.constexpr,
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
        own = tl.load(seq_lens_ptr + seq, mask=seq < num_decodes, other=0)
        if SHARED:
            own -= tl.load(own_start_ptr + seq, mask=seq < num_decodes, other=0)
        total += own.to(tl.int64)
        longest = tl.maximum(longest, own)
    even = tl.cdiv(tl.sum(total, 0) * kv_heads, target_programs).to(tl.int32)
    fits = tl.cdiv(tl.max(longest, 0), max_splits)
    split_len = tl.maximum(tl.maximum(even, fits), min_split)
    tl.store(split_len_ptr, tl.cdiv(split_len, BLOCK_N) * BLOCK_N)


@triton.jit
def _first_own(seq, seq_len, window, own_start_ptr, WINDOW: tl.constexpr, SHARED: tl.constexpr):
    """The first position that a sequence reads by itself: its window's, or what follows the shared segments."""
    lo = 0
    if WINDOW:
        lo = tl.maximum(seq_len - window, 0)
    if SHARED:
        lo = tl.load(own_start_ptr + seq)
    return lo


@triton.jit
def _splits_of(keys, split_len, BLOCK_N: tl.constexpr):
    """(number of splits, keys per split) of a sequence: splits of whole blocks, about equal."""
    splits = tl.maximum(tl.cdiv(keys, split_len), 1)
    return splits, tl.cdiv(tl.cdiv(keys, splits), BLOCK_N) * BLOCK_N


@triton.jit
def _walk(
    q, keys_ptr, values_ptr, slots_ptr, start, end, stride_slot, cols, dot_scale, log2_scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attention of the rows of q (BLOCK_M, BLOCK_D) over positions start..end, all visible: (acc / l, log2-sum-exp).

    Each turn loads the next block's slots, so that addresses are never waited for.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    block = tl.arange(0, BLOCK_N)
    slots = tl.load(slots_ptr + start + block, mask=start + block < end, other=0)
    for first in range(start, end, BLOCK_N):
        pos = first + block
        live = pos < end
        k = load_rows(keys_ptr, slots, stride_slot, cols, live, D, BLOCK_D, True)
        v = load_rows(values_ptr, slots, stride_slot, cols, live, D, BLOCK_D, True)
        slots = tl.load(slots_ptr + pos + BLOCK_N, mask=pos + BLOCK_N < end, other=0)  # of the next block
        acc, m_i, l_i = attend_block(
            acc, m_i, l_i, q, k, v, live[None, :], dot_scale, log2_scale, SOFTCAP, True
        )  # fmt: skip
    return acc / l_i[:, None], m_i + tl.log2(l_i)


@triton.jit(do_not_specialize=["stride_table", "window", "room"])
def _decode_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, partial_ptr, lse_ptr, table_ptr, rows_ptr, seq_lens_ptr,
    split_len_ptr, own_start_ptr, pieces_ptr, stride_q, stride_qh, stride_out, stride_slot, stride_head, stride_table,
    room, window, dot_scale, log2_scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One new token against one split of its own keys. Grid (kv_heads, max_splits, decodes).

        positions of a sequence   |- shared -|--split 0--|--split 1--|--split 2--|   (max_splits - 3 programs exit)
        one program                 [N][N][N]   BLOCK_N keys and values at a time, for GROUP query heads at once

    A sequence in one piece is finished here, merged with its shared pieces, if it has any; otherwise acc / l and its
    log2-sum-exp go to the workspace for `_combine_kernel`. The KV heads of a split are neighbours in the grid, as
    they are in a row of the pool.

    Must move: K and V once, 2 * sum(own keys) * Hkv * D elements; q and out, 2 * B * Hq * D; and per split 4
    * Hq * D bytes, written and read again: in 16 bit a fraction 2 * GROUP / keys per split of the split's K
    and V.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    lo = _first_own(seq, seq_len, window, own_start_ptr, WINDOW, SHARED)
    splits, size = _splits_of(seq_len - lo, tl.load(split_len_ptr), BLOCK_N)
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
    out, lse = _walk(
        q, keys_ptr + kv_head * stride_head, values_ptr + kv_head * stride_head,
        table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * stride_table, start, end, stride_slot, cols,
        dot_scale, log2_scale, D, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP,
    )  # fmt: skip
    # workspace: partial (decodes, room, Hq, D) and lse (decodes, room, Hq); a sequence's shared pieces come first
    heads = tl.num_programs(0) * GROUP
    shared = 0
    if SHARED:
        shared = tl.load(pieces_ptr + seq)
    if splits == 1:
        for piece in range(shared):
            at = (seq64 * room + piece) * heads + head
            other_lse = tl.load(lse_ptr + at, mask=row < GROUP, other=0.0)
            other = tl.load(partial_ptr + at[:, None] * D + cols[None, :], mask=mask, other=0.0)
            peak = tl.maximum(lse, other_lse)
            both = peak + tl.log2(tl.exp2(lse - peak) + tl.exp2(other_lse - peak))
            out = out * tl.exp2(lse - both)[:, None] + other * tl.exp2(other_lse - both)[:, None]
            lse = both
        dest = out_ptr + seq64 * stride_out + (head * D)[:, None] + cols[None, :]
        tl.store(dest, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        at = (seq64 * room + shared + split) * heads + head
        tl.store(partial_ptr + at[:, None] * D + cols[None, :], out, mask=mask)
        tl.store(lse_ptr + at, lse, mask=row < GROUP)


@triton.jit
def _shared_item(
    item_ptr, q_ptr, keys_ptr, values_ptr, partial_ptr, lse_ptr, table_ptr, rows_ptr, members_ptr, stride_q, stride_qh,
    stride_slot, stride_head, stride_table, room, dot_scale, log2_scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One item in a tile of BLOCK_M rows (`_shared_kernel` has the drawing)."""
    kv_head = tl.program_id(0)
    row = tl.arange(0, BLOCK_M)
    member = row // GROUP
    head = kv_head * GROUP + row % GROUP
    cols = tl.arange(0, BLOCK_D)
    reader = tl.load(item_ptr)
    start = tl.load(item_ptr + 1)
    end = tl.load(item_ptr + 2)
    live = (member < tl.load(item_ptr + 4)) & (member < BLOCK_M // GROUP)
    seq = tl.load(members_ptr + tl.load(item_ptr + 3) + member, mask=live, other=0).to(tl.int64)
    mask = live[:, None] & (cols < D)[None, :]
    q = tl.load(q_ptr + seq[:, None] * stride_q + head[:, None] * stride_qh + cols[None, :], mask=mask, other=0.0)
    out, lse = _walk(
        q, keys_ptr + kv_head * stride_head, values_ptr + kv_head * stride_head,
        table_ptr + tl.load(rows_ptr + reader).to(tl.int64) * stride_table, start, end, stride_slot, cols,
        dot_scale, log2_scale, D, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP,
    )  # fmt: skip
    piece = (seq * room + tl.load(item_ptr + 5)) * (tl.num_programs(0) * GROUP) + head
    tl.store(partial_ptr + piece[:, None] * D + cols[None, :], out, mask=mask)
    tl.store(lse_ptr + piece, lse, mask=live)


@triton.jit(do_not_specialize=["stride_table", "room"])
def _shared_kernel(
    q_ptr, keys_ptr, values_ptr, partial_ptr, lse_ptr, table_ptr, rows_ptr, items_ptr, members_ptr, count_ptr,
    stride_q, stride_qh, stride_slot, stride_head, stride_table, room, dot_scale, log2_scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, NARROW: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Shared keys against the new tokens of all members. Grid (kv_heads, programs); a program takes every
    num_programs-th item, so that the grid need not know how many there are.

        item     positions start..end of the first member's row, read once
        tile     row         0 1 2 3 | 4 5 6 7 | ...      BLOCK_M rows, BLOCK_M // GROUP members at most
                 member      0       | 1       |
                 its head    0 1 2 3 | 0 1 2 3 |

    The few members of a twig fit a tile of NARROW rows: with BLOCK_M, most of its arithmetic would be for dead rows,
    and take longer than reading the keys does.

    Must move: K and V of each item once, 2 * sum(end - start) * Hkv * D elements, however many members; q; and 4 *
    Hq * D bytes per member and item, written here and read by `_combine_kernel`.
    """
    for item in range(tl.program_id(1), tl.load(count_ptr), tl.num_programs(1)):
        at = items_ptr + item * 6
        if tl.load(at + 4) * GROUP <= NARROW:
            _shared_item(
                at, q_ptr, keys_ptr, values_ptr, partial_ptr, lse_ptr, table_ptr, rows_ptr, members_ptr, stride_q,
                stride_qh, stride_slot, stride_head, stride_table, room, dot_scale, log2_scale,
                GROUP, D, NARROW, BLOCK_N, BLOCK_D, SOFTCAP,
            )  # fmt: skip
        else:
            _shared_item(
                at, q_ptr, keys_ptr, values_ptr, partial_ptr, lse_ptr, table_ptr, rows_ptr, members_ptr, stride_q,
                stride_qh, stride_slot, stride_head, stride_table, room, dot_scale, log2_scale,
                GROUP, D, BLOCK_M, BLOCK_N, BLOCK_D, SOFTCAP,
            )  # fmt: skip


@triton.jit(do_not_specialize=["window", "room"])
def _combine_kernel(
    partial_ptr, lse_ptr, out_ptr, seq_lens_ptr, split_len_ptr, own_start_ptr, pieces_ptr, stride_out, window, room,
    heads, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of HEADS query heads: out = sum_s 2**(lse_s - max) partial_s / sum_s 2**(lse_s - max).

        grid (Hq / HEADS, decodes)        lse (pieces,) -> weights;   partial (pieces, D), BLOCK_S rows at a time ->
        out (D,)

    Moves 4 * (D + 2) bytes per piece and head in, D elements out; nothing for sequences whose own
    keys are in one piece.
    """
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    lo = _first_own(seq, seq_len, window, own_start_ptr, WINDOW, SHARED)
    pieces, _ = _splits_of(seq_len - lo, tl.load(split_len_ptr), BLOCK_N)
    if pieces == 1:
        return
    if SHARED:
        pieces += tl.load(pieces_ptr + seq)
    every = tl.arange(0, MAX_SPLITS)
    cols = tl.arange(0, BLOCK_D)
    for head in range(tl.program_id(0) * HEADS, tl.program_id(0) * HEADS + HEADS):
        base = seq.to(tl.int64) * room * heads + head
        lse = tl.load(lse_ptr + base + every * heads, mask=every < pieces, other=float("-inf"))
        peak = tl.max(lse, 0)
        norm = tl.sum(tl.exp2(lse - peak), 0)
        acc = tl.zeros([BLOCK_D], tl.float32)
        for first in range(0, pieces, BLOCK_S):
            s = first + tl.arange(0, BLOCK_S)
            piece = base + s * heads
            weight = tl.exp2(tl.load(lse_ptr + piece, mask=s < pieces, other=float("-inf")) - peak)
            mask = (s < pieces)[:, None] & (cols < D)[None, :]
            partial = tl.load(partial_ptr + piece[:, None] * D + cols[None, :], mask=mask, other=0.0)
            acc += tl.sum(weight[:, None] * partial, 0)
        dest = out_ptr + seq.to(tl.int64) * stride_out + head * D + cols
        tl.store(dest, (acc / norm).to(out_ptr.dtype.element_ty), mask=cols < D)


class Decode:
    """Runs the kernels above for the decodes of a batch: `begin` once per step, `run` once per layer."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, tiles: Tiles, processors: int,
        device: torch.device,
    ):  # fmt: skip
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.tiles, self.processors, self.device = tiles, processors, device
        self.shared_m = max(tiles.shared_m, triton.next_power_of_2(self.group))
        self._split_len = torch.empty(1, dtype=torch.int32, device=device)
        # For the batch size that needs most: every CUDA graph shares the workspace.
        most = 4 * tiles.target_programs // num_kv_heads + 1  # from here on, sequences stay in one piece
        self._make_workspace(max(n * self.max_splits(n) for n in range(1, most + 1)))

    def _make_workspace(self, pieces: int) -> None:
        shape = (pieces, self.num_heads)
        self._partial = torch.empty((*shape, self.head_dim), dtype=torch.float32, device=self.device)
        self._lse = torch.empty(shape, dtype=torch.float32, device=self.device)

    def reserve(self, decodes: int) -> None:
        """Make room for shared prefixes in batches of up to `decodes`; before any graph is recorded."""
        pieces = max(
            n * (min(self.max_splits(n), MAX_SPLITS // 2) + self.max_shared_pieces(n)) for n in range(1, decodes + 1)
        )
        if pieces > len(self._lse):
            self._make_workspace(pieces)

    def max_splits(self, decodes: int) -> int:
        """Pieces that a sequence may be cut into in a batch of `decodes`: the grid, so no more than pay.

        Four times the even share, because lengths differ and a long sequence should get more pieces.
        """
        share = triton.cdiv(4 * self.tiles.target_programs, decodes * self.num_kv_heads)
        return min(MAX_SPLITS, share)

    def max_shared_pieces(self, decodes: int) -> int:
        """Pieces of shared segments that a sequence may have in a batch of `decodes`."""
        return min(max(self.max_splits(decodes), MIN_SHARED_PIECES), MAX_SPLITS // 2)

    @property
    def width(self) -> int:
        """Members of a shared item."""
        return self.shared_m // self.group

    @property
    def shared_programs(self) -> int:
        """Programs per KV head that work on shared items: `shared_waves` on each multiprocessor over all heads."""
        return max(1, self.tiles.shared_waves * self.processors // self.num_kv_heads)

    def begin(self, batch: ForwardBatch) -> None:
        """Plan the splits of a batch with decodes."""
        self._batch, tiles, shared = batch, self.tiles, batch.shared
        longest = triton.cdiv(batch.max_seq_len, tiles.min_split)
        most = self.max_splits(batch.num_decodes)
        self._splits = max(1, min(most, longest, MAX_SPLITS if shared is None else MAX_SPLITS // 2))
        self._room = self._splits + (self.max_shared_pieces(batch.num_decodes) if shared is not None else 0)
        # without shared prefixes the kernels never read these two
        self._own_start = shared.own_start if shared is not None else batch.seq_lens
        self._pieces = shared.pieces if shared is not None else batch.seq_lens
        _plan_kernel[(1,)](
            batch.seq_lens, self._own_start, self._split_len, batch.num_decodes, self._splits, self.num_kv_heads,
            tiles.target_programs, tiles.min_split, BLOCK_N=tiles.decode_n, BLOCK_B=1024, SHARED=shared is not None,
        )  # fmt: skip

    def run(self, tensors, strides, scalars, variant) -> None:
        """One layer's attention; arguments as `TritonAttention.forward` makes them for all its kernels."""
        batch, tiles, shared = self._batch, self.tiles, self._batch.shared
        q, keys, values, out = tensors
        window, dot_scale, log2_scale = scalars
        # beside a shared prefix a sequence's own part is short: many small programs instead of long pipelines
        stages = tiles.decode_stages if shared is None else tiles.own_stages
        if shared is not None:
            stride_q, stride_qh, _, *rest = strides
            _shared_kernel[(self.num_kv_heads, self.shared_programs)](
                q, keys, values, self._partial, self._lse, batch.table, batch.rows, shared.items, shared.members,
                shared.count, stride_q, stride_qh, *rest, self._room, dot_scale, log2_scale,
                BLOCK_M=self.shared_m, NARROW=NARROW, **{k: v for k, v in variant.items() if k != "WINDOW"},
                BLOCK_N=tiles.decode_n, num_warps=tiles.shared_warps, num_stages=tiles.shared_stages,
            )  # fmt: skip
        _decode_kernel[(self.num_kv_heads, self._splits, batch.num_decodes)](
            *tensors, self._partial, self._lse, batch.table, batch.rows, batch.seq_lens, self._split_len,
            self._own_start, self._pieces, *strides, self._room, *scalars, **variant, SHARED=shared is not None,
            BLOCK_M=max(16, triton.next_power_of_2(self.group)), BLOCK_N=tiles.decode_n,
            num_warps=tiles.decode_warps, num_stages=stages,
        )  # fmt: skip
        if self._splits > 1:
            # large batches mostly have nothing to merge: fewer programs to find that out
            heads = self.group if batch.num_decodes >= 128 else 1
            _combine_kernel[(self.num_heads // heads, batch.num_decodes)](
                self._partial, self._lse, out, batch.seq_lens, self._split_len, self._own_start, self._pieces,
                out.stride(0), window, self._room, self.num_heads, D=self.head_dim, BLOCK_N=tiles.decode_n,
                BLOCK_D=variant["BLOCK_D"], BLOCK_S=8, MAX_SPLITS=MAX_SPLITS, WINDOW=variant["WINDOW"],
                SHARED=shared is not None, HEADS=heads, num_warps=2,
            )  # fmt: skip
