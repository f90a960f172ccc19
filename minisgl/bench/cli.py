"""The command line of the benchmark: options, the order of the runs, and what is printed.

    start (cache on)  -> make requests -> run -> shut down
    start (cache off) -> the same requests -> run -> look into differing outputs -> shut down
    other engines, one after another (--compare)
    table, then one line of JSON

Engines never share the machine: each is shut down before the next one starts.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import fewshot  # noqa: F401  (registers its workload)
from .report import group_table, json_line, machine, summary, table
from .runners import Difference, Run, differences, explain, measure, median
from .workloads import WORKLOADS, BenchError, BenchRequest, Setting

PEERS = ("hf",)


def parser() -> argparse.ArgumentParser:
    workloads = "\n".join(f"  {w.name:<10} {w.summary}" for w in WORKLOADS.values())
    p = argparse.ArgumentParser(
        prog="bench.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Runs a workload with the radix cache on and off.  Prints a table and, as the last "
        "line of stdout, one JSON object.",
        epilog=f"workloads:\n{workloads}",
    )
    add = p.add_argument
    add("--grammar", action="store_true", help="time grammar engines on the model's vocabulary instead (no GPU needed)")
    add("--workload", choices=list(WORKLOADS), default="fewshot")
    add("--model", metavar="NAME", help="folder, hub id or .gguf file (default: SmolLM2-135M-Instruct)")
    add(
        "--load-format",
        choices=["auto", "safetensors", "gguf", "dummy"],
        default="auto",
        help="dummy: random weights from a config.json alone",
    )
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add("--dtype", choices=["auto", "float32", "float16", "bfloat16"], default="auto")
    add("--requests", type=_positive, metavar="N", help="how many (default: the workload's, fewer on a CPU)")
    add(
        "--shots",
        type=_natural,
        metavar="N",
        help="fewshot: worked examples per subject (default: as many as make 1,000 tokens; 5 with --data)",
    )
    add("--data", type=Path, metavar="DIR", help="fewshot: a folder in MMLU's CSV layout (dev/, test/, val/)")
    add(
        "--random-ids",
        action="store_true",
        help="fewshot: random token ids of the same shape; nothing is scored",
    )
    add(
        "--lengths",
        type=_positive,
        nargs=2,
        metavar="N",
        help="uniform: shortest and longest prompt and output; decode: prompt and output length",
    )
    add("--seed", type=_natural, metavar="N", help="of the requests (default: the workload's own)")
    add(
        "--runs",
        type=_positive,
        default=1,
        metavar="N",
        help="repetitions; the median is reported (default: 1)",
    )
    add("--no-baseline", action="store_true", help="skip the run without the radix cache")
    add("--compare", action="append", choices=PEERS, default=[], help="another engine on the same requests")
    add("--compare-requests", type=_positive, metavar="N", help="only the first N requests for --compare")
    add("--compare-batch", type=_positive, metavar="N", help="its batch (default: 8; decode: all requests)")
    add(
        "--set",
        action="append",
        type=_setting,
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="an argument of minisgl.Runtime, such as schedule_policy=fcfs",
    )
    return p


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text!r}")
    return int(text)


def _setting(text: str) -> tuple[str, Any]:
    """`"chunk_size=512"` -> `("chunk_size", 512)`; what is no Python literal is a string."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def check(args: argparse.Namespace) -> None:
    """Options that don't fit together.  Raises BenchError: no option is accepted and then ignored."""
    options = WORKLOADS[args.workload].options
    for name in ("shots", "data", "random_ids", "lengths"):
        value = getattr(args, name)
        if value is not None and value is not False and name not in options:
            raise BenchError(f"--{name.replace('_', '-')} means nothing to --workload {args.workload}")
    if args.random_ids and (args.data is not None or args.shots is not None):
        raise BenchError("--random-ids goes neither with --data nor with --shots")
    if args.workload == "uniform" and args.lengths and args.lengths[0] > args.lengths[1]:
        raise BenchError("--lengths: the shortest is longer than the longest")
    if not args.compare and (args.compare_requests or args.compare_batch):
        raise BenchError("--compare-requests and --compare-batch need --compare")
    if args.data is not None and not args.data.is_dir():
        raise BenchError(f"--data: no folder {args.data}")
    own = {"model", "device", "dtype", "load_format", "radix_cache"}
    for name, _ in args.settings:
        if name in own:
            raise BenchError(f"--set {name}: has an option of its own, or is what is being compared")


