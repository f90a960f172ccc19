"""Rotary position embedding (RoFormer, arXiv 2104.09864): the table of cosines and sines.

Each pair of elements (x_i, x_{i + D/2}) of a query or key is a point in the plane, turned by an angle that
grows with the token's position; the score of two turned vectors depends on their distance only.  Pair i turns
at frequency theta^(-2i/D): the first pairs tell neighbours apart, the last ones tell chapters apart.

Reaching beyond the trained length means slowing the pairs down, and the five types differ in which:

    default   none
    linear    all of them, by `factor`                                             (kaiokendev)
    llama3    those whose wavelength exceeds the trained length, smoothly          (Llama 3.1)
    yarn      the slow ones by `factor`, the fast ones not, a ramp between         (arXiv 2309.00071)
    dynamic   all, through a larger theta, the more the longer the sequence is     (NTK, emozilla)

Angles are computed in float32, as Hugging Face does, so that float32 logits agree.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> tuple[torch.Tensor, float]:
    """(head_dim / 2,) float32 radians per token, and the factor on cosine and sine (1 but for yarn).

    For `dynamic` these are the frequencies up to the trained length (see `RotaryTable`).
    """
    rope, dim = config.rope, config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = 1.0
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.type == "llama3":
        frequencies = _llama3(frequencies, rope.params)
    elif rope.type == "yarn":
        frequencies, scaling = _yarn(rope.theta, exponents, rope.params)
    return frequencies, scaling


def _llama3(frequencies: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """Wavelengths above original/low_freq_factor are stretched by `factor`, those below
    original/high_freq_factor kept, those between interpolated (Llama 3.1's reference code)."""
    factor, low, high = params["factor"], params["low_freq_factor"], params["high_freq_factor"]
    original = params["original_max_position_embeddings"]
    turns = original / (2 * math.pi / frequencies)  # of each pair, within the trained length
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _yarn(theta: float, exponents: torch.Tensor, params: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN, section 3.2 ("NTK-by-parts") and 3.4 (attention temperature)."""
    pairs, factor = len(exponents), params["factor"]
    original = params["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        """Index of the pair that makes so many full turns over the trained length."""
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    low = pair_that_turns(params.get("beta_fast") or 32)
    high = pair_that_turns(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float32) - low) / (high - low or 0.001)
    stretched = ramp.clamp(0, 1)
    periods = theta**exponents
    frequencies = stretched / (factor * periods) + (1 - stretched) / periods
    return frequencies, _yarn_temperature(params)


def _yarn_temperature(params: dict[str, Any]) -> float:
    given = params.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 1.0 if params["factor"] <= 1 else 0.1 * weight * math.log(params["factor"]) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)


class RotaryTable:
    """`rows(n)` -> (>= n, head_dim) float32 on the device: cosines of the head_dim / 2 pairs, then their
    sines.

    Made for as many positions as were asked for, doubling as longer sequences appear; a CUDA graph that was
    captured with the table must have been captured with the longest length it will be replayed for.

    `dynamic` RoPE in Hugging Face recomputes the frequencies from the current sequence length, so a token's
    rotation depends on when it was computed, and so would the result on chunking and on cache hits.  Here the
    token at position p is turned by the frequencies of a sequence of p + 1 tokens.  That is what Hugging Face
    computes for every prompt within `max_position_embeddings`, and for whatever is generated after it.
    """

    def __init__(self, config: LlamaConfig, device: torch.device | str):
        self.config, self.device = config, torch.device(device)
        self._frequencies, self._scaling = inverse_frequencies(config)
        self._table = self._compute(min(config.context_length, 4096))

    def rows(self, positions: int) -> torch.Tensor:
        """The table, grown first if it is shorter than `positions`."""
        if positions > len(self._table):
            limit = max(positions, self.config.context_length)
            self._table = self._compute(min(max(positions, 2 * len(self._table)), limit))
        return self._table

    def _compute(self, length: int) -> torch.Tensor:
        positions = torch.arange(length, dtype=torch.float32, device=self.device)[:, None]
        frequencies = self._frequencies.to(self.device)
        angles = positions * (self._dynamic(positions) if self.config.rope.type == "dynamic" else frequencies)
        return torch.cat((angles.cos() * self._scaling, angles.sin() * self._scaling), dim=-1)

    def _dynamic(self, positions: torch.Tensor) -> torch.Tensor:
        """(length, head_dim / 2): theta grows with the sequence, so that the slowest pair never turns further
        than it did in training."""
        rope, dim = self.config.rope, self.config.head_dim
        trained = self.config.max_position_embeddings
        stretch = rope.factor * (positions + 1).clamp(min=trained) / trained - (rope.factor - 1)
        theta = rope.theta * stretch ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=self.device) / dim
        return 1.0 / (theta**exponents)
