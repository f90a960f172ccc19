"""Logits equal to transformers', in float32, for every architecture: in one prefill, in chunks, token by
token, and with several sequences in one batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl import ops
from minisgl.attention import ForwardBatch, HostBatch, ReferenceAttention
from minisgl.config import LlamaConfig, ModelError
from minisgl.loader import LoadedModel, load_model
from minisgl.model_llama import Llama
from minisgl.pool import KVPool
from minisgl.rope import RotaryTable

from . import tiny_models

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*past_key_values:FutureWarning"
)  # new name in transformers 5.24

TOLERANCE = 1e-4
CONTEXT = 128


class Sequences:
    """Some sequences in one KV pool; `step` computes the given new tokens of each and returns their
    logits."""

    def __init__(self, loaded: LoadedModel, count: int, context: int = CONTEXT):
        c = loaded.config
        self.model = loaded.model
        pool = KVPool(
            c.num_layers, count * context, c.num_kv_heads, c.head_dim, loaded.model.dtype, loaded.model.device
        )
        self.attn = ReferenceAttention(pool, c.num_heads, c.num_kv_heads, c.head_dim)
        slots = np.random.default_rng(0).permutation(count * context) + 1  # scattered, as after much eviction
        self.table = np.zeros((count + 1, context), np.int32)
        self.table[1:] = slots.reshape(count, context)
        self.lengths = np.zeros(count, np.int64)

    def step(self, new: dict[int, list[int]]) -> list[torch.Tensor]:
        """new: sequence -> token ids.  Returns the logits (tokens, vocab) of each, in the order of `new`."""
        counts = [len(ids) for ids in new.values()]
        index = np.array(list(new))
        start, end = self.lengths[index], self.lengths[index] + counts
        self.lengths[index] = end
        positions = np.concatenate([np.arange(a, b) for a, b in zip(start, end)])
        rows = np.repeat(index + 1, counts)
        host = HostBatch(np.cumsum([0, *counts]), end, index + 1)
        batch = ForwardBatch(
            input_ids=torch.tensor([token for ids in new.values() for token in ids]),
            positions=torch.from_numpy(positions),
            out_slots=torch.from_numpy(self.table[rows, positions].astype(np.int64)),
            q_start=torch.from_numpy(host.q_start.astype(np.int32)),
            seq_lens=torch.from_numpy(end.astype(np.int32)),
            rows=torch.from_numpy((index + 1).astype(np.int32)),
            table=torch.from_numpy(self.table),
            num_decodes=next((i for i, n in enumerate(counts) if n > 1), len(counts)),
            max_seq_len=int(end.max()),
            max_new=max(counts),
            logit_rows=torch.arange(len(positions)),
            host=host,
        )
        with torch.inference_mode():
            self.attn.begin(batch)
            hidden = self.model.forward(batch, self.attn)
            return list(self.model.logits(hidden).split(counts))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def hf_model(folder: Path, dtype: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def hf_logits(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def hf_step_by_step(model, ids: list[int], prefill: int) -> torch.Tensor:
    """Logits of a prefill and of each later token alone, as `generate` computes them."""
    with torch.inference_mode():
        out = model(torch.tensor([ids[:prefill]]), use_cache=True)
        logits = [out.logits[0]]
        for token in ids[prefill:]:
            out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0])
    return torch.cat(logits)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.dtype == torch.float32 and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module", params=list(tiny_models.MODELS))
def tiny(request, tmp_path_factory):
    """(minisgl model, transformers model) of the same folder."""
    folder = tiny_models.make(request.param, tmp_path_factory.mktemp(request.param))
    return load_model(folder, dtype=torch.float32), hf_model(folder)


def test_prefill_equals_transformers(tiny):
    loaded, hf = tiny
    ids = prompt(45)  # within what llama_dynamic was "trained" on
    (logits,) = Sequences(loaded, 1).step({0: ids})
    expected = hf_logits(hf, ids)
    assert expected.std() > 0.5  # the comparison is of something
    close(logits, expected)


def test_decode_equals_transformers(tiny):
    """A prefill, then one token at a time; llama_dynamic leaves its trained length on the way."""
    loaded, hf = tiny
    ids, prefill = prompt(70, seed=1), 40
    sequences = Sequences(loaded, 1)
    logits = sequences.step({0: ids[:prefill]})
    logits += [sequences.step({0: [token]})[0] for token in ids[prefill:]]
    close(torch.cat(logits), hf_step_by_step(hf, ids, prefill))


def test_chunks_and_companions_change_nothing(tiny):
    """Three sequences of different lengths, in uneven chunks, decodes and prefills mixed in one batch."""
    loaded, _ = tiny
    ids = [prompt(n, seed=n) for n in (33, 70, 101)]  # the last two beyond llama_dynamic's trained length
    alone = [Sequences(loaded, 1).step({0: one})[0] for one in ids]
    sequences = Sequences(loaded, 3)
    parts: list[list[torch.Tensor]] = [[], [], []]
    for new in (
        {0: ids[0][:32]},
        {0: ids[0][32:], 1: ids[1][:69]},
        {1: ids[1][69:], 2: ids[2][:7]},
        {2: ids[2][7:]},
    ):
        for sequence, logits in zip(new, sequences.step(new)):
            parts[sequence].append(logits)
    for part, expected in zip(parts, alone):
        close(torch.cat(part), expected)


def test_bfloat16_follows_transformers(tmp_path):
    """Same order of roundings: bf16 logits differ from transformers' by less than bf16 itself costs."""
    folder = tiny_models.make("llama3", tmp_path)
    ids = prompt(45)
    (logits,) = Sequences(load_model(folder, dtype="bfloat16"), 1).step({0: ids})
    theirs, exact = hf_logits(hf_model(folder, torch.bfloat16), ids).float(), hf_logits(hf_model(folder), ids)
    assert (logits - theirs).abs().mean() < (theirs - exact).abs().mean()


