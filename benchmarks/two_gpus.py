"""Two GPUs behind the router against one: `python benchmarks/two_gpus.py` on a machine with two.

Prompts come in groups that share a long beginning, in random order, and a worker's KV pool has room for some 60 % of
the beginnings.  Three arrangements serve the same prompts, in turns, each `--repeat` times from an empty cache:

    one           one worker, behind the router like the others, so that the router's price is in all rows
    round_robin   two workers, in turn: twice the arithmetic, but each of them meets every beginning
    cache_aware   two workers, each with its own half of the beginnings, for which its pool has room

A worker is a process with a GPU of its own (`serve --device cuda:0`).  The clients are `--client-processes` processes,
so that no client is what limits the rate.  Speed depends on the model's shape, not on its weights, so these are random
(`minisgl/bench/shapes.py`); prompts and outputs are token ids, and no tokenizer is needed.

    python benchmarks/two_gpus.py                                                          # llama-1b, cuda:0 and cuda:1
    python benchmarks/two_gpus.py --shape tiny --devices cpu cpu --groups 16 --per-group 4 --shared 256 --own 16 \\
        --out 8 --kv-capacity 2500 --clients 8 --client-processes 2 --repeat 1                         # a try on a CPU

Prints a table of medians; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from router import MODEL, Process, Tally, drive

from minisgl.bench.shapes import SHAPES, shape_folder

COLUMNS = ("requests_per_s", "prompt_tokens_per_s", "hit_rate", "median_latency_s", "p99_latency_s", "seconds")


def prompts(args: argparse.Namespace, vocab: int) -> list[list[int]]:
    """Rows of token ids: `--groups` x `--per-group`, in random order."""
    rng = random.Random(args.seed)
    rows = []
    for _ in range(args.groups):
        shared = [rng.randrange(3, vocab) for _ in range(args.shared)]
        rows += [shared + [rng.randrange(3, vocab) for _ in range(args.own)] for _ in range(args.per_group)]
    rng.shuffle(rows)
    return rows


@contextlib.contextmanager
def workers_on(devices: list[str], folder: Path, args: argparse.Namespace) -> Iterator[list[str]]:
    """A server on each device; yields their URLs."""
    command = ["serve", "--model", str(folder), "--load-format", "dummy", "--port", "0",
               "--kv-capacity", str(args.kv_capacity), "--max-running-requests", str(args.clients)]  # fmt: skip
    processes = []
    try:
        for device in devices:
            processes.append(Process(*command, "--device", device))
        yield [process.ready().url for process in processes]
    finally:
        for process in processes:
            process.stop()


@contextlib.contextmanager
def router_over(policy: str, urls: list[str]) -> Iterator[str]:
    process = Process("route", "--port", "0", "--policy", policy, "--health-timeout", "20", "--workers", *urls)
    try:
        yield process.ready().url
    finally:
        process.stop()


# ---- clients ---------------------------------------------------------------------------------------------------------


def client(url: str, rows: list[list[int]], args: argparse.Namespace, begin: Any, results: Any) -> None:
    """A process: waits for the others, sends its rows, reports what it counted."""
    tally = Tally()
    begin.wait()
    asyncio.run(drive(url, rows, args, tally))
    results.put((time.time(), tally))


def run(url: str, rows: list[list[int]], args: argparse.Namespace) -> dict[str, float]:
    """All rows once, from an empty cache."""
    urllib.request.urlopen(urllib.request.Request(url + "/flush_cache", b"", method="POST"), timeout=60).close()
    context = multiprocessing.get_context("spawn")
    count = args.client_processes
    share = argparse.Namespace(**{**vars(args), "clients": max(args.clients // count, 1)})
    begin, results = context.Barrier(count + 1), context.Queue()
    processes = [context.Process(target=client, args=(url, rows[i::count], share, begin, results), daemon=True)
                 for i in range(count)]  # fmt: skip
    for process in processes:
        process.start()
    begin.wait(60)
    began = time.time()
    ends, tallies = zip(*(results.get(timeout=300) for _ in processes), strict=True)
    for process in processes:
        process.join()
    return summary(tallies, max(ends) - began, len(rows))


def summary(tallies: tuple[Tally, ...], seconds: float, expected: int) -> dict[str, float]:
    lost = [text for tally in tallies for text in tally.lost]
    done = sum(tally.ok for tally in tallies)
    if lost or done != expected:
        raise SystemExit(f"{expected - done} of {expected} requests failed: {lost[:1]}")
    latencies = sorted(latency for tally in tallies for latency in tally.latencies)
    prompt_tokens = sum(tally.prompt_tokens for tally in tallies)
    return {
        "requests_per_s": round(done / seconds, 2),
        "prompt_tokens_per_s": round(prompt_tokens / seconds),
        "output_tokens_per_s": round(sum(tally.output_tokens for tally in tallies) / seconds, 1),
        "hit_rate": round(sum(tally.cached_tokens for tally in tallies) / prompt_tokens, 4),
        "median_latency_s": round(latencies[len(latencies) // 2], 3),
        "p99_latency_s": round(latencies[len(latencies) * 99 // 100], 3),
        "seconds": round(seconds, 2),
    }


# ---- the comparison --------------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace, folder: Path, vocab: int) -> dict[str, Any]:
    rows = prompts(args, vocab)
    with contextlib.ExitStack() as stack:
        began = time.perf_counter()
        urls = stack.enter_context(workers_on(args.devices, folder, args))
        arrangements = {"one": ("round_robin", urls[:1]), "round_robin": ("round_robin", urls),
                        "cache_aware": ("cache_aware", urls)}  # fmt: skip
        routers = {name: stack.enter_context(router_over(*what)) for name, what in arrangements.items()}
        start = time.perf_counter() - began
        print(f"{len(urls)} workers and {len(routers)} routers after {start:.1f} s", flush=True)
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in routers}
        for url in routers.values():  # every size of step once
            run(url, rows[: 2 * args.clients], args)
        for i in range(args.repeat):
            for name in list(measured)[:: -1 if i % 2 else 1]:
                measured[name].append(run(routers[name], rows, args))
                print(f"  {name:12} {measured[name][-1]}", flush=True)
    medians = {
        name: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for name, runs in measured.items()
    }
    base = medians["one"]["requests_per_s"]
    return {
        "start_s": round(start, 1),
        "medians": medians,
        "throughput_over_one": {name: round(row["requests_per_s"] / base, 2) for name, row in medians.items()},
        "runs": measured,
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':12}" + "".join(f"{column:>22}" for column in (*COLUMNS, "over one"))]
    for name, row in result["medians"].items():
        values = [*(row[column] for column in COLUMNS), result["throughput_over_one"][name]]
        lines.append(f"{name:12}" + "".join(f"{value:>22,}" for value in values))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "tiny"], default="llama-1b")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--per-group", type=int, default=8)
    parser.add_argument("--shared", type=int, default=4096, help="tokens that a group's prompts begin with")
    parser.add_argument("--own", type=int, default=64, help="tokens that only one prompt has")
    parser.add_argument("--out", type=int, default=32, help="tokens of output")
    parser.add_argument("--kv-capacity", type=int, default=170_000, help="tokens of a worker's pool")
    parser.add_argument("--clients", type=int, default=64, help="requests at once")
    parser.add_argument("--client-processes", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left running
    with tempfile.TemporaryDirectory() as scratch:
        if args.shape == "tiny":
            folder, vocab = Path(scratch), MODEL["vocab_size"]
            (folder / "config.json").write_text(json.dumps(MODEL))
        else:
            folder, vocab = shape_folder(args.shape, Path(scratch)), SHAPES[args.shape]["vocab_size"]
        result = compare(args, folder, vocab)
    print(table(result))
    print(json.dumps({"benchmark": "two_gpus", **vars(args), **result}))


if __name__ == "__main__":
    main()
