"""What cache-aware routing is worth, and what it costs: `python benchmarks/router.py`.

Take W workers, each with a cache for a quarter of the prompts' shared beginnings.  A router that sends requests in
turn makes every worker see every beginning: each computes all of them, keeps the last few, and finds little.  A router
that sends a prompt to where its beginning was last computed makes W small caches into one that is W times as large.

Three parts, each on real processes over loopback (`--parts` picks):

    policies   --groups x --per-group prompts in random order: --shared tokens that a group has in common, --own tokens
               that only this prompt has, --out tokens of output.  W servers of a small random model, a KV pool of
               --kv-capacity tokens each, --clients requests at once, through the router with each policy, which
               take turns by blocks of requests and have servers of their own.
               Hit rate: cached tokens / prompt tokens, as the servers report them for each request.
    kill       such a load on the cache-aware router, with longer outputs, half of them streamed; one server is killed
               (SIGKILL) after a third of the requests and started again.  Every request must end well, but for
               streams that had begun: they must end with an error event.  Then the server must be back, and get
               requests.
    tree       no server: time to decide for one request (parse its JSON, match the trees of W workers, insert) when
               the trees hold 2^24 characters together, at 1,000 requests per second.

The model is small on purpose: on two cores, four servers of it compute at a rate at which the prompts decide, as they
do with large models on GPUs.  Rates depend on the machine; compare them within one run only.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 676,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TREE_CHARS = 1 << 24


# ---- processes -------------------------------------------------------------------------------------------------------


class Process:
    """`python -m minisgl ...` that prints its address when it is ready."""

    def __init__(self, *arguments: str):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )
        self.url = ""

    def ready(self) -> Process:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "ready on " in line:
                self.url = line.split("ready on ")[1].split()[0]
                return self
        raise SystemExit(f"a process ended with status {self._process.wait()} before it was ready")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.kill()


class Workers:
    """The servers.  One that is started again has its old port."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        (folder / "config.json").write_text(json.dumps(MODEL))
        write_tokenizer(folder)
        self._command = [
            "serve", "--model", str(folder), "--load-format", "dummy", "--device", "cpu", "--dtype", "float32",
            "--kv-capacity", str(args.kv_capacity), "--max-running-requests", "32",
        ]  # fmt: skip
        self._count = args.workers
        self.processes: list[Process] = []
        self.urls: list[str] = []

    def start(self) -> None:
        for _ in range(self._count):
            self.processes.append(Process(*self._command, "--port", "0"))
        self.urls = [process.ready().url for process in self.processes]

    def kill(self, index: int) -> None:
        self.processes[index].kill()

    def restart(self, index: int) -> None:
        self.processes[index] = Process(*self._command, "--port", self.urls[index].rsplit(":", 1)[1])

    def stop(self) -> None:
        for process in self.processes:
            process.stop()


@contextlib.contextmanager
def workers_of(args: argparse.Namespace) -> Iterator[Workers]:
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(args, Path(folder))
        try:
            workers.start()
            yield workers
        finally:
            workers.stop()


@contextlib.contextmanager
def router_of(workers: Workers, policy: str) -> Iterator[str]:
    process = Process("route", "--policy", policy, "--port", "0", "--health-interval", "0.5", "--health-timeout", "20",
                      "--workers", *workers.urls)  # fmt: skip
    try:
        yield process.ready().url
    finally:
        process.stop()


