"""How close the attention kernels are to what the GPU can do: `python benchmarks/attention.py`.

Decode reads every key and value once and computes little: its limit is memory bandwidth, so it is measured
in GB/s of K and V beside a plain copy of a large tensor on the same GPU. Extend computes 4 * head_dim flops
per query head and visible key: its limit is the tensor cores, so it is measured in TFLOP/s beside torch's
scaled_dot_product_attention (the better of its flash and cuDNN backends) on the same shapes, which gets its
K and V contiguous, not paged.

What is timed is one layer as the engine runs it: KV write, attention and combine, replayed in a CUDA graph
so that launches cost nothing. Slots are a random permutation (a pool after long use). A graph walks over as
many layers as are needed to overflow the L2 cache, so that small shapes do not read from it. Medians over
replays.

    --heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16     the model's shape (Llama-3.1-8B)
    --tiles decode_n=32 extend_stages=2                         block sizes other than the default
    --sweep                                                     try many block sizes, print the best per shape

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from minisgl.attention import ForwardBatch
from minisgl.attention_triton import Tiles, TritonAttention
from minisgl.pool import KVPool

DECODE = [(batch, context) for batch in (1, 16, 256) for context in (512, 4096, 32768)]
EXTEND = [(1, 0, 8192), (8, 0, 2048), (64, 1024, 128)]  # sequences, cached prefix, new tokens
L2_BYTES = 256 << 20  # several times the L2 of any GPU so far


def seconds(graph: torch.cuda.CUDAGraph, budget: float = 0.3) -> float:
    """Median seconds of a replay, over as many as fit in `budget` seconds (5 to 100)."""
    graph.replay()
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    times: list[float] = []
    count = 5
    while len(times) < count:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
        count = min(100, max(5, int(budget / times[0])))
    return float(np.median(times))


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` as a CUDA graph; run once before, so that nothing compiles during the capture."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def copy_bandwidth() -> float:
    """GB/s, read and written, of copying 2 GiB."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(captured(lambda: target.copy_(source))) / 1e9