def test_long_prompt_grows_the_rotary_table(tmp_path):
    """Positions past what the table was first made for."""
    folder = tiny_models.make("smollm2", tmp_path)
    loaded = load_model(folder, dtype=torch.float32)
    ids = prompt(900, seed=3)  # max_position_embeddings is 512
    (logits,) = Sequences(loaded, 1, context=1024).step({0: ids})
    # Both are up to 3e-4 away from a float64 computation here, on logits up to 34.
    close(logits, hf_logits(hf_model(folder), ids), tolerance=5e-4)


def test_default_model_equals_transformers():
    from transformers import AutoTokenizer

    loaded = load_model(dtype=torch.float32)
    assert loaded.folder is not None and loaded.eos_token_ids == {2}
    tokenizer = AutoTokenizer.from_pretrained(loaded.folder)
    ids = tokenizer.encode("Water boils at 100 degrees. The capital of France is")
    sequences = Sequences(loaded, 1)
    logits = torch.cat(sequences.step({0: ids[:5]}) + sequences.step({0: ids[5:]}))
    close(logits, hf_logits(hf_model(loaded.folder), ids))
    assert tokenizer.decode(logits[-1].argmax()) == " Paris"


# ---------------------------------------------------------------------- RoPE, one type at a time


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 16.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotary_table_equals_transformers(scaling, head_dim):
    from transformers import LlamaConfig as HFConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    keys = {
        "hidden_size": 4 * head_dim,
        "num_attention_heads": 4,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "rope_theta": 50000.0,
    }
    rotary = LlamaRotaryEmbedding(HFConfig(**keys, rope_scaling=dict(scaling)))
    cos, sin = rotary(torch.zeros(1), torch.arange(6000)[None])
    sizes = {"model_type": "llama", "vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    for spelled in (
        {"rope_theta": 50000.0, "rope_scaling": scaling},
        {"rope_parameters": scaling | {"rope_theta": 50000.0}},
    ):
        ours = LlamaConfig.from_hf(sizes | keys | spelled)
        table = RotaryTable(ours, "cpu").rows(6000)[:6000]
        expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
        torch.testing.assert_close(table, expected, rtol=0, atol=2e-4)


def test_rotary_table_grows_and_keeps_its_rows():
    config = LlamaConfig(8, 8, 8, 1, 1, 1, 64, max_position_embeddings=10_000)
    table = RotaryTable(config, "cpu")
    short = table.rows(1)
    assert len(short) == 4096
    assert len(table.rows(4097)) == 8192  # doubles
    assert len(table.rows(8193)) == 10_000  # but not past the context
    assert len(table.rows(12_345)) == 12_345  # unless a sequence is longer than that
    assert torch.equal(table.rows(1)[:4096], short)


# ---------------------------------------------------------------------- small ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_ops_equal_their_formulas(dtype):
    generator = torch.Generator().manual_seed(0)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    x, residual, weight = random(5, 48), random(5, 48), random(48)
    total = (x + residual).float()
    norm = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.float()
    normed, added = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    torch.testing.assert_close(normed.float(), norm, **tolerance)
    torch.testing.assert_close(added, x + residual)

    gate, up = x.float().chunk(2, dim=-1)
    torch.testing.assert_close(ops.silu_mul(x).float(), gate * gate.sigmoid() * up, **tolerance)

    config = LlamaConfig(8, 8, 8, 1, 1, 1, 16, max_position_embeddings=64)
    positions = torch.tensor([0, 7, 63, 3, 3])
    q = random(5, 3, 16)
    turned = ops.apply_rope(q, ops.rope_rows(RotaryTable(config, "cpu").rows(64), positions, dtype))
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    points = (
        torch.complex(q[..., :8].float(), q[..., 8:].float()) * torch.polar(torch.ones(5, 8), angles)[:, None]
    )
    torch.testing.assert_close(turned.float(), torch.cat((points.real, points.imag), -1), **tolerance)


# ---------------------------------------------------------------------- weights


