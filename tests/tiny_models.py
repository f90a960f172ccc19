"""Tiny random checkpoints of every supported architecture, made on the fly with transformers.

`make(name, folder)` writes config.json, model.safetensors, generation_config.json and a byte-level tokenizer,
so that the same folder loads in minisgl and in transformers.  Weights are drawn wide enough that attention is
far from uniform, norms are not one and biases not zero: a swapped or forgotten tensor shows.

    name              what it exercises
    llama2            multi-head attention, RoPE default, head_dim 64
    llama3            GQA, RoPE llama3, head_dim 128, several eos ids
    llama_linear      RoPE linear in the transformers 4 spelling, attention and MLP biases, head_dim 96
    llama_dynamic     RoPE dynamic (NTK): a context beyond max_position_embeddings
    llama_yarn        RoPE yarn in the transformers 4 spelling, head_dim 80
    mistral           sliding window in every layer
    smollm2           9 query and 3 KV heads, tied embeddings
    qwen2             q, k, v biases, tied embeddings
    qwen2_window      sliding window in the upper layers only (`max_window_layers`), RoPE yarn
    qwen3             q/k norm, explicit head_dim that is not hidden / heads
    qwen3_window      `layer_types`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320  # 256 bytes, the special tokens, and ids that no text has
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")  # ids 256, 257, ...
BOS, EOS = 256, 257
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


def _heads(query: int, kv: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": head_dim, **more}


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# name -> (transformers class, config keys in the transformers 4 spelling, keep that spelling in config.json?)
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama2": ("Llama", _heads(2, 2, 64), True),
    "llama3": ("Llama", _heads(4, 2, 128, rope_theta=500000.0, rope_scaling=_LLAMA3), False),
    "llama_linear": (
        "Llama",
        _heads(4, 1, 96, attention_bias=True, mlp_bias=True, rope_scaling={"type": "linear", "factor": 2.0}),
        True,
    ),
    "llama_dynamic": (
        "Llama",
        _heads(4, 2, 64, max_position_embeddings=48, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
        False,
    ),
    "llama_yarn": ("Llama", _heads(4, 2, 80, rope_scaling=_YARN), True),
    "mistral": ("Mistral", _heads(4, 2, 64, sliding_window=24), False),
    "smollm2": ("Llama", _heads(9, 3, 64, hidden_size=576, tie_word_embeddings=True), False),
    "qwen2": ("Qwen2", _heads(2, 1, 64, tie_word_embeddings=True, rope_theta=1000000.0), True),
    "qwen2_window": (
        "Qwen2",
        _heads(2, 2, 64, use_sliding_window=True, sliding_window=16, max_window_layers=1, rope_scaling=_YARN),
        False,
    ),
    "qwen3": ("Qwen3", _heads(4, 2, 128), False),
    "qwen3_window": (
        "Qwen3",
        _heads(
            4,
            4,
            64,
            use_sliding_window=True,
            sliding_window=16,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        True,
    ),
}


def make(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the tiny model `name` to `folder` (created) and return it."""
    import torch
    import transformers

    kind, keys, old_spelling = MODELS[name]
    if kind == "Qwen2":  # has no head_dim key: it is hidden_size / heads
        keys = {key: value for key, value in keys.items() if key != "head_dim"}
    wanted = _COMMON | keys
    if name == "llama3":
        wanted["eos_token_id"] = [EOS, EOS + 1]
    # A copy: transformers adds keys of its own to the RoPE dict.
    config = getattr(transformers, f"{kind}Config")(**json.loads(json.dumps(wanted)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        _randomise(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if old_spelling:
        _spell_as_transformers_4(folder / "config.json", wanted)
    write_tokenizer(folder)
    return folder


def _randomise(model) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias") or "embed" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 2.0 / parameter.shape[1] ** 0.5)


def _spell_as_transformers_4(path: Path, wanted: dict[str, Any]) -> None:
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    config |= {"rope_theta": wanted["rope_theta"], "rope_scaling": wanted.get("rope_scaling")}
    config["torch_dtype"] = config.pop("dtype", None) or config.get("torch_dtype")
    path.write_text(json.dumps(config))


def write_tokenizer(folder: Path) -> None:
    """One token per byte, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
