"""Choices that a machine makes for us: device, dtype, how to multiply on this CPU, how much KV fits.

On a CPU nothing about speed can be taken for granted.  With AMX a bfloat16 product of 16 or more rows runs several
times faster than float32, without it slower; and on some CPUs products of 1 to 4 rows fall onto a path that is tens of
times slower than 16 rows.  `choose_compute` therefore multiplies matrices of the model's own shapes for a fraction of
a second and takes what was fastest.

Nor can results.  oneDNN cuts a bfloat16 product's inner dimension differently for different numbers of rows, so a row's
last bit, and with it now and then a greedy token, depends on how many other rows are in the batch.  `ComputePlan.rows`
takes that freedom away from prompts: a step that computes any is padded to a multiple of 256 rows.  With the fixed
shapes of `attention_cpu` a prompt then gives the same bits whether it is computed whole, in chunks or behind a cached
prefix, as long as chunks have at most 256 tokens (the default).  A decoded token's bits still depend on whether its
step also computes prompts.  In float32 the last bit may differ as well, but that is 65,536 times smaller.  Where
`ops_amx` computes, a token's bits depend on nothing else in its step, nor on chunks; it leaves padding out.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .attention import Attention, ReferenceAttention
from .config import LlamaConfig
from .model_llama import Llama
from .ops import Ops
from .ops_cpu import PackedOps, can_pack
from .pool import KVPool

DTYPES = ("auto", "float32", "float16", "bfloat16")
EVICTIONS = ("lru", "lfu", "fifo", "mru", "priority")
ATTENTION_BACKENDS = ("auto", "triton", "torch", "reference")
DEFAULT_RUNNING = {"cpu": 64, "cuda": 1024}
DEFAULT_CHUNK = {"cpu": 256, "cuda": 8192}
TILE = 256  # rows
CPU_KV_BYTES = 4 << 30  # on a CPU the pool is taken from at most this much memory
MAX_GRAPH_BATCH = 1024


@dataclass
class ComputePlan:
    """How the model computes.

    min_rows   products of fewer rows are padded up to this many (0: never)
    packed     weights are kept in oneDNN's own layout
    tile       steps that compute prompts are padded to a multiple of this (1: never)
    """

    dtype: torch.dtype
    min_rows: int = 0
    packed: bool = False
    tile: int = 1

    def rows(self, tokens: int, decodes: int) -> int:
        """How many rows a step of `tokens`, `decodes` of them decoding, is padded to."""
        return max(tokens if tokens == decodes else -(-tokens // self.tile) * self.tile, self.min_rows)


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


def measure_cpu(config: LlamaConfig, dtypes: Sequence[torch.dtype], repeats: int = 3) -> ComputePlan:
    """The fastest plan for a mix of decode (1 and 16 rows) and prefill (256 rows) products of this model's shapes.

    Measured once per process and shape: two engines side by side must not differ because of a busy moment.
    """
    n, d, m = config.hidden_size, config.head_dim, config.intermediate_size
    heads = config.num_heads * d
    shapes = (heads + 2 * config.num_kv_heads * d, n), (n, heads), (2 * m, n), (n, m)
    return _fastest_plan(shapes, tuple(dtypes), repeats)


@functools.lru_cache(maxsize=64)
def _fastest_plan(
    shapes: tuple[tuple[int, int], ...], dtypes: tuple[torch.dtype, ...], repeats: int
) -> ComputePlan:
    plans: list[tuple[float, ComputePlan]] = []
    for dtype in dtypes:
        try:
            packed, times = can_pack(), _times(shapes, dtype, can_pack(), repeats)
        except RuntimeError:  # oneDNN has no half precision on this CPU
            packed, times = False, _times(shapes, dtype, False, repeats)
        min_rows = 16 if max(times[1], times[4]) > 1.3 * times[16] else 0
        alone = times[16] if min_rows else times[1]
        tile = 1 if dtype == torch.float32 else TILE
        # a request alone for as long as its answer takes, a full batch, and prompts: weighed alike
        plans.append((alone + times[16] + times[256] / 8, ComputePlan(dtype, min_rows, packed, tile)))
    return min(plans, key=lambda p: p[0])[1]


def _times(
    shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, packed: bool, repeats: int
) -> dict[int, float]:
    """Seconds for one product of each shape (out, in), by number of rows; the best of `repeats`."""
    ops = PackedOps() if packed else Ops()
    weights = [ops.pack(torch.full(shape, 0.01, dtype=dtype)) for shape in shapes]
    times = {}
    with torch.inference_mode():
        for rows in (1, 4, 16, 256):
            xs = [torch.full((rows, shape[1]), 0.5, dtype=dtype) for shape in shapes]
            samples = []
            for _ in range(repeats + 1):
                begin = time.perf_counter()
                for x, w in zip(xs, weights):
                    ops.linear(x, w, None)
                samples.append(time.perf_counter() - begin)
            times[rows] = min(samples[1:])
    return times


def apply(plan: ComputePlan, model: Llama, attention_backend: str = "auto") -> None:
    """Make a freshly loaded model compute as planned.

    With attention_backend="auto" steps are computed by compiled code where that is possible (`ops_amx`).
    """
    if model.device.type == "cuda":
        try:
            from .ops_triton import TritonOps
        except ImportError:  # no Triton on this platform: plain torch
            return
        model.use(TritonOps())
    elif attention_backend == "auto" and plan.packed and (ops := _compiled_ops(model)):
        model.use(ops)
    else:
        model.use(PackedOps() if plan.packed else Ops())


def choose_products(model: Llama, rows: Sequence[int]) -> None:
    """Find the tiles in which a GPU computes the model's products of so many rows fastest (`products`).

    Takes a second or two for a large model.  Leaves them to cuBLAS where that is not possible.
    """
    from .ops_triton import TritonOps
    from .products import Products, Unavailable

    if not isinstance(model.ops, TritonOps):
        return
    try:
        products = Products(model.device)
    except Unavailable as reason:
        logging.getLogger("minisgl").info("products are left to cuBLAS: %s", reason)
        return
    names = [name for name in ("qkv", "o", "gate_up", "down") if getattr(model.layers[0], f"{name}_bias") is None]
    for weights in [[getattr(layer, name) for layer in model.layers] for name in names] + [[model.lm_head]]:
        for n in rows:
            products.choose(weights, n)
    model.ops.products = products


def _compiled_ops(model: Llama) -> Ops | None:
    from . import ops_amx

    try:
        ops_amx.check(model.config, model.dtype)
        return ops_amx.AmxOps(ops_amx.load())
    except ops_amx.Unavailable as reason:
        logging.getLogger("minisgl").info("steps are computed in torch: %s", reason)
        return None


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


def _available_memory(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process could still take: on Linux what the kernel says, files that it caches
    counted as free, but no more than a container's limit leaves; elsewhere unknown, so CPU_KV_BYTES."""
    try:
        lines = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        available = CPU_KV_BYTES
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):  # cgroup versions 2 and 1
        try:
            most, stat = (cgroup / limit).read_text(), (cgroup / limit).with_name("memory.stat").read_text()
            files = int(dict(line.split() for line in stat.splitlines()).get(cached, 0))
            taken = int((cgroup / used).read_text()) - files
            available = min(available, max(int(most) - taken, 0))
        except (OSError, ValueError):  # not there, or the limit is "max"
            continue
    return available


# ---- what the device brings ------------------------------------------------------------------------------------------


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
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    return sorted({s for s in sizes if s < top} | {top})


def shared_graph_sizes(max_requests: int) -> list[int]:
    """The same for batches with shared prefixes: fewer, since each costs a recording at start."""
    top = min(max_requests, MAX_GRAPH_BATCH)
    sizes = [4, 8, 16, 32, 48, 64, *range(96, 257, 32), *range(288, 577, 48), *range(640, 1025, 64)]
    return sorted({s for s in sizes if s < top} | {top})
