"""Hostile model files: tiny real ones, changed at random or by rule, and headers that lie.

What must hold: loading gives a model, or one line of ModelError; it ends soon, and takes memory in proportion to the
file, whatever counts, lengths, offsets and shapes are in it.
"""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

from minisgl.config import ModelError
from minisgl.loader import load_model
from minisgl.tokenizer import Tokenizer

from . import tiny_gguf, tiny_models
from .fuzz import Cpu, Target, one_line

SECONDS = 4.0  # for a file of a few hundred kilobytes
_NUMBERS = st.sampled_from([0, 1, 2, 3, 5, 7, 9, 31, 64, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40,
    2**62, 2**63, 2**64 - 1])


_KEPT = tempfile.TemporaryDirectory(prefix="minisgl-fuzz-")


@cache
def originals() -> Path:
    """A folder with a tiny model of each format, as small as they come."""
    folder = Path(_KEPT.name)
    model = tiny_models.make("llama2", folder / "model")
    tiny_gguf.write(model, folder / "model.gguf")
    return folder


def _edit(data: bytes, edits: list[tuple[int, int, Any]], header: int) -> bytes:
    """`data` with some of its first `header` bytes changed: (where, how, with what)."""
    changed = bytearray(data)
    for where, how, what in edits:
        at = where % max(min(header, len(changed)), 1)
        if how == 0:
            changed[at : at + 8] = struct.pack("<Q", what)
        elif how == 1:
            changed[at : at + 4] = struct.pack("<I", what & 0xFFFFFFFF)
        elif how == 2:
            changed[at : at + 1] = bytes([what & 255])
        elif how == 3:
            del changed[at : at + 1 + what % 64]
        elif how == 4:
            changed[at:at] = bytes(what % 64)
        elif how == 5:
            del changed[(where * 7919) % max(len(changed), 1) :]  # cut off, anywhere
    return bytes(changed)


_EDITS = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 5), _NUMBERS), min_size=1, max_size=4)


def _load(place: Path) -> str:
    try:
        with Cpu(SECONDS):
            loaded = load_model(str(place), dtype="float32")
            if loaded.folder is not None:
                try:
                    Tokenizer(loaded.folder)
                except ValueError as error:
                    one_line(error)
    except ModelError as error:
        one_line(error)
        return "refused"
    return "loaded"


# ---- GGUF

_INTERESTING = (b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count",
    b"tokenizer.ggml.tokens",
                b"tokenizer.ggml.token_type", b"tokenizer.ggml.merges", b"general.architecture", b"token_embd.weight",
                    b"blk.0.attn_q.weight",
                b"tokenizer.ggml.bos_token_id", b"llama.rope.freq_base", b"llama.context_length",
                    b"llama.attention.head_count_kv",
                b"tokenizer.chat_template", b"llama.attention.key_length", b"llama.feed_forward_length")  # fmt: skip


@st.composite
def _ggufs(draw) -> bytes:
    """Changed anywhere in the header, or right behind a name that matters (its type, length, value, shape, offset)."""
    data = (originals() / "model.gguf").read_bytes()
    edits = draw(_EDITS)
    if draw(st.booleans()):
        name = draw(st.sampled_from(_INTERESTING))
        at = data.find(name)
        edits = [(at + len(name) + draw(st.sampled_from([0, 4, 8, 12, 16, 20, 24])), draw(st.sampled_from([0, 1, 2])),
            draw(_NUMBERS)), *edits[:1]]
        if draw(st.booleans()):
            edits = edits[:1]
    return _edit(data, edits, 24_000)


def check_gguf(data: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, MINISGL_CACHE=folder):
        path = Path(folder) / "model.gguf"
        path.write_bytes(data)
        return _load(path)


# ---- safetensors

