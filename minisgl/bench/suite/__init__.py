"""The paper's workloads, a file each (SGLang, arXiv 2312.07104, section 6): importing this registers them all."""

from __future__ import annotations

from . import (
    generative_agents,
    hellaswag,
    json_character,
    judge,
    multiturn,
    prefix_groups,
    rag,
    react,
    sot,
    tot,
)

__all__ = [
    "generative_agents", "hellaswag", "json_character", "judge", "multiturn", "prefix_groups", "rag", "react", "sot",
    "tot",
]  # fmt: skip
