# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false
"""The plain draw on a GPU: temperature only, two reads of the logits instead of a dozen.

`sampler.sample` in plain torch makes the integer weights of a whole vocabulary, their block sums and cumulated sums as
tensors: for 256 rows of 128,000 tokens that is gigabytes of traffic, a millisecond of a 13 ms decode step.  Here the
weights never leave registers:

    _peaks     (row, block)   the block's largest logit and where it is           reads R V
    _sums      (row, block)   sum of the block's weights, given the row's peak    reads R V
    _pick      (row)          the block that holds the target, then the token     reads R V / blocks

It is the same draw (see `sampler`): integer weights whose sums are exact in any order, one uniform number from
(seed, position), the inverse of the cumulated sums.  Rows with filters, penalties or masks take the general way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096  # tokens per program
ONE = 1 << 40  # the weight of a row's likeliest token, as in `sampler`


@triton.jit
def _weights(x, peak, inverse_temperature, live):
    """floor(2^40 * exp(-(peak - x) / T)), int64; 0 where not live."""
    gap = (peak - x) * inverse_temperature
    weight = (tl.exp(-gap) * 1099511627776.0).to(tl.int64)
    return tl.where(live, weight, 0)


@triton.jit
def _peaks(logits_ptr, peak_ptr, at_ptr, stride, V, BLOCKS, BLOCK: tl.constexpr):
    """Largest logit of one block of one row, and the lowest id that has it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    tl.store(peak_ptr + row * BLOCKS + block, peak)
    tl.store(at_ptr + row * BLOCKS + block, tl.min(tl.where(x == peak, cols, V), 0))


@triton.jit
def _sums(logits_ptr, peak_ptr, sum_ptr, inverse_ptr, stride, V, BLOCKS, BLOCK: tl.constexpr, MANY: tl.constexpr):
    """Sum of the weights of one block of one row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    every = tl.arange(0, MANY)
    peak = tl.max(tl.load(peak_ptr + row * BLOCKS + every, mask=every < BLOCKS, other=float("-inf")), 0)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    tl.store(sum_ptr + row * BLOCKS + block, tl.sum(_weights(x, peak, tl.load(inverse_ptr + row), cols < V), 0))


@triton.jit
def _mix(x):
    """SplitMix64's finaliser, `sampling_batch.mix` in 64 unsigned bits."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _pick(
    logits_ptr, peak_ptr, at_ptr, sum_ptr, inverse_ptr, greedy_ptr, seed_ptr, position_ptr, out_ptr, stride, V, BLOCKS,
    BLOCK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """The token of one row: argmax if it is greedy, else the first whose cumulated weight is above the target."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, MANY)
    known = every < BLOCKS
    peaks = tl.load(peak_ptr + row * BLOCKS + every, mask=known, other=float("-inf"))
    peak = tl.max(peaks, 0)
    likeliest = tl.min(tl.where(known & (peaks == peak), tl.load(at_ptr + row * BLOCKS + every, mask=known), V), 0)
    sums = tl.load(sum_ptr + row * BLOCKS + every, mask=known, other=0)
    total = tl.sum(sums, 0)
    step = tl.load(position_ptr + row).to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = _mix(tl.load(seed_ptr + row).to(tl.uint64) + step)
    uniform = (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 53 bits: `sampler.uniform`
    target = (uniform * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    cumulated = tl.cumsum(sums, 0)
    block = tl.minimum(tl.sum((known & (cumulated <= target)).to(tl.int32), 0), BLOCKS - 1)
    target -= tl.sum(tl.where(every < block, sums, 0), 0)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    inside = tl.cumsum(_weights(x, peak, tl.load(inverse_ptr + row), cols < V), 0)
    token = tl.minimum(block * BLOCK + tl.sum((inside <= target).to(tl.int32), 0), V - 1)
    certain = (tl.load(greedy_ptr + row) != 0) | (total <= 0)
    tl.store(out_ptr + row, tl.where(certain, likeliest, token).to(tl.int64))


def draw(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor,
    greedy: torch.Tensor,
    seed: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Next tokens, (R,) int64.

    logits (R, V) in any float dtype, rows contiguous; inverse_temperature (R,) float32; greedy (R,) bool; seed (R,)
    int64, mixed (`SamplingBatch`); positions (R,) int64.  Launches three kernels and waits for nothing, so it can be
    recorded in a CUDA graph.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    many = triton.next_power_of_2(blocks)
    device = logits.device
    peak = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    at = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    sums = torch.empty((rows, blocks), dtype=torch.int64, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    shape = (logits.stride(0), vocab, blocks)
    _peaks[(rows, blocks)](logits, peak, at, *shape, BLOCK=BLOCK, num_warps=8)
    _sums[(rows, blocks)](logits, peak, sums, inverse_temperature, *shape, BLOCK=BLOCK, MANY=many, num_warps=8)
    _pick[(rows,)](
        logits, peak, at, sums, inverse_temperature, greedy, seed, positions, out, *shape, BLOCK=BLOCK, MANY=many,
        num_warps=8,
    )  # fmt: skip
    return out
