"""Running a workload on an engine and timing it.

What one measurement is: all requests are handed over at once, and the clock runs from just before that to the
last answer.  Requests/s is therefore the rate at which a backlog is worked off, and a request's time to first
token includes its wait in the queue (the median is about half of the run).  Before it, a few of the requests
are run and the cache is emptied, so that start-up costs (compiled kernels, first-touched memory) are not in
the figure and no prefix is.

    warm-up, flush  ->  [ submit all ... last answer ]  ->  flush  ->  [ again, with --runs ]
                         `----- Run.seconds -------'
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tqdm.auto import tqdm

from .workloads import BenchError, BenchRequest, Workload

WARMUP_TOKENS = 8  # output tokens per warm-up request
EXPLAINED = 32  # at most this many differing outputs are looked into


class Engine(Protocol):
    """What a benchmark needs of `minisgl.Runtime`."""

    def generate(self, *, input_ids: Any, sampling_params: Any, **options: Any) -> Any: ...
    def flush_cache(self) -> Any: ...
    def stats(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Record:
    """One answered request.  Lengths in tokens, times in seconds (None: the engine doesn't tell)."""

    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int = 0
    ttft: float | None = None
    latency: float | None = None

    @classmethod
    def of(cls, reply: dict[str, Any]) -> Record:
        """From what `Runtime.generate` returned.  Raises BenchError if the request was aborted."""
        info = reply["meta_info"]
        reason = info["finish_reason"] or {}
        if reason.get("type") == "abort":
            raise BenchError(f"a request was aborted: {reason.get('message')}")
        return cls(
            list(reply["output_ids"]),
            info["prompt_tokens"],
            info["cached_tokens"],
            info["ttft"],
            info["e2e_latency"],
        )


@dataclass(frozen=True)
class Run:
    """All requests of a workload, answered once; `records` in the order of the requests."""

    records: list[Record]
    seconds: float


@dataclass(frozen=True)
class Difference:
    """Request `index` got different tokens from two runs, the first at `position`: `tokens` (None: it had
    ended).

    `gap`: by how much the model itself prefers its first choice there, among these two, in log-probability;
    None if it was not looked into or one of them is not among its first choices.  A gap that rounding can
    explain (in bfloat16 logits of 10 to 20 are 0.06 to 0.12 apart) is a near-tie; a larger one is a bug.
    """

    index: int
    position: int
    tokens: tuple[int | None, int | None]
    gap: float | None = None


def submit_all(engine: Engine, requests: Sequence[BenchRequest], label: str) -> list[Record]:
    """Hand all requests over at once and wait for the last; greedy, exactly `max_new_tokens` each."""
    params = [
        {"temperature": 0.0, "max_new_tokens": request.max_new_tokens, "ignore_eos": True}
        for request in requests
    ]
    with _progress(engine, len(requests), label):
        replies = engine.generate(input_ids=[request.prompt for request in requests], sampling_params=params)
    return [Record.of(reply) for reply in replies]


def measure(
    engine: Engine,
    workload: Workload,
    requests: Sequence[BenchRequest],
    label: str,
    runs: int = 1,
    warmup: int = 8,
) -> list[Run]:
    """Run the workload `runs` times on an empty cache, after a warm-up with `warmup` of its requests."""
    execute = workload.run or submit_all
    first = [replace(r, max_new_tokens=min(r.max_new_tokens, WARMUP_TOKENS)) for r in requests[:warmup]]
    execute(engine, first, f"{label}: warm-up")
    measured = []
    for i in range(runs):
        engine.flush_cache()
        begin = time.perf_counter()
        records = execute(engine, requests, label if runs == 1 else f"{label} {i + 1}/{runs}")
        measured.append(Run(records, time.perf_counter() - begin))
    engine.flush_cache()
    return measured


def median(runs: Sequence[Run]) -> Run:
    """The run with the median time (the faster of the two middle ones)."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def differences(one: Run, other: Run) -> list[Difference]:
    """Where the outputs of two runs of the same requests differ, token for token."""
    found = []
    for index, (a, b) in enumerate(zip(one.records, other.records, strict=True)):
        if a.output_ids != b.output_ids:
            pairs = zip(a.output_ids, b.output_ids)
            shorter = min(len(a.output_ids), len(b.output_ids))
            at = next((i for i, (x, y) in enumerate(pairs) if x != y), shorter)
            tokens = tuple(ids[at] if at < len(ids) else None for ids in (a.output_ids, b.output_ids))
            found.append(Difference(index, at, tokens))  # pyright: ignore[reportArgumentType]
    return found


def explain(
    engine: Engine, requests: Sequence[BenchRequest], run: Run, found: Sequence[Difference]
) -> list[Difference]:
    """Fill in `gap` for the first `EXPLAINED` differences: ask the model for its choices at that position."""
    explained = list(found)
    for i, difference in enumerate(found[:EXPLAINED]):
        before = run.records[difference.index].output_ids[: difference.position]
        ids = [*requests[difference.index].prompt.tolist(), *before]
        params = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        reply = engine.generate(
            input_ids=ids, sampling_params=params, return_logprob=True, top_logprobs_num=8
        )
        logprobs = {token: value for value, token, _ in reply["meta_info"]["output_top_logprobs"][0]}
        values = [logprobs.get(token) for token in difference.tokens if token is not None]
        if len(values) == 2 and values[0] is not None and values[1] is not None:
            explained[i] = replace(difference, gap=abs(values[0] - values[1]))
    return explained


@contextmanager
def _progress(engine: Engine, total: int, label: str) -> Iterator[None]:
    """A bar that follows the engine's own count of answered requests, a few times a second, from another
    thread."""
    ended = threading.Event()
    base = engine.stats()["requests"]
    with tqdm(total=total, desc=label, unit="req") as bar:

        def follow() -> None:
            while not ended.wait(0.25):
                try:
                    bar.n = min(total, engine.stats()["requests"] - base)
                except RuntimeError:  # the engine has died: who waits for its answers is told
                    return
                bar.refresh()

        thread = threading.Thread(target=follow, name="minisgl-bench-progress", daemon=True)
        thread.start()
        try:
            yield
            bar.n = total
        finally:
            ended.set()
            thread.join()