def write_tokenizer(folder: Path) -> None:
    """Every token is two letters: without text a stream has nothing to send before its end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


# ---- load ------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the requests."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ok: int = 0
    broken_streams: int = 0
    lost: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def add(self, meta: dict[str, Any], seconds: float) -> None:
        self.ok += 1
        self.prompt_tokens += meta["prompt_tokens"]
        self.cached_tokens += meta["cached_tokens"]
        self.output_tokens += meta["completion_tokens"]
        self.latencies.append(seconds)


def prompts(args: argparse.Namespace, seed: int) -> list[list[int]]:
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, MODEL["vocab_size"]) for _ in range(count)]

    rows = []
    for _ in range(args.groups):
        shared = ids(args.shared)
        rows += [shared + ids(args.own) for _ in range(args.per_group)]
    rng.shuffle(rows)
    return rows


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
    ) as opened:
        yield opened


async def drive(
    url: str, rows: list[list[int]], args: argparse.Namespace, tally: Tally, streamed: float = 0.0
) -> float:
    """Send all rows, `args.clients` at a time; `streamed`: the share that asks for a stream.  Returns seconds."""
    left = list(enumerate(rows))[::-1]
    began = time.perf_counter()
    async with session() as http:

        async def client() -> None:
            while left:
                index, row = left.pop()
                stream = int((index + 1) * streamed) > int(index * streamed)
                payload = {
                    "input_ids": row,
                    "stream": stream,
                    "sampling_params": {"max_new_tokens": args.out, "ignore_eos": True, "temperature": 0},
                }
                sent = time.perf_counter()
                try:
                    await ask(http, url, payload, tally, sent)
                except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
                    tally.lost.append(f"request {index}: {type(error).__name__}: {error}")

        await asyncio.gather(*(client() for _ in range(args.clients)))
    return time.perf_counter() - began


async def ask(http: aiohttp.ClientSession, url: str, payload: dict[str, Any], tally: Tally, sent: float) -> None:
    async with http.post(url + "/generate", json=payload) as reply:
        if reply.status != 200:
            raise ValueError(f"status {reply.status}: {(await reply.text())[:200]}")
        if not payload["stream"]:
            tally.add((await reply.json())["meta_info"], time.perf_counter() - sent)
            return
        events = [line[6:].strip() async for line in reply.content if line.startswith(b"data: ")]
    if events[-1:] != [b"[DONE]"]:
        raise ValueError("a stream ended without [DONE]")
    last = json.loads(events[-2])
    if "error" in last:
        if len(events) < 3:
            raise ValueError("a stream that had not begun ended with an error")
        tally.broken_streams += 1
    else:
        tally.add(last["meta_info"], time.perf_counter() - sent)


# ---- the parts -------------------------------------------------------------------------------------------------------


def run_policies(args: argparse.Namespace) -> dict[str, Any]:
    """Each policy has servers of its own, and they take turns by blocks of requests: what else the machine does in
    these minutes is spread over all of them."""
    rows = prompts(args, args.seed)
    blocks = [rows[at : at + args.block] for at in range(0, len(rows), args.block)]
    tallies = {policy: Tally() for policy in args.policies}
    seconds = dict.fromkeys(args.policies, 0.0)
    with contextlib.ExitStack() as stack:
        fleets = {policy: stack.enter_context(workers_of(args)) for policy in args.policies}
        urls = {policy: stack.enter_context(router_of(fleet, policy)) for policy, fleet in fleets.items()}
        for i, block in enumerate(blocks):
            for policy in args.policies[:: -1 if i % 2 else 1]:
                seconds[policy] += asyncio.run(drive(urls[policy], block, args, tallies[policy]))
    results: dict[str, Any] = {}
    for policy, tally in tallies.items():
        if tally.lost:
            raise SystemExit(f"{policy}: {len(tally.lost)} requests failed, as {tally.lost[0]}")
        tally.latencies.sort()
        results[policy] = {
            "hit_rate": round(tally.cached_tokens / tally.prompt_tokens, 4),
            "requests_per_s": round(tally.ok / seconds[policy], 2),
            "output_tokens_per_s": round(tally.output_tokens / seconds[policy], 1),
            "median_latency_s": round(tally.latencies[len(tally.latencies) // 2], 3),
            "seconds": round(seconds[policy], 1),
        }
        print(f"{policy:13}", *(f"{name} {value}" for name, value in results[policy].items()), sep="  ", flush=True)
    if {"cache_aware", "round_robin"} <= results.keys():
        aware, turns = results["cache_aware"], results["round_robin"]
        results["cache_aware_over_round_robin"] = {
            name: round(aware[name] / turns[name], 2) if turns[name] else None
            for name in ("hit_rate", "requests_per_s")
        }
    return results


def run_kill(args: argparse.Namespace, workers: Workers) -> dict[str, Any]:
    rows, new = (prompts(args, args.seed + i)[: args.groups * args.per_group // 3] for i in (1, 2))
    args = argparse.Namespace(**{**vars(args), "out": 4 * args.out})  # more of the time, a stream has begun
    tally = Tally()

    async def kill_and_restart() -> None:
        while tally.ok < len(rows) // 3:
            await asyncio.sleep(0.05)
        workers.kill(0)
        await asyncio.sleep(1.0)
        workers.restart(0)

    async def load(url: str) -> None:
        await asyncio.gather(drive(url, rows, args, tally, streamed=0.5), kill_and_restart())

    async def back(url: str) -> dict[str, Any]:
        async with session() as http:
            while True:
                async with http.get(url + "/workers") as reply:
                    state = (await reply.json())["workers"][0]
                if state["healthy"]:
                    return state
                await asyncio.sleep(0.2)

    with router_of(workers, "cache_aware") as url:
        asyncio.run(load(url))
        workers.processes[0].ready()
        before = asyncio.run(back(url))["requests"]
        after = Tally()
        asyncio.run(drive(url, new[: 4 * args.clients], args, after))
        gained = asyncio.run(back(url))["requests"] - before
    result = {
        "requests": len(rows), "ended_well": tally.ok, "broken_streams": tally.broken_streams,
        "lost": len(tally.lost) + len(after.lost), "requests_to_it_after_return": gained,
    }  # fmt: skip
    print("kill", result, *tally.lost[:3], flush=True)
    return result


def run_tree(args: argparse.Namespace) -> dict[str, Any]:
    from minisgl.router_key import routing
    from minisgl.router_policy import CacheAware

    rng = random.Random(args.seed)
    words = [f"{rng.getrandbits(32):x}" for _ in range(4000)]

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=length // 8))[:length]

    shared = [text(8192) for _ in range(256)]
    policy = CacheAware(max_tree_chars=4 * TREE_CHARS)
    loads = {f"worker {i}": 0 for i in range(args.workers)}
    while sum(policy.sizes().values()) < TREE_CHARS:
        policy.choose(loads, rng.choice(shared) + text(512))
    bodies = [json.dumps({"text": rng.choice(shared) + text(512)}).encode() for _ in range(5000)]
    times = []
    start = time.perf_counter()
    for i, body in enumerate(bodies):
        time.sleep(max(start + i / 1000 - time.perf_counter(), 0))
        began = time.perf_counter()
        policy.choose(loads, routing("/generate", body).key)
        times.append((time.perf_counter() - began) * 1e3)
    elapsed = time.perf_counter() - start
    times.sort()
    result = {
        "tree_chars": sum(policy.sizes().values()), "workers": args.workers, "prompt_chars": 8704,
        "requests_per_s": round(len(times) / elapsed), "median_ms": round(times[len(times) // 2], 3),
        "p99_ms": round(times[len(times) * 99 // 100], 3), "max_ms": round(times[-1], 3),
    }  # fmt: skip
    print("tree", result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["tree", "policies", "kill"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--policies", nargs="+", default=["round_robin", "cache_aware"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--per-group", type=int, default=16)
    parser.add_argument("--shared", type=int, default=384)
    parser.add_argument("--own", type=int, default=24)
    parser.add_argument("--out", type=int, default=8)
    parser.add_argument("--kv-capacity", type=int, default=7680)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--block", type=int, default=128, help="requests after which it is the next policy's turn")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left running
    results: dict[str, Any] = {"benchmark": "router", **vars(args)}
    if "tree" in args.parts:
        results["tree"] = run_tree(args)
    if "policies" in args.parts:
        results["prefix_groups"] = run_policies(args)
    if "kill" in args.parts:
        with workers_of(args) as workers:
            results["kill"] = run_kill(args, workers)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
