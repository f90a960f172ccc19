"""The in-process engine as a backend.

One thread for each Runtime, the *dispatcher*, stands between programs and engine.  Programs post generations, the
engine's ends are posted too, and the dispatcher takes everything that has arrived at once:

    programs --post--> [gen][gen][end][gen] --> ends first: text made, variables set, queues run on (more gens arrive)
                                            --> then all gens: tokenised in one call, submitted in one burst

so a burst of a thousand programs costs few tokeniser calls and few hops to the engine, and a single gen goes straight
through.  A burst has at most `BURST` gens: while the engine computes them, the next ones are tokenised, which needs no
interpreter.  Neither the engine's thread nor a program's ever tokenises for the other.

Token ids are kept between the generations of a state.  A prompt that goes on from the last output with a special token
(every chat template's turn marker) is the known ids plus those of the new text, since no tokenizer merges across a
special token: turn n's tokens, as sampled, are a prefix of turn n+1's.  Otherwise the text is tokenised as a whole, so
that a word begun in one `s +=` and ended in the next is the token that the model knows.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from .. import forking
from ..chat import Render
from ..choices import Plan, plan
from .base import Anchor, Backend, Job, Prompt, Reply

if TYPE_CHECKING:
    from ..output import Sink
    from ..runtime import Runtime

NO_IDS = np.zeros(0, np.int32)
BURST = 256  # generations that are tokenised and submitted at once: about a step's worth on a GPU
IDLE = 5.0  # seconds after which the dispatcher's thread ends; the next generation starts it again


class RuntimeBackend(Backend):
    """A Runtime as seen by programs.  `as_backend` makes one where a Runtime is given."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.parallelism = runtime.scheduler.table.max_requests
        self._dispatcher = _dispatcher(runtime)

    def submit(self, job: Job) -> None:
        self._dispatcher.post(_Submission(self.runtime, job.prompt, job))

    def prefill(self, prompt: Prompt) -> None:
        self._dispatcher.post(_Submission(self.runtime, prompt, None))

    def precompute(self, prompt: Prompt) -> None:
        submission = _Submission(self.runtime, prompt, None, threading.Event())
        self._dispatcher.post(submission)
        submission.ended.wait()  # type: ignore[union-attr]
        for sink in submission.sinks:
            sink.result()

    def render(self) -> Render | None:
        tokenizer = self.runtime.tokenizer
        return None if tokenizer.chat_template is None else tokenizer.apply_chat_template

    def check_media(self) -> None:
        raise ValueError(f"model {self.runtime.name!r} has no vision: image() and video() need a multimodal model")

    def flush_cache(self) -> int:
        return self.runtime.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        runtime = self.runtime
        return {"model_path": runtime.name, "device": str(runtime.device), "max_context": runtime.scheduler.max_context,
                "max_running_requests": self.parallelism, **runtime.stats()}  # fmt: skip

    def __repr__(self) -> str:
        return f"RuntimeBackend({self.runtime!r})"


