"""Public models' shapes without their weights: `--model llama-8b --load-format dummy`.

Speed depends on sizes, not on values, so engines are compared on a config.json alone and random weights:

    llama-8b           Llama 3.1 8B
    llama-1b           Llama 3.2 1B
    llama-1b-smoltok   the same with SmolLM2's vocabulary and tokenizer, for workloads that need text
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from .workloads import BenchError

_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "head_dim": 128, "intermediate_size": 14336}
_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64, "intermediate_size": 8192}
_LLAMA3_IDS = {"vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": 128001}
_SMOLLM2_IDS = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA3 | _8B | _LLAMA3_IDS | {"tie_word_embeddings": False},
    "llama-1b": _LLAMA3 | _1B | _LLAMA3_IDS | {"tie_word_embeddings": True},
    "llama-1b-smoltok": _LLAMA3 | _1B | _SMOLLM2_IDS | {"tie_word_embeddings": True},
}
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


def shape_folder(name: str, into: Path, tokenizer: Path | None = None) -> Path:
    """Write the shape's config.json (and a tokenizer's files) to `into`/`name` and return that folder.

    tokenizer: a folder with tokenizer files; None: none, or the default model's for llama-1b-smoltok.
    Raises BenchError for a folder without any.
    """
    folder = into / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    if tokenizer is None and name.endswith("-smoltok"):
        from ..default_model import default_model_folder

        tokenizer = default_model_folder()
    if tokenizer is not None:
        files = [tokenizer / file for file in _TOKENIZER_FILES if (tokenizer / file).exists()]
        if not any(file.name in ("tokenizer.json", "tokenizer.model") for file in files):
            raise BenchError(f"--tokenizer: {tokenizer} has neither tokenizer.json nor tokenizer.model")
        for file in files:
            shutil.copy(file, folder / file.name)
    return folder
