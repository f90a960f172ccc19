"""minisgl: the SGLang stack in one readable process.

    from minisgl import Runtime

    with Runtime() as runtime:
        print(runtime.generate("The capital of France is")["text"])

Names are imported on first use (PEP 562), so that `import minisgl` costs milliseconds and needs neither torch nor any
optional package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# public name -> the module that defines it
_WHERE = {
    "Runtime": "runtime",
    "Server": "server",
    "EngineError": "output",
    "SamplingParams": "sampling_params",
    "Cluster": "cluster",
    "EventLog": "events",
    "RadixTree": "radix",
    "Grammar": "fsm",
    "GrammarError": "fsm",
    **dict.fromkeys(
        (
            "gen", "gen_int", "gen_string", "select", "image", "video", "system", "user", "assistant", "system_begin",
            "system_end", "user_begin", "user_end", "assistant_begin", "assistant_end", "separate_reasoning",
        ),
        "primitives",
    ),
    **dict.fromkeys(("function", "set_default_backend", "flush_cache", "get_server_info", "SglFunction"), "lang"),
    "ProgramState": "state",
    "join": "state",
    "TraceError": "trace",
    "token_length_normalized": "choices",
    "greedy_token_selection": "choices",
    "unconditional_likelihood_normalized": "choices",
    "RuntimeEndpoint": "backends.endpoint",
    "OpenAI": "backends.openai",
    "Anthropic": "backends.anthropic",
    "Gemini": "backends.gemini",
    "LiteLLM": "backends.litellm",
}  # fmt: skip
__all__ = sorted(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from .backends.anthropic import Anthropic as Anthropic
    from .backends.endpoint import RuntimeEndpoint as RuntimeEndpoint
    from .backends.gemini import Gemini as Gemini
    from .backends.litellm import LiteLLM as LiteLLM
    from .backends.openai import OpenAI as OpenAI
    from .choices import greedy_token_selection as greedy_token_selection
    from .choices import token_length_normalized as token_length_normalized
    from .choices import unconditional_likelihood_normalized as unconditional_likelihood_normalized
    from .cluster import Cluster as Cluster
    from .events import EventLog as EventLog
    from .fsm import Grammar as Grammar
    from .fsm import GrammarError as GrammarError
    from .lang import SglFunction as SglFunction
    from .lang import flush_cache as flush_cache
    from .lang import function as function
    from .lang import get_server_info as get_server_info
    from .lang import set_default_backend as set_default_backend
    from .output import EngineError as EngineError
    from .primitives import assistant as assistant
    from .primitives import assistant_begin as assistant_begin
    from .primitives import assistant_end as assistant_end
    from .primitives import gen as gen
    from .primitives import gen_int as gen_int
    from .primitives import gen_string as gen_string
    from .primitives import image as image
    from .primitives import select as select
    from .primitives import separate_reasoning as separate_reasoning
    from .primitives import system as system
    from .primitives import system_begin as system_begin
    from .primitives import system_end as system_end
    from .primitives import user as user
    from .primitives import user_begin as user_begin
    from .primitives import user_end as user_end
    from .primitives import video as video
    from .radix import RadixTree as RadixTree
    from .runtime import Runtime as Runtime
    from .sampling_params import SamplingParams as SamplingParams
    from .server import Server as Server
    from .state import ProgramState as ProgramState
    from .state import join as join
    from .trace import TraceError as TraceError


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_WHERE))