@dataclass(eq=False)
class _Submission:
    """A job on its way through the engine; without a job, a prefix to compute."""

    runtime: Runtime
    prompt: Prompt
    job: Job | None
    ended: threading.Event | None = None
    sinks: Sequence[Sink] = ()
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)
    plan: Plan | None = None
    unconditional: Sequence[Sink | None] = ()
    dispatcher: Dispatcher | None = None
    watched: Sequence[Sink] = ()  # all sinks, those of shared prefixes too,
    left: int = 0  # and how many of them have not ended

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def texts(self, special: re.Pattern[str] | None) -> tuple[np.ndarray, list[str], bool]:
        """Known ids, the texts to put behind them (prompt, then prompt + choice for each), and whether with BOS."""
        prompt, known = self.prompt, NO_IDS
        tail, add = prompt.text, not prompt.templated
        anchor = prompt.anchor
        if anchor is not None:
            rest = prompt.text[anchor.length :]
            # A special token starts afresh.  A gen right behind a gen goes on from the ids; a select may merge.
            if (not rest and self.choices is None) or (special is not None and special.match(rest)):
                known, tail, add = _joined(anchor.value), rest, False
        return known, [tail, *(tail + choice for choice in self.choices or ())], add

    @property
    def choices(self) -> tuple[str, ...] | None:
        return None if self.job is None else self.job.choices

    @property
    def plain(self) -> bool:
        """A generation without options of its own: many of them can be prepared in one call."""
        job = self.job
        return job is not None and job.choices is None and job.on_text is None and not job.options

    @property
    def params(self) -> dict[str, Any]:
        assert self.job is not None
        return {name: value for name, value in self.job.params.items() if value is not None}

    def prepare(self, rows: list[np.ndarray]) -> list[Sink]:
        """Make the requests.  Raises ValueError for anything wrong with prompt or parameters."""
        if self.job is None:
            return self._score(rows[0])
        self.ids = rows[0]
        if self.choices is not None:
            return self._prepare_select(rows)
        job = self.job
        options = job.options
        if options.get("logprob_start_len", -1) >= 0 or options.get("top_logprobs_num"):
            options = {**options, "return_logprob": True}
        on_chunk = None if job.on_text is None else self._chunk
        self.sinks, _ = self.runtime.prepare(None, self.params, input_ids=rows[0], on_chunk=on_chunk, **options)
        return list(self.sinks)

    def _score(self, ids: Any, start: int = -1) -> list[Sink]:
        """Requests that only compute a prompt, with log-probabilities from position `start` on."""
        self.sinks, _ = self.runtime.prepare(
            None, {"max_new_tokens": 0}, input_ids=ids, return_logprob=start >= 0, logprob_start_len=start
        )
        return list(self.sinks)

    def _prepare_select(self, rows: list[np.ndarray]) -> list[Sink]:
        """All choices in one burst, behind a request for their common prefix, which so is computed once."""
        assert self.job is not None and self.job.method is not None
        prompt, *choices = (row.tolist() for row in rows)
        self.plan = plan(prompt, choices)
        shared = self._score(self.plan.shared) if self.plan.shared else []
        scored = [self._score(row, start)[0] for row, start in zip(self.plan.rows, self.plan.starts)]
        if self.job.method.unconditional:
            alone = [self.plan.scored(i) for i in range(len(scored))]
            self.unconditional = [self._score(ids, 0)[0] if len(ids) > 1 else None for ids in alone]
        self.sinks = scored
        return [*shared, *scored, *(sink for sink in self.unconditional if sink is not None)]

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _chunk(self, item: Any) -> None:
        job = self.job
        if job is None or job.on_text is None or job.cancelled:
            return
        if isinstance(item, dict) and item["delta"]:
            job.on_text(item["delta"], item["meta_info"])

    def one_ended(self, _: Any) -> None:
        """On the engine's thread, for one request after another."""
        self.left -= 1
        if self.left == 0 and self.dispatcher is not None:
            try:
                self.dispatcher.post(self.finish)
            except RuntimeError as error:  # there is no thread to take it: say so on this one
                self.fail(error)

    def stop(self) -> None:
        self.runtime.engine.abort([sink.request for sink in self.watched])

    def finish(self) -> None:
        """The engine has ended all requests: hand over what came of it."""
        self.watched = ()
        if self.ended is not None:
            self.ended.set()
        job = self.job
        if job is None or job.cancelled:
            return
        try:
            replies = [self._chosen()] if job.choices is not None else [self._reply(sink) for sink in self.sinks]
        except BaseException as error:
            job.on_error(error)
            return
        self.sinks = self.unconditional = ()  # nothing of a generation outlives it but its reply
        job.stop = None
        job.on_done(replies)

    def fail(self, error: BaseException) -> None:
        if self.ended is not None:
            self.ended.set()
        if self.job is not None and not self.job.cancelled:
            self.job.on_error(error)

    def _reply(self, sink: Sink) -> Reply:
        result = sink.result()
        return Reply(result["text"], result["meta_info"], self._anchor(sink, result))

    def _anchor(self, sink: Sink, result: dict[str, Any]) -> Anchor | None:
        """The ids of prompt and output where they are exactly the text's; else of the prompt's finished turns.

        As a list of their parts: most are never asked for, and who asks puts them together.
        """
        tokenizer = self.runtime.tokenizer
        output, matched = result["output_ids"], (result["meta_info"]["finish_reason"] or {}).get("matched")
        if output and matched == output[-1] and not sink.request.params.no_stop_trim:
            output = output[:-1]
        text = result["text"]
        if not isinstance(matched, str) and not text.endswith("\ufffd") and tokenizer.special_ids.isdisjoint(output):
            return Anchor(len(self.prompt.text) + len(text), (self.ids, output))
        ids = self.ids.tolist()
        for i in range(len(ids) - 1, 0, -1):
            if ids[i] in tokenizer.special_ids:
                at = self.prompt.text.rfind(tokenizer.token_text(ids[i]))
                return Anchor(at, (self.ids[:i],)) if at >= 0 else None
        return None

    def _chosen(self) -> Reply:
        assert self.plan is not None and self.job is not None
        assert self.job.choices is not None and self.job.method is not None
        metas = [sink.result()["meta_info"] for sink in self.sinks]
        conditional = [_values(meta) for meta in metas]
        unconditional = None
        if self.job.method.unconditional:
            unconditional = []
            for sink, row in zip(self.unconditional, conditional):
                values = [] if sink is None else _values(sink.result()["meta_info"])
                # u_i0 = 0; a first token that was not scored has none either
                unconditional.append(([0.0, *values])[-len(row) :] if row else [])
        decision = self.job.method(conditional, unconditional)
        best = decision.index
        text = self.job.choices[best]
        meta = {
            "finish_reason": {"type": "select"},
            "prompt_tokens": len(self.ids),
            "completion_tokens": 0,
            "cached_tokens": min(meta["cached_tokens"] for meta in metas),
            "choices": list(self.job.choices),
            "choices_method": self.job.method.name,
            "scores": decision.scores,
            "input_token_logprobs": [meta["input_token_logprobs"] for meta in metas],
        }
        return Reply(text, meta, Anchor(len(self.prompt.text) + len(text), (self.plan.rows[best],)))


