"""What the language costs beside plain requests: `python benchmarks/language_overhead.py`.

A program is Python: a state, a queue, a few small objects, a thread that runs its body.  None of that is there when
the same prompts go to `Runtime.generate` as one list.  All of it shares the interpreter, and its lock, with the
engine's thread, which needs it to form the next step; and an engine whose step takes a millisecond notices each
millisecond that it does not get.  So the question is not what a program costs alone but how many requests per second
are left:

    direct      Runtime.generate(prompts): one call, every request there before the first step
    programs    run_batch of as many few-shot programs, which append the same text and generate, and then every answer
                read (with --reads, by the body itself, which so waits for it)

Each prompt begins with --shots tokens that all of them share, then has a question of about 30 tokens of its own, and
gets --tokens of output.  The dearest case is one token: nothing but prompts to compute, and those mostly cached.

A run of a GPU takes a third of a second.  In that time one full garbage collection, another process that wants the
core, or a first step with few requests in it shows as ten or twenty per cent; and clocks, caches and neighbours drift
over the minute that all runs take.  Therefore

    - one process, a warm-up of each way, garbage collected (and the prefix cache emptied) before each run;
    - rounds of both ways, in alternating order, so that a drift meets both alike;
    - medians over the rounds, and quartiles that say how much a single round is worth.

`gc_ms` is what garbage collections took within a run, `steps` the engine's steps: more of them for the same requests
mean that the first ones left with few.

    python benchmarks/language_overhead.py                                              the default model, CPU
    python benchmarks/language_overhead.py --model llama-1b --load-format dummy         on a GPU
    python benchmarks/language_overhead.py --fake-step 4                                its proportions, without one

`--fake-step MS` puts the stand-in of `http_overhead.py` where the device was: a launch holds the interpreter for
--fake-launch milliseconds, its results are there MS (and --fake-prompt microseconds for each prompt token) after the
step before, and are waited for without the interpreter.  Nor does it tokenise, which a GPU's host does on its other
cores: a text's tokens are known from the warm-up and come after --fake-encode microseconds.  So one core is enough, and
a real-time priority (`chrt -f 40` before the command) keeps what else the machine does out of the figures.

The last line of stdout is one JSON object; `of_direct` is programs' median requests per second divided by direct's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WAYS = ("direct", "programs")


# ---- the model -------------------------------------------------------------------------------------------------------


def model_of(args: argparse.Namespace, into: Path) -> str | None:
    """What Runtime is to load; sets the options that go with it."""
    from minisgl.bench.shapes import SHAPES, shape_folder

    if args.fake_step is not None:
        from http_overhead import fake_device

        args.kv_capacity = args.kv_capacity or args.shots + args.programs * (64 + args.tokens)
        return fake_device(args, into)
    if args.model not in SHAPES:
        return args.model
    folder = shape_folder(args.model, into)
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(folder)
    return str(folder)


def train_tokenizer(folder: Path) -> None:
    """For a shape that comes without one: tokenising must cost what it costs, whatever the tokens are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    import minisgl

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    source = [path.read_text() for path in sorted(Path(minisgl.__file__).parent.glob("*.py"))]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(source, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


class FakeEncoder:
    """Takes the place of the tokenizer's Rust half: what it has encoded once it knows, and takes its time to say."""

    def __init__(self, encoder: Any, seconds: float):
        self._encoder, self._seconds = encoder, seconds
        self._known: dict[tuple[str, bool], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        new = [text for text in dict.fromkeys(texts) if (text, add_special_tokens) not in self._known]
        encoded = self._encoder.encode_batch_fast(new, add_special_tokens=add_special_tokens)
        self._known |= {(text, add_special_tokens): item for text, item in zip(new, encoded)}
        time.sleep(len(texts) * self._seconds)
        return [self._known[text, add_special_tokens] for text in texts]


@contextlib.contextmanager
def runtime_of(args: argparse.Namespace) -> Iterator[Any]:
    from minisgl import Runtime

    with tempfile.TemporaryDirectory() as folder:
        model = model_of(args, Path(folder))
        names = ("load_format", "device", "dtype", "overlap", "kv_capacity", "max_running_requests", "chunk_size")
        options = {name: value for name in names if (value := getattr(args, name, None)) is not None}
        with Runtime(model, **options) as runtime:
            if args.fake_step is not None:
                from http_overhead import FakeRunner

                fake = FakeRunner(runtime.engine.runner, args)
                runtime.engine.call(lambda: setattr(runtime.engine, "runner", fake))
                tokenizer: Any = runtime.tokenizer
                tokenizer._backend = FakeEncoder(tokenizer._backend, args.fake_encode / 1e6)
            yield runtime


# ---- the workload, and the ways to ask for it ------------------------------------------------------------------------


class Work:
    """Few-shot questions as texts, and as arguments of a program that builds the same texts."""

    def __init__(self, runtime: Any, args: argparse.Namespace):
        import minisgl as sgl

        self.runtime, self.threads = runtime, args.threads
        shots, i = "", 0
        while len(runtime.tokenizer.encode(shots)) < args.shots:
            shots += f"Question: what is {i} plus {i * 7 % 13}, and why does it matter for example number {i}?\n"
            shots += f"Answer: {i + i * 7 % 13}\n\n"
            i += 1
        questions = [
            f"what is {k} plus {k * 11 % 97}, and would a careful reader of this question agree with number {k * k}?"
            for k in range(args.programs)
        ]
        self.prompts = [shots + "Question: " + question + "\nAnswer:" for question in questions]
        self.arguments = [{"question": question} for question in questions]
        self.params = {"max_new_tokens": args.tokens, "temperature": 0, "ignore_eos": True}

        @sgl.function
        def answer(s, question):
            s += shots + "Question: " + question + "\nAnswer:"
            s += sgl.gen("answer", max_tokens=args.tokens)
            if args.reads:
                return s["answer"]

        self._program = answer

    def direct(self) -> list[tuple[str, int]]:
        replies = self.runtime.generate(self.prompts, self.params)
        return [(reply["text"], reply["meta_info"]["completion_tokens"]) for reply in replies]

    def programs(self) -> list[tuple[str, int]]:
        states = self._program.run_batch(
            self.arguments, backend=self.runtime, temperature=0, ignore_eos=True, num_threads=self.threads
        )
        return [(s["answer"], s.get_meta_info("answer")["completion_tokens"]) for s in states]


@contextlib.contextmanager
def collections_timed() -> Iterator[list[float]]:
    """Seconds of each garbage collection while the block runs."""
    times: list[float] = []
    begin = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal begin
        if phase == "start":
            begin = time.perf_counter()
        else:
            times.append(time.perf_counter() - begin)

    gc.callbacks.append(note)
    try:
        yield times
    finally:
        gc.callbacks.remove(note)


def measure(work: Work, way: Callable[[], list[tuple[str, int]]]) -> tuple[dict[str, float], list[str]]:
    """One run from an empty cache: its figures and its texts."""
    runtime = work.runtime
    runtime.flush_cache()
    runtime.reset_stats()
    gc.collect()
    with collections_timed() as pauses:
        cpu, begin = time.process_time(), time.perf_counter()
        answers = way()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    count, expected = sum(tokens for _, tokens in answers), len(work.prompts) * work.params["max_new_tokens"]
    if count != expected:
        raise SystemExit(f"{count} tokens came, not {expected}")
    stats = runtime.stats()
    row = {
        "requests_per_s": len(work.prompts) / seconds,
        "steps": stats["steps"],
        "hit_rate": stats["hit_rate"],
        "cpu_ms_per_request": 1e3 * cpu / len(work.prompts),
        "gc_ms": 1e3 * sum(pauses),
    }
    return row, [text for text, _ in answers]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    with runtime_of(args) as runtime:
        work = Work(runtime, args)
        print(f"{runtime!r}: {len(work.prompts)} prompts of {len(runtime.tokenizer.encode(work.prompts[0]))} tokens")
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for way in WAYS:  # warm up
            measure(work, getattr(work, way))
        for i in range(args.rounds):
            texts = {}
            for way in WAYS[:: -1 if i % 2 else 1]:
                row, texts[way] = measure(work, getattr(work, way))
                rows[way].append(row)
                print(f"{way:10}", *(f"{key} {value:,.4g}" for key, value in row.items()), sep="  ", flush=True)
            if args.fake_step is None:  # its tokens are drawn anew
                same = sum(a == b for a, b in zip(*texts.values()))
                print(f"  {same} of {len(work.prompts)} answers are the same", flush=True)
    return summary(rows)


def summary(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    medians: dict[str, Any] = {}
    for way, found in rows.items():
        rates = [row["requests_per_s"] for row in found]
        low, middle, high = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
        others = {key: float(f"{statistics.median(row[key] for row in found):.4g}") for key in found[0]}
        medians[way] = others | {"requests_per_s": round(middle, 1), "quartiles": [round(low, 1), round(high, 1)]}
        print(f"{way:10}  median {middle:,.1f} requests/s, quartiles {low:,.1f} and {high:,.1f}")
    share = round(medians["programs"]["requests_per_s"] / medians["direct"]["requests_per_s"], 3)
    pairs = zip(rows["programs"], rows["direct"])
    each = [round(programs["requests_per_s"] / direct["requests_per_s"], 3) for programs, direct in pairs]
    print(f"programs reach {share:.1%} of direct; single rounds {min(each):.0%} to {max(each):.0%}")
    return {"medians": medians, "of_direct": share, "of_direct_each": each}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a name in minisgl/bench/shapes.py; default: the default model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--kv-capacity", type=int)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shots", type=int, default=1000, help="tokens that all prompts begin with")
    parser.add_argument("--tokens", type=int, default=1, help="of output")
    parser.add_argument("--reads", action="store_true", help="each body waits for what it generated")
    parser.add_argument("--threads", type=lambda text: text if text == "auto" else int(text), default="auto",
                        help="run_batch's num_threads")  # fmt: skip
    parser.add_argument("--fake-step", type=float, metavar="MS", help="no model: a stand-in whose steps take MS")
    parser.add_argument("--fake-launch", type=float, metavar="MS", default=0.3)
    parser.add_argument("--fake-prompt", type=float, metavar="US", default=3.0)
    parser.add_argument("--fake-encode", type=float, metavar="US", default=100.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    print(json.dumps({"benchmark": "language_overhead", **vars(args), **compare(args)}))


if __name__ == "__main__":
    main()
