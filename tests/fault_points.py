"""A fault at every function that the engine's thread calls, one after the other.

    python -m tests.fault_points [--overlap] [--points N]

A hook on the engine's thread raises at its k-th call of a Python function while a few requests run that between them
pass through every part of the engine (prompts in chunks, sampling, penalties, a grammar, stops, log-probabilities, a
stream).  Then everybody who waits must have been answered or told the cause, and the engine must either serve as
before, with nothing running, locked or held, or say that it is dead.  The faults take turns: an ordinary exception,
MemoryError, torch's OutOfMemoryError, and SystemExit, which ends the thread.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from typing import Any

import torch

from minisgl import Runtime
from minisgl.output import EngineError

from . import engines
from .engines import GREEDY, check_idle, random_ids

LETS_GO = 20.0  # seconds within which everybody must have been told
# where a waiter is woken: a fault in the waking itself cannot be told
WAKING = (
    "threading.py", "queue.py", "logging/__init__.py", "concurrent/futures/_base.py", "contextlib.py", "fault_points.py"
)  # and where locks are let go
WAKERS = (
    "_accept", "_call", "<lambda>", "_tell", "fail", "_fail", "_die", "_recover", "_wrap", "set", "drop_all", "ended",
)  # fmt: skip


class Fault(Exception):
    """An ordinary error."""


KINDS: tuple[type[BaseException], ...] = (Fault, MemoryError, torch.OutOfMemoryError, Fault, SystemExit)


class PointByPoint:
    """Engines that are broken at one point each."""

    def __init__(self, **options: Any):
        self.options = {"chunk_size": 8, "kv_capacity": 300, **options}
        self.runtime = self._make()
        self.want = self._outputs(self._work())
        self.places: Counter[str] = Counter()

    def _make(self) -> Runtime:
        runtime = engines.make(**self.options)
        runtime.engine.jump_at_start = True
        return runtime

    # ---- the work --------------------------------------------------------------------------------------------------

    def _work(self) -> list[Any]:
        """Submit everything in one call and wait: a reply or an exception for each, a stream's chunks last."""
        runtime, chunks = self.runtime, []
        wanted = [
            (random_ids(20, seed=1), {**GREEDY, "max_new_tokens": 3}, {}),
            (random_ids(5, seed=2), {**GREEDY, "max_new_tokens": 3, "repetition_penalty": 1.2, "seed": 1}, {}),
            (random_ids(5, seed=3), {**GREEDY, "regex": "[ab]forced[ab]"}, {}),
            (random_ids(6, seed=4), {**GREEDY, "max_new_tokens": 3, "stop": "never"}, {"scores": 2}),
            (random_ids(6, seed=5), {**GREEDY, "max_new_tokens": 3}, {"on_chunk": chunks.append}),
        ]
        sinks = []
        for ids, params, more in wanted:
            scores = more.get("scores", -1)
            sinks += runtime.prepare(
                None, params, input_ids=ids, on_chunk=more.get("on_chunk"), return_logprob=scores >= 0,
                logprob_start_len=scores,
            )[0]  # fmt: skip
        results: list[Any] = []
        try:
            runtime.engine.submit([sink.request for sink in sinks])
        except EngineError as error:
            return [error]
        for sink in sinks:
            try:
                results.append(sink.result(LETS_GO))
            except TimeoutError:
                raise AssertionError(f"request {sink.request.rid} was never told") from None
            except Exception as error:
                results.append(error)
        return results

    @staticmethod
    def _outputs(results: list[Any]) -> list[Any]:
        return [r if isinstance(r, Exception) else r["output_ids"] for r in results]

    # ---- the faults ------------------------------------------------------------------------------------------------

    def count(self) -> int:
        """How many points there are."""
        hook = Hook(None, Fault)
        self._install(hook)
        self._work()
        self._install(None)
        return hook.calls

    def _install(self, hook: Any) -> None:
        self.runtime.engine.call(lambda: sys.setprofile(hook))

    def try_point(self, k: int, kind: type[BaseException]) -> str:
        """Returns "told", "dead" or "passed" (the point was not reached this time); AssertionError if it went wrong."""
        hook = Hook(k, kind)
        try:
            self._install(hook)
            results = self._work()
        except EngineError:
            results = []  # the hook hit its own installation
        except AssertionError as error:
            raise AssertionError(f"{kind.__name__} at call {k}, {hook.place}: {error}") from None
        if hook.place is None:
            self._install(None)
            return "passed"
        where = f"{kind.__name__} at call {k}, {hook.place}"
        self.places[hook.place] += 1
        for result, want in zip(results, self.want):
            if isinstance(result, Exception):
                cause: BaseException | None = result
                while cause is not None and "injected" not in str(cause):
                    cause = cause.__cause__
                assert cause is not None or "SystemExit" in str(result), f"{where}: {result!r} does not say why"
            else:
                assert result["output_ids"] == want, f"{where}: another output"
        if kind is SystemExit:
            self.runtime.engine._thread.join(2.0)
        if not self.runtime.engine.alive:
            # a fault while others are being told is the end, but only an extraordinary one should be
            assert kind is SystemExit or hook.place.split(":")[1] in WAKERS, f"{where}: the engine is dead"
            self.runtime.shutdown()
            self.runtime = self._make()
            return "dead"
        assert self._outputs(self._work()) == self.want, f"{where}: other outputs afterwards"
        check_idle(self.runtime)
        return "told"

    def run(self, points: int | None = None, seed: int = 0) -> dict[str, Any]:
        """All points, or this many of them, spread at random."""
        total = self.count()
        rng = random.Random(seed)
        chosen = range(1, total + 1) if points is None else sorted(rng.sample(range(1, total + 1), points))
        outcomes: Counter[str] = Counter()
        failures: list[str] = []
        for k in chosen:
            try:
                outcomes[self.try_point(k, KINDS[rng.randrange(len(KINDS))])] += 1
            except AssertionError as error:
                failures.append(str(error))
                self.runtime.shutdown()
                self.runtime = self._make()
        self.runtime.shutdown()
        return {"points": total, "tried": len(chosen), "places": len(self.places), **outcomes, "failures": failures}


class Hook:
    """Raises `kind` at the k-th call of a function, except in those that wake a waiter.  k: None, only count."""

    def __init__(self, k: int | None, kind: type[BaseException]):
        self.k, self.kind, self.calls = k, kind, 0
        self.place: str | None = None

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in WAKERS or code.co_filename.endswith(WAKING):
            return
        self.calls += 1
        if self.calls == self.k:
            sys.setprofile(None)
            self.place = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_name}"
            raise self.kind("injected")


def main() -> int:
    parser = argparse.ArgumentParser(description="A fault at every function that the engine's thread calls.")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--points", type=int, help="this many of them, spread at random")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report = PointByPoint(overlap=args.overlap).run(args.points, args.seed)
    print(json.dumps(report, indent=2))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
