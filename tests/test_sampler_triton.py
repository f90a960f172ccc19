"""The fused draw against the general one: the same tokens from the same logits, seeds and positions."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

pytest.importorskip("triton", reason="Triton is installed on Linux only")

from minisgl.sampler import SamplingBatch, sample
from minisgl.sampler_triton import draw
from minisgl.sampling_params import SamplingParams


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocab", [100, 4096, 9000])
def test_same_tokens_as_the_general_way(device, vocab):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton is not in interpreter mode where there is a GPU")
    generator = torch.Generator().manual_seed(vocab)
    rows = 6
    logits = torch.randn((rows, vocab), generator=generator) * 4
    logits[1] = -torch.inf
    logits[1, 7] = 0.0
    logits[2, 50:60] = logits[2].max() + 1  # ties: the lowest id wins
    temperatures = [1.0, 0.7, 0.0, 1.5, 0.0, 0.2]
    params = [SamplingParams(temperature=t) for t in temperatures]
    batch = SamplingBatch.build(params, list(range(rows)), list(range(rows)), [0] * rows, vocab)
    differing = 0
    for position in range(20):
        positions = torch.full((rows,), position)
        want = sample(logits, batch, positions)
        got = draw(
            logits.to(device),
            batch.inverse_temperature.to(device),
            batch.greedy.to(device),
            batch.seed.to(device),
            positions.to(device),
        ).cpu()
        greedy = batch.greedy
        assert (got[greedy] == want[greedy]).all() and got[1] == 7
        differing += int((got != want).sum())
    assert differing <= 1  # exp may round the other way just where the target falls
