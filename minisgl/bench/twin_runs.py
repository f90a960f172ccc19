"""`bench.py --workload twin-... `: token-level workloads on our engine, its switches and its peers, in one run.

    peers, each in its own process -> ours -> ours with each mechanism switched off in turn (--ablate)

Every figure is the median of `--reps` repetitions on an empty cache, after a warm-up. The ratio is that of the
throughputs: a peer's seconds over ours, for the same requests.
"""

from __future__ import annotations

import inspect
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .drive import Played, RuntimePlayer, median
from .peers import Job, measure, require, run_peer
from .report import machine
from .shapes import SHAPES, shape_folder
from .twins import TWINS
from .workloads import BenchError

CONTEXT = 8192  # longest sequence, in tokens, that an engine has to be ready for

# ablation -> the argument of Runtime that switches the mechanism off
SWITCHES: dict[str, dict[str, Any]] = {
    "no CUDA graphs": {"cuda_graphs": False},
    "no tuned products": {"tuned_products": False},
    "no overlap": {"overlap": False},
    "no shared-prefix attention": {"shared_prefix": False},
    "no jump-forward": {"jump_forward": False},
    "no radix cache": {"radix_cache": False},
}


@dataclass
class Variant:
    """One engine: its median repetition and all repetitions' seconds, by workload."""

    name: str
    start: float
    runs: dict[str, Played] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    version: str | None = None

    def add(self, workload: str, played: Sequence[Played]) -> None:
        self.runs[workload], self.seconds[workload] = median(played), [run.seconds for run in played]