def _values(meta: dict[str, Any]) -> list[float]:
    return [value for value, *_ in meta["input_token_logprobs"] if value is not None]


class Dispatcher:
    """Takes what programs and engine post, in bursts, on a thread of its own that ends when nothing is to do."""

    def __init__(self) -> None:
        self._special: tuple[int, re.Pattern[str] | None] | None = None
        forking.tell(self)
        self.after_fork()

    def after_fork(self) -> None:
        """In a child process there is no thread yet, and what the parent's will do is its own."""
        self._inbox: queue.SimpleQueue[_Submission | Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held while the thread begins or ends, not for each post
        self._thread: threading.Thread | None = None

    def post(self, item: _Submission | Callable[[], None]) -> None:
        """Have the thread take this.  RuntimeError if there is none and the system gives none."""
        self._inbox.put(item)
        # is_alive: Ctrl-C may have come before the last one began, and then this one must
        if self._thread is None or not self._thread.is_alive():
            self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._main, name="minisgl-dispatcher", daemon=True)
                self._thread.start()

    def _take(self, wait: bool) -> list[_Submission | Callable[[], None]] | None:
        """All that has been posted.  With `wait`, at least one item, or None if the thread is to end."""
        items = []
        with contextlib.suppress(queue.Empty):
            items.append(self._inbox.get(wait, IDLE))
            while True:
                items.append(self._inbox.get_nowait())
        if wait and not items:
            with self._lock:
                self._thread = None  # first: whoever posts after the look below starts another one
                if self._inbox.empty():
                    return None
                self._thread = threading.current_thread()
        return items

    def _main(self) -> None:
        submissions: list[_Submission] = []
        while (items := self._take(wait=not submissions)) is not None:
            for item in items:
                if isinstance(item, _Submission):
                    submissions.append(item)
                else:
                    try:
                        item()
                    except BaseException:  # a program's own, which has it already; the other programs go on
                        logging.getLogger("minisgl").debug("a program's step failed", exc_info=True)
            burst, submissions = submissions[:BURST], submissions[BURST:]
            if burst:
                try:
                    self._submit(burst)
                except BaseException as error:  # whoever waits for these has nobody else to hear it from
                    for submission in burst:
                        submission.fail(error)
            del items[:], burst  # they hold the runtime, which its owner may want to be gone
            item = None

    def _submit(self, submissions: list[_Submission]) -> None:
        runtime = submissions[0].runtime
        try:
            rows = self._encode(runtime, submissions)
        except Exception as error:
            if len(submissions) == 1:
                submissions[0].fail(error)
            else:  # one text of them cannot be tokenised: the others must not suffer
                for submission in submissions:
                    self._submit([submission])
            return
        wanted = [(s, ids) for s, ids in zip(submissions, rows) if s.job is None or not s.job.cancelled]
        prepared = self._prepare_plain([(s, ids[0]) for s, ids in wanted if s.plain and s.runtime is runtime])
        requests = []
        for submission, ids in wanted:
            try:
                sinks = prepared.get(submission) or submission.prepare(ids)
            except BaseException as error:
                submission.fail(error)
                continue
            requests += [sink.request for sink in sinks]
            self._watch(submission, sinks)
        if not requests:
            return
        try:
            runtime.engine.submit(requests)
        except Exception as error:  # shut down
            for submission in submissions:
                submission.fail(error)
            return
        for submission in submissions:
            if submission.job is not None and submission.job.cancelled:
                submission.stop()  # cancelled while it was being submitted

    @staticmethod
    def _prepare_plain(submissions: list[tuple[_Submission, np.ndarray]]) -> dict[_Submission, Sequence[Sink]]:
        """The requests of many plain generations in one call; {} if one of them is wrong: each is told for itself."""
        if len(submissions) < 2:
            return {}
        params = [submission.params for submission, _ in submissions]
        try:
            sinks, _ = submissions[0][0].runtime.prepare(None, params, input_ids=[ids for _, ids in submissions])
        except Exception:
            return {}
        each = iter(sinks)
        for (submission, ids), wants in zip(submissions, params):
            submission.ids, submission.sinks = ids, list(islice(each, wants.get("n", 1)))
        return {submission: submission.sinks for submission, _ in submissions}

    def _watch(self, submission: _Submission, sinks: Sequence[Sink]) -> None:
        """Post the submission's end when its last request has ended; let the job be stopped until then."""
        submission.dispatcher, submission.watched = self, sinks
        submission.left = len(sinks)
        for sink in sinks:
            sink.ended.add_done_callback(submission.one_ended)
        if submission.job is not None:
            submission.job.stop = submission.stop

    def _encode(self, runtime: Runtime, submissions: list[_Submission]) -> list[list[np.ndarray]]:
        """For each submission the token ids of its texts; all that need BOS in one call, the others in another."""
        tokenizer = runtime.tokenizer
        special = self._special_tokens(tokenizer)
        parts = [submission.texts(special) for submission in submissions]
        encoded: dict[bool, Any] = {}
        for add in (True, False):
            texts = [text for _, texts, flag in parts if flag == add for text in texts]
            encoded[add] = iter(tokenizer.encode_batch(texts, add_special_tokens=add) if texts else ())
        rows = [[_behind(known, next(encoded[add])) for _ in texts] for known, texts, add in parts]
        if tokenizer.bos_id is not None:  # an empty prompt: begin as a text does
            bos = np.array([tokenizer.bos_id], np.int32)
            rows = [group if len(group[0]) else [_behind(bos, row) for row in group] for group in rows]
        for group in rows:
            if not len(group[0]) and len(group) == 1:
                raise ValueError("the prompt is empty and the model has no BOS token to start from")
        return rows

    def _special_tokens(self, tokenizer: Any) -> re.Pattern[str] | None:
        """Matches a special token at the beginning of a text."""
        if self._special is None or self._special[0] != id(tokenizer):
            texts = sorted((re.escape(tokenizer.token_text(i)) for i in tokenizer.special_ids), key=len, reverse=True)
            self._special = id(tokenizer), re.compile("|".join(texts)) if texts else None
        return self._special[1]


def _behind(known: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.concatenate([known, ids], dtype=np.int32) if len(known) else ids


def _joined(parts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    return np.concatenate(parts, dtype=np.int32, casting="unsafe")  # an empty list counts as an array of floats


_dispatchers: WeakKeyDictionary[Any, Dispatcher] = WeakKeyDictionary()


def _dispatcher(runtime: Any) -> Dispatcher:
    if runtime not in _dispatchers:
        _dispatchers.setdefault(runtime, Dispatcher())  # atomic: a lock could be held by nobody in a forked child
    return _dispatchers[runtime]
