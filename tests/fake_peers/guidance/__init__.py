"""A stand-in for guidance, as `bench.peer_guidance` uses it: a model to which text and `gen` are added."""

from types import SimpleNamespace

__version__ = "0.0-fake"


def gen(name, max_tokens, temperature, regex=None):
    assert name == "output" and temperature >= 0
    return SimpleNamespace(text="a" * max_tokens if regex is None else "Anna")


class Transformers:
    def __init__(self, model, tokenizer, echo, text="", output=""):
        self.parts, self.text, self.output = (model, tokenizer, echo), text, output

    def __add__(self, other):
        if isinstance(other, str):
            return Transformers(*self.parts, self.text + other, self.output)
        return Transformers(*self.parts, self.text + other.text, other.text)

    def __getitem__(self, name):
        return {"output": self.output}[name]


models = SimpleNamespace(Transformers=Transformers)
