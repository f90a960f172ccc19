"""Groups of prompts with a long common prefix each: what a router has to keep together.

    group 1   | 2,048 shared tokens | 128 of its own | -> 256 out      x 16
    ...
    group 64

On one engine the tree sorts the groups out of a shuffled stream; over several, a router that sends a group's prompts
to one worker has every prefix computed once, and one that does not has it computed on each worker.
"""

from __future__ import annotations

import numpy as np

from ..workloads import BenchRequest, Setting, random_ids, workload


@workload("prefix-groups", "64 groups x 16 prompts (2,048 shared + 128 tokens, 256 out), shuffled; fewer on a CPU")
def prefix_groups(setting: Setting) -> list[BenchRequest]:
    rng = setting.rng(0)
    per_group = 16 if setting.on_gpu else 4
    groups = -(-setting.count(gpu=1024, cpu=32, quick=12) // per_group)
    prefix, own, out = (2048, 128, 256) if setting.on_gpu else (512, 32, 16)
    requests = []
    for group in range(groups):
        shared = random_ids(rng, prefix, setting.vocab_size)
        for _ in range(per_group):
            ids = np.array(shared + random_ids(rng, own, setting.vocab_size), np.int32)
            requests.append(BenchRequest(ids, out, group=f"group {group}"))
    rng.shuffle(requests)
    return requests[: setting.requests]
