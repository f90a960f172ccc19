"""The sampler against plain numpy, in distribution (chi-square) and bit by bit (independence of the batch).

The references below are the textbook's, one row at a time in float64; the sampler must agree on the support
exactly and on the probabilities to float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from minisgl import sampler
from minisgl.sampler import (
    PenaltyState,
    SamplingBatch,
    distribution,
    output_logprobs,
    prompt_logprobs,
    sample,
    uniform,
)
from minisgl.sampling_params import SamplingParams


def make_batch(
    params: Sequence[SamplingParams], vocab: int, seeds: Any = None, device: Any = "cpu", **more: Any
):
    count = len(params)
    seeds = np.arange(count) if seeds is None else seeds
    given = {"rows": np.arange(1, count + 1), "prompt_lens": np.zeros(count, np.int64), **more}
    return SamplingBatch.build(params, seeds, vocab_size=vocab, device=device, **given)


def draws(logits: Sequence[float], count: int, seed: int = 0, **params: Any) -> np.ndarray:
    """`count` tokens from one row's logits, at consecutive positions of one seed."""
    row = torch.tensor(logits, dtype=torch.float32)
    batch = make_batch([SamplingParams(**params)] * count, len(row), np.full(count, seed))
    return sample(row.expand(count, -1), batch, torch.arange(count)).numpy()


def probabilities(logits: Any, mask: torch.Tensor | None = None, **params: Any) -> np.ndarray:
    row = torch.as_tensor(np.asarray(logits, np.float32))[None]
    batch = make_batch([SamplingParams(**params)], row.shape[1])
    return distribution(row, batch, torch.zeros(1, dtype=torch.int64), mask)[0].numpy()


def reference(logits: np.ndarray, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0) -> np.ndarray:
    """One row's probabilities in float64: one filter after the other, each on the renormalised rest."""
    logits = logits.astype(np.float64)
    if temperature == 0 or top_k == 1:
        return (np.arange(len(logits)) == np.argmax(logits)).astype(np.float64)
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -logits))  # likeliest first, ties by id
    if top_k > 0:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        keep = before < top_p
        keep[0] = True
        p[order[~keep]] = 0
        p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def chi_square_fits(tokens: np.ndarray, expected: np.ndarray) -> bool:
    """Whether counts fit: no token outside the support, and chi-square within 4.5 sigma of its mean."""
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    mean = expected * len(tokens)
    assert counts[expected == 0].sum() == 0
    rare = mean < 8  # the usual rule: pool the cells that are too small for the approximation
    cells = np.append(mean[~rare], mean[rare].sum())
    seen = np.append(counts[~rare], counts[rare].sum())
    seen, cells = seen[cells > 0], cells[cells > 0]
    freedom = max(len(cells) - 1, 1)
    statistic = ((seen - cells) ** 2 / cells).sum()
    return abs(statistic - freedom) < 4.5 * np.sqrt(2 * freedom) + 4


LOGITS = np.random.default_rng(0).normal(size=200).astype(np.float32) * 2.5
FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 20},
    {"top_p": 0.7},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 50, "top_p": 0.95, "min_p": 0.1},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 1},
    {"temperature": 0},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_follow_the_distribution(params: dict[str, Any]):
    expected = reference(LOGITS, **params)
    assert chi_square_fits(draws(LOGITS.tolist(), 10_000, seed=5, **params), expected)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_over_seeds_follow_the_distribution(params: dict[str, Any]):
    """The first token of 10,000 requests with seeds 0, 1, 2, ...: seeds are as good as positions."""
    batch = make_batch([SamplingParams(**params)] * 10_000, len(LOGITS))
    tokens = sample(torch.from_numpy(LOGITS).expand(10_000, -1), batch, torch.full((10_000,), 17))
    assert chi_square_fits(tokens.numpy(), reference(LOGITS, **params))


def test_the_chi_square_test_has_power():
    tokens = draws(LOGITS.tolist(), 10_000, temperature=1.0)
    assert not chi_square_fits(tokens, reference(LOGITS, temperature=1.08))