_DTYPES = st.sampled_from(["F32", "F16", "BF16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "C64", "X", "", "f32", 7])


def _shards(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


@st.composite
def _safetensors(draw) -> bytes:
    data = (originals() / "model" / "model.safetensors").read_bytes()
    if draw(st.integers(0, 5)) == 0:  # any change to a file but of its weights, and next to any edit, ruins it
        header, body = _shards(data)
        text = json.dumps(header | {"__metadata__": draw(st.dictionaries(st.text(max_size=4), st.text(max_size=4)))})
        return struct.pack("<Q", len(text)) + text.encode() + body
    if draw(st.booleans()):
        return _edit(data, draw(_EDITS), draw(st.sampled_from([8, 200, 4000])))
    header, body = _shards(data)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(header)))
        entry = header[name]
        how = draw(st.integers(0, 8))
        if not isinstance(entry, dict) or "shape" not in entry:
            continue
        if how == 0:
            entry["dtype"] = draw(_DTYPES)
        elif how == 1:
            entry["shape"] = draw(st.lists(_NUMBERS | st.just(-1), max_size=4))
        elif how == 2:
            entry["data_offsets"] = draw(st.lists(_NUMBERS, min_size=2, max_size=2))
        elif how == 3:
            entry["data_offsets"] = header[draw(st.sampled_from(sorted(k for k, v in header.items() if isinstance(v,
                dict) and "data_offsets" in v)))]["data_offsets"]
        elif how == 4:
            header[name] = draw(st.sampled_from([None, [], {}, 3, "x"]))
        elif how == 5:
            header[draw(st.sampled_from(["", "x", "lm_head.weight", name + "\n", "é" * 300,
                "model.layers.99.mlp.up_proj.weight"]))] = header.pop(name)
        elif how == 6:
            entry["shape"] = entry["shape"][::-1]
        elif how == 7:
            entry["dtype"], entry["shape"] = draw(st.sampled_from(["F16", "I32", "U8"])), entry["shape"]
        else:
            del header[name]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def with_files(changes: dict[str, bytes], use: Callable[[Path], str] = _load) -> str:
    """What `use` says of a copy of the tiny model, some files of it replaced."""
    with tempfile.TemporaryDirectory() as name:
        for path in (originals() / "model").iterdir():
            if path.name not in changes:
                (Path(name) / path.name).symlink_to(path)
        for file, data in changes.items():
            (Path(name) / file).write_bytes(data)
        return use(Path(name))


def check_safetensors(data: bytes) -> str:
    return with_files({"model.safetensors": data})


# ---- JSON files

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=6)
    | st.sampled_from([10**400, 10**12, 2**31, 2**63, "silu", "llama", "yarn", "linear", "llama3", "dynamic",
        "LlamaForCausalLM", "gelu", "bfloat16", 1e-400, 0.5, "x" * 5000]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "rope_type", "factor", "rope_theta",
        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
                                       "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
                                           "truncate", "a"]), inner, max_size=5),
    max_leaves=6,
)  # fmt: skip
_CONFIG_KEYS = st.sampled_from(
    ["architectures", "model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "head_dim", "vocab_size",
     "intermediate_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
         "sliding_window", "use_sliding_window",
     "max_window_layers", "layer_types", "tie_word_embeddings", "attention_bias", "mlp_bias", "dtype", "torch_dtype",
         "bos_token_id", "eos_token_id",
     "quantization_config", "hidden_act", "partial_rotary_factor", "original_max_position_embeddings"]
)  # fmt: skip
_BROKEN = st.sampled_from([b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b"{}",
    b'{"a":' * 60_000, b"\xef\xbb\xbf{}", b"1" * 5000])


@st.composite
def _configs(draw) -> bytes:
    if draw(st.integers(0, 9)) == 0:
        return draw(_BROKEN)
    config = json.loads((originals() / "model" / "config.json").read_text())
    config |= draw(st.sampled_from([{}, {}, {"architectures": ["MistralForCausalLM"]},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
                                    {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}]))  # fmt: skip
    for key in draw(st.lists(_CONFIG_KEYS, min_size=1, max_size=3)):
        config[key] = draw(_VALUES)
    return json.dumps(config).encode()


def check_config(data: bytes) -> str:
    return with_files({"config.json": data})


def _read_tokenizer(folder: Path) -> str:
    try:
        with Cpu(SECONDS):
            Tokenizer(folder).all_token_bytes()
    except ValueError as error:
        one_line(error)
        return "refused"
    return "loaded"


@st.composite
def _tokenizers(draw) -> dict[str, bytes]:
    name = draw(st.sampled_from(["tokenizer.json", "tokenizer.json", "tokenizer_config.json",
        "generation_config.json", "special_tokens_map.json"]))
    path = originals() / "model" / name
    if draw(st.integers(0, 6)) == 0 or not path.exists():
        return {name: draw(_BROKEN)}
    value = json.loads(path.read_text())
    rng = random.Random(draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value, 0))
        if places:
            holder, key = rng.choice(places)
            if draw(st.booleans()) and isinstance(holder, dict):
                del holder[key]
            else:
                holder[key] = draw(_VALUES)
    return {name: json.dumps(value).encode()}


def _places(value: Any, depth: int):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:40]:
        yield value, key
        if depth < 5:
            yield from _places(inner, depth + 1)


def check_tokenizer(changes: dict[str, bytes]) -> str:
    return with_files(changes, _read_tokenizer)


TARGETS = [
    Target("gguf", _ggufs(), check_gguf, ("refused", "loaded")),
    Target("safetensors", _safetensors(), check_safetensors, ("refused", "loaded")),
    Target("config", _configs(), check_config, ("refused", "loaded")),
    Target("tokenizer", _tokenizers(), check_tokenizer, ("refused", "loaded")),
]
