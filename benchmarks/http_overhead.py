"""What HTTP costs beside calls in the engine's own process: `python benchmarks/http_overhead.py`.

The server's event loop and the engine's thread share one interpreter, and one lock: while the loop parses a request
the engine cannot form its next step, and a GPU that has no next step idles.  The overlapped loop has one step in hand,
so work of less than a step's time, a little at a time, costs nothing; a hundred requests that arrive at once do.
Whether a server is cheap enough can therefore only be seen as throughput, beside an engine that is as fast as it gets.

The same requests (--prompt random token ids in, between --tokens/2 and --tokens out) in five ways (`--ways` picks):

    one call              Runtime.generate on a list: the engine alone
    in process            --clients coroutines, each of which awaits async_generate for one request after the other
    in process, streams   the same, every token read
    http                  --clients connections from another process (`http_client.py`) to /v1/completions
    http, streams         the same with stream=true

They take turns, --repeat times, each from an empty cache.  Shown for each run:

    tokens_per_s          of output
    steps, ms_per_step    of the engine.  A request that comes late leaves its place in the batch empty: more steps.  An
                          engine that waits for the interpreter: longer ones
    *_us_per_request      CPU time of the engine's thread and of the server's

    python benchmarks/http_overhead.py --model llama-1b-smoltok --load-format dummy       on a GPU
    python benchmarks/http_overhead.py --fake-step 1.5                                    its proportions, without one

`--fake-step MS` puts a stand-in where the device was.  Everything of the host is real but the launch of a step, which
holds the interpreter for --fake-launch milliseconds, and its results, which are there MS after the launch or the end of
the step before (--fake-prompt microseconds later for each prompt token) and are waited for without the interpreter.
Two cores are enough if nothing else runs on them.

The last line of stdout is one JSON object.  In it, `of_in_process` holds medians over the turns of a way's tokens per
second divided by those of "in process".
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BASE = "in process"


# ---- a device that is not there --------------------------------------------------------------------------------------


class FakeRunner:
    """Takes the place of `Runner`: steps last what a device would take, and their tokens are as if drawn at random."""

    def __init__(self, runner: Any, args: argparse.Namespace):
        self._runner, self._vocab = runner, runner.vocab_size
        self._step, self._launch = args.fake_step / 1e3, args.fake_launch / 1e3
        self._prompt_token = args.fake_prompt / 1e6
        self._free = 0.0  # when the device has done what was launched
        self._rng = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Any) -> Any:
        from minisgl.runner import Step

        begin = time.perf_counter()
        while time.perf_counter() - begin < self._launch:  # holding the interpreter, as PyTorch's own Python does
            pass
        seconds = self._step + self._prompt_token * (batch.num_tokens - batch.num_decodes)
        self._free = max(self._free, time.perf_counter()) + seconds
        step = Step(batch, None, None)  # type: ignore[arg-type]  (no logits, no sampling)
        step.done = self._free  # type: ignore[assignment]
        return step

    def sample(self, step: Any) -> None:
        pass

    def results(self, step: Any) -> np.ndarray:
        time.sleep(max(step.done - time.perf_counter(), 0.0))
        return self._rng.integers(3, self._vocab, int(step.batch.samples.sum()))


def fake_device(args: argparse.Namespace, into: Path) -> str:
    """Options as on a GPU, and a folder with a model of no size and a real vocabulary."""
    from minisgl import sizing
    from minisgl.bench.shapes import SHAPES, shape_folder

    args.load_format, args.device, args.dtype, args.overlap = "dummy", "cpu", "float32", True
    args.chunk_size = sizing.DEFAULT_CHUNK["cuda"]
    args.max_running_requests = args.max_running_requests or sizing.DEFAULT_RUNNING["cuda"]
    args.kv_capacity = args.kv_capacity or 2 * args.clients * (args.prompt + args.tokens)
    name = "llama-1b-smoltok"
    folder = shape_folder(name, into)
    tiny = {"hidden_size": 64, "num_hidden_layers": 1, "head_dim": 32, "intermediate_size": 64,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | tiny))
    return str(folder)


# ---- the workload, and the ways to ask for it ------------------------------------------------------------------------


class Work:
    """Prompts with the number of tokens that each is to generate."""

    def __init__(self, runtime: Any, args: argparse.Namespace):
        self.runtime, self.clients = runtime, args.clients
        rng = random.Random(args.seed)
        vocab = min(runtime.config.vocab_size, runtime.tokenizer.vocab_size)
        self.prompts = [[rng.randrange(3, vocab) for _ in range(args.prompt)] for _ in range(args.requests)]
        self.lengths = [rng.randrange(args.tokens // 2, args.tokens + 1) for _ in range(args.requests)]
        self.params = [{"max_new_tokens": n, "ignore_eos": True, "temperature": 0} for n in self.lengths]

    def one_call(self) -> dict[str, Any]:
        begin = time.perf_counter()
        replies = self.runtime.generate(input_ids=self.prompts, sampling_params=self.params)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "tokens": sum(reply["meta_info"]["completion_tokens"] for reply in replies)}

    def in_process(self, stream: bool) -> dict[str, Any]:
        todo, counts = list(zip(self.prompts, self.params))[::-1], []

        async def client() -> None:
            while todo:
                ids, params = todo.pop()
                reply = await self.runtime.async_generate(input_ids=ids, sampling_params=params, stream=stream)
                if stream:
                    async for piece in reply:
                        reply = piece
                counts.append(reply["meta_info"]["completion_tokens"])

        async def clients() -> float:
            begin = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(self.clients)))
            return time.perf_counter() - begin

        seconds = asyncio.run(clients())
        return {"seconds": seconds, "tokens": sum(counts)}

    def http(self, port: int, stream: bool) -> dict[str, Any]:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        bodies = [{"prompt": ids, "max_tokens": n, "ignore_eos": True, "temperature": 0, **more}
                  for ids, n in zip(self.prompts, self.lengths)]  # fmt: skip
        command = [sys.executable, str(Path(__file__).with_name("http_client.py"))]
        command += ["127.0.0.1", str(port), str(self.clients), "/v1/completions"]
        out = subprocess.run(command, input=json.dumps(bodies), stdout=subprocess.PIPE, text=True)
        if out.returncode:
            raise SystemExit("the client process failed")
        return json.loads(out.stdout)


def cpu_seconds() -> dict[str, float]:
    """CPU time so far of the threads that matter, by name."""
    found = dict.fromkeys(("minisgl-engine", "minisgl-server"), 0.0)
    for thread in threading.enumerate():
        if thread.name in found and thread.ident is not None:
            found[thread.name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def measure(work: Work, run: Callable[[], dict[str, Any]]) -> dict[str, float]:
    """One run, from an empty cache."""
    work.runtime.flush_cache()
    work.runtime.reset_stats()
    before = cpu_seconds()
    result = run()
    stats, after = work.runtime.stats(), cpu_seconds()
    if result["tokens"] != sum(work.lengths):
        raise SystemExit(f"{result['tokens']} tokens came, not {sum(work.lengths)}")
    row = {
        "tokens_per_s": result["tokens"] / result["seconds"],
        "steps": stats["steps"],
        "ms_per_step": 1e3 * stats["busy_time"] / stats["steps"],
        "host_time_share": stats["host_time_share"],
    }
    for name in before:
        row[f"{name.removeprefix('minisgl-')}_us_per_request"] = 1e6 * (after[name] - before[name]) / len(work.prompts)
    return row


def run(args: argparse.Namespace, model: str | None) -> dict[str, Any]:
    from minisgl import Runtime, Server

    names = ("load_format", "device", "dtype", "overlap", "kv_capacity", "max_running_requests", "chunk_size")
    options = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    with Runtime(model, **options) as runtime:
        if args.fake_step is not None:
            fake = FakeRunner(runtime.engine.runner, args)
            runtime.engine.call(lambda: setattr(runtime.engine, "runner", fake))
        work = Work(runtime, args)
        with Server(runtime, port=0) as server:
            ways: dict[str, Callable[[], dict[str, Any]]] = {
                "one call": work.one_call,
                BASE: lambda: work.in_process(False),
                "in process, streams": lambda: work.in_process(True),
                "http": lambda: work.http(server.port, False),
                "http, streams": lambda: work.http(server.port, True),
            }
            ways = {name: way for name, way in ways.items() if name == BASE or name in args.ways}
            for way in ways.values():  # warm up
                measure(work, way)
            gc.collect()
            gc.freeze()  # as `serve` does: a full collection would fall into one run or another, and stop it for 0.1 s
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
            for i in range(args.repeat):
                for name in list(ways)[:: -1 if i % 2 else 1]:
                    rows[name].append(measure(work, ways[name]))
                    show(name, rows[name][-1])
    ratios = {name: [row["tokens_per_s"] / base["tokens_per_s"] for row, base in zip(found, rows[BASE])]
              for name, found in rows.items()}  # fmt: skip
    medians = {name: {key: float(f"{statistics.median(row[key] for row in found):.4g}") for key in found[0]}
               for name, found in rows.items()}  # fmt: skip
    return {
        "medians": medians,
        "of_in_process": {name: round(statistics.median(found), 3) for name, found in ratios.items()},
        "of_in_process_each": {name: [round(ratio, 3) for ratio in found] for name, found in ratios.items()},
    }


def show(name: str, row: dict[str, float]) -> None:
    print(f"{name:20}", *(f"{key} {value:,.4g}" for key, value in row.items()), sep="  ", flush=True)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        model = args.model
        if args.fake_step is not None:
            model = fake_device(args, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        else:
            from minisgl.bench.shapes import SHAPES, shape_folder

            if model in SHAPES:
                model = str(shape_folder(model, Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        return run(args, model)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a name in minisgl/bench/shapes.py; default: the default model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--kv-capacity", type=int)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an output; the fewest are half of that")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    names = ["one call", BASE, "in process, streams", "http", "http, streams"]
    parser.add_argument("--ways", nargs="+", choices=names, default=names, help=f"{BASE!r} is always among them")
    parser.add_argument("--fake-step", type=float, metavar="MS", help="no model: a stand-in whose steps take MS")
    parser.add_argument("--fake-launch", type=float, metavar="MS", default=0.3)
    parser.add_argument("--fake-prompt", type=float, metavar="US", default=3.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    print(json.dumps({"benchmark": "http_overhead", **vars(args), **compare(args)}))


if __name__ == "__main__":
    main()
