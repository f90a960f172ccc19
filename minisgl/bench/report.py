"""From runs to figures: hit rate and its optimum, rates, percentiles; one table for people, one JSON for
programs."""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .runners import Difference, Run
from .workloads import BenchRequest

# Two tokens whose log-probabilities differ by less can change places when the same sums are rounded in
# another order.  Logits of 16 to 32 are 0.125 apart in bfloat16 and 0.016 in float16: twice that.
NEAR_TIE = {"bfloat16": 0.25, "float16": 0.032, "float32": 0.001}


def optimal_cached_tokens(prompts: Sequence[np.ndarray]) -> int:
    """How many prompt tokens the best possible prefix cache would not compute: every distinct prefix once.

    The distinct prefixes are the nodes of the trie of all prompts.  In sorted order each prompt adds to the
    trie what it doesn't share with its predecessor, so the longest common prefixes of neighbours, summed, are
    what is saved; no trie is built.  One token of a repeated prompt is not saved: without it there are no
    logits.
    """
    ordered = sorted((np.asarray(prompt) for prompt in prompts), key=lambda ids: ids.astype(">u4").tobytes())
    saved = 0
    for previous, ids in pairwise(ordered):
        saved += min(common_prefix(previous, ids), len(ids) - 1)
    return saved


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that two sequences share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def accuracy(requests: Sequence[BenchRequest], run: Run) -> float | None:
    """Share of the scored requests whose first output token is the right one; None if none is scored."""
    right = [
        record.output_ids[:1] == [request.answer]
        for request, record in zip(requests, run.records)
        if request.answer is not None
    ]
    return sum(right) / len(right) if right else None


def accuracy_by_group(requests: Sequence[BenchRequest], run: Run) -> dict[str, float]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for request, record in zip(requests, run.records):
        if request.answer is not None:
            groups[request.group].append(record.output_ids[:1] == [request.answer])
    return {name: sum(right) / len(right) for name, right in sorted(groups.items())}


def rates(run: Run) -> dict[str, float | None]:
    """Figures of one run.  Rates are over the whole run; percentiles over its requests, in milliseconds."""
    n = len(run.records)
    output = sum(len(record.output_ids) for record in run.records)
    prompt = sum(record.prompt_tokens for record in run.records)
    ttft = [record.ttft * 1000 for record in run.records if record.ttft is not None]
    latency = [record.latency * 1000 for record in run.records if record.latency is not None]
    return {
        "seconds": run.seconds,
        "requests_per_s": n / run.seconds,
        "prompt_tokens_per_s": prompt / run.seconds,
        "output_tokens_per_s": output / run.seconds,
        "hit_rate": sum(record.cached_tokens for record in run.records) / prompt,
        "ttft_ms_p50": _percentile(ttft, 50),
        "ttft_ms_p99": _percentile(ttft, 99),
        "latency_ms_p50": _percentile(latency, 50),
        "latency_ms_p99": _percentile(latency, 99),
    }


