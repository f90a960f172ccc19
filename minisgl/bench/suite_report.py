"""The suite's figures: one dict for JSON, one table for people.

    hit rate    1 - computed / asked, in prompt tokens: what the frontend's hints compute counts as computed
    optimum     the same if every distinct prefix of all requests were computed once and never forgotten
    x no cache  seconds of the same programs without a prefix cache over seconds with it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .programs import PROGRAMS
from .recorder import Entry, hit_rate
from .report import NEAR_TIE
from .suite_equal import Equality
from .suite_runs import Outcome, SuiteRun
from .variants import VARIANTS
from .workloads import WORKLOADS

LITTLE = 1.15  # a speed-up below this is called little


def figures(outcome: Outcome) -> dict[str, Any]:
    """Everything, ready for JSON."""
    workloads = {name: workload_figures(name, outcome) for name in outcome.runs}
    full = [found["full"] for found in workloads.values()]
    shares = [found["hit_rate_of_optimal"] for found in full if found["hit_rate_of_optimal"] is not None]
    equal = [v["outputs_equal_up_to_near_ties"] for found in workloads.values() for v in found["variants"].values()]
    return outcome.about | {
        "workloads": workloads,
        "mean_hit_rate_of_optimal": sum(shares) / len(shares) if shares else None,
        "all_outputs_equal_up_to_near_ties": all(equal) if equal else None,
    }


def workload_figures(name: str, outcome: Outcome) -> dict[str, Any]:
    runs = outcome.runs[name]
    full = runs["full"]
    tolerance = NEAR_TIE[outcome.about["dtype"]]
    variants = {
        variant: variant_figures(run, full, tolerance) for variant, run in runs.items() if variant != "full"
    }
    return {"full": run_figures(full), "variants": variants, "peers": outcome.peers.get(name, {})}


def run_figures(run: SuiteRun) -> dict[str, Any]:
    """Rates are over the whole run; percentiles over its requests, in milliseconds."""
    asked = [entry for entry in run.entries if not entry.hint]
    hits = hit_rate(run.entries)
    output = sum(len(entry.output) for entry in asked)
    return {
        "seconds": run.seconds,
        "programs": len(run.results),
        "requests": len(asked),
        "hints": len(run.entries) - len(asked),
        "programs_per_s": len(run.results) / run.seconds,
        "requests_per_s": len(asked) / run.seconds,
        "prompt_tokens": hits.asked,
        "computed_tokens": hits.computed,
        "hit_rate": hits.achieved,
        "optimal_hit_rate": hits.optimal,
        "hit_rate_of_optimal": hits.of_optimal,
        "output_tokens": output,
        "output_tokens_per_s": output / run.seconds,
        "forced_tokens": sum(entry.forced for entry in asked),
        "steps": run.steps,
        **percentiles("ttft_ms", [entry.ttft * 1000 for entry in asked if entry.ttft is not None]),
        **percentiles("latency_ms", [entry.latency * 1000 for entry in asked]),
        **percentiles("ms_per_output_token", _per_token(asked)),
        "accuracy": run.right,
    }


def variant_figures(run: SuiteRun, full: SuiteRun, tolerance: float) -> dict[str, Any]:
    """speedup: of everything on over this variant.  The outputs are compared with those of everything on."""
    equality = run.equality or Equality()
    return {
        "seconds": run.seconds,
        "speedup": run.seconds / full.seconds,
        "steps": run.steps,
        "hit_rate": hit_rate(run.entries).achieved,
        "accuracy": run.right,
        "outputs_different": equality.different,
        "largest_gap": max(equality.gaps, default=None),
        "outputs_equal_up_to_near_ties": bool(equality.near(tolerance)),
    }


def _per_token(entries: Sequence[Entry]) -> list[float]:
    """Milliseconds from one token to the next, by request, where there are two or more."""
    found = []
    for entry in entries:
        if entry.ttft is not None and len(entry.output) > 1:
            found.append((entry.latency - entry.ttft) / (len(entry.output) - 1) * 1000)
    return found


def percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """`{name_p50: ..., name_p99: ...}`, None where there are no values."""
    return {f"{name}_p{q}": float(np.percentile(values, q)) if len(values) else None for q in (50, 99)}


# ---------------------------------------------------------------- what people read


def table(result: dict[str, Any]) -> str:
    """Markdown: a row for each workload; then the ablations and the peers, if there were any."""
    title = (
        f"{result['model']}, {result['dtype']} on {result['device']} ({result['machine']}, {result['threads']} "
        f"threads, torch {result['torch']})"
    )
    workloads = result["workloads"]
    parts = [title, _main_table(workloads), *_sentences(result)]
    if any(len(found["variants"]) > 2 for found in workloads.values()):
        parts.append("Throughput with a mechanism off, as a share of everything on:\n\n" + _ablation_table(workloads))
    if any(found["peers"] for found in workloads.values()):
        parts.append("Other engines on the same requests:\n\n" + _peer_table(workloads))
    return "\n\n".join(parts)


_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("programs", "programs", ",d"),
    ("requests", "requests", ",d"),
    ("hit rate", "hit_rate", ".3f"),
    ("optimum", "optimal_hit_rate", ".3f"),
    ("of it", "hit_rate_of_optimal", ".1%"),
    ("requests/s", "requests_per_s", ",.1f"),
    ("programs/s", "programs_per_s", ",.2f"),
    ("first token p50 (ms)", "ttft_ms_p50", ",.0f"),
    ("latency p50 (ms)", "latency_ms_p50", ",.0f"),
    ("p99", "latency_ms_p99", ",.0f"),
    ("ms/token p50", "ms_per_output_token_p50", ",.1f"),
    ("accuracy", "accuracy", ".2f"),
)


def _main_table(workloads: dict[str, Any]) -> str:
    rows = []
    for name, found in workloads.items():
        full, variants = found["full"], found["variants"]
        cells = [_cell(full[key], form) for _, key, form in _COLUMNS]
        off = variants.get("no cache")
        rows.append([name, *cells, "" if off is None else f"{off['speedup']:.2f}", _same(variants)])
    return _markdown(["workload", *(head for head, _, _ in _COLUMNS), "x no cache", "answers, all off"], rows)


def _same(variants: dict[str, Any]) -> str:
    """Whether everything off gives the same answers."""
    off = variants.get("all off")
    if off is None:
        return ""
    if not off["outputs_different"]:
        return "equal"
    if off["largest_gap"] is None:
        return f"{off['outputs_different']} differ"
    tie = "near-ties" if off["outputs_equal_up_to_near_ties"] else "gaps"
    return f"{off['outputs_different']} differ, {tie} up to {off['largest_gap']:.3f}"


def _sentences(result: dict[str, Any]) -> list[str]:
    lines = []
    if result["mean_hit_rate_of_optimal"] is not None:
        lines.append(f"Hit rate over the optimum, mean of the workloads: {result['mean_hit_rate_of_optimal']:.1%}.")
    for name, found in result["workloads"].items():
        off = found["variants"].get("no cache")
        if off is not None and off["speedup"] < LITTLE:
            lines.append(f"{name} gains little from the cache ({off['speedup']:.2f}x): {_summary(name)}.")
    return lines


def _summary(name: str) -> str:
    return (PROGRAMS.get(name) or WORKLOADS[name]).summary


def _ablation_table(workloads: dict[str, Any]) -> str:
    names = [name for name in VARIANTS if name != "full" and any(name in w["variants"] for w in workloads.values())]
    rows = []
    for workload, found in workloads.items():
        shares = [found["variants"].get(name) for name in names]
        rows.append([workload, "1.00", *("-" if s is None else f"{1 / s['speedup']:.2f}" for s in shares)])
    return _markdown(["workload", "full", *names], rows)


def _peer_table(workloads: dict[str, Any]) -> str:
    rows = []
    for workload, found in workloads.items():
        for peer, values in found["peers"].items():
            full = found["full"]
            rows.append([workload, f"{peer} {values['version']}", f"{values['seconds']:.2f}", f"{full['seconds']:.2f}",
                         f"{values['ratio']:.2f}"])  # fmt: skip
    return _markdown(["workload", "engine", "seconds", "ours", "ratio of throughput, ours over theirs"], rows)


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |" for line in lines)
