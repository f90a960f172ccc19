"""Random cases for stress runs: a case is JSON, so that what fails can be printed, cut down and run again.

    {"seed": 7, "options": {switches of the Runtime}, "trouble": {}, "clients": [[action, ...], ...]}

A thread for each client runs its actions one after the other; meanwhile there may be trouble, which is {"shutdown":
seconds until the Runtime is shut down} or {"fault": number of the engine's function call that fails}.

    {"do": "generate", "prompts", "params", "options", "how", "after"}   requests straight to the Runtime
    {"do": "program", "body", "run", "items", "how"}                     a program of the language
    {"do": "flush"}, {"do": "stats"}

A program's body is a list of nodes, each a list whose first item names it:

    ["text", str]   ["item"]   ["gen", name, parameters]   ["select", name, choices, method]   ["read", name]
    ["role", role, body]   ["scope", name, body]   ["fork", size, body, join]   ["copy", body]   ["index"]   ["raise"]
"""

from __future__ import annotations

import random
from typing import Any

from minisgl.policy import POLICIES
from minisgl.sizing import EVICTIONS

Case = dict[str, Any]

MAX_CONTEXT = 512  # of the tiny model
PROGRAM_TOKENS = 260  # a program's longest text, roof included for what its selects add
LETTERS = "abcdefgh"
REGEXES = (
    "[a-z]{3}[0-9]{2}", "(cat|dog|camel)s?", "forced text[ab]{2} and more forced text", '\\{"a": [0-9]+\\}', "[^a]{4}",
    "(a|b)*c", 'name: "[A-Z][a-z]{2,8}", age: [1-9][0-9]', "x",
)  # fmt: skip
FORCING = (REGEXES[2], REGEXES[6], "(yes|no), forced text behind it, [0-9] and more of it")
STOPS_IN_GRAMMARS = ("text", "d", ": ", "e,", "ed te", " more ", "ame")  # most lie inside text that is forced
SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}}, "required": ["a", "b"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"enum": ["one", "two", "three"]},
)
KINDS = ("text", "gen", "gen", "gen", "select", "role", "scope", "fork", "fork", "copy", "read", "raise")


def make(seed: int, *, load: int = 1, gpu: bool = False, programs: bool = True) -> Case:
    """A random case; the same for the same arguments.  load: multiplies the number of actions."""
    rng = random.Random(seed)
    with_programs = programs and rng.random() < 0.6
    options = _options(rng, with_programs, gpu)
    room = min(options["kv_capacity"], options.get("max_context") or MAX_CONTEXT, MAX_CONTEXT)
    maker = _Maker(rng, room)
    clients = []
    for _ in range(rng.randint(1, 4)):
        actions = []
        for _ in range(rng.randint(1, 4) * load):
            kind = rng.random()
            if kind < 0.06:
                actions.append({"do": rng.choice(["flush", "stats"])})
            elif with_programs and kind < 0.55:
                actions.append(maker.program())
            else:
                actions.append(maker.generate())
        clients.append(actions)
    trouble: dict[str, Any] = {}
    if rng.random() < 0.15:
        fault = {"fault": int(10 ** rng.uniform(1, 4.5))}
        trouble = rng.choice([{"shutdown": rng.choice([0.001, 0.01, 0.05, 0.2])}, fault, fault])
    return {"seed": seed, "options": options, "trouble": trouble, "clients": clients}


def _options(rng: random.Random, programs: bool, gpu: bool) -> dict[str, Any]:
    chunk = rng.choice([None, 1, 3, 16, 64, -1])
    options: dict[str, Any] = {
        "kv_capacity": rng.choice([PROGRAM_TOKENS, 400, 1200] if programs else [24, 40, 80, 150, 400, 1200]),
        "max_running_requests": rng.choice([1, 2, 3, 5, 8, 16, 32]),
        "chunk_size": chunk,
        "schedule_policy": rng.choice(POLICIES),
        "eviction": rng.choice(EVICTIONS),
        "radix_cache": rng.choice([True, True, True, False, "whole"]),
        "overlap": rng.random() < 0.5,
        "jump_forward": rng.random() < 0.7,
        "events": rng.random() < 0.3,
        "overcommit": rng.random() < 0.5,
    }
    if rng.random() < 0.3:  # where requests jump forward among others that do not, see `_Maker.one_jumps`
        options |= {"overlap": True, "jump_forward": True, "max_running_requests": 16}
        options["kv_capacity"] = max(options["kv_capacity"], 400)
    options["max_running_requests"] = min(options["max_running_requests"], options["kv_capacity"])
    if rng.random() < 0.2:
        options["max_context"] = min(options["kv_capacity"], MAX_CONTEXT) - (0 if programs else rng.randrange(8))
    if gpu:
        options["kv_capacity"] *= rng.choice([1, 4])
        options["cuda_graphs"] = rng.random() < 0.5
        options["shared_prefix"] = "auto" if rng.random() < 0.7 else False
        options["attention_backend"] = rng.choice(["auto", "auto", "auto", "torch"])
        if options["attention_backend"] == "torch":
            options["cuda_graphs"] = options["shared_prefix"] = False
    return options


