"""The command line of the benchmark: options, what fits together, and what is printed.

    suite_runs      programs of the language, mechanisms on and off         --workload tot, --all, --ablate
    token_runs      requests known beforehand, cache on and off             --workload fewshot, decode
    twin_runs       token-level twins in rounds, beside other engines       --workload twin-fewshot,twin-tree
    grammar         grammar engines on the model's vocabulary               --grammar

Whatever runs, a table comes first and the last line of stdout is one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import fewshot, plot, suite_report, suite_runs, token_runs, twin_runs  # noqa: F401  (fewshot registers itself)
from .peers import PEERS
from .programs import PROGRAMS
from .report import json_line
from .shapes import SHAPES
from .twins import TWINS
from .workloads import WORKLOADS, BenchError


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="bench.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Runs workloads with the engine's mechanisms on and off, and beside other engines.  Prints a table "
        "and, as the last line of stdout, one JSON object.",
        epilog=_epilog(),
    )
    what = p.add_argument_group("what is run")
    what.add_argument("--workload", type=_workloads, default=["fewshot"], metavar="NAME",
                      help="see below (default: fewshot); of the twins several, between commas, or all as twin-all")
    what.add_argument("--all", action="store_true", help="all workloads of the paper, one report")
    what.add_argument("--quick", action="store_true", help="small sizes: minutes for --all on two CPU cores")
    what.add_argument("--grammar", action="store_true",
                      help="time grammar engines on the model's vocabulary instead (no GPU needed)")
    what.add_argument("--requests", type=_positive, metavar="N",
                      help="how many requests or programs (default: the workload's, fewer on a CPU)")
    what.add_argument("--scale", type=_fraction, metavar="S",
                      help="twins: how many requests and how long, as a share of the full size (default: 1)")
    what.add_argument("--seed", type=_natural, metavar="N", help="of the requests (default: the workload's own)")
    what.add_argument("--shots", type=_natural, metavar="N",
                      help="fewshot: examples per subject (default: as many as make 1,000 tokens; 5 with --data)")
    what.add_argument("--data", type=Path, metavar="PATH",
                      help="public data: fewshot, MMLU's folder of CSV files (dev, test, val); hellaswag, HellaSwag's "
                      ".jsonl; react, HotpotQA's .json; tot and tot-deep, GSM8K's .jsonl")
    what.add_argument("--random-ids", action="store_true",
                      help="fewshot: random token ids of the same shape; nothing is scored")
    what.add_argument("--lengths", type=_positive, nargs=2, metavar="N",
                      help="uniform: shortest and longest prompt and output; decode: prompt and output length")

    how = p.add_argument_group("on what")
    how.add_argument("--model", metavar="NAME",
                     help=f"folder, hub id, .gguf file or shape: {', '.join(SHAPES)} (default: SmolLM2-135M-Instruct)")
    how.add_argument("--load-format", choices=["auto", "safetensors", "gguf", "dummy"], default="auto",
                     help="dummy: random weights from a config.json alone")
    how.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer files for a shape")
    how.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    how.add_argument("--dtype", choices=["auto", "float32", "float16", "bfloat16"], default="auto")
    how.add_argument("--set", action="append", type=_setting, default=[], metavar="NAME=VALUE", dest="settings",
                     help="an argument of minisgl.Runtime, such as schedule_policy=fcfs")

    versus = p.add_argument_group("beside what")
    versus.add_argument("--runs", "--reps", type=_positive, default=1, metavar="N", dest="reps",
                        help="repetitions; the median is reported (default: 1)")
    versus.add_argument("--no-baseline", action="store_true", help="skip the run without the radix cache")
    versus.add_argument("--ablate", action="store_true", help="also with each mechanism switched off in turn")
    versus.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as SVG")
    versus.add_argument("--compare", action="append", choices=list(PEERS), default=[],
                        help="another engine on the same requests, if it is installed")
    versus.add_argument("--compare-requests", type=_positive, metavar="N",
                        help="only the first N requests for --compare hf")
    versus.add_argument("--compare-batch", type=_positive, metavar="N",
                        help="its batch (default: 8; decode: all requests)")
    return p  # fmt: skip


def _epilog() -> str:
    def lines(table: dict[str, Any]) -> str:
        return "\n".join(f"  {name:<21} {entry.summary}" for name, entry in table.items())

    return (
        f"requests:\n{lines(WORKLOADS)}\n\nprograms of the language (`suite`):\n{lines(PROGRAMS)}\n\n"
        f"token-level twins, the same requests for every engine (`drive`):\n{lines(TWINS)}\n\n"
        "beside vLLM on a GPU:\n"
        "  bench.py --workload twin-all --model llama-8b --load-format dummy --compare vllm --reps 3 --ablate"
    )


# ---------------------------------------------------------------- values


def _workloads(text: str) -> list[str]:
    """`"twin-tree,twin-json"` -> a list of names; `"twin-all"`: all twins that need no text."""
    names: list[str] = []
    for name in text.split(","):
        names += [twin.name for twin in TWINS.values() if not twin.needs_text] if name == "twin-all" else [name]
    known = {**WORKLOADS, **PROGRAMS, **TWINS}
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown workload {name!r}: one of {', '.join(known)}, twin-all")
    if len(names) > 1 and not all(name in TWINS for name in names):
        raise argparse.ArgumentTypeError("only the twins can be run several at a time")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text!r}")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 100, got {text!r}")
    return value


def _setting(text: str) -> tuple[str, Any]:
    """`"chunk_size=512"` -> `("chunk_size", 512)`; what is no Python literal is a string."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