def run(args: Namespace, make_runtime: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """All that the options ask for; returns the table and the figures for JSON."""
    jobs = [Job(name, args.scale, args.seed) for name in args.workload]
    for name in args.compare:
        require(name)
    with tempfile.TemporaryDirectory(prefix="minisgl-shapes-") as scratch:
        model = _model(args, Path(scratch))
        if any(TWINS[job.name].needs_text for job in jobs) and not model["has_tokenizer"]:
            raise BenchError(f"twin-json needs a tokenizer, {args.model} has none: pass --tokenizer or another --model")
        variants = [_peer(name, jobs, args, model) for name in dict.fromkeys(args.compare)]
        ours, about = _ours("minisgl", jobs, args, model, {}, make_runtime)
        variants.insert(0, ours)
        if args.ablate:
            for name, switch in _switches(make_runtime, about["device"]).items():
                affected = [job for job in jobs if name != "no jump-forward" or TWINS[job.name].needs_text]
                if affected:
                    variants.append(_ours(name, affected, args, model, switch, make_runtime)[0])
    figures = about | {"workloads": {job.name: _figures(job.name, variants) for job in jobs}}
    figures |= {f"start_{variant.name}": variant.start for variant in variants}
    figures |= {f"version_{variant.name}": variant.version for variant in variants if variant.version}
    return _table(figures, variants, jobs), figures


def _model(args: Namespace, scratch: Path) -> dict[str, Any]:
    """The model's folder and what every engine is told about it."""
    from ..loader import resolve_model

    name = args.model
    if args.tokenizer is not None and name not in SHAPES:
        raise BenchError("--tokenizer is for the built-in shapes: " + ", ".join(SHAPES))
    if name in SHAPES:
        if args.load_format != "dummy":
            raise BenchError(f"--model {name} is a shape without weights: it needs --load-format dummy")
        name = str(shape_folder(name, scratch, args.tokenizer))
    source = resolve_model(name, args.load_format)
    has_tokenizer = any((source.folder / file).exists() for file in ("tokenizer.json", "tokenizer.model"))
    return {
        "name": args.model or source.name,
        "folder": str(source.folder),
        "gguf": None if source.gguf is None else str(source.gguf),
        "load_format": "dummy" if source.dummy else "auto",
        "dtype": args.dtype,
        "device": args.device,
        "max_context": min(CONTEXT, source.config.context_length),
        "has_tokenizer": has_tokenizer,
    }


def _peer(name: str, jobs: list[Job], args: Namespace, model: dict[str, Any]) -> Variant:
    outcome = run_peer(name, jobs, args.reps, model)
    variant = Variant(name, outcome.start, version=outcome.version)
    for job in jobs:
        variant.add(job.name, outcome.runs[job.name])
    return variant


def _ours(
    name: str, jobs: list[Job], args: Namespace, model: dict[str, Any], switch: dict[str, Any], make_runtime: Any
) -> tuple[Variant, dict[str, Any]]:
    options = {"max_context": model["max_context"], "dtype": args.dtype, "device": args.device}
    options |= dict(args.settings) | switch
    begin = time.perf_counter()
    with make_runtime(model["gguf"] or model["folder"], load_format=model["load_format"], **options) as runtime:
        variant = Variant(name, time.perf_counter() - begin)
        for job in jobs:
            variant.add(job.name, measure(RuntimePlayer(runtime), job, args.reps, name))
        return variant, _about(args, model, runtime)


def _switches(make_runtime: Callable[..., Any], device: str) -> dict[str, dict[str, Any]]:
    """Those that are there to be switched off: on a CPU graphs and overlap are not used in the first place."""
    known = inspect.signature(make_runtime).parameters
    unused = () if device.startswith("cuda") else ("cuda_graphs", "tuned_products", "overlap")
    return {n: switch for n, switch in SWITCHES.items() for key in switch if key in known and key not in unused}


def _about(args: Namespace, model: dict[str, Any], runtime: Any) -> dict[str, Any]:
    import torch

    return {
        "model": model["name"],
        "load_format": model["load_format"],
        "device": str(runtime.device),
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "machine": machine(str(runtime.device)),
        "torch": torch.__version__,
        "reps": args.reps,
        "scale": args.scale,
        "settings": dict(args.settings),
    }


def _figures(workload: str, variants: Sequence[Variant]) -> dict[str, Any]:
    ours = variants[0].runs[workload]
    found: dict[str, Any] = {}
    for variant in variants:
        played = variant.runs.get(workload)
        if played is None:
            continue
        found[variant.name] = {
            "seconds": played.seconds,
            "all_seconds": variant.seconds[workload],
            "requests": played.requests,
            "requests_per_s": played.requests / played.seconds,
            "output_tokens": played.output_tokens,
            "output_tokens_per_s": played.output_tokens / played.seconds,
            "prompt_tokens": played.prompt_tokens,
            "hit_rate": played.hit_rate,
            "optimal_hit_rate": played.optimal_hit_rate,
            "valid": played.valid,
            "outputs_as_ours": sum(a == b for a, b in zip(ours.outputs, played.outputs)),
            "ratio": played.seconds / ours.seconds,
        }
    return found


def _table(figures: dict[str, Any], variants: Sequence[Variant], jobs: Sequence[Job]) -> str:
    title = (
        f"{figures['model']}, {figures['dtype']} on {figures['device']} ({figures['machine']}, torch "
        f"{figures['torch']}), medians of {figures['reps']}, scale {figures['scale']:g}"
    )
    starts = ", ".join(f"{variant.name} {variant.start:.1f} s" for variant in variants)
    lines = [title, f"start-up: {starts}", "", _row("workload", "engine", *(head for head, _ in _COLUMNS))]
    for job in jobs:
        for name, values in figures["workloads"][job.name].items():
            lines.append(_row(job.name, name, *(_cell(values, key) for _, key in _COLUMNS)))
    return "\n".join([*lines, "", "ratio: seconds over ours, that is, our throughput over theirs"])


_COLUMNS = (
    ("seconds", "seconds"),
    ("requests/s", "requests_per_s"),
    ("output tok/s", "output_tokens_per_s"),
    ("hit rate", "hit_rate"),
    ("optimum", "optimal_hit_rate"),
    ("ratio", "ratio"),
)


def _cell(values: dict[str, Any], key: str) -> str:
    value = values[key]
    forms = {"hit_rate": ".3f", "optimal_hit_rate": ".3f", "seconds": ".3f", "ratio": ".2f"}
    return "" if value is None else format(value, forms.get(key, ",.1f"))


def _row(workload: str, engine: str, *cells: str) -> str:
    return f"{workload:<21}{engine:<28}" + "".join(f"{cell:>14}" for cell in cells)
