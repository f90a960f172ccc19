"""A peer's process: reads what to play, plays it, writes what came of it (see `peers`)."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .drive import Player
from .peers import PEERS, Job, measure
from .workloads import BenchError


def make_player(name: str, model: dict[str, Any], jobs: Sequence[Job]) -> Player:
    module, _, kind = PEERS[name].player.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), kind)(model, jobs)


def main(spec_file: str, result_file: str) -> None:
    begin = time.perf_counter()
    spec = json.loads(Path(spec_file).read_text())
    jobs = [Job.of(plain) for plain in spec["jobs"]]
    name = spec["peer"]
    try:
        player = make_player(name, spec["model"], jobs)
        start = time.perf_counter() - begin
        runs = {job.name: [asdict(run) for run in measure(player, job, spec["reps"], name)] for job in jobs}
        version = getattr(importlib.import_module(PEERS[name].module), "__version__", "unknown")
        result = {"version": str(version), "start": start, "runs": runs}
    except (BenchError, ValueError, RuntimeError, OSError, ImportError) as error:
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