def tiny_config(**changes) -> LlamaConfig:
    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1)
    return LlamaConfig(**(sizes | {"head_dim": 4, "max_position_embeddings": 16} | changes))


def checkpoint(model: Llama) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, (_, shape) in model._destinations().items()}


def test_load_names_missing_left_over_and_misshapen_tensors():
    model = Llama(tiny_config(), torch.float32, "cpu")
    weights = checkpoint(model)
    model.load(weights.items())

    without = {name: w for name, w in weights.items() if "k_proj" not in name}
    with pytest.raises(ModelError, match=r"lacks model\.layers\.0\.self_attn\.k_proj\.weight$"):
        model.load(without.items())
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.0\.self_attn\.k_proj\.bias$"):
        model.load((weights | {"model.layers.0.self_attn.k_proj.bias": torch.zeros(4)}).items())
    with pytest.raises(
        ModelError, match=r"lm_head\.weight has shape \(16, 9\), the config asks for \(16, 8\)"
    ):
        model.load((weights | {"lm_head.weight": torch.zeros(16, 9)}).items())


def test_load_tolerates_what_old_exporters_wrote():
    model = Llama(tiny_config(tie_word_embeddings=True), torch.float32, "cpu")
    extra = {
        "lm_head.weight": torch.ones(16, 8),  # a copy of the tied embedding
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    model.load((checkpoint(model) | extra).items())
    assert not model.lm_head.any()


def test_dummy_weights_are_seeded_and_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    models = [Llama(tiny_config(qk_norm=True, qkv_bias=True), torch.float32, "cpu") for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1)):
        model.init_dummy(seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    same, again, other = (torch.cat([t.flatten() for t in model.tensors()]) for model in models)
    assert torch.equal(same, again) and not torch.equal(same, other)
    assert same.isfinite().all() and "0M parameters" in repr(models[0])


# ---------------------------------------------------------------------- config


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def test_old_config_gets_the_defaults_of_transformers():
    config = LlamaConfig.from_hf(BASE)  # as the first Llama configs were, and fewer keys still
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (32, 128, 2048)
    assert (config.rms_norm_eps, config.rope.theta, config.rope.type) == (1e-6, 10000.0, "default")
    assert not config.tie_word_embeddings and config.windows == (0,) * 32
    mistral = LlamaConfig.from_hf(BASE | {"architectures": ["MistralForCausalLM"]})
    assert mistral.windows == (4096,) * 32 and mistral.num_kv_heads == 8
    no_window = LlamaConfig.from_hf(BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": None})
    assert no_window.windows == (0,) * 32
    qwen3 = LlamaConfig.from_hf(BASE | {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048})
    assert qwen3.head_dim == 128 and qwen3.qk_norm


@pytest.mark.parametrize(
    "scaling, context",
    [
        (None, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_context_length(scaling, context):
    keys = {"max_position_embeddings": 4096, "rope_scaling": scaling}
    assert LlamaConfig.from_hf(BASE | keys).context_length == context


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture 'GPT2LMHeadModel' isn't supported, only Llama",
        ),
        ({"architectures": None, "model_type": "mamba"}, "architecture 'mamba' isn't supported"),
        ({"architectures": ["MixtralForCausalLM"]}, "architecture 'MixtralForCausalLM' isn't supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        (
            {"num_key_value_heads": 5},
            r"num_attention_heads \(32\) is not a multiple of num_key_value_heads \(5\)",
        ),
        ({"head_dim": 63}, r"head_dim \(63\) must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' isn't supported"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised checkpoints.*'awq'"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "RoPE type 'longrope' isn't supported, only default, linear",
        ),
        ({"rope_scaling": {"type": "linear"}}, "RoPE type 'linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a positive number, got '2'"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters that differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types must list 32 layers",
        ),
    ],
)
def test_config_errors_name_the_cause(changes, message):
    with pytest.raises(ModelError, match=message) as error:
        LlamaConfig.from_hf(BASE | changes)
    assert "\n" not in str(error.value)


def test_config_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, minisgl.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config_of_every_tiny_model_reads_the_same_in_both_spellings(tmp_path):
    """config.json of transformers 5 and its transformers 4 spelling mean the same model."""
    for name in ("llama3", "llama_yarn", "qwen3_window"):
        folder = tiny_models.make(name, tmp_path / name)
        _, keys, _ = tiny_models.MODELS[name]
        config = json.loads((folder / "config.json").read_text())
        scaling = keys.get("rope_scaling") or {"rope_type": "default"}
        theta = keys.get("rope_theta", 10000.0)
        bare = {k: v for k, v in config.items() if not k.startswith("rope_")}
        old = LlamaConfig.from_hf(bare | {"rope_theta": theta, "rope_scaling": scaling})
        new = LlamaConfig.from_hf(bare | {"rope_parameters": scaling | {"rope_theta": theta}})
        assert old == new == LlamaConfig.from_hf(config)
