"""A stand-in for SGLang's offline engine, as `bench.peer_sglang` uses it."""

__version__ = "0.0-fake"


class Engine:
    def __init__(self, *, model_path, load_format, dtype, context_length, skip_tokenizer_init, random_seed, log_level):
        with open(f"{model_path}/config.json") as file:
            assert file.read() and load_format in ("auto", "dummy") and context_length > 0

    def generate(self, *, sampling_params, input_ids=None, prompt=None):
        prompts = input_ids or prompt
        return [self._answer(len(ids), params) for ids, params in zip(prompts, sampling_params, strict=True)]

    def _answer(self, length, params):
        assert params["temperature"] >= 0 and (params.get("ignore_eos") or params.get("regex"))
        info = {"prompt_tokens": length, "cached_tokens": length // 2}
        return {"output_ids": [5] * params["max_new_tokens"], "meta_info": info, "text": "x"}

    def flush_cache(self):
        pass
