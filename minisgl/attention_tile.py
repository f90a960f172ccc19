"""What the attention kernels have in common: loading keys by slot, one step of the online softmax, block sizes.

*Online softmax* (FlashAttention, arXiv 2205.14135). A block of queries walks over blocks of keys and carries, per row,
the running maximum m, the sum l of 2**(score - m) and the weighted values acc; a larger maximum rescales l and acc.
Scores never reach memory. Two such results over different keys merge exactly by their m and l, which is what lets
decode cut one long sequence into splits (Flash-Decoding), and read a shared prefix once for all that have it.
"""

# Triton makes constexprs of ints and gives every kernel num_warps and num_stages, unknown to type checkers:
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634  # softmax in powers of two: e**x = 2**(x * LOG2E)


@triton.jit
def stable_tanh(x):
    """tanh from exp of a non-positive number only: exact +-1 for any large |x|, never inf / inf."""
    decay = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


@triton.jit
def load_rows(
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
def attend_block(
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


@dataclass(frozen=True)
class Tiles:
    """Block sizes of the kernels: everything there is to tune. Change with dataclasses.replace.

    extend_m x extend_n   (tokens x group) rows by keys per step, with extend_warps and extend_stages (loads in flight)
    decode_n              keys per step of decode, with decode_warps and decode_stages
    own_stages            the latter for what sequences read by themselves beside shared prefixes
    shared_m              (members x group) rows of a shared prefix's tile, beside decode_n keys, with shared_warps,
                          shared_stages and shared_waves (programs per multiprocessor)
    target_programs       pieces of equal work a decode step is cut into; a few waves over the GPU
    min_split             fewest keys worth a program of their own
    extend_registers      most registers of a thread of extend; None: what the compiler wants
    """

    extend_m: int = 64
    extend_n: int = 64
    extend_warps: int = 4
    extend_stages: int = 3
    decode_n: int = 64
    decode_warps: int = 4
    decode_stages: int = 3
    own_stages: int = 2
    shared_m: int = 64
    shared_warps: int = 4
    shared_stages: int = 3
    shared_waves: int = 2
    target_programs: int = 2112
    min_split: int = 128
    extend_registers: int | None = None

    @staticmethod
    def choose(head_dim: int, dtype: torch.dtype, processors: int) -> Tiles:
        """Sizes for Hopper (sm_90: 227 KiB of shared memory and 65536 registers on each of `processors`), measured.

        With head_dim 128 and 16 bits, extend runs two programs per multiprocessor, whose products and softmaxes fill
        each other's gaps. With 64 rows each, both wait for keys from L2; 128 rows halve what they read, and for two of
        those to fit, a thread may have 128 registers: it spills a few and is a seventh faster for all that. Decode
        holds 70 KiB, so that three programs keep two blocks of 32 KiB each on their way from memory.
        """
        tiles = Tiles(target_programs=16 * processors)
        if dtype == torch.float32:  # no tensor cores at full precision: larger tiles spill registers
            return replace(
                tiles, extend_m=32, extend_n=16, extend_warps=8, extend_stages=2, decode_n=32, decode_warps=8,
                shared_m=32, shared_warps=8,
            )  # fmt: skip
        if head_dim <= 64:
            return replace(tiles, extend_m=128)
        if head_dim > 128:
            return replace(tiles, extend_n=32, extend_stages=2, decode_n=32)
        return replace(tiles, extend_m=128, extend_warps=8, extend_stages=2, extend_registers=128)
