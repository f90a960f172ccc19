"""Mixed load on a server of its own for a long time: does memory grow, do latencies, is anything left behind?

    python -m tests.soak --minutes 60                                the default model
    python -m tests.soak --minutes 5 --clients 32 --url http://...   a server that runs already (its RSS is not known)

Clients ask for chats, completions (with n, with stops), JSON under a schema, regexes and tool calls, as streams or not,
some of them leaving in the middle; send what is not a request; abort and flush. Each answer is checked for what can be
known of it. Every minute one line: requests, their latency, RSS of the server. In the end nothing may run, wait, be
locked or held, and every slot must be free or in the tree. The last line is JSON:

    rss_mb            after a quarter of the time, by when all is warm, and at the end
    p99_s             of plain requests, in the second and in the last quarter of the time
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from .http_client import call, events, get, open_socket, post, wait_until

TOPICS = ("rivers", "bread", "the moon", "chess", "rain", "ships", "bees", "glass")
LONG = "You answer briefly and are sure of yourself. " * 12
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 2, 3]}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
LOOKING = {"type": "object", "properties": {"up": {"enum": ["a", "b"]}}, "required": ["up"],
           "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "parameters": LOOKING}}
MODEL = "m"


class Client(threading.Thread):
    """One request after the other, of a random kind each."""

    def __init__(self, url: str, seed: int, until: float):
        super().__init__(daemon=True)
        self.url, self.rng, self.until = url, random.Random(seed), until
        self.done: Counter[str] = Counter()
        self.latencies: list[tuple[float, float]] = []  # (when, seconds) of plain requests
        self.failure: str | None = None

    def run(self) -> None:
        kinds = [getattr(self, name) for name in dir(Client) if name.startswith("do_")]
        while time.monotonic() < self.until and self.failure is None:
            kind = self.rng.choice(kinds)
            try:
                kind()
                self.done[kind.__name__[3:]] += 1
            except Exception as error:
                self.failure = f"{kind.__name__}: {type(error).__name__}: {error}"[:500]

    def _messages(self) -> list[dict[str, str]]:
        ask = f"Tell me about {self.rng.choice(TOPICS)}, {self.rng.randrange(50)}."
        return [{"role": "system", "content": LONG}, {"role": "user", "content": ask}]

    def _chat(self, **options: Any) -> dict[str, Any]:
        most = self.rng.randrange(1, 40)
        return {"model": MODEL, "messages": self._messages(), "max_tokens": most, "temperature": 0.7, **options}

    def do_chat(self) -> None:
        begin, body = time.monotonic(), self._chat()
        answer = post(self.url, "/v1/chat/completions", body, 300)
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["completion_tokens"] <= body["max_tokens"]
        self.latencies.append((begin, time.monotonic() - begin))

    def do_stream(self) -> None:
        chunks = list(events(self.url, "/v1/chat/completions", self._chat(stream_options={"include_usage": True})))
        assert chunks[-1]["usage"]["completion_tokens"] >= 1
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] in ("stop", "length")

    def do_several(self) -> None:
        prompt = f"A list: {self.rng.random()}"
        body = {"model": MODEL, "prompt": prompt, "n": 3, "max_tokens": 12, "stop": ["\n\n", "x"]}
        answer = post(self.url, "/v1/completions", body, 300)
        assert answer.status == 200 and len(answer.json["choices"]) == 3, answer.body

    def do_schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        answer = post(self.url, "/v1/chat/completions", self._chat(response_format=form, max_tokens=60), 300)
        assert answer.status == 200, answer.body
        choice = answer.json["choices"][0]
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"name", "age"}

    def do_regex(self) -> None:
        pattern = self.rng.choice([r"[ab]{1,9}c", r"(yes|no), [a-z]{2,8}\.", r"\d{4}-\d\d"])
        body = {"text": f"Say {self.rng.random()}", "sampling_params": {"regex": pattern, "max_new_tokens": 30}}
        answer = post(self.url, "/generate", body, 300)
        assert answer.status == 200 and re.fullmatch(pattern, answer.json["text"]), answer.body

    def do_tool(self) -> None:
        body = self._chat(tools=[TOOL], tool_choice="required", max_tokens=60)
        answer = post(self.url, "/v1/chat/completions", body, 300)
        assert answer.status == 200, answer.body
        choice = answer.json["choices"][0]
        for made in choice["message"]["tool_calls"] if choice["finish_reason"] == "tool_calls" else ():
            assert set(json.loads(made["function"]["arguments"])) == {"up"}

    def do_leave(self) -> None:
        """Take some of a stream, or nothing, and go."""
        body = self._chat(stream=True, max_tokens=200)
        with open_socket(self.url, "/v1/chat/completions", body) as sock:
            if self.rng.random() < 0.7:
                sock.recv(self.rng.choice([1, 500, 4000]))
            time.sleep(self.rng.random() / 5)

    def do_nonsense(self) -> None:
        body = self.rng.choice([b"{", b"", {"messages": 3}, {"model": MODEL, "prompt": ""}, self._chat(n=-1),
                                self._chat(temperature="hot"), self._chat(max_tokens=-3)])  # fmt: skip
        answer = post(self.url, self.rng.choice(["/v1/chat/completions", "/v1/completions", "/nowhere"]), body)
        assert 400 <= answer.status < 500 and answer.error, (body, answer.status, answer.body[:200])

    def do_trouble(self) -> None:
        if self.rng.random() < 0.05:
            assert call(self.url, "POST", "/flush_cache").status in (200, 400)
        rid = f"soak-{self.rng.random()}"
        body = {"text": "On and on", "rid": rid, "sampling_params": {"max_new_tokens": 150, "ignore_eos": True}}
        thread = threading.Thread(target=post, args=(self.url, "/generate", body, 300))
        thread.start()
        time.sleep(self.rng.random() / 5)
        assert post(self.url, "/abort_request", {"rid": rid}).status == 200
        thread.join(300)
        assert not thread.is_alive(), "an aborted request did not end"


def rss_mb(pid: int | None) -> float | None:
    if pid is None:
        return None
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


def start_server(arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
    """`python -m minisgl serve` on a free port, once it is ready."""
    command = [sys.executable, "-m", "minisgl", "serve", "--port", "0", "--served-model-name", MODEL, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"http://[\w.:]+", line)
        if found:
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, found[0]
    raise RuntimeError(f"the server ended with {process.wait()} before it was ready")


def p99(clients: list[Client], begin: float, end: float) -> float:
    found = [seconds for client in clients for when, seconds in client.latencies if begin <= when < end]
    return float(np.percentile(found, 99)) if found else float("nan")


def books(url: str) -> dict[str, int]:
    """What must be zero of an idle server."""
    stats = get(url, "/get_server_info").json
    found = {name: stats[name] for name in ("running", "waiting", "kv_locked", "kv_held")}
    return found | {"kv_lost": stats["kv_capacity"] - stats["kv_free"] - stats["kv_evictable"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url")
    parser.add_argument("serve", nargs="*", help="arguments of `minisgl serve`, after --")
    args = parser.parse_args()
    process, url = (None, args.url) if args.url else start_server(args.serve)
    pid = process.pid if process is not None else None
    begin, seconds = time.monotonic(), 60 * args.minutes
    clients = [Client(url, 1000 * args.seed + i, begin + seconds) for i in range(args.clients)]
    try:
        for client in clients:
            client.start()
        warm = None
        while time.monotonic() < begin + seconds and not any(client.failure for client in clients):
            time.sleep(min(60, seconds / 8))
            now = time.monotonic() - begin
            if warm is None and now >= seconds / 4:
                warm = rss_mb(pid)
            asked = sum(client.done.total() for client in clients)
            late = p99(clients, begin + now - 60, begin + now)
            print(f"{now:6.0f} s  {asked} requests  p99 {late:.2f} s  RSS {rss_mb(pid) or 0:.0f} MB", flush=True)
        for client in clients:
            client.join(400)
        wait_until(lambda: not any(books(url).values()), 60)
        last = rss_mb(pid)
    finally:
        if process is not None:
            process.terminate()
            process.wait(60)
    quarter = seconds / 4
    spans = [(begin + quarter, begin + 2 * quarter), (begin + 3 * quarter, begin + seconds)]
    result = {
        "minutes": args.minutes,
        "requests": dict(sum((client.done for client in clients), Counter())),
        "rss_mb": [warm, last],
        "p99_s": [p99(clients, *span) for span in spans],
        "failures": [client.failure for client in clients if client.failure],
        "alive": sum(client.is_alive() for client in clients),
    }
    print(json.dumps(result))
    return 1 if result["failures"] or result["alive"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
