"""Masks are made while the device works: the order of the engine's loops, on a device that is a clock."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest

from minisgl import Runtime, constraint, runner
from minisgl.runner import Runner, Step

from . import tiny_models

MASK = 0.015  # seconds that a step's masks take


class ClockedRunner(Runner):
    """A device whose forward passes take `seconds`: they are computed at once, but nobody sees tokens before that.

    idle: seconds that the device waited for the host between a forward pass and its sampling.
    """

    seconds, idle, free_at = 0.0, 0.0, 0.0
    ready: ClassVar[dict[int, float]] = {}

    def launch(self, batch):
        step = super().launch(batch)
        self.free_at = self.ready[id(step)] = max(time.perf_counter(), self.free_at) + self.seconds
        return step

    def sample(self, step: Step) -> None:
        super().sample(step)
        if step.guides is not None:
            late = max(time.perf_counter() - self.ready[id(step)], 0.0)
            self.idle += late
            self.free_at = max(self.free_at, self.ready[id(step)] + late)

    def results(self, step: Step):
        time.sleep(max(self.ready[id(step)] - time.perf_counter(), 0.0))
        return super().results(step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.make("smollm2", tmp_path_factory.mktemp("hiding"))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seconds", [0.06, 0.0])
def test_masks_hide_behind_a_longer_step(folder, monkeypatch, overlap, seconds):
    def slow_masks(*args):
        time.sleep(MASK)
        return constraint.masks(*args)

    monkeypatch.setattr("minisgl.runtime.Runner", ClockedRunner)
    monkeypatch.setattr(runner, "masks", slow_masks)
    monkeypatch.setattr(ClockedRunner, "seconds", seconds)
    with Runtime(folder, dtype="float32", overlap=overlap, kv_capacity=2000) as runtime:
        clocked = runtime._engine.runner
        assert isinstance(clocked, ClockedRunner)
        params = [{"regex": regex, "max_new_tokens": 12, "temperature": 0} for regex in ("[a-z ]{99}", "[0-9]{99}")]
        runtime.generate(["a", "b"], params)  # the masks are known from here on
        runtime.reset_stats()
        clocked.idle = 0.0
        runtime.generate(["a", "b"], params)
        exposed = clocked.idle / runtime.stats()["mask_time"]
    assert exposed < 0.5 if seconds else exposed > 0.5, exposed  # 0 and 1 on an idle machine


def test_the_clock_counts_steps_with_masks(folder):
    with Runtime(folder, dtype="float32", kv_capacity=2000) as runtime:
        runtime.generate("x", {"max_new_tokens": 5, "ignore_eos": True})
        assert runtime.stats()["mask_time"] == 0 == runtime.stats()["mask_wait"]
        runtime.generate("x", {"regex": "[a-z]{50}", "max_new_tokens": 5})
        stats = runtime.stats()
        assert stats["mask_time"] > 0 and stats["mask_wait"] == stats["mask_time"]  # a CPU: nothing runs beside
        assert runtime._engine.runner.mask_clock.steps == 5
        runtime.reset_stats()
        assert runtime.stats()["mask_time"] == 0
