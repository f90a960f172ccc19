"""A scripted backend for tests of the language: the reply is a function of the prompt, one token is one character.

Streams character by character, honours stop and max_new_tokens, scores choices with a scripted conditional
log-probability, remembers every job, and can be held, slowed or made to fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from minisgl.backends.base import Anchor, Backend, Job, Prompt, Reply, WorkerPool
from minisgl.choices import plan

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ScriptedBackend(Backend):
    """reply: text, list of texts (one for each job in turn), or a function from Prompt.

    logprob(context, token) -> float for selects; tokenize(text) -> list of str tokens for them.
    inline: answer within submit (otherwise on a pool thread).  delay: seconds per answer.
    """

    def __init__(
        self,
        reply: str | list | Callable[[Prompt], str] = "ok",
        *,
        logprob: Callable[[list[str], str], float] | None = None,
        tokenize: Callable[[str], list[str]] = list,
        inline: bool = False,
        delay: float = 0.0,
        render: Callable | None = None,
        parallelism: int = 16,
        hosted: bool = False,
        continues: bool = True,
        constrains: bool = True,
    ):
        self.reply, self.logprob, self.tokenize = reply, logprob, tokenize
        self.inline, self.delay = inline, delay
        self._render = render
        self.parallelism = parallelism
        self.hosted, self.continues, self.constrains = hosted, continues, constrains  # type: ignore[misc]
        self.jobs: list[Job] = []
        self.prefills: list[Prompt] = []
        self.log: list[str] = []  # order of submissions and hints
        self.cancelled: list[Job] = []
        self.running = self.peak = 0
        self._lock = threading.Lock()
        self._pool = WorkerPool(256, "scripted", idle=0.5)

    def render(self):
        return self._render

    def prefill(self, prompt: Prompt) -> None:
        self.prefills.append(prompt)
        self.log.append(f"prefill {prompt.text}")

    precompute = prefill

    def flush_cache(self):
        return "flushed"

    def get_server_info(self):
        return {"model_path": "scripted"}

    def submit(self, job: Job) -> None:
        with self._lock:
            number = len(self.jobs)
            self.jobs.append(job)
            self.log.append(f"job {job.prompt.text}")
        stopped = threading.Event()
        job.stop = lambda: (self.cancelled.append(job), stopped.set())
        if self.inline:
            self._work(job, number, stopped)
        else:
            self._pool.run(lambda: self._work(job, number, stopped))

    def _work(self, job: Job, number: int, stopped: threading.Event) -> None:
        with self._lock:
            self.running += 1
            self.peak = max(self.peak, self.running)
        try:
            if self.delay and stopped.wait(self.delay):
                return
            replies = [self._choose(job)] if job.choices is not None else self._generate(job, number)
        except BaseException as error:
            job.on_error(error)
            return
        finally:
            with self._lock:
                self.running -= 1
        if not job.cancelled:
            job.on_done(replies)

    def _generate(self, job: Job, number: int) -> list[Reply]:
        return [self._one(job, number, i) for i in range(job.params.get("n", 1))]

    def _one(self, job: Job, number: int, i: int) -> Reply:
        if callable(self.reply):
            text = self.reply(job.prompt)
        else:
            text = self.reply if isinstance(self.reply, str) else self.reply[number]
        if isinstance(text, BaseException):
            raise text
        if isinstance(text, list):
            text = text[i]
        text, reason = cut(text, job.params)
        if job.on_text is not None:
            for char in text:
                job.on_text(char, {"completion_tokens": 1})
                time.sleep(0.001)
        meta = {
            "prompt_tokens": len(job.prompt.text),
            "completion_tokens": len(text),
            "cached_tokens": job.prompt.anchor.length if job.prompt.anchor else 0,
            "finish_reason": reason,
        }
        return Reply(text, meta, Anchor(len(job.prompt.text) + len(text), None))

    def _choose(self, job: Job) -> Reply:
        assert job.choices is not None and job.method is not None
        names: dict[str, int] = {}
        texts = [job.prompt.text, *(job.prompt.text + choice for choice in job.choices)]
        rows = [self.tokenize(text) for text in texts]
        ids = [[names.setdefault(token, len(names)) for token in row] for row in rows]
        found = plan(ids[0], ids[1:])
        logprob = self.logprob or (lambda context, token: -1.0)
        conditional, alone = [], []
        for row, start in zip(rows[1:], found.starts):
            conditional.append([logprob(row[:j], row[j]) for j in range(start, len(row))])
            scored = row[start:]
            alone.append([0.0, *(logprob(scored[:j], scored[j]) for j in range(1, len(scored)))])
        decision = job.method(conditional, alone if job.method.unconditional else None)
        meta = {
            "scores": decision.scores,
            "finish_reason": {"type": "select"},
            "prompt_tokens": len(rows[0]),
            "scored": [row[start:] for row, start in zip(rows[1:], found.starts)],
        }
        return Reply(job.choices[decision.index], meta)


def cut(text: str, params: dict) -> tuple[str, dict]:
    """Apply stop and max_new_tokens (in characters) as an engine would."""
    stop = params.get("stop") or []
    for string in [stop] if isinstance(stop, str) else stop:
        if string in text:
            return text[: text.index(string)], {"type": "stop", "matched": string}
    if len(text) > params["max_new_tokens"]:
        return text[: params["max_new_tokens"]], {"type": "length"}
    return text, {"type": "stop"}


def chatml(messages, add_generation_prompt):
    """A ChatML renderer, as Qwen's and SmolLM's models have it."""
    from minisgl.chat_template import ChatTemplate

    return ChatTemplate(CHATML).render(messages, add_generation_prompt) if messages else "<|im_start|>assistant\n"