# ---------------------------------------------------------------- what fits together


def check(args: argparse.Namespace) -> None:
    """Options that don't fit together.  Raises BenchError: no option is accepted and then ignored."""
    name = args.workload[0]
    if name in TWINS:
        _refuse(args, "a token-level twin", "requests", "shots", "data", "random_ids", "lengths", "no_baseline",
                "quick", "plot", "compare_requests", "compare_batch")  # fmt: skip
        args.scale = args.scale or 1.0
    else:
        options = set() if args.all else {**WORKLOADS, **PROGRAMS}[name].options
        meaningless = [option for option in ("shots", "data", "random_ids", "lengths") if option not in options]
        what = "--all" if args.all else f"--workload {name}"
        _refuse(args, what, *meaningless, "scale", "tokenizer", *(["requests"] if args.all else []))
        if in_suite(args):
            _refuse(args, what, "compare_requests", "compare_batch")
        elif any(peer != "hf" for peer in args.compare):
            raise BenchError(f"--compare: only hf runs {name} alone; the others do with --ablate, or its twin")
    if args.no_baseline and args.ablate:
        raise BenchError("--no-baseline goes not with --ablate")
    if args.random_ids and (args.data is not None or args.shots is not None):
        raise BenchError("--random-ids goes neither with --data nor with --shots")
    if args.workload[0] == "uniform" and args.lengths and args.lengths[0] > args.lengths[1]:
        raise BenchError("--lengths: the shortest is longer than the longest")
    if not args.compare and (args.compare_requests or args.compare_batch):
        raise BenchError("--compare-requests and --compare-batch need --compare")
    if args.tokenizer is not None and not args.tokenizer.is_dir():
        raise BenchError(f"--tokenizer: no folder {args.tokenizer}")
    if args.data is not None and not (args.data.is_dir() if name == "fewshot" else args.data.is_file()):
        raise BenchError(f"--data: no {'folder' if name == 'fewshot' else 'file'} {args.data}")
    if args.plot is not None and not args.plot.absolute().parent.is_dir():
        raise BenchError(f"--plot: no folder {args.plot.absolute().parent}")
    own = {"model", "device", "dtype", "load_format", "radix_cache"}
    for name, _ in args.settings:
        if name in own:
            raise BenchError(f"--set {name}: has an option of its own, or is what is being compared")


def in_suite(args: argparse.Namespace) -> bool:
    """Whether `suite_runs` runs it: programs, and whatever is ablated, drawn, or one of all."""
    return args.all or args.ablate or args.plot is not None or args.workload[0] in PROGRAMS


def _refuse(args: argparse.Namespace, what: str, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False:
            raise BenchError(f"--{name.replace('_', '-')} means nothing to {what}")


# ---------------------------------------------------------------- running


def grammar_report(model: str | None) -> str:
    """The table of `bench.grammar` for a model's tokenizer."""
    from ..loader import resolve_model
    from ..tokenizer import Tokenizer
    from .grammar import report

    return report(Tokenizer(resolve_model(model).folder))


def main(argv: Sequence[str] | None = None, make_runtime: Callable[..., Any] | None = None) -> int:
    """Run the command line; returns the exit code (2: it could not be run as asked, 130: interrupted)."""
    p = parser()
    args = p.parse_args(argv)
    try:
        print(_run(args, make_runtime), flush=True)
    except (BenchError, ValueError, TypeError, RuntimeError, ImportError) as error:
        print(f"{p.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(args: argparse.Namespace, make_runtime: Callable[..., Any] | None) -> str:
    if args.grammar:
        return grammar_report(args.model)
    check(args)
    if make_runtime is None:
        from ..runtime import Runtime as make_runtime
    if args.workload[0] in TWINS:
        table, figures = twin_runs.run(args, make_runtime)
        return f"{table}\n\n{json_line(figures)}"
    if in_suite(args):
        figures = suite_report.figures(suite_runs.execute(args, make_runtime))
        if args.plot is not None:
            args.plot.write_text(plot.svg(figures), encoding="utf-8")
        return f"{suite_report.table(figures)}\n\n{json_line(figures)}"
    return token_runs.report(token_runs.execute(args, make_runtime))
