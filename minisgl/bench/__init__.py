"""Benchmarks: the paper's workloads, what each mechanism is worth on them, and how other engines do.

    what is asked    suite/             programs of the language, a file each (`programs`)
                     workloads, fewshot, tasks, facts      requests known beforehand
                     twins              the same traffic as token ids, in rounds, for any engine
    who answers      recorder           a Runtime that keeps every request
                     drive, peers, peer_*                  other engines, each in a process of its own
                     variants           ours with a mechanism off
    what came of it  suite_runs, suite_equal, suite_report, plot          --workload tot, --all
                     twin_runs                                            --workload twin-tree
                     token_runs, runners, report                          --workload fewshot
                     cli                the command line

The figure to look at first is the hit rate beside its optimum: which share of the prompt tokens came from the cache,
and which share the best possible cache would have saved.  The speed-up says what that is worth against the same engine
with the cache off, and the comparison of outputs that it changed no token.
"""

from __future__ import annotations

from .cli import main as main
from .programs import PROGRAMS as PROGRAMS
from .programs import Programs as Programs
from .programs import programs as programs
from .twins import TWINS as TWINS
from .workloads import WORKLOADS as WORKLOADS
from .workloads import BenchError as BenchError
from .workloads import BenchRequest as BenchRequest
from .workloads import Setting as Setting
from .workloads import workload as workload
