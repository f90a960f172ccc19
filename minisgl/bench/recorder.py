"""A backend that runs programs on a Runtime and keeps every request that they cause.

    program -> job -> Recorder -> Runtime.prepare -> sinks -> engine
                         |                             |
                         program, select scores        prompt, output, cached tokens, times

What a workload costs and what a perfect cache would save is counted over these requests, not over what the programs
look like. A *hint* is a request that nobody reads: a prefix that the frontend has computed before its continuations
ask for it (`run_batch`'s constant text, a fork's common text, the common part of a select's choices). Its work counts,
its prompt is nobody's question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends.base import Job, Prompt, Reply
from ..backends.runtime import RuntimeBackend, _Submission
from .drive import optimal_hits
from .twins import Ask
from .workloads import BenchError


@dataclass(frozen=True)
class Entry:
    """One request.  prompt, output: token ids.  Times in seconds, `submitted` and `ended` on the process's clock."""

    prompt: np.ndarray
    output: np.ndarray
    cached: int
    hint: bool
    submitted: float
    ended: float
    ttft: float | None
    forced: int = 0
    program: object = None
    text: str | None = None  # of a constrained request: its prompt
    regex: str | None = None

    @property
    def latency(self) -> float:
        return self.ended - self.submitted


@dataclass
class Log:
    """What passed: requests in the order of submission, and the scores of selects by (prompt, choices)."""

    sinks: list[tuple[Any, bool, Job | None]] = field(default_factory=list)
    selects: dict[tuple[str, tuple[str, ...]], list[float]] = field(default_factory=dict)

    def entries(self) -> list[Entry]:
        """Raises BenchError if a request was aborted."""
        return [_entry(*item) for item in self.sinks]


def _entry(sink: Any, hint: bool, job: Job | None) -> Entry:
    request = sink.request
    reason = request.finish_reason or {}
    if reason.get("type") == "abort":
        raise BenchError(f"a request was aborted: {reason.get('message')}")
    first = request.first_token - request.submitted if request.first_token else None
    constrained = job is not None and request.params.grammar is not None
    return Entry(
        np.array(request.prompt),
        np.array(request.output),
        request.cached_tokens or 0,
        hint,
        request.submitted,
        request.ended,
        first,
        request.forced_tokens,
        None if job is None else job.program,
        job.prompt.text if job is not None and constrained else None,
        request.params.regex,
    )


class Recorder(RuntimeBackend):
    """hints=False: the frontend's hints are not passed on (an ablation)."""

    def __init__(self, runtime: Any, *, hints: bool = True):
        super().__init__(runtime)
        self.hints, self.log = hints, Log()

    def submit(self, job: Job) -> None:
        if job.choices is not None:
            self._note_scores(job)
        tap: Any = Tap(self.runtime, self.log, job)
        self._dispatcher.post(_Submission(tap, job.prompt, job))

    def prefill(self, prompt: Prompt) -> None:
        if self.hints:
            tap: Any = Tap(self.runtime, self.log, None, hint=True)
            self._dispatcher.post(_Submission(tap, prompt, None))

    def _note_scores(self, job: Job) -> None:
        done, key = job.on_done, (job.prompt.text, tuple(job.choices or ()))

        def on_done(replies: list[Reply]) -> None:
            self.log.selects[key] = list(replies[0].meta["scores"])
            done(replies)

        job.on_done = on_done


class Tap:
    """A Runtime, but what is prepared through it is noted.  job: on whose behalf, if there is one."""

    def __init__(self, runtime: Any, log: Log, job: Job | None = None, hint: bool = False):
        self._runtime, self._log, self._job, self._hint = runtime, log, job, hint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def prepare(self, *args: Any, **options: Any) -> Any:
        sinks, single = self._runtime.prepare(*args, **options)
        for sink in sinks:
            unread = sink.request.params.max_new_tokens == 0 and not sink.request.return_logprob
            self._log.sinks.append((sink, self._hint or unread, self._job))
        return sinks, single


# ---------------------------------------------------------------- figures


@dataclass(frozen=True)
class HitRate:
    """In tokens.  Of `asked` prompt tokens `computed` were computed; `least` is what the best cache computes."""

    asked: int
    computed: int
    least: int

    @property
    def achieved(self) -> float:
        return 1 - self.computed / max(self.asked, 1)

    @property
    def optimal(self) -> float:
        return 1 - self.least / max(self.asked, 1)

    @property
    def of_optimal(self) -> float | None:
        """achieved / optimal; None where nothing at all can be saved."""
        return self.achieved / self.optimal if self.optimal > 0.005 else None


def hit_rate(entries: Sequence[Entry]) -> HitRate:
    """Over the whole set of requests: hints are computed, but what they save counts for those who asked."""
    asked = sum(len(entry.prompt) for entry in entries if not entry.hint)
    everything = sum(len(entry.prompt) for entry in entries)
    computed = everything - sum(entry.cached for entry in entries)
    saved = optimal_hits((entry.prompt, entry.output.tolist()) for entry in entries)
    return HitRate(asked, computed, everything - saved)


def rounds(entries: Sequence[Entry]) -> list[list[Ask]]:
    """The requests as rounds that another engine can play: in each program, one round for each step it waited for.

    A request's round is one more than the latest of those requests of its program that had ended before it came.
    Outputs are as long as ours were.  A scored prompt (`select`) is asked for one token, which is what a peer without
    scoring can do with it.
    """
    by_program: dict[int, list[tuple[float, int]]] = {}
    found: dict[int, list[Ask]] = {}
    for entry in sorted((e for e in entries if not e.hint), key=lambda e: e.submitted):
        before = by_program.setdefault(id(entry.program) if entry.program is not None else id(entry), [])
        level = 1 + max((level for ended, level in before if ended <= entry.submitted), default=-1)
        before.append((entry.ended, level))
        found.setdefault(level, []).append(_as_ask(entry))
    return [found[level] for level in sorted(found)]


def _as_ask(entry: Entry) -> Ask:
    if entry.text is not None:
        return Ask(entry.text, max(len(entry.output) * 2, 16), regex=entry.regex)
    return Ask(entry.prompt, max(len(entry.output), 1))
