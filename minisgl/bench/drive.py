"""Playing rounds of requests (`twins`) on an engine, with the clock running only while the engine has the requests.

    prepare a round | hand over ... last answer | prepare the next | hand over ... last answer | ...
                     `------- timed ----------'                     `------- timed ----------'

`prepare` turns requests into the engine's own form (arrays here, lists of ints there): no engine is charged for that.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..radix import RadixTree
from .twins import Ask, Rounds


@dataclass(frozen=True)
class Answer:
    """Lengths in tokens, times in seconds since the hand-over (None: the engine doesn't tell)."""

    output_ids: list[int]
    prompt_ids: list[int] | np.ndarray | None
    prompt_tokens: int
    cached_tokens: int = 0
    text: str | None = None
    ttft: float | None = None
    latency: float | None = None


@dataclass
class Played:
    """One repetition of a workload: totals, and for each request what is needed to compare and to explain."""

    seconds: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    optimal_cached_tokens: int | None = None
    valid: int | None = None  # texts that match their regex
    ttft: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def optimal_hit_rate(self) -> float | None:
        if self.optimal_cached_tokens is None:
            return None
        return self.optimal_cached_tokens / max(self.prompt_tokens, 1)


class Player(ABC):
    """An engine that answers rounds.  `prepare` is not timed, `answer` is."""

    @abstractmethod
    def prepare(self, asks: Sequence[Ask]) -> Any:
        """The requests in the engine's own form."""

    @abstractmethod
    def answer(self, prepared: Any) -> list[Answer]:
        """Run them all at once and wait for the last; in their order."""

    @abstractmethod
    def flush(self) -> None:
        """Forget cached prefixes."""


class RuntimePlayer(Player):
    """`minisgl.Runtime`."""

    def __init__(self, runtime: Any):
        self.runtime = runtime

    def prepare(self, asks: Sequence[Ask]) -> dict[str, Any]:
        key = "prompt" if isinstance(asks[0].prompt, str) else "input_ids"
        return {key: [ask.prompt for ask in asks], "sampling_params": [_params(i, ask) for i, ask in enumerate(asks)]}

    def answer(self, prepared: dict[str, Any]) -> list[Answer]:
        answers = []
        for reply, prompt in zip(self.runtime.generate(**prepared), prepared.get("input_ids") or prepared["prompt"]):
            info = reply["meta_info"]
            ids = None if isinstance(prompt, str) else prompt
            counts = info["prompt_tokens"], info["cached_tokens"]
            answers.append(Answer(reply["output_ids"], ids, *counts, reply["text"], info["ttft"], info["e2e_latency"]))
        return answers

    def flush(self) -> None:
        self.runtime.flush_cache()


def _params(index: int, ask: Ask) -> dict[str, Any]:
    """With a seed for each request, so that repetitions and ablations sample the same tokens."""
    params: dict[str, Any] = {"temperature": ask.temperature, "max_new_tokens": ask.max_new_tokens}
    params["seed"] = index if ask.seed is None else ask.seed
    return params | ({"ignore_eos": True} if ask.regex is None else {"regex": ask.regex})


def play(player: Player, rounds: Rounds, progress: Callable[[int], Any] = lambda n: None) -> Played:
    """Play all rounds.  `progress(n)` is told of n more requests that have been answered."""
    played = Played()
    seen: list[tuple[Any, list[int]]] = []
    asks = next(rounds)
    while True:
        prepared = player.prepare(asks)
        begin = time.perf_counter()
        answers = player.answer(prepared)
        played.seconds += time.perf_counter() - begin
        for ask, answer in zip(asks, answers, strict=True):
            _count(played, ask, answer)
            seen.append((answer.prompt_ids, answer.output_ids))
        progress(len(asks))
        try:
            asks = rounds.send([answer.output_ids for answer in answers])
        except StopIteration:
            break
    if all(prompt is not None for prompt, _ in seen):
        played.optimal_cached_tokens = optimal_hits(seen)
    return played


def _count(played: Played, ask: Ask, answer: Answer) -> None:
    played.requests += 1
    played.prompt_tokens += answer.prompt_tokens
    played.output_tokens += len(answer.output_ids)
    played.cached_tokens += answer.cached_tokens
    played.outputs.append(list(answer.output_ids))
    if ask.regex is not None:
        played.valid = (played.valid or 0) + bool(re.fullmatch(ask.regex, answer.text or ""))
    if answer.ttft is not None:
        played.ttft.append(answer.ttft)
    if answer.latency is not None:
        played.latency.append(answer.latency)


def optimal_hits(sequences: Iterable[tuple[Any, Sequence[int]]]) -> int:
    """Prompt tokens that a cache which forgets nothing would save: every distinct prefix is computed once.

    sequences: (prompt ids, output ids) in the order of submission.  Outputs count as computed, but for their last
    token, whose K and V nobody has needed yet; of a repeated prompt one token is always computed, for its logits.
    """
    tree, saved = RadixTree(), 0
    for prompt, output in sequences:
        prompt = np.asarray(prompt, np.int32)
        saved += min(tree.match_length(prompt), len(prompt) - 1)
        whole = np.concatenate([prompt, np.asarray(output[:-1], np.int32)])
        tree.insert(whole, np.zeros(len(whole), np.int32))
    return saved


def median(runs: Sequence[Played]) -> Played:
    """The repetition with the median time (the faster of the two middle ones)."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
