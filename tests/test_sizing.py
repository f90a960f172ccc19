"""What a machine decides for us: device, dtype, ways of multiplying, memory."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.nn.functional as F

from minisgl import sizing
from minisgl.attention import ReferenceAttention
from minisgl.attention_cpu import CpuAttention
from minisgl.config import LlamaConfig, RopeConfig
from minisgl.model_llama import Llama
from minisgl.ops import Ops
from minisgl.ops_cpu import PackedOps, can_pack
from minisgl.pool import KVPool
from minisgl.sizing import ComputePlan

from . import engines


def tiny_config(**more) -> LlamaConfig:
    keys = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "windows": (0, 0),
    }
    return LlamaConfig(**{**keys, **more})


# ---- device and dtype ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:x", "", None, 7.5, "mps"])
def test_unknown_devices_are_refused(device):
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda"):
        sizing.choose_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu():
    assert sizing.choose_device("auto") == torch.device("cpu")
    for device in ("cuda", "cuda:0"):
        with pytest.raises(ValueError, match="there is no CUDA device"):
            sizing.choose_device(device)


def test_a_gpu_is_named_by_its_number(monkeypatch):
    """torch.cuda.set_device, called on the engine's thread, takes no "cuda" without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert sizing.choose_device("auto") == sizing.choose_device("cuda") == torch.device("cuda", 1)
    assert sizing.choose_device("cuda:0") == torch.device("cuda", 0)
    assert sizing.choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="there are 2 CUDA devices"):
        sizing.choose_device("cuda:2")


