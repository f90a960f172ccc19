"""Engines over tiny models for the tests of `Runtime`, and what to compare them with."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from minisgl import Runtime
from minisgl.output import EngineError

from . import tiny_models

GREEDY = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
VARIED = {"temperature": 2.0, "seed": 1, "max_new_tokens": 10, "ignore_eos": True}  # greedy ones repeat themselves
LETTERS = "abcdefgh"


@functools.cache
def folder(name: str = "llama2") -> Path:
    """A tiny checkpoint, made once for the whole test session."""
    scratch = tempfile.TemporaryDirectory(prefix="minisgl-tests-")
    path = tiny_models.make(name, Path(scratch.name) / name)
    _scratch.append(scratch)  # deleted when the interpreter exits
    return path


_scratch: list[tempfile.TemporaryDirectory] = []


@functools.cache
def hf_model(name: str = "llama2"):
    """The same checkpoint in transformers, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32).eval()


def hf_logits(ids: list[int], name: str = "llama2") -> torch.Tensor:
    """(len(ids), vocab): row i predicts token i + 1."""
    with torch.no_grad():
        return hf_model(name)(torch.tensor([ids])).logits[0].float()


def make(name: str = "llama2", **options) -> Runtime:
    """A small float32 engine on the CPU."""
    options = {"kv_capacity": 1200, "dtype": "float32", "device": "cpu"} | options
    return Runtime(folder(name), **options)


class Engines:
    """Engines by their options, each made once and kept until `close`."""

    def __init__(self):
        self._made: dict[tuple, Runtime] = {}

    def __call__(self, name: str = "llama2", **options) -> Runtime:
        key = (name, *sorted(options.items()))
        if key not in self._made:
            self._made[key] = make(name, **options)
        return self._made[key]

    def close(self) -> None:
        for runtime in self._made.values():
            runtime.shutdown()
        self._made.clear()


def check_idle(runtime: Runtime) -> None:
    """Nothing runs or waits, nothing is locked or held, and every slot has one owner (invariants 1, 2, 3, 8)."""
    stats = runtime.stats()
    busy = {k: stats[k] for k in ("waiting", "running", "kv_locked", "kv_held") if stats[k]}
    assert not busy, busy
    assert stats["kv_free"] + stats["kv_evictable"] == stats["kv_capacity"]
    runtime._engine.call(runtime.scheduler.check)
    assert runtime.scheduler.table.available_rows == runtime.scheduler.table.max_requests
    assert not runtime._engine._live


def settled(runtime: Runtime) -> bool:
    """Whether `check_idle` finds nothing: to wait for where requests may still come and go on their own."""
    try:
        check_idle(runtime)
    except AssertionError:
        return False
    return True


Call = tuple[threading.Thread, list]


def callers(runtime: Runtime, count: int) -> list[Call]:
    """`count` threads that call `generate` until the engine fails, and leave its EngineError in their boxes.

    Returns when all of them are in the engine; a reply that comes earlier is asked for again.
    """

    def call(box: list) -> None:
        try:
            while True:
                runtime.generate("x", {**GREEDY, "max_new_tokens": 400})
        except EngineError as error:
            box.append(error)

    boxes: list[list] = [[] for _ in range(count)]
    threads = [threading.Thread(target=call, args=(box,), daemon=True) for box in boxes]
    for thread in threads:
        thread.start()
    while (taken := runtime.stats())["running"] + taken["waiting"] < count:
        time.sleep(0.002)
    return list(zip(threads, boxes))


def overcommit(runtime: Runtime) -> None:
    """Let admission keep no memory free for the output of what runs, so that some will have to be retracted."""
    runtime._engine.call(lambda: setattr(runtime.scheduler, "reserve_ratio", 0.0))


def random_ids(n: int, seed: int = 0, low: int = 0, high: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(low, high, n).tolist()


def only_letters(runtime: Runtime, letters: str = LETTERS) -> dict[int, float]:
    """A logit_bias under which the model, whatever it thinks, says nothing but these letters."""
    return {int(runtime.tokenizer.encode(c)[0]): 100.0 for c in letters}