class _Maker:
    """Makes actions for an engine where sequences have at most `room` tokens."""

    def __init__(self, rng: random.Random, room: int):
        self.rng, self.room = rng, room
        self.grammars = rng.choice([0.1, 0.1, 0.7])  # share of the greedy requests that have one
        stems: list[str] = [""]
        for _ in range(4):  # stems share beginnings, as prompts do
            stem = rng.choice(stems)
            stems.append(stem + self.word(1, max(2, min(60, room - 8 - len(stem)))) if len(stem) < room - 12 else stem)
        self.stems = stems
        self.names = 0

    def word(self, low: int, high: int) -> str:
        return "".join(self.rng.choice(LETTERS) for _ in range(self.rng.randint(low, high)))

    # ---- requests ------------------------------------------------------------------------------------------------

    def generate(self) -> dict[str, Any]:
        rng = self.rng
        how = rng.choice(["call", "call", "call", "call", "async", "stream", "close", "cancel", "abort"])
        single = how in ("stream", "close")
        prompts = [self.prompt() for _ in range(1 if single else rng.choice([1, 1, 2, 5, 12]))]
        params = [self.params(single) for _ in prompts]
        if len(prompts) > 2 and rng.random() < 0.5:
            self.one_jumps(params)
        options: dict[str, Any] = {}
        if rng.random() < 0.25:
            options = {"return_logprob": True, "top_logprobs_num": rng.choice([0, 0, 1, 4])}
            if rng.random() < 0.5:
                options["logprob_start_len"] = rng.randint(0, min(map(len, prompts)))
        if rng.random() < 0.2:
            options["priority"] = rng.randint(-2, 2)
        after = rng.choice([0, 0.001, 0.005, 0.02])
        return {"do": "generate", "prompts": prompts, "params": params, "options": options, "how": how, "after": after}

    def prompt(self) -> str:
        text = self.rng.choice(self.stems) + self.word(0, 6)
        return (text or "a")[: self.room - 2]

    def params(self, single: bool) -> dict[str, Any]:
        rng = self.rng
        params: dict[str, Any] = {"max_new_tokens": rng.choice([0, 1, 2, 5, 10, 10, 20, 40]), "temperature": 0}
        if rng.random() < 0.3:
            params |= {"temperature": rng.choice([0.5, 1.0, 2.0]), "seed": rng.randrange(100)}
            params |= rng.choice([{}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
        if rng.random() < 0.5:
            params["ignore_eos"] = True
        if rng.random() < 0.15 and not single:
            params["n"] = rng.choice([2, 3])
        if rng.random() < self.grammars and params["temperature"] == 0:
            params = self.in_grammar(params)
        else:
            params |= rng.choice(
                [{}] * 5
                + [{"stop": rng.choice(["a", "7", "E", ["b", "Q"], "ab", [" ", "."]])}]
                + [{"stop_regex": rng.choice(["[0-9]", "[a-d][A-M]", "[A-Z]{2}"]), "no_stop_trim": rng.random() < 0.5}]
                + [{"stop_token_ids": rng.sample([ord(c) for c in "abcdefghijklmnop"], 5)}]
                + [{"frequency_penalty": 1.5, "presence_penalty": 0.5}, {"repetition_penalty": 1.3}]
                + [{"logit_bias": {str(ord(c)): 30.0 for c in "xyz"}}]
            )
            if rng.random() < 0.2:
                params["min_new_tokens"] = rng.randint(0, params["max_new_tokens"])
        return params

    def one_jumps(self, params: list[dict[str, Any]]) -> None:
        """One grammar with certain text, none beside it: the next step is formed before it jumps, in vain for it."""
        for i, given in enumerate(params):
            if given.keys() & {"regex", "json_schema"}:
                params[i] = {"max_new_tokens": given["max_new_tokens"], "temperature": 0, "ignore_eos": True}
        jumping = self.in_grammar({"max_new_tokens": 40, "temperature": 0})
        params[0] = {k: v for k, v in jumping.items() if k != "json_schema"} | {"regex": self.rng.choice(FORCING)}

    def in_grammar(self, params: dict[str, Any]) -> dict[str, Any]:
        rng = self.rng
        params = {**params, "max_new_tokens": max(params["max_new_tokens"], 1), **self.grammar()}
        least = rng.randint(1, params["max_new_tokens"])  # it may be more than the grammar's texts have
        params |= rng.choice([{}, {}, {"stop": rng.choice(STOPS_IN_GRAMMARS)}, {"min_new_tokens": least}])
        return params | rng.choice([{}, {}, {"frequency_penalty": 1.5, "repetition_penalty": 1.2}])

    def grammar(self) -> dict[str, Any]:
        if self.rng.random() < 0.7:
            return {"regex": self.rng.choice(REGEXES)}
        return {"json_schema": self.rng.choice(SCHEMAS)}

    # ---- programs ------------------------------------------------------------------------------------------------

    def program(self) -> dict[str, Any]:
        rng = self.rng
        how = rng.choice(["run", "run", "batch", "batch", "stream"])
        left = min(PROGRAM_TOKENS, self.room) - 40
        items = [self.word(1, 5) for _ in range(rng.choice([2, 4, 9]) if how == "batch" else 1)]
        body: list[Any] = [["text", rng.choice(self.stems)[:60] + self.word(1, 4)], ["item"]]
        rest, _ = self.body(left - 70, 2, True, [])
        run = {"max_new_tokens": rng.choice([3, 8]), "temperature": 0}
        run |= rng.choice([{}, {"ignore_eos": True}, {"stop": "5"}, {"use_thread": False} if how != "stream" else {}])
        return {"do": "program", "body": body + rest, "run": run, "items": items, "how": how}

    def body(self, left: int, depth: int, roles: bool, known: list[str]) -> tuple[list[Any], int]:
        """Nodes whose text has at most `left` tokens; returns what is left.  known: names that may be read."""
        rng, nodes, known = self.rng, [], list(known)
        for _ in range(rng.randint(1, 5)):
            if left < 40:
                break
            kind = rng.choice(KINDS)
            self.names += 1
            name = f"v{self.names}"
            if kind == "text":
                text = self.word(1, 12)
                nodes.append(["text", text])
                left -= len(text)
            elif kind == "gen":
                params = self.gen_params()
                nodes.append(["gen", name, params])
                left -= params.get("max_tokens", 8) + 2
                if params.get("n", 1) == 1:
                    known.append(name)
            elif kind == "select":
                choices = [self.word(1, 6) for _ in range(rng.randint(1, 4))]
                nodes.append(["select", name, choices, rng.randrange(3)])
                left -= 6
                known.append(name)
            elif kind == "read" and known:
                nodes.append(["read", rng.choice(known)])
                left -= 4
            elif kind == "role" and roles:
                inner, left = self.body(left - 30, depth - 1, False, known)
                nodes.append(["role", rng.choice(["user", "assistant"]), inner])
            elif kind == "scope" and depth:
                inner, left = self.body(left, depth - 1, False, known)
                nodes.append(["scope", name, inner])
                known.append(name)
            elif kind == "fork" and depth:
                size, join = rng.choice([1, 2, 3]), rng.choice([None, "gather_variable", "concate_and_append"])
                inner, rest = self.body((left - 10) // (size + 1), depth - 1, roles, known)
                nodes.append(["fork", size, [["index"], *inner], join])
                left -= size * ((left - 10) // (size + 1) - rest + 2) if join == "concate_and_append" else 0
            elif kind == "copy" and depth:
                nodes.append(["copy", self.body(left, depth - 1, roles, known)[0]])
            elif kind == "raise" and rng.random() < 0.1:
                nodes.append(["raise"])
        return nodes, left

    def gen_params(self) -> dict[str, Any]:
        rng = self.rng
        params: dict[str, Any] = {}
        if rng.random() < 0.6:
            params["max_tokens"] = rng.choice([1, 4, 10])
        params |= rng.choice(
            [{}] * 4
            + [{"n": 2}, {"stop": ["a", "Q"]}, {"regex": rng.choice(REGEXES[:5])}, {"dtype": "int"}]
            + [{"temperature": 0.3, "seed": rng.randrange(9)}, {"return_logprob": True}, {"ignore_eos": True}]
        )
        return params