class Bench:
    """One step of `batch` sequences with `prefix` cached and `new` new tokens each, ready to be timed."""

    def __init__(self, shape: argparse.Namespace, batch: int, prefix: int, new: int):
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.dtype = getattr(torch, shape.dtype)
        self.count, self.prefix, self.new = batch, prefix, new
        self.context = prefix + new
        capacity = batch * self.context
        self.kv_bytes = capacity * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize
        self.layers = max(1, min(64, -(-L2_BYTES // self.kv_bytes)))
        self.pool = KVPool(self.layers, capacity, self.kv_heads, self.head_dim, self.dtype, "cuda")
        self.pool.kv.normal_()
        slots = (torch.randperm(capacity, device="cuda") + 1).int().view(batch, self.context)
        steps = torch.arange(batch, device="cuda", dtype=torch.int32)
        tokens = batch * new
        positions = torch.arange(prefix, self.context, device="cuda").repeat(batch)
        self.batch = ForwardBatch(
            input_ids=torch.zeros(tokens, dtype=torch.int64, device="cuda"),
            positions=positions,
            out_slots=slots[:, prefix:].reshape(-1).long(),
            q_start=torch.arange(batch + 1, device="cuda", dtype=torch.int32) * new,
            seq_lens=torch.full_like(steps, self.context),
            rows=steps + 1,
            table=torch.cat([torch.zeros_like(slots[:1]), slots]),
            num_decodes=batch if new == 1 else 0,
            max_seq_len=self.context,
            max_new=new,
            logit_rows=positions[:1],
        )
        self.q = torch.randn((tokens, self.heads, self.head_dim), device="cuda", dtype=self.dtype)
        self.k, self.v = torch.randn(
            (2, tokens, self.kv_heads, self.head_dim), device="cuda", dtype=self.dtype
        )

    @property
    def flops(self) -> float:
        """Of one layer: two products of 2 * head_dim flops per query head and visible key."""
        visible = self.new * self.prefix + self.new * (self.new + 1) / 2
        return 4 * self.count * self.heads * self.head_dim * visible

    def ours(self, tiles: Tiles | None) -> float:
        """Seconds per layer with these block sizes."""
        attention = TritonAttention(self.pool, self.heads, self.kv_heads, self.head_dim, tiles)
        attention.begin(self.batch)

        def all_layers() -> None:
            for layer in range(self.layers):
                attention.forward(layer, self.q, self.k, self.v, scale=self.head_dim**-0.5)

        return seconds(captured(all_layers)) / self.layers

    def sdpa(self) -> float:
        """Seconds of torch's attention on the same shapes; K and V contiguous, one head per query head."""
        size = (self.count, self.heads, self.context, self.head_dim)
        q = torch.randn((*size[:2], self.new, self.head_dim), device="cuda", dtype=self.dtype)
        k, v = torch.randn((2, *size), device="cuda", dtype=self.dtype)
        mask = causal_lower_right(self.new, self.context) if self.prefix else None
        times = []
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    graph = captured(
                        lambda: F.scaled_dot_product_attention(
                            q, k, v, attn_mask=mask, is_causal=mask is None
                        )
                    )
                times.append(seconds(graph))
            except RuntimeError as error:  # this backend does not do this shape
                print(f"  ({backend.name} skipped: {str(error).splitlines()[0]})")
        return min(times, default=float("nan"))


def candidates(tiles: Tiles, decode: bool) -> Iterator[Tiles]:
    """Block sizes worth trying around the default ones."""
    if decode:
        sizes = itertools.product((32, 64, 128), (2, 4), (2, 3, 4), (8, 16, 32))
        for n, warps, stages, waves in sizes:
            programs = tiles.target_programs * waves // 16
            yield replace(
                tiles, decode_n=n, decode_warps=warps, decode_stages=stages, target_programs=programs
            )
    else:
        for m, n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            if warps * 16 <= m:  # a warp group of four holds 64 rows
                yield replace(tiles, extend_m=m, extend_n=n, extend_warps=warps, extend_stages=stages)


def sweep(bench: Bench, tiles: Tiles, decode: bool) -> None:
    """Time every candidate on one shape and print the best five."""
    found = []
    for candidate in candidates(tiles, decode):
        try:
            found.append((bench.ours(candidate), candidate))
        except Exception as error:  # too much shared memory, say: not a choice on this GPU
            print(f"  skipped {candidate}: {str(error).splitlines()[0]}")
    for time, candidate in sorted(found, key=lambda pair: pair[0])[:5]:
        print(f"  {time * 1e6:9.1f} us  {candidate}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="decode GB/s and extend TFLOP/s of the Triton attention kernels"
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--only", choices=["decode", "extend"], help="one of the two tables")
    parser.add_argument("--tiles", nargs="*", default=[], metavar="NAME=N", help="fields of Tiles to set")
    parser.add_argument("--sweep", action="store_true", help="try many block sizes on every shape")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        print("benchmarks/attention.py needs an NVIDIA GPU: torch.cuda.is_available() is false")
        return 1
    gpu = torch.cuda.get_device_properties(0)
    tiles = Tiles.choose(args.head_dim, getattr(torch, args.dtype), gpu.multi_processor_count)
    tiles = replace(tiles, **{name: int(n) for name, n in (pair.split("=") for pair in args.tiles)})
    result = dict(
        gpu=gpu.name, heads=args.heads, kv_heads=args.kv_heads, head_dim=args.head_dim, dtype=args.dtype
    )
    result |= dict(tiles=asdict(tiles), decode=[], extend=[])
    print(f"{gpu.name}, {args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.dtype}, {tiles}")
    if args.only != "extend":
        copy = result["copy_gb_per_s"] = copy_bandwidth()
        print(f"\ncopy {copy:.0f} GB/s\n{'decode':>18} {'us':>9} {'GB/s':>7} {'of copy':>8}")
        for batch, context in DECODE:
            bench = Bench(args, batch, context - 1, 1)
            time = bench.ours(tiles)
            rate = bench.kv_bytes / time / 1e9
            print(
                f"{batch:>9} x {context:<6} {time * 1e6:>9.1f} {rate:>7.0f} {rate / copy:>8.1%}", flush=True
            )
            result["decode"].append(
                dict(batch=batch, context=context, us=time * 1e6, gb_per_s=rate, of_copy=rate / copy)
            )
            if args.sweep:
                sweep(bench, tiles, decode=True)
            del bench
    if args.only != "decode":
        print(f"\n{'extend':>22} {'us':>9} {'TFLOP/s':>8} {'SDPA':>8} {'of SDPA':>8}")
        for batch, prefix, new in EXTEND:
            bench = Bench(args, batch, prefix, new)
            ours, theirs = bench.flops / bench.ours(tiles) / 1e12, bench.flops / bench.sdpa() / 1e12
            time = bench.flops / ours / 1e6
            name = f"{batch} x ({prefix} + {new})"
            print(f"{name:>22} {time:>9.1f} {ours:>8.0f} {theirs:>8.0f} {ours / theirs:>8.1%}", flush=True)
            row = dict(
                batch=batch, prefix=prefix, new=new, us=time, tflop_per_s=ours, sdpa_tflop_per_s=theirs
            )
            result["extend"].append(row)
            if args.sweep:
                sweep(bench, tiles, decode=False)
            del bench
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
