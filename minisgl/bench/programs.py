"""Workloads as a user would write them: programs of the language, run many at a time.

Adding one is a short file in `suite` with a program, its data, and a line that says what is shared:

    @sgl.function
    def judge(s, essay): ...

    @programs("judge", "six forks over one essay")
    def build(setting: Setting) -> Programs:
        return Programs(judge, [{"essay": essay} for essay in ...])

A program returns what it generated: that is what is compared between the engine's mechanisms on and off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .workloads import BenchError, Setting

__all__ = ["PROGRAMS", "BenchError", "ProgramWorkload", "Programs", "Setting", "programs"]


@dataclass(frozen=True)
class Programs:
    """function: a program of the language; calls: its arguments, one dict for each run.

    right(i, result): whether what run i returned is right, for workloads that are scored.
    """

    function: Any
    calls: list[dict[str, Any]]
    right: Callable[[int, Any], bool] | None = None


@dataclass(frozen=True)
class ProgramWorkload:
    """options: those of the command line that mean something to it.  constrained: its outputs follow a grammar."""

    name: str
    summary: str
    build: Callable[[Setting], Programs]
    options: frozenset[str] = field(default_factory=frozenset)
    constrained: bool = False


PROGRAMS: dict[str, ProgramWorkload] = {}


def programs(name: str, summary: str, options: Sequence[str] = (), constrained: bool = False) -> Callable:
    """Register the decorated function as workload `name`."""

    def register(build: Callable[[Setting], Programs]) -> Callable[[Setting], Programs]:
        PROGRAMS[name] = ProgramWorkload(name, summary, build, frozenset(options), constrained)
        return build

    return register