@dataclass
class Outcome:
    """What was run and on what; `peers`: name -> (the requests it answered, its run)."""

    requests: list[BenchRequest]
    run: Run
    baseline: Run | None = None
    found: list[Difference] = field(default_factory=list)
    peers: dict[str, tuple[list[BenchRequest], Run]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


def execute(args: argparse.Namespace, make_runtime: Callable[..., Any]) -> Outcome:
    """The runs that the options ask for.  `make_runtime`: `minisgl.Runtime`, or a double with its
    interface."""
    workload = WORKLOADS[args.workload]
    options = {
        "device": args.device,
        "dtype": args.dtype,
        "load_format": args.load_format,
        **dict(args.settings),
    }

    with make_runtime(args.model, radix_cache=True, **options) as runtime:
        requests = workload.build(_setting_for(args, runtime))
        warmup = 64 if str(runtime.device).startswith("cuda") else 8
        run = median(measure(runtime, workload, requests, "cache on", args.runs, warmup))
        outcome = Outcome(requests, run, about=_about(args, runtime))
    if not args.no_baseline:
        options["dtype"] = outcome.about[
            "dtype"
        ]  # "auto" is measured at each start, and could come out differently
        with make_runtime(args.model, radix_cache=False, **options) as runtime:
            outcome.baseline = median(measure(runtime, workload, requests, "cache off", args.runs, warmup))
            found = differences(run, outcome.baseline)
            outcome.found = explain(runtime, requests, run, found)
    for name in dict.fromkeys(args.compare):
        subset = requests[: args.compare_requests]
        outcome.peers[name] = (subset, _run_hf(args, subset, outcome.about))
    return outcome


def _setting_for(args: argparse.Namespace, runtime: Any) -> Setting:
    return Setting(
        tokenizer=_tokenizer(runtime),
        vocab_size=runtime.config.vocab_size,
        max_context=runtime.scheduler.max_context,
        device=str(runtime.device),
        requests=args.requests,
        shots=args.shots,
        seed=args.seed,
        data=args.data,
        lengths=tuple(args.lengths) if args.lengths else None,
        random_ids=args.random_ids,
    )


def _tokenizer(runtime: Any) -> Any:
    """The runtime's tokenizer, or None: asking a model that came without one for it is a ValueError."""
    try:
        return runtime.tokenizer
    except ValueError:
        return None


def _about(args: argparse.Namespace, runtime: Any) -> dict[str, Any]:
    import torch

    return {
        "workload": args.workload,
        "model": runtime.name,
        "device": str(runtime.device),
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "machine": machine(str(runtime.device)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "runs": args.runs,
        "settings": dict(args.settings),
    }


def _run_hf(args: argparse.Namespace, requests: list[BenchRequest], about: dict[str, Any]) -> Run:
    """Hugging Face in `--dtype`, or in bfloat16, which is its fastest on a GPU and on a CPU with AMX."""
    import torch

    from ..loader import resolve_model
    from .peers_hf import HuggingFace

    source = resolve_model(args.model, args.load_format)
    if source.gguf is not None:
        raise BenchError(
            "--compare hf: transformers runs from a folder of safetensors, not from a .gguf file"
        )
    name = "bfloat16" if args.dtype == "auto" else args.dtype
    about["hf_dtype"] = name
    batch = args.compare_batch or (len(requests) if args.workload == "decode" else 8)
    about["hf_batch"] = batch
    peer = HuggingFace(source.folder, dtype=getattr(torch, name), device=about["device"], dummy=source.dummy)
    return peer.run(requests, batch)


def report(outcome: Outcome) -> str:
    """Table and JSON line."""
    about = outcome.about
    result = about | summary(
        outcome.requests, outcome.run, outcome.baseline, outcome.found, outcome.peers, about["dtype"]
    )
    title = (
        f"{about['workload']}: {about['model']}, {about['dtype']} on {about['device']} ({about['machine']}, "
        f"{about['threads']} threads, torch {about['torch']})"
    )
    parts = [title, table(result, list(outcome.peers)), group_table(result)]
    return "\n\n".join(part for part in parts if part) + "\n\n" + json_line(result)


def grammar_report(model: str | None) -> str:
    """The table of `bench.grammar` for a model's tokenizer."""
    from ..loader import resolve_model
    from ..tokenizer import Tokenizer
    from .grammar import report

    return report(Tokenizer(resolve_model(model).folder))


def main(argv: Sequence[str] | None = None, make_runtime: Callable[..., Any] | None = None) -> int:
    """Run the command line; returns the exit code (2: it could not be run as asked, 130: interrupted)."""
    p = parser()
    args = p.parse_args(argv)
    try:
        if args.grammar:
            print(grammar_report(args.model), flush=True)
            return 0
        check(args)
        if make_runtime is None:
            from ..runtime import Runtime as make_runtime
        print(report(execute(args, make_runtime)), flush=True)
    except (BenchError, ValueError, TypeError, RuntimeError) as error:
        print(f"{p.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
