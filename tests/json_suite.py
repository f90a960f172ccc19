"""The JSON-Schema-Test-Suite against our grammars: nothing invalid may be accepted, what we can't enforce is refused.

    python -m tests.json_suite DIR                 draft 2020-12, the required tests
    python -m tests.json_suite DIR --optional      those of `optional/format` and the like too
    python -m tests.json_suite DIR --show 5        with examples of each kind of difference

DIR is a checkout of https://github.com/json-schema-org/JSON-Schema-Test-Suite, or any folder that has its
`tests/draft2020-12`: the source distribution of the Python package `jsonschema` carries a copy in `json/`
(`pip download --no-deps --no-binary :all: jsonschema`, then unpack).

Each test is a schema, an instance and whether it is valid. What we do with it is one of

    exact             valid and accepted (as `json.dumps` writes it), or invalid and not accepted
    refused           the schema is refused, with the keyword's name: the caller knows
    valid rejected    not accepted: the value can't be generated in that spelling
    INVALID ACCEPTED  a text that isn't valid could be generated: the one thing that must not be
    FAULT             another error than GrammarError, or longer than `LONGEST` seconds
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.fsm import Grammar, GrammarError

EXACT, REFUSED, REJECTED, ACCEPTED, FAULT = "exact", "refused", "valid rejected", "INVALID ACCEPTED", "FAULT"
LONGEST = 10.0  # seconds for one schema or instance


@dataclass
class Findings:
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)  # of refusals

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def note(self, kind: str, example: str) -> None:
        self.counts[kind] += 1
        self.examples.setdefault(kind, []).append(example)

    def __str__(self) -> str:
        shares = (f"{self.counts[k]} {k} ({self.counts[k] / max(self.total, 1):.1%})" for k in KINDS)
        return f"{self.total} tests: " + ", ".join(shares)


KINDS = (EXACT, REFUSED, REJECTED, ACCEPTED, FAULT)


def run_group(findings: Findings, group: dict[str, Any], name: str) -> None:
    """All tests of one schema."""
    label = f"{name}: {group['description']}"
    begin = time.monotonic()
    grammar: Grammar | None = None
    unsatisfiable = False
    try:
        grammar = Grammar.from_json_schema(group["schema"])
    except GrammarError as error:
        unsatisfiable = "unsatisfiable" in str(error)
        if not unsatisfiable:
            for test in group["tests"]:
                findings.note(REFUSED, f"{label}: {test['description']}: {error}")
                findings.reasons[str(error)[:70]] += 1
            return
    except Exception as error:
        for test in group["tests"]:
            findings.note(FAULT, f"{label}: {test['description']}: {error!r}")
        return
    for test in group["tests"]:
        example = f"{label}: {test['description']}: {json.dumps(test['data'])[:120]}"
        try:
            accepted = grammar is not None and grammar.matches(json.dumps(test["data"]))
        except GrammarError as error:
            findings.note(REFUSED, f"{example}: {error}")
            continue
        except Exception as error:
            findings.note(FAULT, f"{example}: {error!r}")
            continue
        if time.monotonic() - begin > LONGEST:
            findings.note(FAULT, f"{example}: slow")
        elif accepted == test["valid"]:
            findings.note(EXACT, example)
        else:
            findings.note(ACCEPTED if accepted else REJECTED, example)
        begin = time.monotonic()


def run(folder: Path, optional: bool = False) -> Findings:
    """Raises ValueError when `folder` doesn't hold the suite."""
    tests = folder / "tests" / "draft2020-12"
    files = sorted(tests.glob("*.json")) + (sorted(tests.glob("optional/**/*.json")) if optional else [])
    if not files:
        raise ValueError(f"{folder} has no tests/draft2020-12/*.json")
    findings = Findings()
    for path in files:
        for group in json.loads(path.read_text(encoding="utf-8")):
            run_group(findings, group, str(path.relative_to(tests)))
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description="The JSON-Schema-Test-Suite, draft 2020-12, against our grammars.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--optional", action="store_true")
    parser.add_argument("--show", type=int, default=0, help="examples of each kind of difference")
    args = parser.parse_args()
    findings = run(args.folder, args.optional)
    for kind in (FAULT, ACCEPTED, REJECTED):
        for example in findings.examples.get(kind, [])[: max(args.show, 10 if kind in (FAULT, ACCEPTED) else 0)]:
            print(f"{kind}: {example}")
    if args.show:
        for reason, count in findings.reasons.most_common(40):
            print(f"{count:5} {reason}")
    print(findings)
    return 1 if findings.counts[ACCEPTED] or findings.counts[FAULT] else 0


if __name__ == "__main__":
    raise SystemExit(main())
