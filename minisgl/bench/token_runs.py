"""Running a workload whose requests are known beforehand, with the radix cache on and off.

    start (cache on)  -> make requests -> run -> shut down
    start (cache off) -> the same requests -> run -> look into differing outputs -> shut down
    Hugging Face generate (--compare hf)

Engines never share the machine: each is shut down before the next one starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .report import group_table, json_line, machine, summary, table
from .runners import Difference, Run, differences, explain, measure, median
from .workloads import WORKLOADS, BenchError, BenchRequest, Setting


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
    workload = WORKLOADS[args.workload[0]]
    options = {
        "device": args.device,
        "dtype": args.dtype,
        "load_format": args.load_format,
        **dict(args.settings),
    }

    with make_runtime(args.model, radix_cache=True, **options) as runtime:
        requests = workload.build(setting_for(args, runtime))
        warmup = 64 if str(runtime.device).startswith("cuda") else 8
        run = median(measure(runtime, workload, requests, "cache on", args.reps, warmup))
        outcome = Outcome(requests, run, about=about(args, runtime))
    if not args.no_baseline:
        options["dtype"] = outcome.about[
            "dtype"
        ]  # "auto" is measured at each start, and could come out differently
        with make_runtime(args.model, radix_cache=False, **options) as runtime:
            outcome.baseline = median(measure(runtime, workload, requests, "cache off", args.reps, warmup))
            found = differences(run, outcome.baseline)
            outcome.found = explain(runtime, requests, run, found)
    for name in dict.fromkeys(args.compare):
        subset = requests[: args.compare_requests]
        outcome.peers[name] = (subset, _run_hf(args, subset, outcome.about))
    return outcome


def setting_for(args: argparse.Namespace, runtime: Any) -> Setting:
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
        quick=args.quick,
    )


def _tokenizer(runtime: Any) -> Any:
    """The runtime's tokenizer, or None: asking a model that came without one for it is a ValueError."""
    try:
        return runtime.tokenizer
    except ValueError:
        return None


def about(args: argparse.Namespace, runtime: Any) -> dict[str, Any]:
    import torch

    return {
        "workload": args.workload[0],
        "model": runtime.name,
        "device": str(runtime.device),
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "machine": machine(str(runtime.device)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "runs": args.reps,
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
    batch = args.compare_batch or (len(requests) if args.workload[0] == "decode" else 8)
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