@pytest.mark.parametrize("vocab", [1, 2, 5, 127, 128, 129, 640, 4096, 5000])
def test_distribution_equals_the_reference(vocab: int):
    """Random parameters and vocabularies that do and do not divide into blocks; all rows in one batch."""
    random = np.random.default_rng(vocab)
    logits = (random.normal(size=(40, vocab)) * random.choice([0.1, 1, 4, 30], size=(40, 1))).astype(
        np.float32
    )
    every = [
        {
            "temperature": float(random.choice([0, 0.3, 1, 2.5])),
            "top_k": int(random.choice([-1, 1, 2, 7, 50, 10**6])),
            "top_p": float(random.choice([0.05, 0.5, 0.9, 0.99, 1])),
            "min_p": float(random.choice([0, 0, 0.01, 0.3])),
        }
        for _ in logits
    ]
    batch = make_batch([SamplingParams(**params) for params in every], vocab)
    got = distribution(torch.from_numpy(logits), batch, torch.zeros(40, dtype=torch.int64)).numpy()
    want = np.stack([reference(row, **params) for row, params in zip(logits, every)])
    assert np.abs(got - want).max() < 2e-6
    # supports are equal, but for tokens too rare to be drawn, or at a threshold to within rounding
    assert ((got > 0) & (want == 0)).sum() + ((got == 0) & (want > 1e-11)).sum() <= 2


def test_top_p_boundary_token():
    """Case top-p-boundary-token: the token that crosses p is kept."""
    got = probabilities(np.log([0.1, 0.2, 0.3, 0.4]), top_p=0.6)
    assert np.allclose(got, [0, 0, 3 / 7, 4 / 7], atol=1e-6)
    tokens = draws(np.log([0.1, 0.2, 0.3, 0.4]).tolist(), 10_000, top_p=0.6)
    assert chi_square_fits(tokens, np.array([0, 0, 3 / 7, 4 / 7]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [0, 1e-8, 1e-4])
def test_top_p_zero_nan(top_p: float, dtype: torch.dtype):
    """Case top-p-zero-nan: the likeliest token is always kept."""
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=dtype)
    batch = make_batch([SamplingParams(top_p=top_p)], 4)
    assert distribution(logits, batch, torch.tensor([3])).tolist() == [[0, 0, 0, 1]]
    assert all(sample(logits, batch, torch.tensor([p])).item() == 3 for p in range(20))


def test_ties_go_to_the_lowest_id():
    same = np.zeros(256)
    assert np.flatnonzero(probabilities(same, top_k=3)).tolist() == [0, 1, 2]
    assert np.flatnonzero(probabilities(same, top_p=2.5 / 256)).tolist() == [0, 1, 2]
    assert np.flatnonzero(probabilities(same, top_p=0)).tolist() == [0]
    assert np.flatnonzero(probabilities(same, temperature=0)).tolist() == [0]
    assert (probabilities(same, min_p=1.0) == 1 / 256).all()
    some = np.array([1.0, 3, 2, 3, 2, 2])
    assert np.flatnonzero(probabilities(some, top_k=4)).tolist() == [1, 2, 3, 4]
    # with many ties, the whole of a large vocabulary, ranked by blocks or not
    coarse = torch.randint(0, 3, (4, 4096), generator=torch.Generator().manual_seed(1)).float()
    order = torch.sort(coarse, dim=1, stable=True).indices
    for width in (1, 5, 32, 33, 500, 4096):
        assert torch.equal(sampler._ranked(coarse, width), order[:, :width])


def test_argmax_is_torchs_first():
    logits = torch.randint(0, 50, (64, 1024), generator=torch.Generator().manual_seed(2)).float()
    first = torch.from_numpy(logits.numpy().argmax(1))
    assert torch.equal(sampler._argmax(logits), first)
    assert torch.equal(
        sampler._argmax(logits[:, :1000]), torch.from_numpy(logits[:, :1000].numpy().argmax(1))
    )


