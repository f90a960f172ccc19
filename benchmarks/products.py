"""What choosing tiles for the matrix products of decode steps is worth: `python benchmarks/products.py`.

For each product of a layer and each number of rows it prints microseconds of cuBLAS's own choice, of ours
(`minisgl.products`), and the limit: reading the weight once or computing at full rate, whichever takes longer.
Weights are random; as many copies take turns as overflow the L2 cache.

    --hidden 4096 --intermediate 14336 --heads 32 --kv-heads 8 --head-dim 128     the model's shape (Llama-3.1-8B)
    --rows 64 128 256                                                             batch sizes
    --exhaustive                                                                  every tile, cluster and option too

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial

import torch

from minisgl.products import BANDWIDTH, FLOPS, TILES, Product, Products

L2_BYTES = 256 << 20  # several times the L2 of any GPU so far


def shapes(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Product -> (columns, inner dimension)."""
    n, m, d = args.hidden, args.intermediate, args.head_dim
    return {
        "qkv": ((args.heads + 2 * args.kv_heads) * d, n),
        "o": (n, args.heads * d),
        "gate_up": (2 * m, n),
        "down": (n, m),
    }


def exhaustive(products: Products, weights: list[torch.Tensor], rows: int) -> list[tuple[float, tuple[int, int]]]:
    """The five fastest (microseconds, tile) of all."""
    columns, inner = weights[0].shape
    product = Product(products._library, rows, columns, inner, weights[0].dtype)
    x = torch.randn((rows, inner), dtype=weights[0].dtype, device="cuda")
    found = []
    for tile in TILES:
        times = [
            products._stopwatch(partial(product.run, x, algorithm=algorithm), weights)
            for algorithm in product.algorithms(tile, range(8), range(2, 10))
        ]
        if times:
            found.append((min(times) / products._stopwatch.LAUNCHES * 1e3, tile))
    return sorted(found)[:5]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="matrix products of decode steps: cuBLAS's tiles and ours")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="*", default=[48, 64, 96, 128, 160, 192, 224, 256])
    parser.add_argument("--exhaustive", action="store_true")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks/products.py needs an NVIDIA GPU: torch.cuda.is_available() is false")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    products = Products(device)
    choices = []
    layer = {rows: [0.0, 0.0, 0.0] for rows in args.rows}
    print(f"{torch.cuda.get_device_name(device)}\n{'rows':>5} {'product':>8} {'cuBLAS':>8} {'ours':>8} {'limit':>8} us")
    for name, (columns, inner) in shapes(args).items():
        copies = max(2, -(-L2_BYTES // (2 * columns * inner)))
        weights = [torch.randn((columns, inner), dtype=torch.bfloat16, device=device) for _ in range(copies)]
        for rows in args.rows:
            products.choices.clear()
            products.choose(weights, rows)
            if not products.choices:  # nothing that could be tried
                continue
            (choice,) = products.choices
            choices.append(choice)
            flops, size = 2 * rows * columns * inner, 2 * (columns * inner + rows * (columns + inner))
            limit = max(flops / FLOPS, size / BANDWIDTH) * 1e6
            theirs, ours = choice.library * 1e3, choice.ours * 1e3
            print(f"{rows:>5} {name:>8} {theirs:>8.1f} {ours:>8.1f} {limit:>8.1f}  {choice.tile or 'kept as it is'}")
            for i, value in enumerate((theirs, min(theirs, ours), limit)):
                layer[rows][i] += value
            if args.exhaustive:
                print("      of all:", ", ".join(f"{t:.1f} {tile}" for t, tile in exhaustive(products, weights, rows)))
        del weights
    for rows, (theirs, ours, limit) in layer.items():
        print(f"{rows:>5} {'layer':>8} {theirs:>8.1f} {ours:>8.1f} {limit:>8.1f}  {ours / theirs:.1%} of cuBLAS's time")
    print(json.dumps({"gpu": torch.cuda.get_device_name(device), "choices": [asdict(c) for c in choices]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
