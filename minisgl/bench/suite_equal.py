"""Do two runs of the same greedy programs say the same, and if not, can rounding explain it?

Texts are compared first. Where they differ, the first cause is looked for among the requests: one prompt, two outputs.
At the token where they part the model is asked for the log-probabilities of both; their difference is the *gap*. For a
select it is the difference of the two choices' scores. Whatever follows such a place has other prompts and is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .suite_runs import SuiteRun

EXPLAINED = 8  # at most this many places are looked into


@dataclass
class Equality:
    """different: programs whose results differ; gaps: in log-probability, of the places where they part."""

    different: int = 0
    gaps: list[float] = field(default_factory=list)

    def near(self, tolerance: float) -> bool | None:
        """Equal up to near-ties: each gap is within `tolerance`.  None: they differ and no place was found."""
        if not self.different:
            return True
        return max(self.gaps) <= tolerance if self.gaps else None


def compare(one: SuiteRun, other: SuiteRun, runtime: Any) -> Equality:
    """`runtime` is asked for the gaps; its cache is left empty."""
    found = Equality(sum(a != b for a, b in zip(one.results, other.results, strict=True)))
    if found.different:
        for prompt, tokens in _partings(one, other):
            if len(found.gaps) == EXPLAINED:
                break
            found.gaps.append(_gap(runtime, prompt, tokens))
        found.gaps += _select_gaps(one, other)
        runtime.flush_cache()
    return found


def _partings(one: SuiteRun, other: SuiteRun) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """(ids up to there, the two tokens) wherever a prompt that both runs had got different outputs."""
    theirs = {entry.prompt.tobytes(): entry.output.tolist() for entry in other.entries if not entry.hint}
    for entry in one.entries:
        output = theirs.get(entry.prompt.tobytes())
        if entry.hint or output is None:
            continue
        for i, (a, b) in enumerate(zip(entry.output.tolist(), output)):
            if a != b:
                yield [*entry.prompt.tolist(), *output[:i]], (a, b)
                break


def _gap(runtime: Any, ids: list[int], tokens: tuple[int, int]) -> float:
    """By how much the model prefers one token to the other after `ids`."""
    replies = runtime.generate(
        input_ids=[[*ids, token] for token in tokens],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=len(ids),
    )
    a, b = (reply["meta_info"]["input_token_logprobs"][-1][0] for reply in replies)
    return abs(a - b)


def _select_gaps(one: SuiteRun, other: SuiteRun) -> list[float]:
    gaps = []
    for key, scores in one.log.selects.items():
        theirs = other.log.selects.get(key)
        if theirs is None:
            continue
        mine, yours = scores.index(max(scores)), theirs.index(max(theirs))
        if mine != yours:
            gaps.append(abs(scores[mine] - scores[yours]))
    return gaps
