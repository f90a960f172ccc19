"""From what a caller gave to requests: everything is checked here, on the caller's thread, before anything is queued.

    prompt, sampling_params, ...  -->  token ids, checked parameters, compiled grammar  -->  a Request and its Sink
                                  -->  ValueError that names the parameter, and nothing has happened

Whatever can be wrong with a request is wrong here, so that the engine, which serves many callers at once, need not
doubt what it is given.
"""

from __future__ import annotations

import itertools
from array import array as array_of
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from .checks import check_flag, check_int
from .config import LlamaConfig
from .constraint import Guide
from .grammar import Compiled, GrammarCompiler, GrammarSpec, Kind
from .output import Sink, TokenLogprobs
from .request import MAX_STOP_IDS, Request
from .sampling_params import SamplingParams, make_all
from .scheduler import Scheduler
from .tokenizer import BaseTokenizer

Params = Mapping[str, Any] | SamplingParams | None

_names = itertools.count()


class Preparer:
    """Makes one Runtime's requests.

    name, config, tokenizer, eos_ids        of the model; without a tokenizer, prompts are token ids
    scheduler                               is asked what it could never run
    jump_forward, grammar_backend, seed     as `Runtime` has them
    """

    def __init__(
        self,
        name: str,
        config: LlamaConfig,
        tokenizer: BaseTokenizer | None,
        eos_ids: Sequence[int],
        scheduler: Scheduler,
        *,
        jump_forward: bool,
        grammar_backend: str,
        seed: int,
    ):
        self.name, self.config, self._tokenizer, self._eos_ids = name, config, tokenizer, tuple(eos_ids)
        self._scheduler = scheduler
        self._jump_forward = jump_forward
        self._grammars = None
        if tokenizer is not None:
            self._grammars = GrammarCompiler(tokenizer, grammar_backend, set(eos_ids))
        self._rng = np.random.default_rng(seed)
        self._prefix = f"minisgl-{next(_names)}"
        self._count = itertools.count()

    @property
    def tokenizer(self) -> BaseTokenizer:
        """Raises ValueError if there is none."""
        if self._tokenizer is None:
            raise ValueError(f"model {self.name!r} has no tokenizer files: pass input_ids instead of text")
        return self._tokenizer

    def prepare(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        *,
        input_ids: Any = None,
        on_chunk: Callable[[Any], None] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        return_text_in_logprobs: bool = False,
        priority: int = 0,
        rid: str | None = None,
    ) -> tuple[list[Sink], bool]:
        """Check everything, as `Runtime.generate` says it, and make a Request with its Sink for each output wanted.

        Nothing is queued: that is `engine.submit([sink.request for sink in sinks])`, which several calls' requests may
        share.  `on_chunk` is called on the engine's thread with each item of a stream, and with None at its end.
        Returns the sinks, and whether one reply rather than a list was asked for.
        """
        prompts, single = self._token_ids(prompt, input_ids)
        if isinstance(sampling_params, Sequence) and not isinstance(sampling_params, (str, Mapping)):
            if len(sampling_params) != len(prompts):
                raise ValueError(
                    f"sampling_params has {len(sampling_params)} entries for {len(prompts)} prompts"
                )
            params = make_all(sampling_params)
        else:
            params = [SamplingParams.make(sampling_params)] * len(prompts)  # type: ignore[arg-type]
        check_int("logprob_start_len", logprob_start_len, -1)
        check_int("top_logprobs_num", top_logprobs_num, 0)
        check_int("priority", priority)
        check_flag("return_logprob", return_logprob)
        check_flag("return_text_in_logprobs", return_text_in_logprobs)
        if (logprob_start_len >= 0 or top_logprobs_num) and not return_logprob:
            raise ValueError("logprob_start_len and top_logprobs_num need return_logprob=True")
        if rid is not None and not (isinstance(rid, str) and rid):
            raise ValueError(f"rid must be a non-empty string, got {rid!r}")
        if on_chunk is not None and not (single and params[0].n == 1):
            raise ValueError("stream=True takes one prompt and n=1; start one stream for each")
        sinks: list[Sink] = []
        for ids, p in zip(prompts, params):
            self._check_params(p, ids, logprob_start_len)
            compiled = self._compile(p)
            for i in range(p.n):
                name = rid if rid is not None and len(prompts) * p.n == 1 else self._name(rid)
                request = self._request(name, ids, p, i, priority)
                request.group = rid
                logprobs = None
                if return_logprob:
                    request.return_logprob, request.top_logprobs = True, top_logprobs_num
                    request.logprob_start = logprob_start_len if logprob_start_len >= 0 else None
                    logprobs = TokenLogprobs(request.logprob_start, top_logprobs_num, return_text_in_logprobs)
                why = self._scheduler.refusal(request)
                if why is not None:
                    raise ValueError(why)
                if compiled is not None:
                    # a forced token has no logits of its own, so whoever asks for log-probabilities samples each
                    request.guide = Guide(compiled.start(), self._jump_forward and not return_logprob)
                request.sink = Sink(request, self._tokenizer, on_chunk=on_chunk, logprobs=logprobs)
                request.watch = request.sink.watches
                sinks.append(request.sink)
        return sinks, single and params[0].n == 1

    def _token_ids(self, prompt: Any, input_ids: Any) -> tuple[list[np.ndarray], bool]:
        """The prompts as int32 arrays, and whether there was one, not a list."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give prompt or input_ids, one of the two")
        if prompt is not None:
            single = isinstance(prompt, str)
            texts = [prompt] if single else prompt
            if not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in texts):
                raise ValueError(f"prompt must be a string or a list of strings, got {type(prompt).__name__}")
            if not texts:
                raise ValueError("prompt is an empty list")
            if "" in texts:
                raise ValueError("prompt is empty: at least one character is needed")
            # a tokenizer may know tokens that the model has no embedding for
            return self._checked_rows("prompt", self.tokenizer.encode_batch(texts)), single
        if isinstance(input_ids, np.ndarray) and input_ids.ndim == 1:
            return [self._checked_ids("input_ids", input_ids)], True
        if isinstance(input_ids, (np.ndarray, torch.Tensor)):
            input_ids = input_ids.tolist()
        if not isinstance(input_ids, Sequence) or isinstance(input_ids, (str, bytes)):
            raise ValueError(f"input_ids must be a list of token ids, got {type(input_ids).__name__}")
        single = len(input_ids) == 0 or not isinstance(input_ids[0], (Sequence, np.ndarray, torch.Tensor))
        return self._checked_rows("input_ids", [input_ids] if single else input_ids), single

    def _checked_rows(self, name: str, rows: Sequence[Any]) -> list[np.ndarray]:
        """`_checked_ids` of each row; of many arrays, in one array that is looked at once.

        numpy lets go of the interpreter's lock for each operation on a row of some length, and the engine's thread
        takes it every time: a thousand hand-overs, each of which costs more than the operation.
        """
        if len(rows) > 1 and all(type(row) is np.ndarray and row.dtype == np.int32 and row.ndim == 1 for row in rows):
            joined = np.concatenate(rows)
            if joined.size and joined.min() >= 0 and joined.max() < self.config.vocab_size:
                ends = itertools.accumulate(map(len, rows))
                return [joined[end - len(row) : end] for end, row in zip(ends, rows)]
        return [self._checked_ids(name, row) for row in rows]

    def _checked_ids(self, name: str, row: Any) -> np.ndarray:
        vocab = self.config.vocab_size
        try:
            quick = type(row) is list and row and type(row[0]) is int  # a third faster than numpy's own look at it
            array = np.frombuffer(array_of("q", row), np.int64) if quick else np.asarray(row)
        except (ValueError, TypeError, OverflowError):  # lists of different depths, or not integers
            array = np.zeros((0, 0))
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(f"{name} must be integers, in a list for each prompt")
        if array.size and (array.min() < 0 or array.max() >= vocab):
            bad = array[(array < 0) | (array >= vocab)][0]
            raise ValueError(f"{name} has token id {bad}, outside the vocabulary [0, {vocab - 1}]")
        return array.astype(np.int32)

    def _check_params(self, p: SamplingParams, ids: np.ndarray, logprob_start: int) -> None:
        p.validate_vocab(self.config.vocab_size)
        if (p.stop or p.stop_regex) and self._tokenizer is None:
            raise ValueError("stop and stop_regex need a tokenizer, which this model came without")
        if logprob_start > len(ids):
            raise ValueError(f"logprob_start_len must be at most the prompt's {len(ids)} tokens, got {logprob_start}")

    def _compile(self, p: SamplingParams) -> Compiled | None:
        """The request's grammar, on the caller's thread.  Raises GrammarError (a ValueError) for what cannot be."""
        if p.grammar is None:
            return None
        kind, source = p.grammar
        if self._grammars is None:
            raise ValueError(f"{kind} needs a tokenizer, which this model came without")
        return self._grammars.compile(GrammarSpec(cast("Kind", kind), source))

    def _request(self, name: str, ids: np.ndarray, p: SamplingParams, index: int, priority: int) -> Request:
        ignore_eos = p.ignore_eos and p.grammar is None  # a grammar's text ends where the grammar does
        stop_ids = {*p.stop_token_ids, *(() if ignore_eos else self._eos_ids)}
        if len(stop_ids) > MAX_STOP_IDS:
            count = f"{MAX_STOP_IDS} stop ids with the model's own, got {len(stop_ids)}"
            raise ValueError(f"stop_token_ids: at most {count}")
        seed = int(self._rng.integers(1 << 62)) if p.seed is None else p.seed
        return Request(
            rid=name,
            prompt=ids,
            params=p,
            max_len=len(ids) + p.max_new_tokens,
            stop_ids=tuple(sorted(stop_ids)),
            seed=(seed + index * 0x5DEECE66D + (1 << 63)) % (1 << 64) - (1 << 63),
            priority=priority,
        )

    def _name(self, rid: str | None) -> str:
        return f"{rid or self._prefix}-{next(self._count)}"