@pytest.mark.parametrize("vocab", [1, 7, 128, 300])
def test_the_search_finds_every_target(vocab: int):
    """Every integer below the total, against the plain cumulated sum; zeros are never found."""
    weights = torch.randint(0, 3, (vocab,), generator=torch.Generator().manual_seed(vocab))
    weights[0] = 1
    total = int(weights.sum())
    u = (torch.arange(total).double() + 0.5) / total
    tokens, totals = sampler._draw(weights.expand(total, -1), u)
    assert (totals == total).all()
    assert tokens.tolist() == [i for i, weight in enumerate(weights.tolist()) for _ in range(weight)]
    last, _ = sampler._draw(weights.expand(2, -1), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert last.tolist() == [int(weights.nonzero()[0]), int(weights.nonzero()[-1])]


def test_uniform_is_splitmix64_of_seed_and_position():
    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    for seed, position in itertools.product([0, 1, -1, 2**63 - 1, -(2**63), 12345], [0, 1, 131071]):
        batch = make_batch([SamplingParams()], 4, seeds=[seed])
        got = uniform(batch.seed, torch.tensor([position])).item()
        want = (mix((mix(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53
        assert got == want and 0 <= got < 1


def test_uniform_is_uniform_and_uncorrelated():
    count = 100_000
    seeds = make_batch([SamplingParams()] * 1000, 2).seed
    by_seed = uniform(seeds[:, None], torch.arange(100)).numpy()  # (seeds, positions)
    ordered = np.sort(by_seed.ravel())
    assert np.abs(ordered - (np.arange(count) + 0.5) / count).max() < 1.95 / np.sqrt(
        count
    )  # Kolmogorov-Smirnov
    for shifted in (by_seed[1:] * by_seed[:-1], by_seed[:, 1:] * by_seed[:, :-1]):  # neighbours
        assert abs(shifted.mean() - 0.25) < 5 * np.sqrt(7 / 144 / shifted.size)


# -- independence of the rest of the batch ------------------------------------------------------------------


def mixed_batch(
    vocab: int, count: int
) -> tuple[torch.Tensor, list[SamplingParams], np.ndarray, torch.Tensor]:
    random = np.random.default_rng(7)
    logits = torch.from_numpy((random.normal(size=(count, vocab)) * 3).astype(np.float32))
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_k": 5},
        {"top_p": 0.9},
        {"top_k": 300, "top_p": 0.97},
        {"min_p": 0.1, "temperature": 1.7},
        {"top_p": 0.4, "logit_bias": {3: 4.0}},
    ]
    params = [SamplingParams(**kinds[i % len(kinds)]) for i in range(count)]
    return (
        logits,
        params,
        random.integers(-(2**62), 2**62, count),
        torch.from_numpy(random.integers(0, 9999, count)),
    )


@pytest.mark.parametrize("vocab", [4096, 5003])
def test_a_row_does_not_depend_on_its_companions(vocab: int):
    logits, params, seeds, positions = mixed_batch(vocab, 35)

    def run(rows: list[int]) -> tuple[list[int], torch.Tensor]:
        batch = make_batch([params[i] for i in rows], vocab, seeds[rows])
        return sample(logits[rows], batch, positions[rows]).tolist(), distribution(
            logits[rows], batch, positions[rows]
        )

    together, probability = run(list(range(35)))
    for i in range(35):
        tokens, alone = run([i])
        assert tokens == [together[i]] and torch.equal(alone[0], probability[i])
    shuffled = np.random.default_rng(3).permutation(35)[:20].tolist()
    assert run(shuffled)[0] == [together[i] for i in shuffled]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert run(list(range(35)))[0] == together
    finally:
        torch.set_num_threads(threads)


def test_how_many_tokens_top_p_looks_at_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    logits, _, seeds, positions = mixed_batch(4096, 12)
    kinds = [
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_p": 0.99999},
        {"top_k": 600, "top_p": 0.9},
        {"top_k": 3000},
    ]
    params = [SamplingParams(**kinds[i % len(kinds)]) for i in range(12)]
    batch = make_batch(params, 4096, seeds)
    results = []
    for narrow in ((), (1,), (8, 64, 512), (128, 2048)):
        monkeypatch.setattr(sampler, "NARROW", narrow)
        results.append(distribution(logits, batch, positions))
    assert all(torch.equal(result, results[0]) for result in results)


def test_logprobs_do_not_depend_on_companions():
    """Cases greedy-changes-under-concurrency, batch-invariant-not-deterministic: the sampler's part."""
    logits, _, _, tokens = mixed_batch(5003, 44)
    together = output_logprobs(logits, tokens % 5003, 8)
    for i in range(44):
        alone = output_logprobs(logits[i : i + 1], tokens[i : i + 1] % 5003, 3)
        assert alone.chosen[0] == together.chosen[i]
        assert torch.equal(alone.top[0], together.top[i, :3])
        assert torch.equal(alone.top_ids[0], together.top_ids[i, :3])


# -- extremes -----------------------------------------------------------------------------------------------

EXTREME = [
    {"temperature": 1e-300},
    {"temperature": 1e-30},
    {"temperature": 1e300},
    {"temperature": 1e300, "top_k": 2},
    {"temperature": 1e-30, "top_p": 0.5, "min_p": 1},
    {"top_p": 0},
    {"min_p": 1},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 2, "frequency_penalty": 2, "presence_penalty": -2},
    {"logit_bias": {0: 1e9, 3: -1e9}},
    {"temperature": 0},
]
ROWS = [
    [0.0, 0.0, 0.0, 0.0],
    [1e38, -1e38, 3e38, -3e38],
    [-np.inf, 1.0, -np.inf, 0.5],
    [-np.inf, -np.inf, -np.inf, 2.0],
    [3e38, 3e38, 3e38, 3e38],
    [-3e38, -3e38, -3e38, -np.inf],
    [1e-40, 0.0, -0.0, -1e-40],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", EXTREME, ids=str)
def test_never_nan(params: dict[str, Any], dtype: torch.dtype):
    logits = torch.tensor(ROWS, dtype=torch.float64).to(dtype)
    batch = make_batch([SamplingParams(**params)] * len(ROWS), 4)
    penalties = PenaltyState(len(ROWS) + 1, 4)
    for row in range(1, len(ROWS) + 1):
        penalties.reset(row, [0, 1], [2, 2])
    positions = torch.arange(len(ROWS))
    got = distribution(logits, batch, positions, None, penalties)
    assert torch.allclose(got.sum(1), torch.ones(len(ROWS), dtype=torch.float64))
    tokens = sample(logits, batch, positions, None, penalties)
    assert (got.gather(1, tokens[:, None]) > 0).all()
    assert (got[logits == -torch.inf] == 0).all()


def test_a_row_of_nothing_gives_a_valid_token():
    """All -inf (a grammar's bug) or NaN (a model's) must not become an index out of range."""
    for value, params in itertools.product([-torch.inf, torch.nan], FILTERS):
        batch = make_batch([SamplingParams(**params)] * 2, 200)
        tokens = sample(torch.full((2, 200), value), batch, torch.arange(2))
        assert ((tokens >= 0) & (tokens < 200)).all()


def test_inputs_are_not_changed_and_shapes_are_checked():
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = [
        SamplingParams(logit_bias={1: 5}, top_k=4),
        SamplingParams(min_new_tokens=3, temperature=0),
        SamplingParams(top_p=0.5, min_p=0.1, repetition_penalty=1.3),
    ]
    batch = make_batch(params, 64, eos_ids=[2])
    penalties = PenaltyState(4, 64)
    penalties.reset(3, [1, 2, 3])
    mask = torch.full((3, 2), 0x55555555, dtype=torch.int32)
    sample(logits, batch, torch.zeros(3, dtype=torch.int64), mask, penalties)
    assert torch.equal(logits, before)
    with pytest.raises(ValueError, match=r"logits must be \(3, 64\), got \(2, 64\)"):
        sample(logits[:2], batch, torch.zeros(3, dtype=torch.int64), mask, penalties)
    with pytest.raises(ValueError, match=r"grammar_mask must be \(R, 2\) torch.int32, got \(3, 1\)"):
        sample(logits, batch, torch.zeros(3, dtype=torch.int64), mask[:, :1], penalties)
    with pytest.raises(ValueError, match="penalties must be given"):
        sample(logits, batch, torch.zeros(3, dtype=torch.int64), mask)
    with pytest.raises(ValueError, match="vocab_size must be at most"):
        make_batch(params, 1 << 23)


# -- penalties, bias and masks ------------------------------------------------------------------------------


def test_penalties_equal_the_reference():
    vocab, random = 150, np.random.default_rng(4)
    logits = (random.normal(size=(5, vocab)) * 4).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {},
        {"frequency_penalty": 0.7, "presence_penalty": -0.4},
        {"repetition_penalty": 0.5, "frequency_penalty": -2.0},
        {"presence_penalty": 2.0},
    ]
    rows = np.array([4, 2, 5, 1, 3])
    prompts = [random.integers(0, vocab, 40) for _ in rows]
    outputs = [random.integers(0, vocab, 30) for _ in rows]
    penalties = PenaltyState(7, vocab)
    assert not penalties.allocated
    for row, prompt, output in zip(rows, prompts, outputs):
        penalties.reset(int(row), [9, 9, 9], [9])  # an earlier request of the same row leaves nothing behind
        penalties.reset(int(row), prompt, output[:20])
    for step in range(20, 30):
        penalties.add(torch.from_numpy(rows), torch.tensor([output[step] for output in outputs]))

    want = []
    for x, kind, prompt, output in zip(logits.astype(np.float64), kinds, prompts, outputs):
        counts = np.bincount(output, minlength=vocab)
        seen = np.isin(np.arange(vocab), np.concatenate([prompt, output]))
        r = kind.get("repetition_penalty", 1.0)
        x = np.where(seen, np.where(x > 0, x / r, x * r), x)
        x = x - kind.get("frequency_penalty", 0) * counts - kind.get("presence_penalty", 0) * (counts > 0)
        want.append(x)
    batch = make_batch([SamplingParams(**kind) for kind in kinds], vocab, rows=rows)
    got = torch.from_numpy(logits.copy())
    penalties.apply(got, batch.rows, batch)
    assert np.allclose(got.numpy(), np.stack(want), atol=1e-5)
    assert np.array_equal(got[1].numpy(), logits[1])
    tokens = sample(
        torch.from_numpy(logits),
        make_batch([SamplingParams(temperature=0, **kind) for kind in kinds], vocab, rows=rows),
        torch.arange(5),
        None,
        penalties,
    )
    assert tokens.tolist() == np.argmax(want, axis=1).tolist()


def test_penalties_add_counts_repeated_rows():
    penalties = PenaltyState(3, 8)
    penalties.add(torch.tensor([1]), torch.tensor([1]))  # nobody has penalties yet: nothing to count
    penalties.reset(1, [0])
    penalties.add(torch.tensor([1, 1, 2]), torch.tensor([5, 5, 7]))
    assert penalties.counts[1].tolist() == [0, 0, 0, 0, 0, 2, 0, 0]
    assert penalties.counts[2, 7] == 1 and penalties.counts[0].sum() == 0


def test_logit_bias_moves_only_its_row():
    logits = torch.zeros(2, 10)
    batch = make_batch([SamplingParams(logit_bias={3: 2.0, "7": -1e9}), SamplingParams()], 10)
    got = distribution(logits, batch, torch.zeros(2, dtype=torch.int64)).numpy()
    want = np.full(10, 1.0)
    want[3], want[7] = np.exp(2), 0
    assert np.allclose(got[0], want / want.sum(), atol=1e-6) and np.allclose(got[1], 0.1)


def pack(allowed: np.ndarray) -> torch.Tensor:
    """(R, V) bools as the int32 words of xgrammar and llguidance."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("vocab", [31, 32, 100, 1000])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_grammar_mask(vocab: int, as_bytes: bool):
    random = np.random.default_rng(vocab)
    logits = random.normal(size=(6, vocab)).astype(np.float32)
    allowed = random.random((6, vocab)) < 0.2
    allowed[:, 3] = True
    allowed[5] = True  # a row without a grammar
    mask = pack(allowed)
    if as_bytes:
        mask = mask.view(torch.uint8)[:, : -(-vocab // 8)]
    params = [
        SamplingParams(**kind) for kind in ({}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0}, {}, {})
    ]
    got = distribution(
        torch.from_numpy(logits), make_batch(params, vocab), torch.zeros(6, dtype=torch.int64), mask
    )
    assert (got.numpy()[~allowed] == 0).all()
    masked = np.where(allowed, logits, -np.inf)
    for row, p, params_of in zip(masked, got.numpy(), params):
        want = reference(row, params_of.temperature, params_of.top_k, params_of.top_p)
        assert np.allclose(p, want, atol=1e-6)


def test_min_new_tokens_holds_stop_tokens_back():
    logits = torch.zeros(4, 10)
    logits[:, 2] = 9  # eos
    logits[:, 5] = 8  # a stop token of some requests
    params = [
        SamplingParams(min_new_tokens=3, temperature=0),
        SamplingParams(min_new_tokens=3, temperature=0, stop_token_ids=[5]),
        SamplingParams(min_new_tokens=3, temperature=0, stop_token_ids=[5], ignore_eos=True),
        SamplingParams(temperature=0, stop_token_ids=[5]),
    ]
    batch = make_batch(params, 10, prompt_lens=[7, 7, 7, 7], eos_ids=[2])
    held = sample(logits, batch, torch.tensor([7, 8, 9, 7]))
    assert held.tolist() == [5, 0, 2, 2]
    assert sample(logits, batch, torch.tensor([10, 10, 10, 10])).tolist() == [2, 2, 2, 2]


def test_a_grammar_that_can_only_stop_wins_over_min_new_tokens():
    logits = torch.zeros(2, 32)
    batch = make_batch([SamplingParams(min_new_tokens=3)] * 2, 32, eos_ids=[2])
    only_stop = np.zeros((2, 32), bool)
    only_stop[:, 2] = True
    only_stop[1, 9] = True
    got = distribution(logits, batch, torch.zeros(2, dtype=torch.int64), pack(only_stop))
    assert got[0, 2] == 1 and got[1, 9] == 1


def test_flags_follow_the_parameters():
    plain = make_batch([SamplingParams(), SamplingParams(temperature=0, top_p=0.5, min_p=0.5)], 10)
    assert plain.plain and not plain.all_greedy and not plain.any_min_p and len(plain.filtered) == 0
    assert make_batch([SamplingParams(temperature=0), SamplingParams(top_k=1)], 10).all_greedy
    batch = make_batch(
        [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(top_k=99)], 10
    )
    assert batch.filtered.tolist() == [1, 2] and batch.max_top_k == 10
    assert not make_batch([SamplingParams(repetition_penalty=1.1)], 10).plain
    assert not make_batch([SamplingParams(logit_bias={1: 1})], 10).plain
    assert not make_batch([SamplingParams(min_new_tokens=1)], 10, eos_ids=[1]).plain


# -- log-probabilities --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 1000, 4096])
@pytest.mark.parametrize("scale", [0.01, 3, 40])
def test_logprobs_equal_log_softmax(vocab: int, scale: float):
    logits = torch.randn(50, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    tokens = torch.randint(0, vocab, (50,), generator=torch.Generator().manual_seed(1))
    want = logits.double().log_softmax(1)
    got = output_logprobs(logits, tokens, [0, 2, 5] + [1] * 47)
    assert torch.allclose(got.chosen.double(), want.gather(1, tokens[:, None])[:, 0], rtol=3e-7, atol=1e-6)
    values, ids = want.topk(min(5, vocab), 1)
    assert torch.equal(got.top_ids, ids) and torch.allclose(got.top.double(), values, rtol=3e-7, atol=1e-6)
    lists = got.to_lists([0, 2, 5] + [1] * 47)
    assert [len(top) for _, top in lists[:4]] == [0, 2, min(5, vocab), 1]
    assert lists[1][1] == list(zip(got.top[1, :2].tolist(), got.top_ids[1, :2].tolist()))
    assert lists[7][0] == got.chosen[7].item()


def test_logprobs_are_finite_or_minus_infinity():
    logits = torch.tensor(ROWS, dtype=torch.float64).float()
    for token in range(4):
        got = output_logprobs(logits, torch.full((len(ROWS),), token), 4)
        assert not got.chosen.isnan().any() and not got.top.isnan().any()
        assert (got.chosen <= 0).all()
    assert output_logprobs(logits[3:4], torch.tensor([0])).chosen.tolist() == [-torch.inf]
    assert output_logprobs(torch.full((1, 4), -torch.inf), torch.tensor([0]), 2).chosen.tolist() == [
        -torch.inf
    ]


def test_logprobs_take_bf16():
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = logits.float().log_softmax(1)[:, 7]
    assert torch.allclose(output_logprobs(logits, torch.full((4,), 7)).chosen, want, atol=1e-6)


def test_prompt_logprobs_in_chunks_of_bounded_size():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(100, 8, generator=generator), torch.randn(8, 500, generator=generator)
    tokens = torch.randint(0, 500, (100,), generator=generator)
    sizes = []

    def to_logits(states: torch.Tensor) -> torch.Tensor:
        sizes.append(len(states))
        return states @ head

    want = (hidden @ head).log_softmax(1)
    got = prompt_logprobs(hidden, tokens, to_logits, 500, 3, max_bytes=500 * 32 * 7)
    assert max(sizes) == 7 and sum(sizes) == 100
    assert torch.allclose(got.chosen, want.gather(1, tokens[:, None])[:, 0], atol=2e-5)
    assert torch.equal(got.top_ids, want.topk(3, 1).indices)
    empty = prompt_logprobs(hidden[:0], tokens[:0], to_logits, 500, 3)
    assert empty.to_lists([]) == [] and empty.top.shape == (0, 3)


# -- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_rows_are_independent_equal_the_cpus_and_never_wait():
    vocab, count = 32000, 64
    logits, params, seeds, positions = mixed_batch(vocab, count)
    cpu = sample(logits, make_batch(params, vocab, seeds), positions)
    on_gpu, at = logits.cuda(), positions.cuda()
    mask = torch.full((count, vocab // 32), -1, dtype=torch.int32, device="cuda")
    batch = make_batch(params, vocab, seeds, device="cuda")
    penalties = PenaltyState(count + 1, vocab, "cuda")
    penalties.reset(1, [0, 1], [2])
    sample(on_gpu, batch, at, mask, penalties)  # the first call makes the mask's table
    torch.cuda.set_sync_debug_mode("error")
    try:
        together = sample(on_gpu, batch, at, mask, penalties)
        penalties.add(batch.rows, together)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (together.cpu() == cpu).sum() >= count - 1  # exp may differ in the last bit, the rest may not
    logprobs = output_logprobs(on_gpu, together, 5)
    for i in range(count):
        alone = make_batch([params[i]], vocab, seeds[i : i + 1], device="cuda")
        assert torch.equal(sample(on_gpu[i : i + 1], alone, at[i : i + 1]), together[i : i + 1])
        assert output_logprobs(on_gpu[i : i + 1], together[i : i + 1]).chosen[0] == logprobs.chosen[i]
