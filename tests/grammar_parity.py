"""Jump-forward changes the number of steps and nothing else: greedy output with and without it, 40 schemas, 20 regexes.

    python -m tests.grammar_parity               all 60 on the default model (minutes on a CPU)
    python -m tests.grammar_parity --count 6     every tenth
    python -m tests.grammar_parity --dtype bfloat16

For each grammar two requests, with jump-forward on and off: token ids, text, finish reason and the count of prompt
tokens are compared. Then both again with log-probabilities, which are compared token by token (a request that asks
for them samples forced tokens too, for they have no other logits), prompt tokens included.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator

from minisgl import Runtime
from minisgl.bench.grammar_schemas import realistic_schemas

_INTEGER = {"type": "integer", "minimum": 0, "maximum": 999}


def _record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


CHINESE_AND_EMOJI: list[Any] = [
    _record(名前={"type": "string", "maxLength": 12}, 年齢=_INTEGER),
    _record(城市={"enum": ["北京", "上海", "广州", "深圳"]}, 人口=_INTEGER),
    _record(**{"mood 😀": {"enum": ["😀", "😢", "🤷‍♀️"]}, "reason": {"type": "string", "maxLength": 20}}),
    _record(wetter={"enum": ["sonnig ☀️", "Regen 🌧️", "Schnee ❄️"]}, straße={"type": "string", "maxLength": 15}),
    _record(reply={"const": "你好，世界！"}, language={"enum": ["中文", "English", "日本語"]}),
    {"enum": ["一二三", "一二四", "一五", "😀😀😀", "😀😁"]},
    {"type": "array", "items": {"enum": ["🍎", "🍐", "🍊🍊"]}, "minItems": 2, "maxItems": 3},
    _record(orderId=_INTEGER, orderName={"type": "string", "maxLength": 10}, order={"type": "boolean"}),
    _record(**{'a "quoted" key': {"type": "null"}, "back\\slash": {"enum": ["tab\t", "line\nbreak"]}}),
    _record(text={"type": "string", "pattern": "^[一-龥]{2,4}，[ぁ-ん]{1,3}$"}),
]
REGEXES = [
    r"The answer is (yes|no), because [a-z ]{5,30}\.",
    r'\{"name": "[A-Z][a-z]{2,8}", "age": [0-9]{1,3}\}',
    r"((25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)\.){3}(25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)",
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z",
    r"Name: [A-Z]\w{1,10}\nHouse: (Gryffindor|Slytherin|Ravenclaw|Hufflepuff)\nWand: [a-z]{3,8} wood\n",
    r"你好，(北京|上海|东京)！今天的天气是(晴|雨|多云)。",
    r"(😀|😢|🎉🎉){2,4} done",
    r"温度：-?\d{1,2}℃，湿度：\d{1,2}％",
    r"print\(\"[a-z]{1,12}\"\)\nprint\(\"end\"\)\n",
    r"(red|green|blue)(, (red|green|blue)){1,3}",
    r"<answer>[0-9]+</answer>\n<explanation>[A-Za-z ,]{10,40}</explanation>",
    r"0x[0-9a-f]{8}",
    r"SELECT [a-z_]{2,10} FROM (users|orders|user_orders) WHERE id = [0-9]{1,4};",
    r"\| name \| value \|\n\| --- \| --- \|\n(\| [a-z]{1,6} \| [0-9]{1,3} \|\n){2}",
    r"    def [a-z_]{3,10}\(self\):\n        return (None|True|False)\n",
    r"[ぁ-ん]{3}、カタカナ、[一-龥]{2}。",
    r"ünïcödé [äöü]{1,3} (Straße|Weg|Platz) \d{1,3}",
    r"(abc|abcd|abcde)f{0,2}g",
    r"https://example\.(com|org|net)/[a-z]{2,8}\?page=\d{1,2}",
    r"🧙‍♂️: (Lumos|Nox|Accio [a-z]{3,6})!",
]


def grammars() -> list[tuple[str, Any]]:
    """("json_schema" or "regex", grammar), 40 and 20 of them."""
    realistic = [schema for _, schema in realistic_schemas()][::6][:30]
    found = [("json_schema", schema) for schema in [*realistic, *CHINESE_AND_EMOJI]]
    return found + [("regex", regex) for regex in REGEXES]


@dataclass
class Findings:
    compared: int = 0
    finished: int = 0  # ended by the grammar rather than by the limit; valid all
    forced: int = 0  # tokens that jump-forward appended
    tokens: int = 0
    steps: dict[bool, int] = field(default_factory=dict)  # by jump-forward
    logprobs: int = 0  # of output tokens, equal all
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.compared} grammars: {len(self.wrong)} differ; {self.tokens} tokens of which {self.forced} forced; "
            f"{self.steps[False]} steps without jump-forward, {self.steps[True]} with; {self.finished} finished and "
            f"valid; {self.logprobs} log-probabilities equal"
        )


def valid(kind: str, grammar: Any, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(grammar, text) is not None
    return Draft202012Validator(grammar).is_valid(json.loads(text))


def run(
    model: str | None,
    chosen: list[tuple[str, Any]],
    limit: int = 120,
    logprobs: bool = True,
    dtype: str = "float32",
    **options: Any,
) -> Findings:
    """All grammars in one batch, then all with log-probabilities, with jump-forward off and on."""
    findings = Findings(compared=len(chosen))
    prompts = [f"Number {i}. Give an example of the following: " for i in range(len(chosen))]
    params = [{kind: grammar, "max_new_tokens": limit, "temperature": 0} for kind, grammar in chosen]
    plain, scored = {}, {}
    for jump in (False, True):
        with Runtime(model, dtype=dtype, jump_forward=jump, grammar_backend="fsm", **options) as runtime:
            plain[jump] = runtime.generate(prompts, params)
            findings.steps[jump] = runtime.stats()["steps"]
            if logprobs:
                scored[jump] = runtime.generate(prompts, params, return_logprob=True, logprob_start_len=0)
    for i, (kind, grammar) in enumerate(chosen):
        off, on = plain[False][i], plain[True][i]
        same = all(off[key] == on[key] for key in ("text", "output_ids"))
        same = same and all(off["meta_info"][k] == on["meta_info"][k] for k in ("finish_reason", "prompt_tokens"))
        if logprobs:
            same = same and _equal_scores(findings, scored[False][i], scored[True][i], on["output_ids"])
        if on["meta_info"]["finish_reason"]["type"] == "stop":
            findings.finished += 1
            same = same and valid(kind, grammar, on["text"])
        if not same:
            findings.wrong.append(f"{kind} {i}: {off['text']!r} / {on['text']!r}")
        findings.forced += on["meta_info"]["forced_tokens"]
        findings.tokens += len(on["output_ids"])
    return findings


def _equal_scores(findings: Findings, off: dict[str, Any], on: dict[str, Any], ids: list[int]) -> bool:
    """The same tokens, prompt and output, with log-probabilities that differ by float32 rounding at most."""
    for key in ("input_token_logprobs", "output_token_logprobs"):
        first, second = off["meta_info"][key], on["meta_info"][key]
        if [entry[1] for entry in first] != [entry[1] for entry in second]:
            return False
        pairs = [(a[0], b[0]) for a, b in zip(first, second) if a[0] is not None]
        if any(abs(a - b) > 1e-3 for a, b in pairs):
            return False
    findings.logprobs += len(ids)
    return [entry[1] for entry in on["meta_info"]["output_token_logprobs"]] == ids


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy output with and without jump-forward.")
    parser.add_argument("--model")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    chosen = grammars()[:: max(60 // args.count, 1)]
    findings = run(args.model, chosen, dtype=args.dtype)
    print("\n".join(findings.wrong))
    print(findings)


if __name__ == "__main__":
    main()
