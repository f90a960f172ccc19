"""Choices that a machine makes for us: device, dtype, how to multiply on this CPU, how much KV fits.

On a CPU nothing about speed can be taken for granted.  With AMX a bfloat16 product of 16 or more rows runs several
times faster than float32, without it slower; and on some CPUs products of 1 to 4 rows fall onto a path that is tens of
times slower than 16 rows.  `choose_compute` therefore multiplies matrices of the model's own shapes for a fraction of
a second and takes what was fastest.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .attention import Attention, ReferenceAttention
from .config import LlamaConfig
from .model_llama import Llama
from .ops import Ops
from .ops_cpu import PackedOps, PaddedOps, can_pack
from .pool import KVPool

DTYPES = ("auto", "float32", "float16", "bfloat16")
EVICTIONS = ("lru", "lfu", "fifo", "mru", "priority")
ATTENTION_BACKENDS = ("auto", "triton", "torch", "reference")
DEFAULT_RUNNING = {"cpu": 64, "cuda": 512}
DEFAULT_CHUNK = {"cpu": 1024, "cuda": 8192}
CPU_KV_BYTES = 4 << 30  # on a CPU the pool is taken from at most this much memory
MAX_GRAPH_BATCH = 512


@dataclass
class ComputePlan:
    """How the model computes.  min_rows: products of fewer rows are padded up to this many (0: never)."""

    dtype: torch.dtype
    min_rows: int = 0
    packed: bool = False


def choose_device(device: str) -> torch.device:
    """ "auto" is the GPU if there is one.  Raises ValueError for a device that is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda[:n]', got {device!r}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda[:n]', got {device!r}")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={device!r}: there is no CUDA device")
        if (chosen.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device={device!r}: there are {torch.cuda.device_count()} CUDA devices")
        if chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def choose_compute(config: LlamaConfig, device: torch.device, dtype: str) -> ComputePlan:
    """Dtype, and for CPUs the way of multiplying; measured unless `dtype` leaves no choice."""
    wanted = None if dtype == "auto" else getattr(torch, dtype)
    if device.type == "cuda":
        return ComputePlan(wanted or _gpu_dtype(config, torch.cuda.get_device_capability(device)))
    return measure_cpu(config, [wanted] if wanted else [torch.float32, torch.bfloat16])


def _gpu_dtype(config: LlamaConfig, capability: tuple[int, int]) -> torch.dtype:
    dtype = getattr(torch, config.dtype)
    if dtype == torch.bfloat16 and capability < (8, 0):
        warnings.warn("this GPU has no bfloat16 (needs sm_80): running in float16", stacklevel=3)
        return torch.float16
    return dtype


def measure_cpu(config: LlamaConfig, dtypes: list[torch.dtype], repeats: int = 3) -> ComputePlan:
    """The fastest plan for a mix of decode (1 and 16 rows) and prefill (256 rows) products of this model's shapes."""
    plans: list[tuple[float, ComputePlan]] = []
    for dtype in dtypes:
        weights = _layer_weights(config, dtype)
        for packed in (False, True) if can_pack() else (False,):
            ops = PackedOps() if packed else Ops()
            held = [ops.pack(w) for w in weights]
            times = {rows: _time(config, held, ops.linear, dtype, rows, repeats) for rows in (1, 4, 16, 256)}
            min_rows = 16 if times[1] > 1.3 * times[16] or times[4] > 1.3 * times[16] else 0
            alone = times[16] if min_rows else times[1]
            # a request alone for as long as its answer takes, a full batch, and prompts: weighed alike
            plans.append((alone + times[16] + times[256] / 8, ComputePlan(dtype, min_rows, packed)))
    return min(plans, key=lambda p: p[0])[1]


def _layer_weights(config: LlamaConfig, dtype: torch.dtype) -> list[torch.Tensor]:
    n, d, m = config.hidden_size, config.head_dim, config.intermediate_size
    qkv = (config.num_heads + 2 * config.num_kv_heads) * d
    shapes = [(qkv, n), (n, config.num_heads * d), (2 * m, n), (n, m)]
    return [torch.full(shape, 0.01, dtype=dtype) for shape in shapes]


def _time(config: LlamaConfig, weights: list, linear: Callable, dtype: torch.dtype, rows: int, repeats: int) -> float:
    inputs = [config.hidden_size, config.num_heads * config.head_dim, config.hidden_size, config.intermediate_size]
    xs = [torch.full((rows, n), 0.5, dtype=dtype) for n in inputs]
    samples = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            for x, w in zip(xs, weights):
                linear(x, w, None)
            samples.append(time.perf_counter() - begin)
    return statistics.median(samples[1:])


def apply(plan: ComputePlan, model: Llama) -> None:
    """Make a freshly loaded model compute as planned."""
    if model.device.type == "cuda":
        try:
            from .ops_triton import TritonOps
        except ImportError:  # no Triton on this platform: plain torch
            return
        model.use(TritonOps())
    else:
        ops = PackedOps() if plan.packed else Ops()
        model.use(PaddedOps(ops, plan.min_rows) if plan.min_rows else ops)


# ---- memory ----------------------------------------------------------------------------------------------------------


def kv_capacity(config: LlamaConfig, dtype: torch.dtype, device: torch.device, mem_fraction: float) -> int:
    """Tokens whose K and V fit into `mem_fraction` of the free memory (on a CPU: of at most 4 GiB of it)."""
    per_token = KVPool.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, dtype.itemsize)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        budget = free - (1 - mem_fraction) * total  # what is left for activations and graphs counts in the total
    else:
        budget = mem_fraction * min(_available_memory(), CPU_KV_BYTES)
    tokens = int(budget // per_token) - 1
    if tokens < 1:
        raise ValueError(
            f"mem_fraction={mem_fraction} leaves no memory for the KV pool ({per_token} bytes a token): raise it"
        )
    return tokens


def _available_memory() -> int:
    """Bytes of memory that this process could still take."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return CPU_KV_BYTES


# ---- what the device brings --------------------------------------------------------------------------------------------


def make_attention(backend: str, pool: KVPool, config: LlamaConfig) -> Attention:
    """The attention of a backend's name; "auto" is Triton on a GPU."""
    cuda = pool.kv.device.type == "cuda"
    heads = (pool, config.num_heads, config.num_kv_heads, config.head_dim)
    if backend == "reference":
        return ReferenceAttention(*heads)
    if backend == "triton" or (backend == "auto" and cuda):
        if not cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("attention_backend='triton' needs a CUDA device (or TRITON_INTERPRET=1, very slowly)")
        try:
            from .attention_triton import TritonAttention
        except ImportError as error:
            raise ValueError(f"attention_backend='triton' needs Triton: pip install triton ({error})") from error
        return TritonAttention(*heads)
    from .attention_cpu import CpuAttention

    return CpuAttention(*heads)


def graph_sizes(max_requests: int) -> list[int]:
    """Decode batch sizes to record: powers of two at first, then closer, so that padding stays below a fifth."""
    top = min(max_requests, MAX_GRAPH_BATCH)
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, MAX_GRAPH_BATCH + 1, 32)]
    return sorted({s for s in sizes if s < top} | {top})
