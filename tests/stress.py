"""Random programs and requests against a naive reference, until something is wrong.

    python -m tests.stress --minutes 30 --seed 1                            # the scripted model, on a CPU
    python -m tests.stress --minutes 5 --model tiny --device cuda --dtype bfloat16
    python -m tests.stress --case 1000042                                   # one case again, from its seed
    python -m tests.stress --replay case.json --shrink                      # cut a failing case down

Each case is a Runtime with random switches (cache, overlap, chunk, policy, eviction, jump-forward, tiny pools that
evict and retract) under a few threads that call, stream, cancel, abort, and run programs of the language
(`stress_cases`).  At its end nothing may run or be locked or held, and every token, text, log-probability, choice and
program must be what the reference makes of it (`stress_check`, `stress_models`).  The last line printed is JSON.

Threads meet as they like, so a seed gives the same case but not the same interleaving: `--repeat` tries a case again.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import stress_cases
from .stress_cases import Case
from .stress_models import MODEL_NAMES, Model
from .stress_run import Run

HANGS_AFTER = 120.0  # seconds of the processor, or without using it: a busy machine may give a case little of it


def no_totals() -> dict[str, int]:
    return dict.fromkeys(("cases", "programs", "requests", "tokens", "near_ties"), 0)


def run_case(model: Model, case: Case, totals: dict[str, int]) -> None:
    """Run and check one case; a hang is the end of the process."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(case, over), daemon=True).start()
    try:
        run = Run(model, case)
        checker = run.run()
    finally:
        over.set()
    totals["cases"] += 1
    totals["requests"] += checker.replies
    totals["tokens"] += checker.tokens
    totals["programs"] += len(run.programs)
    totals["near_ties"] += checker.near_ties


def _watch(case: Case, over: threading.Event) -> None:
    begin = last = time.process_time()
    while not over.wait(HANGS_AFTER):
        now = time.process_time()
        if now - begin > HANGS_AFTER or now - last < 1.0:
            _hung(case)
        last = now


def _hung(case: Case) -> None:
    print(f"case {case['seed']} HANGS; its threads:", flush=True)
    faulthandler.dump_traceback(all_threads=True)
    print(json.dumps(case), flush=True)
    os._exit(3)


def stress(
    model: Model, minutes: float, seed: int, load: int, programs: bool = True, stop_after: int = 5
) -> dict[str, Any]:
    """Cases until the time is over, or `stop_after` of them have failed."""
    totals = no_totals()
    failed: list[int] = []
    begin = time.perf_counter()
    number = seed * 1_000_000
    while time.perf_counter() - begin < minutes * 60 and len(failed) < stop_after:
        case = stress_cases.make(number, load=load, gpu=model.device != "cpu", programs=programs)
        try:
            run_case(model, case, totals)
        except Exception:
            failed.append(number)
            print(f"case {number} FAILS:\n{traceback.format_exc()}\n{json.dumps(case)}", flush=True)
        number += 1
    passed = (time.perf_counter() - begin) / 60
    return {"model": model.name, "device": model.device, "dtype": model.dtype, "seed": seed,
            "minutes": round(passed, 2), **totals, "failed": failed}  # fmt: skip


# ---- shrinking -------------------------------------------------------------------------------------------------------


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """A smaller case that still fails: fewer clients, actions, prompts, nodes and switches, while any can go."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _reductions(case):
            if fails(candidate):
                case, smaller = candidate, True
                print(f"smaller: {len(json.dumps(case))} characters", flush=True)
                break
    return case


def _reductions(case: Case) -> Any:
    clients = case["clients"]
    for i in range(len(clients)):
        if len(clients) > 1:
            yield {**case, "clients": clients[:i] + clients[i + 1 :]}
    for i, actions in enumerate(clients):
        for actions_ in _shorter(actions):
            yield {**case, "clients": [*clients[:i], actions_, *clients[i + 1 :]]}
    for name in list(case["options"]):
        if name not in ("kv_capacity", "cuda_graphs"):
            yield {**case, "options": {k: v for k, v in case["options"].items() if k != name}}


def _shorter(actions: list[dict[str, Any]]) -> Any:
    for i, action in enumerate(actions):
        if len(actions) > 1:
            yield actions[:i] + actions[i + 1 :]
        for smaller in _smaller(action):
            yield [*actions[:i], smaller, *actions[i + 1 :]]


def _smaller(action: dict[str, Any]) -> Any:
    if action["do"] == "generate":
        n = len(action["prompts"])
        for i in range(n if n > 1 else 0):
            kept = [j for j in range(n) if j != i]
            yield {**action, **{k: [action[k][j] for j in kept] for k in ("prompts", "params")}}
        if action["options"]:
            yield {**action, "options": {}}
        if action["how"] != "call":
            yield {**action, "how": "call"}
    elif action["do"] == "program":
        for i in range(1, len(action["body"])):
            yield {**action, "body": action["body"][:i] + action["body"][i + 1 :]}
        if len(action["items"]) > 1:
            yield {**action, "items": action["items"][:-1]}


def _fails_elsewhere(arguments: list[str], repeat: int) -> Callable[[Case], bool]:
    """Whether a case fails in a process of its own (it may hang)."""

    def fails(case: Case) -> bool:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(case, file)
            file.flush()
            command = [sys.executable, "-m", "tests.stress", "--replay", file.name, "--repeat", str(repeat), *arguments]
            return subprocess.run(command, capture_output=True).returncode != 0

    return fails


def main() -> int:
    parser = argparse.ArgumentParser(description="Random cases against a naive reference.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=MODEL_NAMES, default="scripted")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--load", type=int, default=1, help="actions per case, as a factor")
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument("--replay", type=Path, help="only the case in this JSON file")
    parser.add_argument("--repeat", type=int, default=1, help="how often to run that case")
    parser.add_argument("--shrink", action="store_true", help="cut the case down while it fails")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="minisgl-stress-") as scratch:
        model = Model(args.model, Path(scratch), args.device, args.dtype)
        if args.case is None and args.replay is None:
            report = stress(model, args.minutes, args.seed, args.load)
            print(json.dumps(report))
            return 1 if report["failed"] else 0
        gpu = args.device != "cpu"
        case: Case = (
            json.loads(args.replay.read_text())
            if args.replay is not None
            else stress_cases.make(args.case or 0, load=args.load, gpu=gpu)
        )
        if args.shrink:
            same = ["--model", args.model, "--device", args.device, "--dtype", args.dtype]
            print(json.dumps(shrink(case, _fails_elsewhere(same, args.repeat))))
            return 0
        totals = no_totals()
        for _ in range(args.repeat):
            run_case(model, case, totals)
        print(json.dumps(totals))
    return 0


if __name__ == "__main__":
    sys.exit(main())
