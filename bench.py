"""Benchmarks: `python bench.py --workload fewshot` (see `--help` and minisgl/bench).

Measures what prefix caching is worth on a real model: the same requests, worked off with the radix cache on
and off, in one process, one after the other.  The last line of stdout is one JSON object; progress goes to
stderr.
"""

from __future__ import annotations

import sys

from minisgl.bench import main

if __name__ == "__main__":
    sys.exit(main())
