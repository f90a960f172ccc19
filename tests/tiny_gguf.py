"""Writes a tiny Hugging Face folder as a GGUF file, the way llama.cpp's converter does: the inverse of
`gguf_file`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.gguf_file import _TENSORS


def write(
    folder: Path, path: Path, *, quantise: str = "F32", metadata: dict[str, Any] | None = None, drop: str = ""
) -> Path:
    """`quantise`: type of the matrices ("F32", "F16", "Q8_0", "Q4_1"); `metadata` overrides keys, None
    removes one; `drop`: the name of a tensor to leave out."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize
    from safetensors.torch import load_file

    hf = json.loads((folder / "config.json").read_text())
    arch = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}[
        hf["architectures"][0]
    ]
    writer = GGUFWriter(str(path), arch)
    for key, value in (_metadata(folder, hf, arch) | (metadata or {})).items():
        if value is None:
            continue
        add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
        getattr(writer, f"add_{add}")(key, value)
    names = {f"{b}.{kind}": f"{a}.{kind}" for a, b in _TENSORS.items() for kind in ("weight", "bias")}
    for name, tensor in load_file(folder / "model.safetensors").items():
        array = tensor.float().numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            gguf_name = f"blk.{layer}.{names[rest]}"
        else:
            gguf_name = names[name]
        if arch == "llama" and ".attn_q." in gguf_name:
            array = _pairs_from_halves(array, hf["num_attention_heads"])
        elif arch == "llama" and ".attn_k." in gguf_name:
            array = _pairs_from_halves(array, hf["num_key_value_heads"])
        kind = GGMLQuantizationType[quantise if array.ndim == 2 else "F32"]
        if gguf_name != drop:
            writer.add_tensor(gguf_name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pairs_from_halves(array: np.ndarray, heads: int) -> np.ndarray:
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _metadata(folder: Path, hf: dict[str, Any], arch: str) -> dict[str, Any]:
    theta = hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"]
    vocab = json.loads((folder / "tokenizer.json").read_text())
    tokens = {i: token for token, i in vocab["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in vocab["added_tokens"]}
    ids = range(hf["vocab_size"])
    tokens[ids[-1]] = "he"  # so that there is one merge
    return {
        f"{arch}.block_count": hf["num_hidden_layers"],
        f"{arch}.context_length": hf["max_position_embeddings"],
        f"{arch}.embedding_length": hf["hidden_size"],
        f"{arch}.feed_forward_length": hf["intermediate_size"],
        f"{arch}.attention.head_count": hf["num_attention_heads"],
        f"{arch}.attention.head_count_kv": hf["num_key_value_heads"],
        f"{arch}.attention.key_length": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        f"{arch}.rope.freq_base": float(theta),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [special.get(i) or tokens.get(i) or f"[unused{i}]" for i in ids],
        "tokenizer.ggml.token_type": [3 if i in special else 1 if i in tokens else 5 for i in ids],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.eot_token_id": 258,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
