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
    "SamplingParams": "sampling_params",
    "EventLog": "events",
    "RadixTree": "radix",
}
__all__ = sorted(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from .events import EventLog as EventLog
    from .radix import RadixTree as RadixTree
    from .runtime import Runtime as Runtime
    from .sampling_params import SamplingParams as SamplingParams


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_WHERE))
