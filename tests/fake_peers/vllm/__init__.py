"""A stand-in for vLLM: its interface as `bench.peer_vllm` uses it, answers that are a hash of the prompt.

Caches nothing unless told so by enable_prefix_caching; then whole prefixes of 16 tokens, like the real one's blocks.
"""

from types import SimpleNamespace

__version__ = "0.0-fake"
BLOCK = 16


class SamplingParams:
    def __init__(
        self, temperature, max_tokens, seed=None, ignore_eos=False, detokenize=True, structured_outputs=None
    ):
        self.max_tokens, self.structured_outputs = max_tokens, structured_outputs
        assert temperature >= 0 and (ignore_eos or structured_outputs is not None)


class LLM:
    def __init__(self, model, *, load_format, dtype, max_model_len, enable_prefix_caching, **options):
        with open(f"{model}/config.json") as file:  # a folder as transformers has it
            assert file.read()
        if load_format == "fail":
            raise RuntimeError("out of\nmemory")
        self.max_model_len, self.prefix_caching, self.blocks = max_model_len, enable_prefix_caching, set()

    def reset_prefix_cache(self):
        self.blocks.clear()

    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm
        return [self._answer(prompt, p) for prompt, p in zip(prompts, params, strict=True)]

    def _answer(self, prompt, params):
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        assert len(ids) + params.max_tokens <= self.max_model_len
        blocks = [hash(tuple(ids[: i + BLOCK])) for i in range(0, len(ids) - BLOCK, BLOCK)]
        cached = sum(block in self.blocks for block in blocks) * BLOCK
        if self.prefix_caching:
            self.blocks.update(blocks)
        output = SimpleNamespace(token_ids=[7 + len(ids) % 5] * params.max_tokens, text="no JSON")
        return SimpleNamespace(prompt_token_ids=ids, outputs=[output], num_cached_tokens=cached)
