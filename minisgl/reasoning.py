"""Splitting a reasoning model's output into what it thought and what it answers.

    <think>7 times 6 is 42</think>The answer is 42.   ->   ("7 times 6 is 42", "The answer is 42.")

Models that are opened by their template inside the thinking block (DeepSeek-R1 and its kin) write only the closing
marker; for them everything up to it, or everything when it never comes, is reasoning.
"""

from __future__ import annotations

# model type -> (opening marker, closing marker, output begins inside the block)
MODEL_TYPES: dict[str, tuple[str, str, bool]] = {
    "deepseek-r1": ("<think>", "</think>", True),
    "deepseek-v3": ("<think>", "</think>", False),
    "glm45": ("<think>", "</think>", False),
    "kimi": ("◁think▷", "◁/think▷", False),
    "qwen3": ("<think>", "</think>", False),
    "qwen3-thinking": ("<think>", "</think>", True),
    "step3": ("<think>", "</think>", True),
}


def check_model_type(model_type: str) -> str:
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type must be one of {', '.join(sorted(MODEL_TYPES))}, got {model_type!r}")
    return model_type


def split_reasoning(text: str, model_type: str) -> tuple[str, str]:
    """(reasoning, answer), each without surrounding white space next to the markers."""
    opening, closing, inside = MODEL_TYPES[check_model_type(model_type)]
    begin = text.find(opening)
    if begin < 0 and not inside:
        return "", text
    before = text[:begin] if begin > 0 and not inside else ""
    body = text[begin + len(opening) :] if begin >= 0 else text
    reasoning, found, answer = body.partition(closing)
    if not found:
        return reasoning.strip(), before
    return reasoning.strip(), before + answer.lstrip()