def test_bf16_on_turing():
    """auto: float16 on a GPU without bfloat16, with a line that says so; on a CPU what is fastest."""
    config = tiny_config(dtype="bfloat16")
    with pytest.warns(UserWarning, match=r"no bfloat16 .*running in float16"):
        assert sizing._gpu_dtype(config, (7, 5)) == torch.float16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sizing._gpu_dtype(config, (8, 0)) == torch.bfloat16
        assert sizing._gpu_dtype(config, (9, 0)) == torch.bfloat16
        assert sizing._gpu_dtype(tiny_config(dtype="float16"), (7, 5)) == torch.float16
    plan = sizing.choose_compute(config, torch.device("cpu"), "auto")
    assert plan.dtype in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("name, found", [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_dtype_that_is_asked_for_is_taken(name, found):
    assert sizing.choose_compute(tiny_config(), torch.device("cpu"), name).dtype == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
def test_every_dtype_generates(dtype):
    with engines.make(dtype=dtype) as runtime:
        want = {"auto": (torch.float32, torch.bfloat16)}.get(dtype, (getattr(torch, dtype, None),))
        assert runtime.dtype in want
        ids = runtime.generate(["a", "b" * 40], engines.GREEDY)
        assert [len(r["output_ids"]) for r in ids] == [10, 10]
        engines.check_idle(runtime)


# ---- how to multiply -------------------------------------------------------------------------------------------


def test_measured_once_for_a_shape(monkeypatch):
    """Two engines over one model must not differ because of a busy moment."""
    calls = []
    times = {1: 1.0, 4: 1.0, 16: 1.0, 256: 2.0}
    monkeypatch.setattr(sizing, "_times", lambda *args: calls.append(args) or times)
    sizing._fastest_plan.cache_clear()
    config = tiny_config()
    first = sizing.measure_cpu(config, [torch.float32, torch.bfloat16])
    assert sizing.measure_cpu(tiny_config(vocab_size=99), [torch.float32, torch.bfloat16]) == first
    assert len(calls) == 2
    sizing.measure_cpu(tiny_config(hidden_size=64), [torch.float32])
    assert len(calls) == 3
    sizing._fastest_plan.cache_clear()


@pytest.mark.parametrize("fast", [torch.float32, torch.bfloat16])
def test_the_fastest_dtype_wins(monkeypatch, fast):
    def times(shapes, dtype, packed, repeats):
        scale = 1.0 if dtype == fast else 1.2
        return {1: scale, 4: scale, 16: scale, 256: 8 * scale}

    monkeypatch.setattr(sizing, "_times", times)
    sizing._fastest_plan.cache_clear()
    assert sizing.measure_cpu(tiny_config(), [torch.float32, torch.bfloat16]).dtype == fast
    sizing._fastest_plan.cache_clear()


def test_few_slow_rows_are_padded_up(monkeypatch):
    times = {1: 9.0, 4: 1.0, 16: 1.0, 256: 2.0}
    monkeypatch.setattr(sizing, "_times", lambda *_: times)
    sizing._fastest_plan.cache_clear()
    assert sizing.measure_cpu(tiny_config(), [torch.bfloat16]).min_rows == 16
    sizing._fastest_plan.cache_clear()
    times[1] = 1.1
    assert sizing.measure_cpu(tiny_config(), [torch.bfloat16]).min_rows == 0
    sizing._fastest_plan.cache_clear()


def test_a_cpu_without_packed_half_precision_goes_without(monkeypatch):
    def times(shapes, dtype, packed, repeats):
        if packed:
            raise RuntimeError("mkldnn_reorder_linear_weight: half path needs avx512")
        return {1: 1.0, 4: 1.0, 16: 1.0, 256: 1.0}

    monkeypatch.setattr(sizing, "_times", times)
    monkeypatch.setattr(sizing, "can_pack", lambda: True)
    sizing._fastest_plan.cache_clear()
    plan = sizing.measure_cpu(tiny_config(), [torch.float16])
    assert plan.dtype == torch.float16 and not plan.packed
    sizing._fastest_plan.cache_clear()


def test_rows_of_a_step():
    plan = ComputePlan(torch.bfloat16, min_rows=16, tile=256)
    assert [plan.rows(n, n) for n in (1, 16, 17, 300)] == [16, 16, 17, 300]  # decodes alone
    assert [plan.rows(n, 3) for n in (4, 256, 257)] == [256, 256, 512]
    plain = ComputePlan(torch.float32)
    assert [plain.rows(n, d) for n, d in ((1, 1), (5, 0), (257, 3))] == [1, 5, 257]
    slow = ComputePlan(torch.float32, min_rows=16)
    assert [slow.rows(n, 0) for n in (3, 40)] == [16, 40]  # short prompts are few rows, too


@pytest.mark.skipif(not can_pack(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_equal_plain_ones(dtype, bias, rows):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    plain, packed = Ops(), PackedOps()
    x, residual, norm = random(rows, 32), random(rows, 48), random(48)
    weight, gate_up = random(48, 32), random(2 * 40, 32)
    b, b2 = (random(48), random(80)) if bias else (None, None)
    bound = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.2, "rtol": 0.05}
    want = F.linear(x, weight, b)
    torch.testing.assert_close(packed.linear(x, packed.pack(weight), b), want, **bound)
    torch.testing.assert_close(
        packed.swiglu(x, packed.pack_gate_up(gate_up), b2), plain.swiglu(x, gate_up, b2), **bound
    )
    got = packed.linear_add_norm(x, packed.pack(weight), b, residual.clone(), norm, 1e-5)
    want = plain.linear_add_norm(x, weight, b, residual.clone(), norm, 1e-5)
    for a, w in zip(got, want):
        torch.testing.assert_close(a, w, **bound)


def test_a_plan_changes_how_not_what():
    """The same hidden states from packed and plain weights, and from padded steps."""
    config = tiny_config()
    outputs = []
    for packed in (False, True) if can_pack() else (False,):
        model = Llama(config, torch.float32, "cpu")
        model.init_dummy(3)
        sizing.apply(ComputePlan(torch.float32, packed=packed), model)
        assert isinstance(model.ops, PackedOps) == packed
        with torch.inference_mode():
            outputs.append(model.logits(torch.ones(3, 32)))
    torch.testing.assert_close(outputs[0], outputs[-1])


# ---- memory ----------------------------------------------------------------------------------------------------

MEMINFO = "MemTotal:       24731708 kB\nMemFree:          300000 kB\nMemAvailable:    9000000 kB\n"
GIB = 1 << 30


def test_files_that_the_kernel_caches_count_as_free_memory(tmp_path):
    """A laptop that is up for a day has little free memory and much available."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert sizing._available_memory(tmp_path / "meminfo", tmp_path) == 9_000_000 * 1024


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    v2 = tmp_path / "v2"
    v2.mkdir()
    (v2 / "memory.max").write_text(f"{2 * GIB}\n")
    (v2 / "memory.current").write_text(f"{GIB}\n")
    (v2 / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
    assert sizing._available_memory(tmp_path / "meminfo", v2) == 3 * GIB // 2
    (v2 / "memory.max").write_text("max\n")
    assert sizing._available_memory(tmp_path / "meminfo", v2) == 9_000_000 * 1024
    v1 = tmp_path / "v1" / "memory"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (v1 / "memory.usage_in_bytes").write_text(f"{2 * GIB}\n")
    (v1 / "memory.stat").write_text("total_inactive_file 0\n")
    assert sizing._available_memory(tmp_path / "meminfo", v1.parent) == 0


def test_unknown_memory_is_taken_to_be_the_default(tmp_path):
    assert sizing._available_memory(tmp_path / "none", tmp_path) == sizing.CPU_KV_BYTES
    (tmp_path / "meminfo").write_text("MemTotal: many\n")
    assert sizing._available_memory(tmp_path / "meminfo", tmp_path) == sizing.CPU_KV_BYTES
    assert sizing._available_memory() > 0


def test_capacity_is_what_fits(monkeypatch):
    config, cpu = tiny_config(), torch.device("cpu")
    per_token = 2 * 2 * 1 * 16 * 4  # layers, K and V, heads, head_dim, bytes
    monkeypatch.setattr(sizing, "_available_memory", lambda: 100 * per_token)
    assert sizing.kv_capacity(config, torch.float32, cpu, 1.0) == 99  # and the dummy slot
    assert sizing.kv_capacity(config, torch.float32, cpu, 0.5) == 49
    assert sizing.kv_capacity(config, torch.bfloat16, cpu, 0.5) == 99
    pool = KVPool(2, 99, 1, 16, torch.float32, "cpu")
    assert pool.kv.nbytes == 100 * per_token
    monkeypatch.setattr(sizing, "_available_memory", lambda: 1 << 50)
    assert (sizing.kv_capacity(config, torch.float32, cpu, 1.0) + 1) * per_token == sizing.CPU_KV_BYTES
    monkeypatch.setattr(sizing, "_available_memory", lambda: per_token)
    with pytest.raises(ValueError, match=r"mem_fraction=0\.5 leaves no memory for the KV pool"):
        sizing.kv_capacity(config, torch.float32, cpu, 0.5)


def test_a_gpus_capacity_leaves_the_rest_alone(monkeypatch):
    per_token = 256
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600 * per_token, 1000 * per_token))
    config, cuda = tiny_config(), torch.device("cuda", 0)
    assert sizing.kv_capacity(config, torch.float32, cuda, 0.9) == 499  # 600 free, 100 stay so
    with pytest.raises(ValueError, match="mem_fraction"):
        sizing.kv_capacity(config, torch.float32, cuda, 0.3)


def test_the_engine_takes_what_was_sized(monkeypatch):
    monkeypatch.setattr(sizing, "_available_memory", lambda: 1 << 20)
    with engines.make(kv_capacity=None, max_running_requests=5, max_context=100) as runtime:
        stats = runtime.stats()
        per_token = 3 * 2 * 2 * 64 * 4
        assert stats["kv_capacity"] == int(0.85 * (1 << 20)) // per_token - 1
        assert runtime.scheduler.max_context == 100 and runtime.scheduler.table.max_requests == 5
    with engines.make(kv_capacity=20) as small:  # fewer tokens than requests by default
        assert small.scheduler.table.max_requests == 20 and small.scheduler.max_context == 20
        assert small.generate("x", engines.GREEDY)["output_ids"]


# ---- what the device brings ------------------------------------------------------------------------------------


def test_attention_by_name(monkeypatch):
    config = tiny_config()
    pool = KVPool(2, 10, 1, 16, torch.float32, "cpu")
    assert type(sizing.make_attention("auto", pool, config)) is CpuAttention
    assert type(sizing.make_attention("torch", pool, config)) is CpuAttention
    assert type(sizing.make_attention("reference", pool, config)) is ReferenceAttention
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="attention_backend='triton' needs a CUDA device"):
        sizing.make_attention("triton", pool, config)
    assert os.environ.get("TRITON_INTERPRET") is None


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_backends_agree(backend):
    with engines.make(attention_backend=backend, chunk_size=16) as runtime:
        prompts = [engines.random_ids(n, seed=n) for n in (3, 40, 41)]
        replies = runtime.generate(input_ids=prompts, sampling_params=engines.GREEDY)
        outputs = [r["output_ids"] for r in replies]
    assert _seen.setdefault("outputs", outputs) == outputs


_seen: dict[str, list] = {}


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 100, 512, 5000])
def test_graph_sizes_cover_every_batch(most):
    sizes = sizing.graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1
    assert sizes[-1] == min(most, sizing.MAX_GRAPH_BATCH)
    for batch in range(9, sizes[-1] + 1):
        size = next(s for s in sizes if s >= batch)
        assert size - batch < max(8, size / 5)
