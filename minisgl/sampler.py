"""Logits to tokens: every row of the batch at once, each row as if it were alone. And log-probabilities.

A request with a seed must give the same tokens whatever else is in the batch. Floating-point sums do not
allow that by themselves: kernels sum in another order for another batch size. So the probabilities become
whole numbers first, whose sums are exact in any order:

    gap     = max(logits) - logits                       float32, 0 for the likeliest token
    weights = floor(2^40 * exp(-gap / temperature))      int64, 2^40 for the likeliest token
    filters (top-k, top-p, min-p) set weights to 0
    target  = floor(u * sum(weights)),  u = hash(seed, position) in [0, 1)
    token   = the first one whose cumulated weight is above the target (inverse CDF)

Max, element-wise functions and integer sums do not depend on the batch, so neither does the draw, on CPU or
GPU. What is rounded: the float32 exp (2^-23 of each weight) and the floor (2^-40 of the largest weight, so a
token less likely than that beside the likeliest is never drawn). The search for the token runs in two levels,
which is fast and just as exact:

    weights      |5 0 1 ... 2|0 7 0 ... 1|4 4 0 ... 0| ...   (R, V) in blocks of 128
    block sums        17          9           11             find the block that holds the target,
    cumulated                0 7 7 ... 9                     then the token inside that block

Order: penalties, logit_bias, grammar mask and min_new_tokens, temperature, top-k, top-p, min-p, draw. Each
filter sees the distribution renormalised after the one before. Ties go to the lowest token id, in argmax,
top-k and top-p alike; min-p keeps all ties. A row always keeps its likeliest token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from .sampling_batch import GOLDEN, PenaltyState, SamplingBatch, mix, shift_right

__all__ = [
    "Logprobs",
    "PenaltyState",
    "SamplingBatch",
    "distribution",
    "output_logprobs",
    "prompt_logprobs",
    "sample",
    "uniform",
]

ONE = 1 << 40  # the weight of a row's likeliest token
BLOCK = 128  # tokens per block of the two-level search, roughly the square root of a vocabulary
GROUP = 32  # tokens per block in the search for the likeliest
# On a CPU, top-p first looks at the 128, then 2,048 likeliest tokens: selecting them is far cheaper than a
# sort of the vocabulary, and most distributions have their mass there.
NARROW = (128, 2048)
PIECE = 1 << 20  # on a CPU, log-probabilities are made of this many logits at a time, to stay in its caches
_FLOAT_MAX = torch.finfo(torch.float32).max


# -- the draw ------------------------------------------------------------------------------------------------


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    positions: torch.Tensor,
    grammar_mask: torch.Tensor | None = None,
    penalties: PenaltyState | None = None,
) -> torch.Tensor:
    """The next token of each row. Never waits for the device, never changes `logits`.

    Args:
        logits: (R, V), float32 (a half type is converted); -inf is allowed, NaN and +inf are not.
        batch: the rows' parameters.
        positions: (R,) int64, absolute position of the token being sampled (prompt_len for the first output).
        grammar_mask: packed bits of the allowed tokens, bit i % 32 of word i // 32 for token i:
            (R, ceil(V / 32)) int32, or the same memory as uint8. Rows without a grammar are all ones.
        penalties: the token counts; required if any row has a penalty.

    Returns:
        (R,) int64 token ids. A row of nothing but -inf gives token 0.
    """
    if logits.is_cuda and batch.plain and not batch.all_greedy and grammar_mask is None and batch.unfiltered:
        from .sampler_triton import draw  # the same draw in three kernels

        return draw(logits, batch.inverse_temperature, batch.greedy, batch.seed, positions)
    logits = _adjust(logits, batch, positions, grammar_mask, penalties)
    likeliest = _argmax(logits)
    if batch.all_greedy:
        return likeliest
    tokens, total = _draw(_filtered_weights(logits, batch), uniform(batch.seed, positions))
    return torch.where(batch.greedy | (total == 0), likeliest, tokens)


def distribution(
    logits: torch.Tensor,
    batch: SamplingBatch,
    positions: torch.Tensor,
    grammar_mask: torch.Tensor | None = None,
    penalties: PenaltyState | None = None,
) -> torch.Tensor:
    """(R, V) float64: the probabilities that `sample` would draw from (one-hot for greedy rows)."""
    logits = _adjust(logits, batch, positions, grammar_mask, penalties)
    weights = _filtered_weights(logits, batch)
    one_hot = F.one_hot(_argmax(logits), batch.vocab_size)
    sure = batch.greedy[:, None] | (weights.sum(1, keepdim=True) == 0)
    weights = torch.where(sure, one_hot, weights)
    return weights / weights.sum(1, keepdim=True).double()


def uniform(seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(R,) float64, uniform in [0, 1) with 53 bits: a pure function of (seed, position), on any device.

    SplitMix64 (Steele, Lea, Flood 2014) read at index `positions`: mix(seed + position * golden). `seed` has
    been mixed once already (SamplingBatch.build), so that seeds 0, 1, 2, ... are unrelated.
    """
    bits = mix(seed + positions * GOLDEN)
    return shift_right(bits, 11).double() * 2.0**-53


