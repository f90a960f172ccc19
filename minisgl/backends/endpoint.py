"""A running server as a backend: SGLang's native API (`/generate` and its neighbours), with nothing but the standard
library on this side.

    POST /generate            {"text" | "input_ids", "sampling_params", "return_logprob", ..., "stream", "rid"}
    POST /abort_request       {"rid"}
    POST /flush_cache
    GET  /get_model_info      model_path, and (minisgl's server) chat_template and special_tokens
    GET  /get_server_info     sizes and totals

The server tokenises; it is sent the whole text each time, and its cache finds the prefix again.  A select asks for the
log-probabilities of a window of tokens around the end of the prompt, which shows where each choice's tokens begin to
differ from the prompt's own, however they merge.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

from ..chat import Render
from ..chat_template import ChatTemplate
from ..choices import plan
from .base import BlockingBackend, Job, Prompt, Reply, retry_status, with_retries

T = TypeVar("T")
Scored = list[tuple[float | None, int]]
WINDOW = 16  # prompt tokens before a choice that are looked at first; if all of them differ, everything is


class EndpointError(RuntimeError):
    """The server answered with an error.  status_code: its HTTP status; retry_after: seconds, if it named some."""

    def __init__(self, message: str, status_code: int, retry_after: float = 0.0):
        super().__init__(message)
        self.status_code, self.retry_after = status_code, retry_after


def _retryable(error: BaseException) -> float | None:
    asked = retry_status(error)
    return asked if asked is None else max(asked, getattr(error, "retry_after", 0.0))


class RuntimeEndpoint(BlockingBackend):
    """RuntimeEndpoint("http://host:port", api_key=None).

    parallelism   requests at once; "auto": what the server says it runs at once
    timeout       seconds without an answer after which a request fails
    Raises ConnectionError if nothing answers there.
    """

    hosted: ClassVar[bool] = False
    constrains: ClassVar[bool] = True

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        parallelism: int | str = "auto",
        timeout: float = 600.0,
        max_retries: int = 4,
        retry_wait: float = 0.5,
    ):
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, got {base_url!r}")
        self.base_url, self.api_key, self.timeout = base_url.rstrip("/"), api_key, timeout
        self.max_retries, self.retry_wait = max_retries, retry_wait
        self.model_info: dict[str, Any] = self._get("/get_model_info")
        if parallelism == "auto":
            parallelism = int(self.get_server_info().get("max_running_requests") or 64)
        if not isinstance(parallelism, int):
            raise ValueError(f"parallelism must be 'auto' or an integer of at least 1, got {parallelism!r}")
        super().__init__(parallelism)
        source = self.model_info.get("chat_template")
        self._template = ChatTemplate(source, self.model_info.get("special_tokens") or {}) if source else None

    def __repr__(self) -> str:
        return f"RuntimeEndpoint({self.base_url!r}, model {self.model_info.get('model_path')!r})"

    # ---- the protocol ----------------------------------------------------------------------------------------------

    def render(self) -> Render | None:
        return None if self._template is None else self._template.render

    def check_media(self) -> None:
        if not self.model_info.get("has_image_understanding"):
            raise ValueError("the server's model has no vision: image() and video() need a multimodal model")

    def get_server_info(self) -> dict[str, Any]:
        return self._get("/get_server_info")

    def flush_cache(self) -> Any:
        self._post("/flush_cache", {})

    def prefill(self, prompt: Prompt) -> None:
        self._pool.run(lambda: self._quietly(prompt))

    def precompute(self, prompt: Prompt) -> None:
        self._generate({"text": prompt.text, "sampling_params": {"max_new_tokens": 0}})

    def _quietly(self, prompt: Prompt) -> None:
        try:
            self.precompute(prompt)
        except Exception:
            return  # a hint: what is wrong with the prompt or the server shows in the requests that follow

    def generate(self, job: Job) -> list[Reply]:
        params = {name: value for name, value in job.params.items() if value is not None}
        payload = {"text": job.prompt.text, "sampling_params": params, "rid": uuid.uuid4().hex, **job.options}
        job.stop = lambda: self._abort(payload["rid"])
        if job.on_text is not None:
            return [self._stream(job, payload)]
        answer = self._generate(payload)
        return [Reply(a["text"], a["meta_info"]) for a in (answer if isinstance(answer, list) else [answer])]

    def choose(self, job: Job) -> Reply:
        assert job.choices is not None and job.method is not None
        prompt = job.prompt.text
        only_score = {"max_new_tokens": 0}
        length = self._generate({"text": prompt, "sampling_params": only_score})["meta_info"]["prompt_tokens"]
        start = max(length - WINDOW, 0)
        rows, metas = self._scored([prompt, *(prompt + choice for choice in job.choices)], start)
        ids = [[token for _, token in row] for row in rows]
        found = plan(ids[0], ids[1:])
        if start and min(found.starts) == 0:  # the choices change the tokens further back than the window
            rows, metas = self._scored([prompt, *(prompt + choice for choice in job.choices)], 0)
            ids = [[token for _, token in row] for row in rows]
            found = plan(ids[0], ids[1:])
        conditional = [[value for value, _ in row[at:] if value is not None] for row, at in zip(rows[1:], found.starts)]
        unconditional = None
        if job.method.unconditional:
            alone = [[token for _, token in row[at:]] for row, at in zip(rows[1:], found.starts)]
            unconditional = [self._alone(tokens, len(values)) for tokens, values in zip(alone, conditional)]
        decision = job.method(conditional, unconditional)
        meta = {
            **metas[1 + decision.index],
            "prompt_tokens": length,
            "completion_tokens": 0,
            "finish_reason": {"type": "select"},
            "choices": list(job.choices),
            "scores": decision.scores,
        }
        return Reply(job.choices[decision.index], meta)

    def _scored(self, texts: list[str], start: int) -> tuple[list[Scored], list[dict[str, Any]]]:
        """(log-probability, token id) of each text's tokens from `start` on, all in one batch."""
        answers = self._generate(
            {"text": texts, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
             "logprob_start_len": start}
        )  # fmt: skip
        metas = [answer["meta_info"] for answer in answers]
        return [[(value, token) for value, token, *_ in meta["input_token_logprobs"]] for meta in metas], metas

    def _alone(self, tokens: list[int], count: int) -> list[float]:
        values: list[float] = []
        if len(tokens) > 1:
            answer = self._generate(
                {"input_ids": tokens, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
                 "logprob_start_len": 0}
            )  # fmt: skip
            values = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"] if entry[0] is not None]
        return [0.0, *values][-count:] if count else []

    # ---- HTTP ------------------------------------------------------------------------------------------------------

    def _generate(self, payload: dict[str, Any]) -> Any:
        return self._retried(lambda: self._post("/generate", payload))

    def _retried(self, call: Callable[[], T]) -> T:
        return with_retries(
            call, retryable=_retryable, attempts=self.max_retries + 1, first_wait=self.retry_wait
        )

    def _stream(self, job: Job, payload: dict[str, Any]) -> Reply:
        """Server-sent events, each with the whole text so far."""
        text, meta = "", {}
        for answer in self._events({**payload, "stream": True}):
            if "error" in answer:
                raise EndpointError(_message(answer), 500)
            delta, text, meta = answer["text"][len(text) :], answer["text"], answer["meta_info"]
            if delta and job.on_text is not None and not job.cancelled:
                job.on_text(delta, meta)
        return Reply(text, meta)

    def _events(self, payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._retried(lambda: self._open("POST", "/generate", payload)) as response:
            for line in response:
                if line.startswith(b"data:"):
                    data = line[len(b"data:") :].strip()
                    if data == b"[DONE]":
                        return
                    yield json.loads(data)

    def _abort(self, rid: str) -> None:
        def send() -> None:
            try:
                self._post("/abort_request", {"rid": rid})
            except Exception:
                return  # whoever cancelled has gone on already

        threading.Thread(target=send, name="minisgl-abort", daemon=True).start()

    def _get(self, path: str) -> dict[str, Any]:
        with self._open("GET", path, None) as response:
            return json.load(response)

    def _post(self, path: str, payload: dict[str, Any]) -> Any:
        with self._open("POST", path, payload) as response:
            body = response.read()
        try:
            return json.loads(body)
        except ValueError:
            return body.decode("utf-8", "replace")  # /flush_cache answers in prose

    def _open(self, method: str, path: str, payload: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.base_url + path, data, headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read()
            try:
                message = _message(json.loads(body))
            except ValueError:
                message = body.decode("utf-8", "replace")[:300]
            if error.code == 400:
                raise ValueError(message) from None
            asked = error.headers.get("Retry-After") or ""
            retry_after = float(asked) if asked.isdecimal() else 0.0
            raise EndpointError(f"{self.base_url}{path}: {error.code}: {message}", error.code, retry_after) from None
        except urllib.error.URLError as error:
            raise ConnectionError(f"no server answers at {self.base_url}: {error.reason}") from error


def _message(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
