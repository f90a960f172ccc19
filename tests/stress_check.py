"""Is this what the model would have said?  Every reply against the reference, token by token.

The reference sees prompt and output whole, once, without a cache (`Model.logits`); row by row the token is compared
with what the definition of its sampling parameters makes of that row:

    logits -> penalties -> logit_bias -> grammar -> min_new_tokens -> likeliest, or the seeded draw

and then where the output ended, its text, and its log-probabilities.  Nothing here is shared with the engine but the
meaning of a seed (`sampler.uniform`, `sampler.distribution`) and, for JSON schemas, the grammar (`fsm`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import regex
import torch

from minisgl.fsm import Grammar, TokenGrammar
from minisgl.output import Sink
from minisgl.request import Request
from minisgl.sampler import SamplingBatch, distribution, uniform
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer import BaseTokenizer

from .stress_models import Model


class Disagreement(AssertionError):
    """The engine and the reference do not say the same."""


class Legal:
    """What may follow under a request's grammar, found by asking for every continuation anew."""

    def __init__(self, kind: str, source: str, tokenizer: BaseTokenizer, stop_ids: set[int], text_tokens: bool):
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        self.pattern = regex.compile(source, regex.DOTALL) if kind == "regex" and text_tokens else None
        if self.pattern is None:
            grammar = Grammar.from_regex(source) if kind == "regex" else Grammar.from_json_schema(source)
            self.tokens = TokenGrammar(grammar, tokenizer, stop_ids)
            self.state: int | None = self.tokens.start
        self.text = ""

    def allows(self, token: int) -> bool:
        if self.pattern is None:
            assert self.state is not None
            return self.tokens.is_legal(self.state, token)
        if token in self.stop_ids:
            return self.pattern.fullmatch(self.text) is not None
        if token in self.tokenizer.special_ids or token >= 128:
            return False
        return self.pattern.fullmatch(self.text + chr(token), partial=True) is not None

    def take(self, token: int) -> None:
        if self.pattern is not None:
            self.text += "" if token in self.stop_ids else chr(token)
        else:
            assert self.state is not None
            self.state = self.tokens.advance(self.state, token)


