"""Benchmarks of the engine: the same requests through several engines, and figures that can be checked.

    workloads.py, fewshot.py   what is asked: requests from a seed        tasks.py, facts.py   and their
    questions runners.py                 asking it, and the clock                   peers_hf.py          other
    engines report.py                  hit rate and its optimum, rates, percentiles, one table, one JSON line
    cli.py                     the command line

The figure to look at first is `hit_rate` beside `optimal_hit_rate`: which share of the prompt tokens came
from the cache, and which share the best possible cache would have saved.  `speedup` says what that is worth
in requests/s against the same engine with the cache off, and `outputs_equal` that it changed no token.
"""

from __future__ import annotations

from .cli import main as main
from .workloads import WORKLOADS as WORKLOADS
from .workloads import BenchError as BenchError
from .workloads import BenchRequest as BenchRequest
from .workloads import Setting as Setting
from .workloads import workload as workload
