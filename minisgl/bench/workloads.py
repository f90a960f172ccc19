"""What a benchmark asks of the engine: requests, made by a workload from a seed.

A workload is a function from a `Setting` (tokenizer, sizes, seed) to a list of `BenchRequest`s, kept in
`WORKLOADS` under its name.  All requests of a workload are submitted at once, as token ids: every engine
compared gets exactly the same, and tokenisation is outside of the measurement.  Adding a workload is

    @workload("name", "one line that says what is shared between its requests")
    def name(setting: Setting) -> list[BenchRequest]: ...

and, where requests depend on earlier answers, a `run` of its own in place of `runners.submit_all`.

The random generators are Python's `random.Random(seed)` with a fixed order of calls, so that a workload is
the same on every machine and Python version, and figures can be compared with those of other engines that
replay it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .runners import Record


class BenchError(ValueError):
    """A benchmark that cannot be run as asked; the message is one line."""


@dataclass(frozen=True)
class BenchRequest:
    """`prompt`: (n,) int32 token ids.  `max_new_tokens` are generated exactly (stop ids are ignored).

    `answer`: the token id that is right, for workloads that are scored; `group`: what its prefix is shared
    by.
    """

    prompt: np.ndarray
    max_new_tokens: int
    answer: int | None = None
    group: str = ""


@dataclass(frozen=True)
class Setting:
    """What a workload may depend on.  None means the workload's own default."""

    tokenizer: Any = None  # minisgl.tokenizer.Tokenizer, or None: the model came without one
    vocab_size: int = 10_000
    max_context: int = 8192
    device: str = "cpu"
    requests: int | None = None
    shots: int | None = None
    seed: int | None = None
    data: Path | None = None
    lengths: tuple[int, int] | None = None
    random_ids: bool = False
    quick: bool = False

    def count(self, *, gpu: int, cpu: int, quick: int) -> int:
        """How many requests or programs: what was asked for, else by machine; `quick` is minutes for all workloads."""
        return self.requests or (quick if self.quick else gpu if self.on_gpu else cpu)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def rng(self, default_seed: int) -> random.Random:
        return random.Random(default_seed if self.seed is None else self.seed)


@dataclass(frozen=True)
class Workload:
    """`build` makes the requests; `run`, if given, replaces `runners.submit_all` (same arguments and
    result)."""

    name: str
    summary: str
    build: Callable[[Setting], list[BenchRequest]]
    options: frozenset[str] = field(default_factory=frozenset)
    run: Callable[[Any, Sequence[BenchRequest], str], list[Record]] | None = None


WORKLOADS: dict[str, Workload] = {}


def workload(name: str, summary: str, options: Sequence[str] = (), run: Any = None) -> Callable:
    """Register the decorated function as `name`; `options`: the command line's options that mean something to
    it."""

    def register(build: Callable[[Setting], list[BenchRequest]]) -> Callable[[Setting], list[BenchRequest]]:
        WORKLOADS[name] = Workload(name, summary, build, frozenset(options), run)
        return build

    return register


def random_ids(rng: random.Random, n: int, vocab_size: int = 10_000) -> list[int]:
    """n token ids, uniform in 5 .. min(vocab_size, 10,000) - 1: no special ids, and the same for every
    vocabulary."""
    return [rng.randrange(5, min(vocab_size, 10_000)) for _ in range(n)]


@workload("uniform", "nothing shared: random prompts and output lengths", options=["lengths"])
def uniform(setting: Setting) -> list[BenchRequest]:
    """n prompts of U[lo, hi] random tokens, U[lo, hi] output tokens each: plain continuous batching.

    Here a prefix cache can only cost time, and this shows how much.  On a GPU 256 requests of 100 to 1,024
    tokens each way (144,000 output tokens); on a CPU 32 of 32 to 128.
    """
    rng = setting.rng(0)
    n = setting.count(gpu=256, cpu=32, quick=12)
    lo, hi = setting.lengths or ((100, 1024) if setting.on_gpu else (32, 64) if setting.quick else (32, 128))
    requests = []
    for _ in range(n):
        prompt = random_ids(rng, rng.randint(lo, hi), setting.vocab_size)
        requests.append(BenchRequest(np.array(prompt, np.int32), rng.randint(lo, hi)))
    return requests


@workload("decode", "short prompts, many output tokens: decoding at a fixed batch", options=["lengths"])
def decode(setting: Setting) -> list[BenchRequest]:
    """`--requests` (16) prompts of 32 random tokens, 128 output tokens each (`--lengths PROMPT OUTPUT`).

    All of them run from the first step to the last, so output tokens/s is the decode rate at that batch.
    """
    rng = setting.rng(0)
    prompt_len, output_len = setting.lengths or (32, 128)
    return [
        BenchRequest(np.array(random_ids(rng, prompt_len, setting.vocab_size), np.int32), output_len)
        for _ in range(setting.requests or 16)
    ]
