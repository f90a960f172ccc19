"""What is switched off, and how: the ablations of the paper's figure 8 and two of our own.

A variant is options of the Runtime and of the frontend. Variants with the same Runtime share one.

    full              everything on
    no cache          no KV is shared between requests
    no tree           a cache of whole sequences only: two prompts that merely begin alike share nothing
    fcfs, random      requests are served as they come, or at random, instead of longest cached prefix first
    no parallelism    a program waits for each generation: its forks run one after another
    no hint           nobody computes a fork's or a batch's common text before its continuations ask for it
    no jump-forward   forced tokens are sampled one by one
    all off           all of it at once
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """engine: arguments of Runtime.  parallel, hints: of the frontend (only programs have one)."""

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    parallel: bool = True
    hints: bool = True
    needs_grammar: bool = False

    def applies(self, is_program: bool, constrained: bool) -> bool:
        """Whether it can make a difference to a workload."""
        frontend_only = not self.engine and self.name != "full"
        return (is_program or not frontend_only) and (constrained or not self.needs_grammar)


_OFF = {"radix_cache": False, "schedule_policy": "fcfs", "jump_forward": False}
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("full"),
        Variant("no hint", hints=False),
        Variant("no parallelism", parallel=False),
        Variant("no cache", {"radix_cache": False}),
        Variant("no tree", {"radix_cache": "whole"}),
        Variant("fcfs", {"schedule_policy": "fcfs"}),
        Variant("random", {"schedule_policy": "random"}),
        Variant("no jump-forward", {"jump_forward": False}, needs_grammar=True),
        Variant("all off", _OFF, parallel=False, hints=False),
    )
}
DEFAULT = ("full", "no cache", "all off")


def by_engine(variants: Iterable[Variant]) -> list[tuple[dict[str, Any], list[Variant]]]:
    """(Runtime arguments, the variants that run on it), in the order of first appearance."""
    groups: list[tuple[dict[str, Any], list[Variant]]] = []
    for variant in variants:
        found = next((group for engine, group in groups if engine == variant.engine), None)
        if found is None:
            groups.append((variant.engine, [variant]))
        else:
            found.append(variant)
    return groups