class Checker:
    """Checks the requests of one engine.  `tokens`, `replies`: how many were compared."""

    def __init__(self, model: Model, tokenizer: BaseTokenizer, eos_ids: tuple[int, ...], max_context: int):
        self.model, self.tokenizer, self.eos_ids, self.max_context = model, tokenizer, eos_ids, max_context
        self.tokens = self.replies = self.near_ties = 0

    def check(self, sink: Sink) -> None:
        """Raises Disagreement where the request's reply is not what it should be."""
        request = sink.request
        reason = request.finish_reason
        _expect(reason is not None, f"{request.rid} has no finish reason")
        assert reason is not None
        output = request.output.tolist()
        logits = self.model.logits([*request.prompt.tolist(), *output])
        self._check_tokens(request, output, logits[request.prompt_len - 1 :])
        if reason["type"] != "abort":
            self._check_end(request, output, sink)
        if sink.logprobs is not None and reason["type"] != "abort":
            self._check_logprobs(sink, output, logits)
        self.replies += 1
        self.tokens += len(output)

    # ---- tokens --------------------------------------------------------------------------------------------------

    def _check_tokens(self, request: Request, output: list[int], logits: np.ndarray) -> None:
        params = request.params
        legal = None
        if params.grammar is not None:
            legal = Legal(*params.grammar, self.tokenizer, set(self.eos_ids), self.model.bytes)
        said: Counter[int] = Counter()
        for i, token in enumerate(output):
            row = self._adjusted(logits[i], request, said, i)
            if params.greedy:
                self._check_likeliest(request, row, token, legal, i)
            else:
                self._check_draw(request, row, token, i)
            said[token] += 1
            if legal is not None:
                _expect(legal.allows(token), f"{request.rid}: token {i} ({token}) is not legal behind {legal.text!r}")
                legal.take(token)

    def _adjusted(self, logits: np.ndarray, request: Request, said: Counter[int], index: int) -> np.ndarray:
        """(vocab,) float64 after penalties, bias and min_new_tokens; the grammar is asked token by token."""
        params, x = request.params, logits.astype(np.float64)
        if params.repetition_penalty != 1:
            seen = list({*request.prompt.tolist(), *said})
            x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
        for token, count in said.items():
            x[token] -= params.frequency_penalty * count + params.presence_penalty
        for token, bias in params.logit_bias.items():
            x[token] += bias
        if index < params.min_new_tokens and params.grammar is None:
            x[[*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)]] = -np.inf
        return x

    def _check_likeliest(self, request: Request, row: np.ndarray, token: int, legal: Legal | None, index: int) -> None:
        if legal is not None and not self.model.bytes:
            return  # certain text has the tokenizer's spelling, which need not be the likeliest
        best = int(row.argmax())
        if legal is not None:
            allowed = [int(t) for t in np.argsort(-row, kind="stable") if legal.allows(int(t))]
            if index < request.params.min_new_tokens:  # stops come only where there is nothing else
                allowed = [t for t in allowed if t not in legal.stop_ids] or allowed
            best = allowed[0] if allowed else -1
        if best != token:
            gap = float(row[best] - row[token])
            _expect(
                gap <= self.model.tolerance.gap,
                f"{request.rid}: output {index} is {token}, the reference says {best} (its logit is {gap:.4g} above); "
                f"prompt {request.prompt.tolist()}, output {request.output.tolist()}",
            )
            self.near_ties += 1

    def _check_draw(self, request: Request, row: np.ndarray, token: int, index: int) -> None:
        """The draw is an inverse CDF at a number in [0, 1) that seed and position give: is the token there?"""
        plain = SamplingParams(
            temperature=request.params.temperature, top_k=request.params.top_k, top_p=request.params.top_p,
            min_p=request.params.min_p,
        )  # fmt: skip
        batch = SamplingBatch.build([plain], [request.seed], [1], [request.prompt_len], len(row))
        position = torch.tensor([request.prompt_len + index])
        mass = distribution(torch.from_numpy(row).float()[None], batch, position)[0].cumsum(0).numpy()
        u, slack = float(uniform(batch.seed, position)[0]), self.model.tolerance.mass
        low = mass[token - 1] if token else 0.0
        filtered = request.params.top_p < 1 or request.params.top_k > 0 or request.params.min_p > 0
        if filtered and self.model.name != "scripted":
            return  # a near-tie at a filter's edge moves everything
        _expect(
            low - slack <= u <= mass[token] + slack,
            f"{request.rid}: output {index} is {token}, which has [{low:.6f}, {mass[token]:.6f}] of the mass; the draw "
            f"is at {u:.6f}; prompt {request.prompt.tolist()}, output {request.output.tolist()}",
        )

    # ---- the end -------------------------------------------------------------------------------------------------

    def _check_end(self, request: Request, output: list[int], sink: Sink) -> None:
        params, reason = request.params, request.finish_reason
        assert reason is not None
        limit = min(request.prompt_len + params.max_new_tokens, self.max_context) - request.prompt_len
        stop_ids = {*params.stop_token_ids, *(self.eos_ids if not params.ignore_eos or params.grammar else ())}
        what = f"{request.rid}: ended by {reason} after {len(output)} of at most {limit} tokens: {output}"
        ends = set(self.eos_ids) if params.grammar else set()  # legal where the grammar may end
        first = next(
            (i for i, t in enumerate(output) if t in ends or (t in stop_ids and i + 1 > params.min_new_tokens)), None
        )
        if self.model.bytes:
            text_end = self._first_stop(params, output if first is None else output[:first])
            if text_end is not None:
                _expect(reason["type"] == "stop" and text_end == len(output) - 1, f"{what}; stops at {text_end}")
                self._check_text(sink, output, reason["matched"])
                return
        if first is not None:
            _expect(reason == {"type": "stop", "matched": output[first]} and first == len(output) - 1, what)
            self._check_text(sink, output[:-1] if not params.no_stop_trim else output, None)
        elif self.model.bytes or reason["type"] == "length":
            _expect(reason == {"type": "length"} and len(output) == limit, what)
            self._check_text(sink, output, None)

    def _first_stop(self, params: SamplingParams, output: list[int]) -> int | None:
        """The index of the token that completes the first stop string or pattern."""
        text = ""
        for i, token in enumerate(output):
            if i < params.min_new_tokens:
                continue
            text += self._text([token])
            if any(text.endswith(stop) for stop in params.stop):
                return i
            if any(regex.search(pattern, text) for pattern in params.stop_regex):
                return i
        return None

    def _check_text(self, sink: Sink, output: list[int], matched: Any) -> None:
        if not self.model.bytes:
            return
        text, params = sink.result()["text"], sink.request.params
        want = self._text(output)
        if isinstance(matched, str) and not params.no_stop_trim:
            if matched in params.stop:
                want = want[: len(want) - len(matched)]
            else:
                _expect(want.startswith(text) and regex.fullmatch(matched, want[len(text) :]), f"{text!r} of {want!r}")
                return
        _expect(text == want, f"{sink.request.rid}: the text is {text!r}, should be {want!r}")

    def _text(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    # ---- log-probabilities -----------------------------------------------------------------------------------------

    def _check_logprobs(self, sink: Sink, output: list[int], logits: np.ndarray) -> None:
        logprobs, request = sink.logprobs, sink.request
        assert logprobs is not None
        table = log_softmax(logits)
        n = request.prompt_len
        self._compare(request, logprobs.output, logprobs.output_top, output, table[n - 1 :], logprobs.top_n)
        if logprobs.start is not None:
            ids = request.prompt.tolist()[logprobs.start :]
            values, tops, rows = logprobs.prompt, logprobs.prompt_top, table[max(logprobs.start - 1, 0) :]
            if logprobs.start == 0:
                _expect(values[0][0] is None and values[0][1] == ids[0], f"{request.rid}: the first has a probability")
                values, tops, ids = values[1:], tops[1:], ids[1:]
            self._compare(request, values, tops, ids, rows, logprobs.top_n)

    def _compare(self, request: Request, values: Any, tops: Any, ids: list[int], rows: np.ndarray, top_n: int) -> None:
        slack = self.model.tolerance.logprob
        tokens = [token for _, token, _ in values]
        _expect(tokens == ids, f"{request.rid}: log-probabilities of {tokens}, not {ids}")
        for i, (value, token, _) in enumerate(values):
            _expect(
                abs(value - rows[i, token]) <= slack,
                f"{request.rid}: log-probability {i} (token {token}) is {value:.5f}, should be {rows[i, token]:.5f}",
            )
            best = np.sort(rows[i])[::-1][:top_n]
            got = [entry[0] for entry in tops[i]]
            _expect(
                len(got) == top_n and np.abs(np.array(got) - best).max(initial=0) <= slack,
                f"{request.rid}: the likeliest at {i} are {got}, should be {best.tolist()}",
            )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def _expect(right: Any, message: str) -> None:
    if not right:
        raise Disagreement(message)