def _percentile(values: list[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None


def summary(
    requests: Sequence[BenchRequest],
    run: Run,
    baseline: Run | None = None,
    found: Sequence[Difference] = (),
    peers: Mapping[str, tuple[Sequence[BenchRequest], Run]] | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """The figures of a benchmark, flat, ready for JSON.

    `baseline`: the same requests with the cache off, `found`: where its outputs differ from `run`'s.
    `peers`: by name, the requests that another engine answered (a subset is possible), and its run.
    `dtype`: of the computation; it says how far apart tokens can be and still be a near-tie (`NEAR_TIE`).
    Without a baseline its figures, and what is derived from them, are None.
    """
    ours = rates(run)
    prompt_tokens = sum(record.prompt_tokens for record in run.records)
    cached = sum(record.cached_tokens for record in run.records)
    optimal = optimal_cached_tokens([request.prompt for request in requests]) / prompt_tokens
    base = rates(baseline) if baseline is not None else dict.fromkeys(ours)
    result: dict[str, Any] = {
        "requests": len(requests),
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(len(record.output_ids) for record in run.records),
        "cached_tokens": cached,
        "hit_rate": cached / prompt_tokens,
        "optimal_hit_rate": optimal,
        "hit_rate_of_optimal": cached / prompt_tokens / optimal if optimal else None,
        "requests_per_s": ours["requests_per_s"],
        "baseline_requests_per_s": base["requests_per_s"],
        "speedup": _ratio(ours["requests_per_s"], base["requests_per_s"]),
        "output_tokens_per_s": ours["output_tokens_per_s"],
        "baseline_output_tokens_per_s": base["output_tokens_per_s"],
        "seconds": ours["seconds"],
        "baseline_seconds": base["seconds"],
    }
    for name in ("ttft_ms_p50", "ttft_ms_p99", "latency_ms_p50", "latency_ms_p99"):
        result[name] = ours[name]
        result[f"baseline_{name}"] = base[name]
    result["accuracy"] = accuracy(requests, run)
    result["baseline_accuracy"] = accuracy(requests, baseline) if baseline is not None else None
    result["outputs_equal"] = not found if baseline is not None else None
    result["outputs_different"] = len(found) if baseline is not None else None
    gaps = [difference.gap for difference in found if difference.gap is not None]
    result["largest_gap"] = max(gaps) if gaps else None
    result["gaps_unknown"] = len(found) - len(gaps) if baseline is not None else None
    near = len(gaps) == len(found) and max(gaps, default=0.0) <= NEAR_TIE[dtype]
    result["outputs_equal_up_to_near_ties"] = near if baseline is not None else None
    if by_group := accuracy_by_group(requests, run):
        result["accuracy_by_group"] = by_group
    for name, (subset, peer_run) in (peers or {}).items():
        result |= _peer_summary(name, ours, requests, run, subset, peer_run)
    return result


def _peer_summary(
    name: str,
    ours: dict[str, float | None],
    requests: Sequence[BenchRequest],
    run: Run,
    subset: Sequence[BenchRequest],
    peer_run: Run,
) -> dict[str, Any]:
    theirs = rates(peer_run)
    index = {id(request): i for i, request in enumerate(requests)}
    same = sum(
        record.output_ids == run.records[index[id(request)]].output_ids
        for request, record in zip(subset, peer_run.records)
    )
    return {
        f"{name}_requests": len(subset),
        f"{name}_requests_per_s": theirs["requests_per_s"],
        f"{name}_output_tokens_per_s": theirs["output_tokens_per_s"],
        f"{name}_accuracy": accuracy(subset, peer_run),
        f"{name}_outputs_equal": same,
        f"ratio_{name}": _ratio(ours["requests_per_s"], theirs["requests_per_s"]),
        f"ratio_{name}_output_tokens": _ratio(ours["output_tokens_per_s"], theirs["output_tokens_per_s"]),
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


# ---------------------------------------------------------------- what people read


def table(result: dict[str, Any], peers: Sequence[str] = ()) -> str:
    """The figures as a table: a row per figure, a column per engine."""
    columns = [("cache on", ""), ("cache off", "baseline_")] + [(name, f"{name}_") for name in peers]
    columns = [(title, prefix) for title, prefix in columns if result[f"{prefix}requests_per_s"] is not None]
    rows = [
        ("requests/s", "requests_per_s", "{:,.2f}"),
        ("output tokens/s", "output_tokens_per_s", "{:,.1f}"),
        ("first token, median (ms)", "ttft_ms_p50", "{:,.0f}"),
        ("first token, 99th percentile (ms)", "ttft_ms_p99", "{:,.0f}"),
        ("accuracy", "accuracy", "{:.3f}"),
    ]
    lines = [" " * 34 + "".join(f"{title:>14}" for title, _ in columns)]
    for title, key, form in rows:
        values = [result.get(prefix + key) for _, prefix in columns]
        if any(value is not None for value in values):
            cells = ["" if value is None else form.format(value) for value in values]
            lines.append(f"{title:<34}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join([*lines, "", *_sentences(result, peers)])


def _sentences(result: dict[str, Any], peers: Sequence[str]) -> list[str]:
    lines = [
        f"{result['requests']:,} requests, {result['prompt_tokens']:,} prompt tokens, of which "
        f"{result['cached_tokens']:,} came from the cache: hit rate {result['hit_rate']:.4f}, "
        f"optimum {result['optimal_hit_rate']:.4f}; {result['output_tokens']:,} output tokens"
    ]
    if result["speedup"] is not None:
        lines.append(f"{result['speedup']:.2f}x the requests/s of the same engine without its prefix cache")
        lines.append(_equality(result))
    for name in peers:
        lines.append(
            f"{result[f'ratio_{name}']:.2f}x the requests/s of {name} (which ran "
            f"{result[f'{name}_requests']:,} requests and answered {result[f'{name}_outputs_equal']:,} alike)"
        )
    return lines


def _equality(result: dict[str, Any]) -> str:
    if result["outputs_equal"]:
        return "outputs with the cache on and off are equal, token for token"
    text = f"outputs of {result['outputs_different']} requests differ between cache on and off"
    if result["outputs_equal_up_to_near_ties"]:
        return (
            f"{text}: all near-ties, two tokens whose log-probabilities in {result['dtype']} are at most "
            f"{result['largest_gap']:.3f} apart"
        )
    if result["largest_gap"] is not None:
        text += (
            f"; where they part, the tokens' log-probabilities are up to {result['largest_gap']:.3f} apart"
        )
    if result["gaps_unknown"]:
        text += f"; {result['gaps_unknown']} not among the model's first choices, or not looked into"
    return text


def group_table(result: dict[str, Any]) -> str:
    """Accuracy by subject, a few to a line; empty when nothing is scored or there are too many subjects to
    read."""
    groups = result.get("accuracy_by_group", {})
    if not 1 < len(groups) <= 20:
        return ""
    cells = [f"{name} {value:.2f}" for name, value in groups.items()]
    lines = ["  ".join(f"{cell:<18}" for cell in cells[i : i + 5]).rstrip() for i in range(0, len(cells), 5)]
    return "\n".join(["accuracy by subject:", *lines])


def json_line(result: dict[str, Any]) -> str:
    """One line; floats to 6 significant digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, dict):
            return {key: rounded(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [rounded(item) for item in value]
        return value

    return json.dumps(rounded(result))


def machine(device: str) -> str:
    """The GPU's name, or the CPU's and how many cores this process may use."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_name()}, {cores} cores"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
