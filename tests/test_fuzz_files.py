"""Hostile model files, briefly (at length: `python -m tests.fuzz`), and the faults that were found."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis", reason='needs pip install "minisgl[test]"')

from minisgl import gguf_header
from minisgl.config import LlamaConfig, ModelError, read_json
from minisgl.gguf_file import GGUFFile
from minisgl.loader import load_model
from minisgl.tokenizer import Tokenizer

from . import fuzz, fuzz_files, tiny_gguf

TARGETS = {target.name: target for target in fuzz_files.TARGETS}


@pytest.mark.parametrize(("name", "examples"), [("gguf", 50), ("safetensors", 60), ("config", 60), ("tokenizer", 100)])
def test_refused_in_one_line_or_loaded(name, examples):
    found = fuzz.campaign(TARGETS[name], examples, shrink=False)
    assert found["refused"] and found["loaded"], found


# ---- GGUF headers that lie


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _field(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ",
        kind, offset)


def _gguf(fields: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: int = 64, tail: bytes = b"",
    count: int | None = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors) if count is None else count, len(fields))
    body = head + b"".join(fields) + b"".join(tensors)
    return body + b"\0" * (-len(body) % 32) * bool(tensors) + b"\0" * data + tail


LIES = [
    (_gguf([_field("a", 9, struct.pack("<IQ", 0, 2**60))]), "elements"),  # read on past the end: for ever
    (_gguf([_field("a", 9, struct.pack("<IQ", 0, 1000))]), "array length"),
    (_gguf([_field("a", 9, struct.pack("<IQ", 8, 1000))]), "array length"),
    (_gguf([_field("a", 9, struct.pack("<IQ", 9, 3))]), "elements of type 9"),
    (_gguf([_field("a", 8, struct.pack("<Q", 2**62))]), "a length of"),
    (_gguf([_field("a", 77, b"")]), "unknown type 77"),
    (_gguf(count=2**40), "tensor count"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "metadata count"),
    (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
    (b"GGUF" + struct.pack("<I", 3), "too short"),
    (b"GGML" + bytes(40), "begin with GGUF"),
    (_gguf(tensors=[_tensor("t", [2**32, 2**32])]), "beyond the file"),  # multiplies to 0 in 64 bits
    (_gguf(tensors=[_tensor("t", [4], offset=2**62)]), "beyond the file"),
    (_gguf(tensors=[_tensor("t", [4]), _tensor("u", [4], offset=8)]), "upon another"),
    (_gguf(tensors=[_tensor("t", [0, 4])]), "shape"),
    (_gguf(tensors=[_tensor("t", [])]), "0 dimensions"),
    (_gguf(tensors=[_tensor("t", [1] * 9)]), "9 dimensions"),
    (_gguf(tensors=[_tensor("t", [4], kind=999)]), "unknown type 999"),
    (_gguf(tensors=[_tensor("t", [33], kind=8)]), "shape"),  # Q8_0 has blocks of 32
    (_gguf([_field("general.alignment", 4, struct.pack("<I", 3))]), "alignment 3"),
]


@pytest.mark.parametrize(("data", "named"), LIES)
def test_gguf_headers_that_lie(data, named, tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    begin = time.thread_time()
    with pytest.raises(ModelError, match=f"broken GGUF file.*{named}") as error:
        GGUFFile(path)
    fuzz.one_line(error.value)
    assert time.thread_time() - begin < 2


def test_heads_that_do_not_divide_the_rows(tmp_path: Path, monkeypatch):
    """The metadata says how q's rows are put in order: where that can't be, it is the file's error."""
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    tiny_gguf.write(fuzz_files.originals() / "model", tmp_path / "m.gguf", metadata={"llama.attention.head_count": 5,
        "llama.attention.head_count_kv": 5})
    with pytest.raises(ModelError, match=r"attn_[qk]") as error:
        list(GGUFFile(tmp_path / "m.gguf").weights())
    fuzz.one_line(error.value)


