"""Greedy float32 output against Hugging Face `generate`, token for token, with every switch on and off.

    python -m tests.parity                  64 prompts of 1 to 1,500 tokens, 128 new tokens, every combination
    python -m tests.parity --quick          a small slice of it
    python -m tests.parity --pairs          combinations that cover every pair of switch values, instead of all
    python -m tests.parity --shard 0/4      every fourth combination, to share the work between processes
    python -m tests.parity --first 30       from the 31st combination on, to go on with a run that was cut
    python -m tests.parity --reference F    keep what Hugging Face generated in file F, or take it from there

A difference is forgiven only where it is none: if the reference's two best logits at the first differing position are
closer than float32 sums in another order can resolve (`TIE`), and then it is counted and printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from minisgl import Runtime
from minisgl.policy import POLICIES

TIE = 2e-4  # logits of size 10 to 20, sums of some hundred float32 terms


@dataclass
class Reference:
    """Prompts and what Hugging Face generates for them: outputs[i] (new,), gaps[i]: best minus second best logit."""

    prompts: list[list[int]]
    outputs: list[list[int]]
    gaps: list[list[float]]


def make_prompts(count: int, longest: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Lengths from 1 to `longest`; half of them continue a prefix that others have too."""
    rng = np.random.default_rng(seed)
    lengths = np.unique(np.linspace(1, longest, count).astype(int)).tolist()
    lengths += [longest] * (count - len(lengths))
    stem = rng.integers(3, vocab, longest).tolist()
    prompts = []
    for i, n in enumerate(lengths):
        shared = int(n * rng.random()) if i % 2 else 0
        prompts.append(stem[:shared] + rng.integers(3, vocab, n - shared).tolist())
    return prompts


def hf_reference(folder, prompts: list[list[int]], new: int, device: str = "cpu", batch: int = 1) -> Reference:
    """The prompts through transformers' generate in float32, `batch` at a time (padded on the left)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    outputs, gaps = [], []
    for at in range(0, len(prompts), batch):
        group = prompts[at : at + batch]
        longest = max(map(len, group))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in group], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in group], device=device)
        with torch.inference_mode():
            result = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        outputs += result.sequences[:, longest:].tolist()
        best = torch.stack([step.float().topk(2, dim=-1).values for step in result.logits], dim=1)
        gaps += (best[..., 0] - best[..., 1]).tolist()
    return Reference(prompts, outputs, gaps)


def compare(reference: Reference, replies: list[dict], what: str) -> int:
    """Assert equality; returns the number of outputs that part at a tie."""
    ties = 0
    for i, (want, reply) in enumerate(zip(reference.outputs, replies)):
        got = reply["output_ids"]
        if got == want:
            continue
        at = next((k for k, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
        gap = reference.gaps[i][at] if at < len(reference.gaps[i]) else float("inf")
        assert gap < TIE, f"{what}: prompt {i} ({len(reference.prompts[i])} tokens) differs at {at}, gap {gap:.2e}"
        print(f"  {what}: prompt {i} parts at {at} from a tie (gap {gap:.1e})")
        ties += 1
    return ties


def combinations(pools: tuple[int | None, ...], chunks=(16, 256, -1)):
    """Every combination of the switches, as Runtime options."""
    for kv, radix, overlap, chunk, policy in itertools.product(pools, (True, False), (True, False), chunks, POLICIES):
        yield {
            "kv_capacity": kv,
            "radix_cache": radix,
            "overlap": overlap,
            "chunk_size": chunk,
            "schedule_policy": policy,
        }


def pairs(combinations: list[dict]) -> list[dict]:
    """Few of the combinations, in which every pair of values of two switches still meets (greedily chosen)."""

    def met(options: dict) -> set:
        return set(itertools.combinations(options.items(), 2))

    missing, chosen = set().union(*map(met, combinations)), []
    while missing:
        best = max(combinations, key=lambda options: len(met(options) & missing))
        chosen.append(best)
        missing -= met(best)
    return chosen


def run(folder, reference: Reference, new: int, options: dict, device: str = "cpu", **more) -> tuple[int, dict]:
    """One engine, all prompts at once, twice where there is a cache (cold, then warm)."""
    label = " ".join(f"{k}={v}" for k, v in options.items())
    with Runtime(folder, dtype="float32", device=device, **options, **more) as runtime:
        ties = 0
        for _ in range(2 if options.get("radix_cache", True) else 1):
            replies = runtime.generate(
                input_ids=reference.prompts,
                sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
            )
            ties += compare(reference, replies, label)
        runtime._engine.call(runtime.scheduler.check)
        stats = runtime.stats()
        assert stats["running"] == stats["waiting"] == stats["kv_locked"] == stats["kv_held"] == 0
    return ties, stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small-pool", type=int, default=4000)
    parser.add_argument("--large-pool", type=int, default=60_000)
    parser.add_argument("--hf-batch", type=int, default=1)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--running", type=int, default=None, help="max_running_requests: fewer graphs to record")
    parser.add_argument("--reference", type=Path, default=None)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.longest, args.new, args.small_pool = 8, 200, 16, 300
    from minisgl.loader import resolve_model

    source = resolve_model(args.model)
    prompts = make_prompts(args.prompts, args.longest, source.config.vocab_size)
    begin = time.time()
    if args.reference is not None and args.reference.exists():
        reference = Reference(**json.loads(args.reference.read_text()))
        assert reference.prompts == prompts, f"{args.reference} is of other prompts"
    else:
        reference = hf_reference(source.folder, prompts, args.new, args.device, args.hf_batch)
        if args.reference is not None:
            args.reference.write_text(json.dumps(asdict(reference)))
    print(f"reference: {len(prompts)} prompts, {time.time() - begin:.0f} s", flush=True)
    ties = count = retractions = 0
    begin = time.time()
    shard, shards = map(int, args.shard.split("/"))
    every = list(combinations((args.large_pool, args.small_pool)))
    more = {} if args.running is None else {"max_running_requests": args.running}
    for options in (pairs(every) if args.pairs else every)[args.first :][shard::shards]:
        found, stats = run(source.folder, reference, args.new, options, args.device, **more)
        ties, count, retractions = ties + found, count + 1, retractions + stats["retractions"]
        print(f"{time.time() - begin:5.0f} s  equal: {options}", flush=True)
    print(
        f"{count} combinations equal to Hugging Face generate ({ties} outputs part at ties closer than {TIE}), "
        f"{retractions} retractions, {time.time() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
