"""Hostile input, at length: every fuzz target of the tests, for as long as you like.

    python -m tests.fuzz --list
    python -m tests.fuzz --target regex --minutes 5 --seed 1
    python -m tests.fuzz --minutes 60                          all targets in turn

A target is a strategy (Hypothesis makes and shrinks the inputs) and a check, which raises when a property is broken
and else says what came of the input ("refused", "walked", ...), so that a run shows that it reached both. The
properties are the same everywhere: a right result, or one line of ValueError; no other error, nothing beyond its budget
of time or memory. Runs are under a memory limit: what wants more gets a MemoryError, which is a finding too.

The tests (`test_fuzz_*.py`) run the same targets briefly and always with the same inputs.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

MEMORY = 3 << 30  # bytes that a run may have beyond what it has at its start


@dataclass(frozen=True)
class Target:
    """`check` says in a word what came of an input. expected: words that any fair sample of inputs leads to."""

    name: str
    inputs: SearchStrategy[Any]
    check: Callable[[Any], str]
    expected: tuple[str, ...] = ()


class Cpu:
    """with Cpu(2.0): ...      fails if the block took longer, in seconds of this thread's work."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self) -> None:
        self.begin = time.thread_time()

    def __exit__(self, kind: Any, *_: object) -> None:
        taken = time.thread_time() - self.begin
        if kind is None:
            assert taken < self.seconds, f"took {taken:.1f} s where {self.seconds:g} are promised"


def one_line(error: BaseException) -> None:
    """The message of an error that a user sees: one line of printable length."""
    text = str(error)
    assert text and "\n" not in text, f"not one line: {text[:300]!r}"
    assert len(text) < 1000, f"{len(text)} characters of message: {text[:100]!r}..."


def campaign(target: Target, examples: int, number: int | None = None, shrink: bool = True) -> Counter[str]:
    """Check `examples` inputs; number: which ones (None: always the same). Returns how often what came of them."""
    results: Counter[str] = Counter()
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=number is None, phases=phases,
        suppress_health_check=[*HealthCheck], print_blob=False,  # pyright: ignore
    )  # fmt: skip
    @given(target.inputs)
    def run(value: Any) -> None:
        results[target.check(value)] += 1

    (run if number is None else seed(number)(run))()
    return results


def targets() -> dict[str, Target]:
    from . import fuzz_chat, fuzz_files, fuzz_grammars, fuzz_output

    found = [*fuzz_grammars.TARGETS, *fuzz_files.TARGETS, *fuzz_chat.TARGETS, *fuzz_output.TARGETS]
    return {target.name: target for target in found}


def limit_memory(more: int = MEMORY) -> None:
    """Let this process have no more than `more` bytes beyond what it has (where the system can)."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


def show(error: BaseException) -> None:
    """Each distinct failure with the input and the places that it came from."""
    for inner in getattr(error, "exceptions", ()):
        show(inner)
    if not hasattr(error, "exceptions"):
        print(f"{type(error).__name__}: {error}"[:1000])
        print("\n".join(note[:2000] for note in getattr(error, "__notes__", ())))
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "hypothesis" not in f.filename]
        print("".join(f"    {frame.filename}:{frame.lineno} {frame.line}\n" for frame in frames[-6:]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Hostile input, at length.")
    parser.add_argument("--target", action="append", help="a target of --list, or several; all without")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    known = targets()
    if args.list:
        print("\n".join(known))
        return 0
    if unknown := [name for name in args.target or () if name not in known]:
        parser.error(f"--target must be among {', '.join(known)}, not {unknown[0]}")
    chosen = [known[name] for name in args.target or known]
    limit_memory()
    failed = False
    for target in chosen:
        end, results, number = time.monotonic() + 60 * args.minutes / len(chosen), Counter[str](), args.seed
        try:
            while time.monotonic() < end:
                results += campaign(target, 100, number)
                number += 1
                gc.collect()  # Hypothesis keeps a campaign's inputs in cycles, files of megabytes among them
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed = True
            print(f"{target.name}: seed {number}")
            show(error)
        print(f"{target.name}: {sum(results.values())} inputs, {dict(results)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
