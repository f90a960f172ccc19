"""What the sampler knows of the requests in a batch, as tensors on the device.

`SamplingBatch` is their parameters: built from R `SamplingParams` when the batch's composition changes, read
at every step until then. `PenaltyState` is their history: which tokens each request of the table has seen and
said, counted on the device, so that the overlapped loop can count a token that has not reached the host.

    SamplingParams ... SamplingParams        R requests, on the host
          |  columns of numbers, sparse pairs (logit_bias, min_new_tokens), sizes and flags
    SamplingBatch                            tensors (R,), (P,) for top-k and top-p, (Q,) for penalties
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .sampling_params import SamplingParams

__all__ = ["GOLDEN", "MAX_VOCAB", "PenaltyState", "SamplingBatch", "mix", "shift_right"]

MAX_VOCAB = 1 << 22  # so that the sum of a row's weights stays below 2^63 (sampler.ONE is 2^40)
_FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass
class SamplingBatch:
    """The sampling parameters of R requests, on the device; made again when the batch's composition changes.

    Only rows that have a top-k or top-p (`filtered`) or penalties (`penalised`) pay for them, and the sizes
    and flags kept on the host let a step skip what no request asked for without looking at the device.
    """

    size: int  # R
    vocab_size: int
    all_greedy: bool
    any_min_p: bool
    max_top_k: int  # over the filtered rows
    # int64, (R,)
    rows: torch.Tensor  # of the request table
    seed: torch.Tensor  # mixed
    # int64, (P,): the rows among the R that have a top-k or top-p, and their top_k (vocab_size: no limit)
    filtered: torch.Tensor
    top_k: torch.Tensor
    # int64, (Q,): the rows among the R that have penalties
    penalised: torch.Tensor
    # int64: (row, token) pairs of logit_bias; (row, stop token, first position where it is free) triples
    bias_rows: torch.Tensor
    bias_tokens: torch.Tensor
    hold_rows: torch.Tensor
    hold_tokens: torch.Tensor
    hold_until: torch.Tensor
    # float32, with the shape of what they belong to
    inverse_temperature: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    bias: torch.Tensor
    # float64, (P,) with infinity for no limit, and (R,)
    top_p: torch.Tensor
    min_p: torch.Tensor
    # bool, (R,)
    greedy: torch.Tensor

    @property
    def plain(self) -> bool:
        """Whether the logits are used as they are: no penalty, bias or minimum length in the batch."""
        return not (len(self.penalised) or len(self.bias) or len(self.hold_until))

    @property
    def unfiltered(self) -> bool:
        """Whether no row has a top-k, top-p or min-p."""
        return not (len(self.filtered) or self.any_min_p)

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int] | np.ndarray,
        rows: Sequence[int] | np.ndarray,
        prompt_lens: Sequence[int] | np.ndarray,
        vocab_size: int,
        device: torch.device | str = "cpu",
        eos_ids: Collection[int] = (),
    ) -> SamplingBatch:
        """Makes the batch of R requests.

        Args:
            params: (R,) in the order of the logits' rows.
            seeds: (R,) int64: each request's own seed, or the engine's choice.
            rows: (R,) the requests' rows in the request table (PenaltyState is indexed by them).
            prompt_lens: (R,) in tokens; the first output token is sampled at position prompt_len.
            eos_ids: the model's stop ids, held back by min_new_tokens (unless ignore_eos: they stop nothing).
        """
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"vocab_size must be at most {MAX_VOCAB}, got {vocab_size}")
        columns = np.array([p.row for p in params], dtype=np.float64).reshape(-1, 8).T
        greedy, temperature, top_k, top_p, min_p, repetition, frequency, presence = columns
        sampled = greedy == 0
        min_p = np.where(sampled, min_p, 0)
        top_k = np.where(top_k < 0, vocab_size, np.minimum(top_k, vocab_size))
        filtered = np.flatnonzero(sampled & ((top_k < vocab_size) | (top_p < 1)))
        penalised = np.flatnonzero((repetition != 1) | (frequency != 0) | (presence != 0))
        biases = [(i, token, value) for i, p in enumerate(params) for token, value in p.logit_bias.items()]
        holds = [
            (i, token, prompt_lens[i] + p.min_new_tokens)
            for i, p in enumerate(params)
            if p.min_new_tokens
            for token in {*p.stop_token_ids, *(() if p.ignore_eos else eos_ids)}
        ]
        integers = _to_device(
            device,
            np.int64,
            rows=rows,
            seed=mix(torch.as_tensor(np.asarray(seeds, dtype=np.int64))).numpy(),
            filtered=filtered,
            top_k=top_k[filtered],
            penalised=penalised,
            bias_rows=[row for row, _, _ in biases],
            bias_tokens=[token for _, token, _ in biases],
            hold_rows=[row for row, _, _ in holds],
            hold_tokens=[token for _, token, _ in holds],
            hold_until=[position for _, _, position in holds],
        )
        floats = _to_device(
            device,
            np.float32,
            # Clamped so that t and 1/t are finite. Greedy rows are drawn too, but not used: any t will do.
            inverse_temperature=1 / np.clip(np.where(sampled, temperature, 1), 1e-30, 1e30),
            repetition=np.maximum(repetition, 1e-30)[penalised],
            frequency=frequency[penalised],
            presence=presence[penalised],
            bias=[value for _, _, value in biases],
        )
        doubles = _to_device(
            device, np.float64, top_p=np.where(top_p < 1, top_p, np.inf)[filtered], min_p=min_p
        )
        return cls(
            size=len(params),
            vocab_size=vocab_size,
            all_greedy=not sampled.any(),
            any_min_p=bool(min_p.any()),
            max_top_k=int(top_k[filtered].max(initial=0)),
            **integers,
            **floats,
            **doubles,
            **_to_device(device, np.bool_, greedy=greedy),
        )


def _to_device(device: torch.device | str, dtype: Any, **arrays: Any) -> dict[str, torch.Tensor]:
    """1-D arrays of numbers as tensors, in one copy: a small copy costs as much as a kernel launch."""
    parts = [np.asarray(array).astype(dtype) for array in arrays.values()]
    sent = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)
    return dict(zip(arrays, sent.split([len(part) for part in parts])))


class PenaltyState:
    """What each request of the table has said so far: output token counts and a mask of its prompt's tokens.

    Lives on the device, so that the overlapped loop can count a token it has not seen on the host. Memory is
    5 * max_rows * vocab_size bytes, allocated when the first request with a penalty arrives.

    Args:
        max_rows: rows of the request table, the dummy row 0 included; rows are in [0, max_rows).
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str = "cpu"):
        self.max_rows, self.vocab_size, self.device = max_rows, vocab_size, torch.device(device)
        self.counts = self.in_prompt = torch.empty(0)  # (max_rows, V) int32 and bool once allocated

    @property
    def allocated(self) -> bool:
        return self.counts.numel() > 0

    def reset(
        self,
        row: int,
        prompt_ids: Sequence[int] | np.ndarray,
        output_ids: Sequence[int] | np.ndarray = (),
    ) -> None:
        """Starts `row` for a request that has a penalty; it may have output already (after a retraction)."""
        if not self.allocated:
            shape = (self.max_rows, self.vocab_size)
            counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.counts, self.in_prompt = counts, in_prompt  # both or, if memory runs out, neither
        sent = _to_device(self.device, np.int64, prompt=prompt_ids, output=output_ids)
        ones = torch.ones_like(sent["output"], dtype=torch.int32)
        self.counts[row].zero_().scatter_add_(0, sent["output"], ones)
        self.in_prompt[row].zero_().index_fill_(0, sent["prompt"], True)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts one output token for each of `rows`; both (N,) int64 on the device. Rows may repeat."""
        if self.allocated:
            ones = torch.ones_like(tokens, dtype=torch.int32)
            self.counts.view(-1).scatter_add_(0, rows * self.vocab_size + tokens, ones)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, batch: SamplingBatch) -> None:
        """Changes in place the rows of `logits` (R, V) that have penalties; `rows` (R,) are their table rows.

        repetition_penalty r first, for tokens in prompt or output (Keskar et al. 2019, CTRL, section 4.1, as
        Hugging Face has it: x / r if x > 0 else x * r), then x - frequency * count - presence * (count > 0)
        over the output alone, as the OpenAI API defines them.
        """
        if not self.allocated:
            raise ValueError("penalties must be reset for each request that has a penalty")
        of = batch.penalised
        repetition = batch.repetition[:, None]
        counts = self.counts[rows[of]]
        said = counts > 0
        x = logits[of]
        # clamped: a tiny penalty must not make an infinite logit
        repeated = x.clamp(min=0).div_(repetition).clamp_(max=_FLOAT_MAX)
        repeated += x.clamp(max=0).mul_(repetition)
        x = torch.where(said | self.in_prompt[rows[of]], repeated, x)
        x -= batch.frequency[:, None] * counts
        x -= batch.presence[:, None] * said
        logits[of] = x


# -- the hash ------------------------------------------------------------------------------------------------

# 64-bit constants as torch's signed integers have them; its int64 products wrap around, as the hash needs.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, a bijection of int64 in which every input bit reaches every output bit."""
    x = (x ^ shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shift_right(x, 31)


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # the sign bit must not be copied
