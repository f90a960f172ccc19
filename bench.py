"""Benchmarks: `python bench.py --all --quick`, `python bench.py --workload tot --ablate` (see `--help`, minisgl/bench).

Measures what the engine's mechanisms are worth on a real model: the same programs or requests, worked off with
everything on and with mechanisms off, in one process, one after the other, and on other engines that are installed.
The last line of stdout is one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import sys

from minisgl.bench import main

if __name__ == "__main__":
    sys.exit(main())
