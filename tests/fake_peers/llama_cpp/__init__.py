"""A stand-in for llama-cpp-python, as `bench.peer_llamacpp` uses it: it keeps the last request's tokens."""

import numpy as np

__version__ = "0.0-fake"


class Llama:
    def __init__(self, model_path, *, n_ctx, n_gpu_layers, verbose):
        with open(model_path, "rb") as file:
            assert file.read(4) == b"GGUF"
        self.input_ids, self.n_tokens = np.zeros(n_ctx, np.int32), 0

    def generate(self, tokens, *, temp, repeat_penalty, reset):
        assert temp == 0.0 and reset
        self.input_ids[: len(tokens)], self.n_tokens = tokens, len(tokens)
        while True:
            yield 7

    def reset(self):
        self.n_tokens = 0