def _filtered_weights(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """(R, V) int64 weights after temperature and filters, in proportion to the probabilities."""
    weights = _weights(_gap(logits).mul_(-batch.inverse_temperature[:, None]))
    if len(batch.filtered):
        limits = batch.top_k[:, None], batch.top_p[:, None]
        _keep_top(weights, logits, batch.filtered, *limits, _widths(batch, logits.device))
    if batch.any_min_p:
        weights *= weights >= (batch.min_p[:, None] * ONE).long()
    return weights


def _gap(logits: torch.Tensor) -> torch.Tensor:
    """(R, V) float32 >= 0: how far each logit is below its row's largest (inf where all are -inf)."""
    return logits.amax(1, keepdim=True).clamp_(min=-_FLOAT_MAX) - logits


def _weights(log_ratio: torch.Tensor) -> torch.Tensor:
    """(R, V) int64: floor(2^40 * exp(log_ratio)), where log_ratio <= 0 is overwritten."""
    return log_ratio.exp_().mul_(ONE).long()


def _draw(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, total weights), each (R,) int64, by inverse CDF over blocks, then inside a block."""
    vocab = weights.shape[1]
    if vocab % BLOCK:
        weights = F.pad(weights, (0, -vocab % BLOCK))
    blocks = weights.unflatten(1, (-1, BLOCK))
    sums = blocks.sum(2)
    cumulated = sums.cumsum(1)
    total = cumulated[:, -1]
    target = torch.minimum((u * total).long(), total - 1)[:, None]  # u * total may round up to total
    # Both positions are clamped, so that a NaN in the logits cannot become an index out of range.
    block = (cumulated <= target).sum(1, keepdim=True).clamp_(max=sums.shape[1] - 1)
    target -= (cumulated - sums).gather(1, block)
    inside = blocks.take_along_dim(block[:, :, None], 1)[:, 0].cumsum(1)
    tokens = block[:, 0] * BLOCK + (inside <= target).sum(1)
    return tokens.clamp_(max=vocab - 1), total


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """(R,) int64: argmax, lowest id among ties; in two levels, ten times faster than torch's on a CPU."""
    if logits.shape[1] % BLOCK:
        return logits.argmax(1)
    blocks = logits.unflatten(1, (-1, BLOCK))
    block = blocks.amax(2).argmax(1, keepdim=True)
    inside = blocks.take_along_dim(block[:, :, None], 1)[:, 0]
    return block[:, 0] * BLOCK + inside.argmax(1)


# -- top-k and top-p -----------------------------------------------------------------------------------------


def _widths(batch: SamplingBatch, device: torch.device) -> list[int]:
    """How many of the likeliest tokens to look at: what top_k asks for, or all; on a CPU, few before all."""
    narrow = NARROW if device.type == "cpu" and batch.max_top_k == batch.vocab_size else ()
    return [*(width for width in narrow if width < batch.vocab_size), batch.max_top_k]


def _keep_top(
    weights: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    widths: list[int],
) -> None:
    """In place, in (P,) `rows` of the (R, V) weights: 0 for all but the top_k likeliest tokens, and of these
    for all but top_p of their mass.

    The token that crosses top_p is kept: token j stays if the mass of those before it is below top_p. Only
    the widths[0] likeliest tokens are looked at, and rows that this does not decide go on to the next width.
    The last is at least every row's top_k, and decides. Sums are exact: widths change only the time.
    """
    width, *wider = widths
    ids = _ranked(_gap(logits if len(rows) == len(logits) else logits[rows]), width)
    ranked = weights[rows[:, None], ids]
    mass = ranked.cumsum(1)
    of_top_k = mass.gather(1, top_k.clamp(max=width) - 1)
    limit = top_p * torch.where(top_k <= width, of_top_k, weights.sum(1)[rows, None])
    keep = (torch.arange(width, device=logits.device) < top_k) & (mass - ranked < limit)
    keep[:, 0] = True  # also for top_p = 0
    kept = ranked * keep
    if wider:  # on a CPU only: elsewhere, looking at the result would wait for the device
        undecided = ((top_k > width) & ((top_k < logits.shape[1]) | (mass[:, -1:] < limit)))[:, 0]
        if undecided.any():
            _keep_top(weights, logits, rows[undecided], top_k[undecided], top_p[undecided], wider)
        rows, ids, kept = rows[~undecided], ids[~undecided], kept[~undecided]
    weights.index_fill_(0, rows, 0)
    weights[rows[:, None], ids] = kept


def _ranked(gap: torch.Tensor, width: int) -> torch.Tensor:
    """(R, width) int64: the ids of the smallest gaps, in order, lowest id first among ties.

    The `width` smallest are all in the `width` blocks whose own smallest come first (whatever is in another
    block has at least those before it), so a few candidates are ranked instead of the vocabulary.
    """
    vocab = gap.shape[1]
    ids = torch.arange(vocab, device=gap.device).expand_as(gap)
    if vocab % GROUP == 0 and width * GROUP * 4 <= vocab:
        groups = _smallest(gap.unflatten(1, (-1, GROUP)).amin(2), ids[:, : vocab // GROUP], width)
        ids = (groups[:, :, None] * GROUP + ids[0, :GROUP]).flatten(1)
        gap = gap.gather(1, ids)
    return _smallest(gap, ids, width)


def _smallest(gap: torch.Tensor, ids: torch.Tensor, width: int) -> torch.Tensor:
    """The ids of the `width` smallest (gap, id).

    torch.topk leaves the order of ties open (it changes with k and with the device), so gap and id become one
    key: the bits of a float32 >= 0 are ordered as the number is, and go above the id.
    """
    keys = gap.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(ids)
    full = width == gap.shape[1]
    smallest = keys.sort(1).values if full else keys.topk(width, 1, largest=False, sorted=True).values
    return smallest & 0xFFFFFFFF


# -- penalties, bias and masks -------------------------------------------------------------------------------


def _adjust(
    logits: torch.Tensor,
    batch: SamplingBatch,
    positions: torch.Tensor,
    grammar_mask: torch.Tensor | None,
    penalties: PenaltyState | None,
) -> torch.Tensor:
    """(R, V) float32: the logits after all that comes before the temperature; the caller's are left alone."""
    if logits.shape != (batch.size, batch.vocab_size):
        raise ValueError(f"logits must be {(batch.size, batch.vocab_size)}, got {tuple(logits.shape)}")
    logits = logits.float()
    if batch.plain and grammar_mask is None:
        return logits
    logits = logits.clone()
    if len(batch.penalised):
        if penalties is None:
            raise ValueError("penalties must be given: a request of the batch has a penalty")
        penalties.apply(logits, batch.rows, batch)
    if len(batch.bias):
        logits[batch.bias_rows, batch.bias_tokens] += batch.bias  # the pairs are distinct
    if grammar_mask is not None:
        logits += _mask_to_bias(grammar_mask, batch.vocab_size)
    if len(batch.hold_until):
        _hold_stops(logits, batch, positions)
    return logits


def _mask_to_bias(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(R, V) float32 from packed bits: 0 where allowed, -inf elsewhere. A table lookup per 8 tokens."""
    packed = mask.contiguous().view(torch.uint8)
    if packed.dim() != 2 or packed.shape[1] * 8 < vocab_size:
        words = -(-vocab_size // (8 * mask.element_size()))
        raise ValueError(f"grammar_mask must be (R, {words}) {mask.dtype}, got {tuple(mask.shape)}")
    table = _byte_biases(mask.device)
    return table.index_select(0, packed.int().flatten()).view(packed.shape[0], -1)[:, :vocab_size]


@functools.lru_cache(maxsize=16)
def _byte_biases(device: torch.device) -> torch.Tensor:
    """(256, 8) float32: row b has 0 at each set bit of b (bit 0 first) and -inf at the others."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, np.float32(0), np.float32(-np.inf))).to(device)


def _hold_stops(logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor) -> None:
    """In place: stop tokens get -inf until the request has its min_new_tokens.

    A grammar that allows nothing but a stop token wins: min_new_tokens cannot ask for text that is not legal.
    """
    at = (batch.hold_rows, batch.hold_tokens)
    before = logits[at]
    held = positions[batch.hold_rows] < batch.hold_until
    logits[at] = before.masked_fill(held, -torch.inf)
    stuck = (logits.amax(1) == -torch.inf)[batch.hold_rows]
    logits[at] = torch.where(stuck, before, logits[at])


# -- log-probabilities ---------------------------------------------------------------------------------------


@dataclass
class Logprobs:
    """Log-probabilities of R tokens, and of the N likeliest at the same places; on the device.

    Values are finite, or -inf where the logit is; never NaN.
    """

    chosen: torch.Tensor  # (R,) float32
    top: torch.Tensor  # (R, N) float32, likeliest first, ties by token id
    top_ids: torch.Tensor  # (R, N) int64

    @classmethod
    def cat(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """The rows of all parts, which must have the same N."""
        return cls(*(torch.cat([getattr(p, name) for p in parts]) for name in ("chosen", "top", "top_ids")))

    def to_lists(self, top_n: Sequence[int]) -> list[tuple[float, list[tuple[float, int]]]]:
        """On the host, per row: the chosen token's value, and (value, id) of the top_n[row] likeliest."""
        rows = zip(self.chosen.tolist(), self.top.tolist(), self.top_ids.tolist(), top_n)
        return [(chosen, list(zip(top[:n], ids[:n]))) for chosen, top, ids, n in rows]


def output_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top_n: int | Sequence[int] = 0) -> Logprobs:
    """log_softmax of the RAW logits at `tokens`: the model's own opinion, before penalties, bias, masks and
    temperature (log_softmax of Hugging Face's `output_logits`, not of its `output_scores`).

    The normaliser is a sum of integer weights, like the sampler's: the same whatever else is in the batch,
    and within a few 1e-7 of the exact one.

    Args:
        logits: (R, V), as the model gives them.
        tokens: (R,) int64.
        top_n: how many of the likeliest tokens are wanted, for all rows or per row (N is the largest).
    """
    wanted = min(_largest(top_n), logits.shape[1])
    step = max(1, PIECE // logits.shape[1] if logits.device.type == "cpu" else len(logits))
    pieces = zip(logits.split(step), tokens.split(step))
    return Logprobs.cat([_logprobs(piece.float(), ids[:, None], wanted) for piece, ids in pieces])


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, wanted: int) -> Logprobs:
    gap = _gap(logits)
    log_sum = torch.log(_weights(-gap).sum(1, keepdim=True).clamp_(min=1).double() / ONE)
    top_ids = _ranked(gap, wanted) if wanted else tokens[:, :0]
    chosen, top = (-(gap.gather(1, ids) + log_sum).float() for ids in (tokens, top_ids))
    return Logprobs(chosen[:, 0], top, top_ids)


def prompt_logprobs(
    hidden: torch.Tensor,
    next_tokens: torch.Tensor,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    top_n: int | Sequence[int] = 0,
    max_bytes: int = 256 << 20,
) -> Logprobs:
    """The log-probability of each next prompt token, never holding all the logits of a long prompt at once.

    Args:
        hidden: (T, H), the model's last hidden states.
        next_tokens: (T,) int64: the token that follows each.
        to_logits: (t, H) -> (t, vocab_size), the output projection.
        top_n: for all T, or one per token.
        max_bytes: bounds a chunk's float32 logits and all that is made of them, 32 bytes per logit together.
    """
    rows = max(1, max_bytes // (32 * vocab_size))
    chunks = zip(hidden.split(rows), next_tokens.split(rows))
    return Logprobs.cat([output_logprobs(to_logits(h), tokens, _largest(top_n)) for h, tokens in chunks])


def _largest(top_n: int | Sequence[int]) -> int:
    return top_n if isinstance(top_n, int) else max(top_n, default=0)