def test_true_headers_pass(tmp_path: Path):
    gguf_header.check(fuzz_files.originals() / "model.gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(_gguf([_field("a", 9, struct.pack("<IQ", 4, 3) + bytes(12))], [_tensor("t", [4]), _tensor("u",
        [4], offset=32)]))
    gguf_header.check(path)


# ---- config.json


def _config(**changes: Any) -> dict[str, Any]:
    return json.loads((fuzz_files.originals() / "model" / "config.json").read_text()) | changes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": [["x"]]}, "architectures"),
        ({"architectures": True}, "architectures"),
        ({"architectures": None, "model_type": ["llama"]}, "architecture"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": ["yarn"]}}, "RoPE type"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 2,
            "original_max_position_embeddings": "x"}}, "original_max"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": [1]}}, "beta_fast"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 1e308}}, "factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_theta": 10**400, "rope_parameters": None}, "rope_theta"),
        ({"partial_rotary_factor": ["x"]}, "partial_rotary_factor"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
        ({"hidden_size": 10**400}, "hidden_size must be at most"),
        ({"hidden_act": "x" * 100_000}, "hidden_act"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": "x"},
            "max_window_layers"),
    ],
)
def test_configs_of_wrong_types_and_sizes(changes, named):
    begin = time.thread_time()
    with pytest.raises(ModelError, match=named) as error:
        LlamaConfig.from_hf(_config(**changes))
    fuzz.one_line(error.value)
    assert time.thread_time() - begin < 1


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "head_dim": 2},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}},
    ],
)
def test_models_that_cannot_be_made(changes):
    """Sizes that no memory holds, frequencies that divide by zero."""

    def load(folder: Path) -> str:
        with pytest.raises(ModelError, match="cannot be made") as error:
            load_model(str(folder), load_format="dummy")
        fuzz.one_line(error.value)
        return ""

    fuzz_files.with_files({"config.json": json.dumps(_config(**changes)).encode()}, load)


def test_json_nested_too_deeply_is_not_valid_json(tmp_path: Path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="not valid JSON"):
        read_json(tmp_path / "config.json")


# ---- tokenizer files


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer_config.json": b"[" * 100_000}, "not valid JSON"),
        ({"tokenizer_config.json": b'{"extra_special_tokens": 3}'}, "tokenizer files are broken"),
        ({"tokenizer_config.json": b'{"chat_template": 3}'}, "chat_template must be"),
        ({"tokenizer_config.json": b"{}", "chat_template.json": b"[]"}, "tokenizer files are broken"),
    ],
)
def test_tokenizer_files_of_wrong_shapes(changes, named):
    def read(folder: Path) -> str:
        with pytest.raises(ValueError, match=named) as error:
            Tokenizer(folder)
        fuzz.one_line(error.value)
        return ""

    fuzz_files.with_files(changes, read)


def test_stop_ids_that_are_none_are_left_out():
    def read(folder: Path) -> str:
        assert Tokenizer(folder).eos_ids >= {258}
        return ""

    fuzz_files.with_files({"generation_config.json": b'{"eos_token_id": [null, 258, "x", true]}'}, read)


def test_a_token_id_beyond_any_vocabulary_makes_no_table_of_that_size():
    text = json.loads((fuzz_files.originals() / "model" / "tokenizer.json").read_text())
    text["model"]["vocab"]["zzz"] = 2**32 - 1

    def read(folder: Path) -> str:
        with pytest.raises(ValueError, match="token id 4294967295"):
            Tokenizer(folder)
        return ""

    fuzz_files.with_files({"tokenizer.json": json.dumps(text).encode()}, read)


def test_dimensions_wrap_around_in_numpy():
    """Why shapes are multiplied with Python's integers."""
    assert int(np.prod(np.array([2**32, 2**32], np.uint64))) == 0
