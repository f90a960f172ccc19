"""Greedy float32 output equals Hugging Face `generate`; see `parity` for the full run."""

from __future__ import annotations

import pytest

from . import parity, tiny_models

SWITCHES = list(parity.combinations((None, 70), chunks=(16, 256, -1)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """folder -> its reference, made once for each architecture."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tiny_models.make(name, tmp_path_factory.mktemp(name))
            prompts = parity.make_prompts(8, 40, 250)
            made[name] = folder, parity.hf_reference(folder, prompts, 24)
        return made[name]

    return get


@pytest.mark.parametrize("name", list(tiny_models.MODELS))
def test_every_architecture(tiny, name):
    folder, reference = tiny(name)
    assert parity.run(folder, reference, 24, {"chunk_size": 16})[0] == 0
    assert parity.run(folder, reference, 24, {"chunk_size": -1, "radix_cache": False, "overlap": True})[0] == 0


def test_every_combination_of_switches(tiny):
    """On one tiny model, all 120, a pool of 70 tokens (with eviction and retraction) among them."""
    folder, _ = tiny("llama3")
    reference = parity.hf_reference(folder, parity.make_prompts(5, 40, 250), 20)
    retractions = sum(parity.run(folder, reference, 20, options)[1]["retractions"] for options in SWITCHES)
    assert retractions > 0


# every value of every switch, and every pair of (cache, overlap, chunk size)
DEFAULT_MODEL = [
    dict(zip(("kv_capacity", "radix_cache", "overlap", "chunk_size", "schedule_policy"), row))
    for row in [
        (None, True, False, 256, "lpm"),
        (None, True, True, 16, "fcfs"),
        (260, True, True, -1, "dfs-weight"),
        (260, False, False, 16, "lof"),
        (None, False, True, 256, "random"),
        (260, True, False, 16, "random"),
    ]
]


@pytest.fixture(scope="module")
def default_reference(default_model_folder):
    prompts = parity.make_prompts(8, 200, 49152)
    return default_model_folder, parity.hf_reference(default_model_folder, prompts, 16)


@pytest.mark.parametrize("options", DEFAULT_MODEL, ids=lambda o: "-".join(map(str, o.values())))
def test_default_model(default_reference, options):
    folder, reference = default_reference
    assert parity.run(folder, reference, 16, options)[0] == 0


@pytest.mark.gpu
def test_default_model_on_a_gpu(default_model_folder):
    prompts = parity.make_prompts(16, 600, 49152)
    reference = parity.hf_reference(default_model_folder, prompts, 48, "cuda")
    for options in DEFAULT_MODEL[:3]:
        options = options | {"kv_capacity": 2000 if options["kv_capacity"] else None}
        parity.run(default_model_folder, reference, 48, options, "cuda")
