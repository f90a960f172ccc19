"""`bench.py --workload tot`, `--all`: workloads of programs, with mechanisms switched off, and beside other engines.

    for each workload:
        for each variant (`variants`):  flush, run its programs, keep every request (`recorder`)
    peers, each in its own process, play the requests that were recorded

On a CPU all Runtimes that the variants need are there from the beginning, idle but for the one that is measured, so
that what is compared is measured one right after the other. On a GPU each has the whole memory: one after the other,
and for each all workloads.

All programs of a workload are started at once and the clock runs to the last one's end. Generation is greedy, so every
variant must return the same texts; where one does not, the first differing token's lead over the other is looked up:
rounding can explain a small one (`report.NEAR_TIE`), nothing else can.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import suite  # noqa: F401  (registers its workloads)
from .peers import Job, require, run_peer
from .programs import PROGRAMS, Programs
from .recorder import Entry, Log, Recorder, Tap, rounds
from .suite_equal import Equality, compare
from .token_runs import about, setting_for
from .variants import DEFAULT, VARIANTS, Variant, by_engine
from .workloads import WORKLOADS, BenchError, BenchRequest

# the order of the report: what the cache gains most on first, what it gains little on last
ALL = (
    "fewshot", "hellaswag", "react", "generative-agents", "tot", "tot-deep", "sot", "judge", "rag", "prefix-groups",
    "multiturn-short", "json", "json-schema", "multiturn-long", "uniform",
)  # fmt: skip
KV, KV_QUICK = 40_960, 16_384  # tokens in a KV pool on a CPU: nothing has to be evicted


@dataclass
class SuiteRun:
    """A workload on one variant.

    results: what each program returned (output ids where there are no programs).  steps: the engine's forward steps.
    """

    seconds: float
    entries: list[Entry]
    results: list[Any]
    log: Log
    right: float | None = None
    equality: Equality | None = None
    steps: int = 0


@dataclass
class Outcome:
    """runs[workload][variant]; peers[workload][peer]: seconds and outputs; about: machine, model, sizes."""

    runs: dict[str, dict[str, SuiteRun]] = field(default_factory=dict)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


def execute(args: Namespace, make_runtime: Callable[..., Any]) -> Outcome:
    """All runs that the options ask for."""
    for name in args.compare:
        require(name)
    chosen = list(VARIANTS) if args.ablate else ["full"] if args.no_baseline else list(DEFAULT)
    names = list(ALL) if args.all else args.workload
    outcome = Outcome({name: {} for name in names})
    works: dict[str, Programs | list[BenchRequest]] = {}
    variants = [VARIANTS[name] for name in chosen]
    variants = [variant for variant in variants if any(_applies(variant, name) for name in names)]
    for engines in _engines(args, make_runtime, variants):
        if not works:
            runtime = engines[0][0]
            outcome.about = about(args, runtime) | {"quick": args.quick}
            outcome.about["workload"] = "all" if args.all else names[0]
            setting = setting_for(args, runtime)
            works = {name: _build(name, setting) for name in names}
        for name, work in works.items():
            for runtime, group in engines:
                for variant in group:
                    if _applies(variant, name):
                        _one(outcome, name, work, variant, runtime, args.reps)
    for peer in dict.fromkeys(args.compare):
        _peer(outcome, peer, args)
    return outcome


def _applies(variant: Variant, name: str) -> bool:
    return variant.applies(name in PROGRAMS, name in PROGRAMS and PROGRAMS[name].constrained)


def _engines(
    args: Namespace, make_runtime: Callable[..., Any], variants: Sequence[Variant]
) -> Iterator[list[tuple[Any, list[Variant]]]]:
    """Runtimes, warm, with the variants that run on them: all in one list on a CPU, one a list on a GPU."""
    from ..sizing import choose_device

    options = {"device": args.device, "dtype": args.dtype, "load_format": args.load_format}
    if choose_device(args.device).type == "cpu":
        options["kv_capacity"] = KV_QUICK if args.quick else KV  # several pools have to fit side by side
    options |= dict(args.settings)
    with ExitStack() as stack:
        held: list[tuple[Any, list[Variant]]] = []
        for engine, group in by_engine(variants):
            runtime = stack.enter_context(make_runtime(args.model, **(options | engine)))
            options["dtype"] = str(runtime.dtype).removeprefix("torch.")  # "auto" is measured at each start
            warm_up(runtime)
            held.append((runtime, group))
            if str(runtime.device).startswith("cuda"):
                yield held
                held = []
                stack.pop_all().close()
        if held:
            yield held


def _build(name: str, setting: Any) -> Programs | list[BenchRequest]:
    if name in PROGRAMS:
        if setting.tokenizer is None:
            raise BenchError(f"--workload {name}: programs are text, and the model came without a tokenizer")
        return PROGRAMS[name].build(setting)
    return WORKLOADS[name].build(setting)


def warm_up(runtime: Any) -> None:
    """Compiled kernels and first-touched memory are no part of the figures."""
    rng = np.random.default_rng(0)
    most = min(runtime.config.vocab_size, 10_000)
    prompts = [rng.integers(5, most, 64).tolist() for _ in range(8)]
    runtime.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True})
    runtime.flush_cache()


def _one(outcome: Outcome, name: str, work: Any, variant: Variant, runtime: Any, reps: int) -> None:
    """Run one workload on one variant, `reps` times on an empty cache, and keep the run with the median time."""
    execute: Callable[..., SuiteRun] = run_programs if isinstance(work, Programs) else run_requests
    runs = []
    for _ in range(reps):
        runtime.flush_cache()
        before = runtime.stats()["steps"]
        run = execute(runtime, work, variant, f"{name}, {variant.name}")
        run.steps = runtime.stats()["steps"] - before
        runs.append(run)
    run = sorted(runs, key=lambda run: run.seconds)[(reps - 1) // 2]
    full = outcome.runs[name].get("full")
    if full is not None:
        run.equality = compare(full, run, runtime)
    outcome.runs[name][variant.name] = run


def run_programs(runtime: Any, work: Programs, variant: Variant, label: str = "") -> SuiteRun:
    """Start all programs at once, greedy, and wait for the last."""
    from tqdm.auto import tqdm

    backend = Recorder(runtime, hints=variant.hints)
    with tqdm(total=len(work.calls), desc=label, unit="program") as bar:
        begin = time.perf_counter()
        states = work.function.run_batch(
            work.calls, temperature=0.0, backend=backend, use_thread=variant.parallel, generator_style=True
        )
        results = []
        for state in states:
            results.append(state.ret_value)
            bar.update()
        seconds = time.perf_counter() - begin
    right = None
    if work.right is not None:
        right = sum(work.right(i, result) for i, result in enumerate(results)) / len(results)
    return SuiteRun(seconds, backend.log.entries(), results, backend.log, right)


def run_requests(runtime: Any, work: Sequence[BenchRequest], variant: Variant, label: str = "") -> SuiteRun:
    """Hand all requests over at once, greedy, exactly `max_new_tokens` each, and wait for the last."""
    log = Log()
    params = [{"temperature": 0.0, "max_new_tokens": r.max_new_tokens, "ignore_eos": True} for r in work]
    begin = time.perf_counter()
    tap = Tap(runtime, log)
    sinks, _ = tap.prepare(None, params, input_ids=[r.prompt for r in work])
    runtime.engine.submit([sink.request for sink in sinks])
    results = [sink.result()["output_ids"] for sink in sinks]
    seconds = time.perf_counter() - begin
    scored = [ids[:1] == [r.answer] for ids, r in zip(results, work) if r.answer is not None]
    return SuiteRun(seconds, log.entries(), results, log, sum(scored) / len(scored) if scored else None)


def _peer(outcome: Outcome, peer: str, args: Namespace) -> None:
    """Replay what the full variant asked for, round by round."""
    from ..loader import resolve_model

    source = resolve_model(args.model, args.load_format)
    model = {
        "folder": str(source.folder),
        "gguf": None if source.gguf is None else str(source.gguf),
        "load_format": "dummy" if source.dummy else "auto",
        "dtype": outcome.about["dtype"],
        "device": outcome.about["device"],
        "max_context": min(8192, source.config.context_length),
        "has_tokenizer": any((source.folder / file).exists() for file in ("tokenizer.json", "tokenizer.model")),
    }
    jobs = [Job(name, recorded=rounds(runs["full"].entries)) for name, runs in outcome.runs.items()]
    found = run_peer(peer, jobs, 1, model)
    for job in jobs:
        played = found.runs[job.name][0]
        ours = outcome.runs[job.name]["full"]
        outcome.peers.setdefault(job.name, {})[peer] = {
            "seconds": played.seconds,
            "requests": played.requests,
            "output_tokens": played.output_tokens,
            "hit_rate": played.hit_rate,
            "ratio": played.seconds / ours.seconds,
            "version": found.version,
        }
