"""`python -m minisgl serve`: a Runtime and a Server until SIGTERM or Ctrl-C.

    $ python -m minisgl serve --port 30000
    minisgl: ready on http://127.0.0.1:30000 (SmolLM2-135M-Instruct, cpu, KV 102,400 tokens)

The first signal drains: no new connections, what runs may end within --drain-timeout, the rest is aborted.  A second
one aborts at once.  The exit status is 0 in both cases, and the engine's thread and memory are gone before.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

_DEFAULTS = "options left out have Runtime's defaults: see `help(minisgl.Runtime)`"
# option -> (Runtime's keyword, type, help)
_ENGINE: dict[str, tuple[str, Any, str]] = {
    "--device": ("device", str, "auto, cpu, cuda, cuda:1"),
    "--dtype": ("dtype", str, "auto, float32, float16, bfloat16"),
    "--load-format": ("load_format", str, "auto, safetensors, gguf, or dummy for random weights"),
    "--revision": ("revision", str, "branch, tag or commit of a hub model"),
    "--mem-fraction": ("mem_fraction", float, "share of the memory left after the weights for the KV pool"),
    "--kv-capacity": ("kv_capacity", int, "size of the KV pool in tokens, instead"),
    "--max-running-requests": ("max_running_requests", int, "most sequences in one batch"),
    "--max-context": ("max_context", int, "longest sequence in tokens"),
    "--chunk-size": ("chunk_size", int, "most tokens per step; -1: unlimited"),
    "--schedule-policy": ("schedule_policy", str, "lpm, fcfs, dfs-weight, lof, random"),
    "--eviction": ("eviction", str, "lru, lfu, fifo, mru, priority"),
    "--attention-backend": ("attention_backend", str, "auto, triton, torch, reference"),
    "--grammar-backend": ("grammar_backend", str, "auto, fsm, llguidance, xgrammar"),
    "--seed": ("seed", int, "for requests that bring none"),
}
_SWITCHES = {
    "--disable-radix-cache": ("radix_cache", "no sharing of prefixes between requests"),
    "--disable-overlap": ("overlap", "form a step only when the one before has ended"),
    "--disable-cuda-graphs": ("cuda_graphs", "launch each kernel by itself"),
    "--disable-tuned-products": ("tuned_products", "leave all matrix products to cuBLAS's own choice of tiles"),
    "--disable-jump-forward": ("jump_forward", "sample tokens that a grammar forces, too"),
}
_LIMITS = {
    "--max-queued-requests": ("max_queued", int, "sequences that may wait; beyond them the answer is 429"),
    "--max-body-bytes": ("max_body", int, "largest request body"),
    "--drain-timeout": ("drain_timeout", float, "seconds that running requests have after SIGTERM"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `serve`."""
    parser.epilog = _DEFAULTS
    parser.add_argument("--model", help="folder, hub id or .gguf file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from elsewhere (use an API key)")
    parser.add_argument("--port", type=int, default=30000, help="0: any free one")
    parser.add_argument("--api-key", help="clients must send it; better in the environment, as MINISGL_API_KEY")
    parser.add_argument("--served-model-name", action="append", help="what requests may call the model (repeatable)")
    parser.add_argument("--chat-template", type=Path, help="a file with a Jinja template, instead of the model's")
    for option, (name, kind, text) in (_ENGINE | _LIMITS).items():
        parser.add_argument(option, dest=name, type=kind, help=text)
    for option, (name, text) in _SWITCHES.items():
        parser.add_argument(option, dest=name, action="store_false", default=None, help=text)
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="ray: --workers of them on Ray")
    parser.add_argument("--workers", type=int, default=1, help="engines behind one router, with --engine ray")
    parser.set_defaults(run=serve)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords for Runtime that were given."""
    names = [name for name, *_ in (_ENGINE | _SWITCHES).values()]
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.chat_template is not None:
        try:
            options["chat_template"] = args.chat_template.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--chat-template: {error}") from None
    return options


def serve(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit status."""
    try:
        from .server import Limits, Server
    except ImportError as error:
        raise ValueError(str(error)) from error
    from .runtime import Runtime

    limits = {name: value for name, *_ in _LIMITS.values() if (value := getattr(args, name)) is not None}
    for name, value in limits.items():
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    key = args.api_key or os.environ.get("MINISGL_API_KEY") or None
    if args.engine == "ray":
        from .cluster import serve_cluster

        server_options = {"model_names": args.served_model_name or (), "limits": Limits(**limits)}
        return serve_cluster(
            args.workers, args.model, engine_options(args), host=args.host, port=args.port, api_key=key,
            server=server_options,
        )  # fmt: skip
    if args.workers != 1:
        raise ValueError(f"workers={args.workers} needs --engine ray (or several servers and `minisgl route`)")
    with _Signals() as signals, Runtime(args.model, **engine_options(args)) as runtime:
        if signals.count:
            return 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                server = Server(
                    runtime, args.host, args.port, api_key=key, model_names=args.served_model_name or (),
                    limits=Limits(**limits),
                )  # fmt: skip
            except OSError as error:
                raise ValueError(str(error)) from None
        for warning in caught:
            print(f"minisgl: warning: {warning.message}", file=sys.stderr)
        signals.call = server.close
        gc.collect()
        gc.freeze()  # the model's objects stay: a full collection would walk them for 0.1 s while every stream waits
        size = f"KV {runtime.scheduler.allocator.capacity:,} tokens"
        print(f"minisgl: ready on {server.url} ({server.model_names[0]}, {runtime.device}, {size})", flush=True)
        while server.serving and not signals.count:
            signals.wait()
        server.close()
    return 0


class _Signals:
    """SIGINT and SIGTERM as a count, while the context lasts; from the second on, `call(0)` ends the server at once."""

    def __init__(self) -> None:
        self.count = 0
        self.call: Any = None
        self._came = threading.Event()

    def wait(self) -> None:
        self._came.wait(1.0)

    def _handle(self, number: int, frame: Any) -> None:
        self.count += 1
        self._came.set()
        if self.count > 1 and self.call is not None:
            threading.Thread(target=self.call, args=(0.0,), daemon=True).start()

    def __enter__(self) -> _Signals:
        self._before = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
