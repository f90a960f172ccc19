"""Local HTTP servers that speak the wire formats of hosted models, for tests of the backends' official clients.

    with FakeServer(openai_api, reply=lambda body: "text") as server:
        OpenAI("m", api_key="k", base_url=server.url + "/v1")

reply(body) -> text (or a list for n outputs).  failures: HTTP statuses to answer first.  requests: (path, body) seen.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    def __init__(self, api: Callable, reply: Any = "ok", failures: tuple = (), delay: float = 0.0):
        self.api, self.delay = api, delay
        self.reply = reply if callable(reply) else lambda body: reply
        self.failures = list(failures)
        self.requests: list[tuple[str, Any]] = []
        self.times: list[float] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.do_POST()

            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                outer.requests.append((self.path, body))
                outer.times.append(time.perf_counter())
                time.sleep(outer.delay)
                if outer.failures:
                    status = outer.failures.pop(0)
                    headers = {}
                    if isinstance(status, tuple):
                        status, headers["retry-after"] = status
                    self.answer(
                        status, {"error": {"message": f"failed with {status}", "type": "e", "code": status}}, headers
                    )
                    return
                answer = outer.api(outer, self.path, body)
                if isinstance(answer, str):
                    self.answer_raw(200, answer.encode(), {"Content-Type": "text/event-stream"})
                else:
                    self.answer(200, answer)

            def answer(self, status, data, headers=None):
                self.answer_raw(
                    status, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})}
                )

            def answer_raw(self, status, data, headers):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def texts(self, body, n=1):
        reply = self.reply(body)
        return reply if isinstance(reply, list) else [reply] * n

    @property
    def bodies(self):
        return [body for _, body in self.requests]


def events(items, named=False, done=False) -> str:
    lines = []
    for item in items:
        if named:
            lines.append(f"event: {item['type']}\n")
        lines.append(f"data: {json.dumps(item)}\n\n")
    return "".join(lines) + ("data: [DONE]\n\n" if done else "")


def finish(text, stop, limit):
    """(text, reason): stop strings, then a limit in characters."""
    for string in [stop] if isinstance(stop, str) else stop or []:
        if string in text:
            return text[: text.index(string)], "stop"
    return (text[:limit], "length") if limit is not None and len(text) > limit else (text, "stop")


def openai_api(server: FakeServer, path: str, body: dict) -> Any:
    chat = path.endswith("/chat/completions")
    base = {"id": "c1", "created": 0, "model": body["model"]}
    base["object"] = "chat.completion" if chat else "text_completion"
    limit = body.get("max_tokens", body.get("max_completion_tokens"))
    usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
    if not chat and body.get("echo"):
        return {**base, "usage": usage, "choices": [_echo(server, i, text) for i, text in enumerate(body["prompt"])]}
    outs = [finish(text, body.get("stop"), limit) for text in server.texts(body, body.get("n", 1))]
    if body.get("stream"):
        text, reason = outs[0]
        pieces = [text[i : i + 2] for i in range(0, len(text), 2)]
        chunks = []
        for piece in [*pieces, None]:
            inner = {"delta": {"content": piece} if piece else {}} if chat else {"text": piece or ""}
            choice = {"index": 0, **inner, "finish_reason": None if piece else reason}
            kind = "chat.completion.chunk" if chat else "text_completion"
            chunks.append({**base, "object": kind, "choices": [choice]})
        chunks.append({**base, "object": chunks[-1]["object"], "choices": [], "usage": usage})
        return events(chunks, done=True)
    choices = []
    for i, (text, reason) in enumerate(outs):
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": i, "finish_reason": reason, **content}
        if body.get("logprobs") and chat:
            token = {"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": []}
            choice["logprobs"] = {"content": [token], "refusal": None}
        choices.append(choice)
    return {**base, "choices": choices, "usage": usage}


def _echo(server: FakeServer, index: int, text: str) -> dict:
    """Character tokens; ' Paris' is likely, everything else not."""
    values = [None, *(-0.1 if text.endswith(" Paris") else -2.0 for _ in text[1:])]
    logprobs = {
        "tokens": list(text),
        "token_logprobs": values,
        "top_logprobs": None,
        "text_offset": list(range(len(text))),
    }
    return {"index": index, "text": text, "finish_reason": "length", "logprobs": logprobs}


def anthropic_api(server: FakeServer, path: str, body: dict) -> Any:
    base = {"id": "m1", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
    usage = {"input_tokens": 11, "output_tokens": 5}
    if "tools" in body:
        block = {"type": "tool_use", "id": "t1", "name": body["tool_choice"]["name"], "input": server.reply(body)}
        return {**base, "content": [block], "stop_reason": "tool_use", "usage": usage}
    text = server.texts(body)[0]
    cut, reason = finish(text, body.get("stop_sequences"), body["max_tokens"])
    sequence = next((s for s in body.get("stop_sequences") or [] if s in text), None)
    reason = "stop_sequence" if sequence else {"stop": "end_turn", "length": "max_tokens"}[reason]
    if body.get("stream"):
        start = {**base, "content": [], "stop_reason": None, "usage": {"input_tokens": 11, "output_tokens": 1}}
        pieces = [cut[i : i + 2] for i in range(0, len(cut), 2)]
        return events(
            [
                {"type": "message_start", "message": start},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                *(
                    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
                    for piece in pieces
                ),
                {"type": "content_block_stop", "index": 0},
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": reason, "stop_sequence": sequence},
                    "usage": {"output_tokens": 5},
                },
                {"type": "message_stop"},
            ],
            named=True,
        )
    block = {"type": "text", "text": cut}
    return {**base, "content": [block], "stop_reason": reason, "stop_sequence": sequence, "usage": usage}


def gemini_api(server: FakeServer, path: str, body: dict) -> Any:
    config = body.get("generationConfig", {})
    usage = {"promptTokenCount": 11, "candidatesTokenCount": 5, "totalTokenCount": 16}

    def answer(text, reason=None):
        candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "index": 0}
        return candidate | ({"finishReason": reason} if reason else {})

    outs = [
        finish(text, config.get("stopSequences"), config.get("maxOutputTokens"))
        for text in server.texts(body, config.get("candidateCount", 1))
    ]
    names = {"stop": "STOP", "length": "MAX_TOKENS"}
    if "streamGenerateContent" in path:
        text, reason = outs[0]
        pieces = [text[i : i + 2] for i in range(0, len(text), 2)]
        chunks = [{"candidates": [answer(piece)]} for piece in pieces[:-1]]
        return events([*chunks, {"candidates": [answer(pieces[-1], names[reason])], "usageMetadata": usage}])
    return {"candidates": [answer(text, names[reason]) for text, reason in outs], "usageMetadata": usage}


def sglang_api(server: FakeServer, path: str, body: dict) -> Any:
    """The native API; a token is a character, except that '>>>all' and '>>>' are one each."""
    if path == "/get_model_info":
        template = getattr(server, "template", None)
        return {"model_path": "fake", "chat_template": template, "special_tokens": {"bos_token": "<s>"}}
    if path == "/get_server_info":
        return {"max_running_requests": 7}
    if path in ("/flush_cache", "/abort_request"):
        return {"success": True}
    prompts = body.get("text", body.get("input_ids"))
    single = isinstance(prompts, str) or isinstance(prompts[0], int)
    answers = [a for p in ([prompts] if single else prompts) for a in _generate(server, p, body)]
    if body.get("stream"):
        text = answers[0]["text"]
        growing = [{**answers[0], "text": text[:i]} for i in range(1, len(text) + 1)]
        return events(growing, done=True)
    return answers[0] if single and len(answers) == 1 else answers


def _generate(server: FakeServer, prompt: Any, body: dict) -> list[dict]:
    ids = char_tokens(prompt) if isinstance(prompt, str) else list(prompt)
    params = body["sampling_params"]
    meta = {"id": body.get("rid"), "prompt_tokens": len(ids), "cached_tokens": 0, "completion_tokens": 0}
    if params["max_new_tokens"] == 0:
        if body.get("return_logprob"):
            start = body["logprob_start_len"]
            scores = [None if i == 0 else server.logprob(ids[:i], ids[i]) for i in range(len(ids))]
            meta["input_token_logprobs"] = [(scores[i], ids[i], None) for i in range(start, len(ids))]
        return [{"text": "", "meta_info": {**meta, "finish_reason": {"type": "length"}}}]
    outs = []
    for text in server.texts(body, params.get("n", 1)):
        cut, reason = finish(text, params.get("stop"), params["max_new_tokens"])
        outs.append(
            {"text": cut, "meta_info": {**meta, "completion_tokens": len(cut), "finish_reason": {"type": reason}}}
        )
    return outs


def char_tokens(text: str) -> list[int]:
    ids, i = [], 0
    while i < len(text):
        for number, piece in ((100_001, ">>>all"), (100_000, ">>>")):
            if text.startswith(piece, i):
                ids.append(number)
                i += len(piece)
                break
        else:
            ids.append(ord(text[i]))
            i += 1
    return ids
