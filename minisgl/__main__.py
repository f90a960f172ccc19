"""`python -m minisgl`: a prompt, a chat, a server or a benchmark from the shell.

Only the standard library is imported until a command needs more, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["bench"]:  # has options of its own
        from .bench import main as bench

        return bench(arguments[1:])
    if arguments[:1] == ["route"]:
        from .router_run import main as route

        return route(arguments[1:])
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except ValueError as error:  # a model or parameter that is not right: one line, no traceback
        print(f"minisgl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    about = "A prompt, a chat, a server or a benchmark from the shell."
    parser = argparse.ArgumentParser(prog="minisgl", description=about)
    commands = parser.add_subparsers(title="commands", required=True)
    generate = commands.add_parser("generate", help="complete one prompt")
    generate.add_argument("prompt")
    generate.set_defaults(run=_generate)
    chat = commands.add_parser("chat", help="talk to the model (end with an empty line)")
    chat.set_defaults(run=_chat)
    from .server_cli import add_arguments

    add_arguments(commands.add_parser("serve", help="serve OpenAI's and SGLang's HTTP APIs"))
    commands.add_parser("bench", help="benchmarks; see `python -m minisgl bench --help`", add_help=False)
    commands.add_parser("route", help="many workers behind one address; see `... route --help`", add_help=False)
    for command in (generate, chat):
        command.add_argument("--model", help="folder, hub id or .gguf file (default: SmolLM2-135M-Instruct)")
        command.add_argument("--device", default="auto")
        command.add_argument("--dtype", default="auto")
        command.add_argument("--max-new-tokens", type=int, default=128)
        command.add_argument("--temperature", type=float, default=0.0)
        command.add_argument("--seed", type=int)
    return parser


def _generate(args: argparse.Namespace) -> int:
    from . import Runtime

    with Runtime(args.model, device=args.device, dtype=args.dtype) as runtime:
        for chunk in runtime.generate(args.prompt, _params(args), stream=True):
            print(chunk["delta"], end="", flush=True)
    print()
    return 0


def _chat(args: argparse.Namespace) -> int:
    from . import Runtime

    messages: list[dict[str, str]] = []
    with Runtime(args.model, device=args.device, dtype=args.dtype) as runtime:
        while text := _ask():
            messages.append({"role": "user", "content": text})
            answer = ""
            for chunk in runtime.chat(messages, _params(args), stream=True):
                print(chunk["delta"], end="", flush=True)
                answer = chunk["text"]
            print()
            messages.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str:
    try:
        return input("> ")
    except EOFError:
        return ""


def _params(args: argparse.Namespace) -> dict[str, object]:
    return {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}


if __name__ == "__main__":
    sys.exit(main())
