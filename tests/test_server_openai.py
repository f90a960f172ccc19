"""The official openai client, LangChain and DSPy against the server over the default model."""

from __future__ import annotations

import json

import pytest

openai = pytest.importorskip("openai", reason='needs pip install "minisgl[test]"')
pytest.importorskip("starlette", reason='needs pip install "minisgl[server]"')
pytest.importorskip("prometheus_client", reason='needs pip install "minisgl[server]"')

from minisgl import Runtime, Server  # noqa: E402

from . import engines  # noqa: E402

ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture(scope="module")
def runtime(default_model_folder):
    with Runtime(default_model_folder, device="cpu", kv_capacity=6000, max_running_requests=16) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def server(runtime):
    with Server(runtime, port=0, api_key="the key", model_names=["smol", runtime.name]) as server:
        yield server


@pytest.fixture
def client(server, runtime):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="the key", max_retries=0) as client:
        yield client
    engines.check_idle(runtime)


def chat(client, **more):
    usual = {"model": "smol", "messages": ASK, "temperature": 0, "max_tokens": 16}
    return client.chat.completions.create(**{**usual, **more})


def complete(client, **more):
    usual = {"model": "smol", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}
    return client.completions.create(**{**usual, **more})


# ---- chat -----


def test_chat_and_usage(client, runtime):
    runtime.flush_cache()
    first, second = chat(client), chat(client)
    for reply in (first, second):
        assert reply.object == "chat.completion" and reply.model == "smol" and reply.id.startswith("chatcmpl-")
        assert reply.choices[0].message.content == PARIS and reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].message.role == "assistant" and reply.choices[0].message.tool_calls is None
        usage = reply.usage
        assert usage.prompt_tokens == len(runtime.tokenizer.chat_ids(ASK)) == 37 and usage.completion_tokens == 8
        assert usage.total_tokens == 45
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 36
    assert first.id != second.id


def test_chat_stream(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    *pieces, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in pieces)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == PARIS
    assert [c.choices[0].finish_reason for c in pieces if c.choices[0].finish_reason] == ["stop"]
    with client.chat.completions.stream(model="smol", messages=ASK, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == PARIS


def test_n_and_seed(client):
    more = {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 8}
    texts = [choice.message.content for choice in chat(client, **more).choices]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in chat(client, **more, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    assert [c.message.content for c in chat(client, **{**more, "seed": 6}).choices] != texts


def test_stop(client):
    for stop in ("France", ["xyz", " France"]):
        reply = chat(client, stop=stop).choices[0]
        assert reply.message.content.strip() == "The capital of" and reply.finish_reason == "stop"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, stop=stop, stream=True))
        assert text == reply.message.content


def test_length_and_limits(client):
    for name in ("max_tokens", "max_completion_tokens"):
        reply = chat(client, **{"max_tokens": openai.omit, name: 3})
        assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 3
    assert chat(client, max_tokens=None).choices[0].message.content == PARIS


def test_logprobs(client, runtime):
    reply = chat(client, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == PARIS  # without the stop token
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token and entry.logprob == entry.top_logprobs[0].logprob <= 0
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert chat(client).choices[0].logprobs is None


def test_logit_bias_and_penalties(client, runtime):
    paris = int(runtime.tokenizer.encode(" Paris", add_special_tokens=False)[0])
    assert "Paris" not in chat(client, logit_bias={str(paris): -100}).choices[0].message.content
    reply = chat(client, logit_bias={paris: 100}, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=3)
    assert reply.choices[0].message.content == " Paris Paris Paris"


def test_extras(client, runtime):
    reply = chat(client, extra_body={"ignore_eos": True, "top_k": 1, "min_p": 0.1, "min_tokens": 2}, temperature=1)
    assert reply.usage.completion_tokens == 16 and reply.choices[0].message.content.startswith(PARIS)
    assert chat(client, extra_body={"regex": "(yes|no)!"}).choices[0].message.content in ("yes!", "no!")
    reply = chat(client, extra_body={"stop_token_ids": [int(runtime.tokenizer.encode(" of")[0])]})
    assert reply.choices[0].message.content == "The capital"
    begun = [*ASK, {"role": "assistant", "content": "The capital of"}]
    reply = chat(client, messages=begun, extra_body={"continue_final_message": True})
    assert reply.choices[0].message.content == " France is Paris."
    parts = [{"type": "text", "text": ASK[0]["content"]}]
    parts = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert "Paris" in chat(client, messages=parts).choices[0].message.content


def test_ebnf(client):
    pytest.importorskip("llguidance", reason='needs pip install "minisgl[grammar]"')
    assert chat(client, extra_body={"ebnf": 'root ::= "a" | "b"'}).choices[0].message.content in ("a", "b")


def test_json(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for more in ({"response_format": form}, {"extra_body": {"json_schema": PERSON}}):
        reply = chat(client, messages=[{"role": "user", "content": "A wizard"}], max_tokens=40, **more).choices[0]
        person = json.loads(reply.message.content)
        assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99 and reply.finish_reason == "stop"
    example = [{"role": "user", "content": 'Say {"a": 1}'}]
    more = {"messages": example, "response_format": {"type": "json_object"}, "max_tokens": 60, "stop": "\n"}
    assert chat(client, **more).choices[0].message.content.startswith("{")
    assert chat(client, response_format={"type": "text"}).choices[0].message.content == PARIS


def test_pydantic_parse(client):
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        age: int = pydantic.Field(ge=0, le=150)

    messages = [{"role": "user", "content": "Bob is 31. Who?"}]
    reply = client.chat.completions.parse(
        model="smol", messages=messages, response_format=Person, max_tokens=60, temperature=0
    )
    assert isinstance(reply.choices[0].message.parsed, Person)


# ---- tools -----


def arguments(call):
    return call.function.name, json.loads(call.function.arguments)


def test_tools_by_name_and_required(client, runtime):
    named = {"type": "function", "function": {"name": "add"}}
    reply = chat(client, tools=[WEATHER, ADD], tool_choice=named, max_tokens=60)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "stop" and message.content is None
    [(name, values)] = map(arguments, message.tool_calls)
    assert name == "add" and set(values) == {"a", "b"} and all(type(v) is int and v <= 99 for v in values.values())
    weather = {"messages": [{"role": "user", "content": "The weather in Paris, in C?"}], "tools": [WEATHER, ADD]}
    once = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 40}
    reply = chat(client, **weather, **once, n=2)
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls"
        [(name, values)] = map(arguments, choice.message.tool_calls)
        if name == "get_weather":
            assert len(values["city"]) <= 12 and values["unit"] in ("C", "F")
        else:
            assert name == "add" and set(values) == {"a", "b"}
    assert reply.usage.completion_tokens > 10 and reply.usage.prompt_tokens > 100
    assert reply.usage.prompt_tokens_details.cached_tokens <= reply.usage.prompt_tokens
    # the result goes back, and the model answers
    call = reply.choices[0].message.tool_calls[0]
    answer = chat(client, tools=[WEATHER, ADD], tool_choice="none", messages=[
        *weather["messages"], reply.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "22 degrees and sunny"},
    ], max_tokens=4)  # fmt: skip
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_tools_stream(client):
    more = {"messages": [{"role": "user", "content": "The weather in Paris, in C?"}], "tools": [WEATHER, ADD],
            "tool_choice": "required", "max_tokens": 28}  # fmt: skip
    whole = chat(client, **more)
    calls, reasons, usage = {}, [], None
    for chunk in chat(client, **more, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            reasons += [choice.finish_reason] * bool(choice.finish_reason)
            for call in choice.delta.tool_calls or ():
                if call.function.name:
                    assert call.id and call.index == len(calls)
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments
    assert [tuple(call) for call in calls.values()] == [
        (call.function.name, call.function.arguments) for call in whole.choices[0].message.tool_calls
    ]
    assert reasons == [whole.choices[0].finish_reason] and usage.completion_tokens == whole.usage.completion_tokens


def test_tools_auto(client, runtime):
    """The model decides: made to say the tag it gets a call that is right, else its text is the answer."""
    said = chat(client, tools=[WEATHER])
    assert said.choices[0].message.content and said.choices[0].message.tool_calls is None
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, tools=[WEATHER], stream=True))
    assert text == said.choices[0].message.content
    tag = runtime.tokenizer.encode("<tool_call>", add_special_tokens=False).tolist()
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "unit": "C"}}\n</tool_call>'
    example = [
        {"role": "user", "content": "The weather in Rome, in C?"},
        {"role": "assistant", "content": "Let me see. " + call},
        {"role": "user", "content": "The weather in Paris, in C?"},
        {"role": "assistant", "content": "Let me see."},
    ]  # fmt: skip
    bias = {str(token): 8 for token in tag}
    reply = chat(client, messages=example, tools=[WEATHER], logit_bias=bias, max_tokens=60,
                 parallel_tool_calls=False, extra_body={"continue_final_message": True}).choices[0]  # fmt: skip
    assert reply.finish_reason == "tool_calls" and "<tool" not in (reply.message.content or "")
    assert arguments(reply.message.tool_calls[0])[0] == "get_weather"


def test_tools_auto_of_an_answer_that_was_cut(client):
    """No call follows a text that ended by its length."""
    cut = chat(client, tools=[WEATHER], max_tokens=3)
    assert cut.choices[0].message.tool_calls is None and cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens == 3
    chunks = list(chat(client, tools=[WEATHER], max_tokens=3, stream=True))
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_tools_that_do_not_fit_together(client):
    wrong = {
        "tool_choice": {"tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        "response_format": {"response_format": {"type": "json_object"}},
        "logprobs": {"logprobs": True},
        "tools": {"tools": [WEATHER, WEATHER]},
    }
    for name, more in wrong.items():
        with pytest.raises(openai.BadRequestError, match=name):
            chat(client, **{"tools": [WEATHER], **more})
    schema = {"type": "object", "properties": {"x": {"type": "no"}}}
    bad = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="json_schema"):
            chat(client, tools=[WEATHER, bad], stream=stream)


def test_tools_cut_short(client):
    for stream in (False, True):
        reply = chat(client, tools=[WEATHER], tool_choice="required", max_tokens=3, stream=stream)
        choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
        assert choices[-1].finish_reason == "length"


# ---- completions -----


def test_completions(client, runtime):
    reply = complete(client)
    expected = runtime.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 6})["text"]
    assert reply.object == "text_completion" and reply.choices[0].text == expected
    assert "".join(chunk.choices[0].text for chunk in complete(client, stream=True)) == expected
    ids = runtime.tokenizer.encode("The capital of France is").tolist()
    assert complete(client, prompt=ids).choices[0].text == expected
    replies = complete(client, prompt=["The capital of France is", "1, 2, 3,"], n=2).choices
    assert [choice.index for choice in replies] == [0, 1, 2, 3]
    assert replies[0].text == replies[1].text == expected and replies[2].text == replies[3].text
    assert [c.text for c in complete(client, prompt=[ids, ids]).choices] == [expected] * 2


def test_cache_reuse_empty_completion(client):
    """case cache-reuse-empty-completion: the second answer, from the cache, is the first."""
    more = {"prompt": "Reply with exactly the word OK.", "max_tokens": 8}
    first, second = complete(client, **more), complete(client, **more)
    assert first.choices[0].text == second.choices[0].text != ""
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


def test_completions_logprobs_and_echo(client, runtime):
    prompt = "The capital of France is"
    n = len(runtime.tokenizer.encode(prompt))
    reply = complete(client, logprobs=2, echo=True)
    scores, text = reply.choices[0].logprobs, reply.choices[0].text
    assert text.startswith(prompt) and "".join(scores.tokens) == text and len(scores.tokens) == n + 6
    assert scores.token_logprobs[0] is None and all(value <= 0 for value in scores.token_logprobs[1:])
    assert scores.top_logprobs[0] is None and all(len(top) == 2 for top in scores.top_logprobs[1:])
    found = [text[i : i + len(token)] for i, token in zip(scores.text_offset, scores.tokens)]
    assert found == scores.tokens
    direct = runtime.generate(prompt, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    values = [value for value, *_ in direct["meta_info"]["input_token_logprobs"]][1:]
    assert scores.token_logprobs[1:n] == pytest.approx(values, abs=2e-2)
    only = complete(client, logprobs=0, echo=True, max_tokens=0).choices[0]
    assert only.text == prompt and len(only.logprobs.tokens) == n
    pieces = list(complete(client, logprobs=2, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in pieces) == text
    tokens = [token for chunk in pieces if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens]
    assert tokens == scores.tokens


# ---- errors, other routes -----


def test_errors(client, server):
    for kind, call in {
        openai.BadRequestError: lambda: chat(client, temperature=-1),
        openai.NotFoundError: lambda: chat(client, model="nobody"),
        openai.AuthenticationError: lambda: chat(client.with_options(api_key="wrong")),
    }.items():
        with pytest.raises(kind) as error:
            call()
        assert error.value.body["message"] and error.value.body["type"]
    with pytest.raises(openai.BadRequestError, match="context"):
        chat(client, messages=[{"role": "user", "content": "a " * 7000}])
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model="smol", input="a")
    with pytest.raises(openai.BadRequestError, match="unknown parameter 'foo'"):
        chat(client, extra_body={"foo": 1})


def test_models(client, runtime):
    assert [model.id for model in client.models.list()] == ["smol"]
    assert client.models.retrieve(runtime.name).id == "smol"


def test_async_clients_side_by_side(server):
    import asyncio

    async def main():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="the key", max_retries=0) as client:

            async def one(i):
                more = {"model": "smol", "messages": ASK, "temperature": 0, "max_tokens": 16}
                if i % 2:
                    return (await client.chat.completions.create(**more)).choices[0].message.content
                stream = await client.chat.completions.create(**more, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(24)))

    assert asyncio.run(main()) == [PARIS] * 24


# ---- programs on top -----


def test_langchain(server):
    """A chain with a prompt, a parser, streaming, structured output and a tool."""
    langchain = pytest.importorskip("langchain_openai", reason='needs pip install "minisgl[dev]"')
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        """A person"""

        name: str = Field(max_length=8)
        age: int

    model = langchain.ChatOpenAI(
        base_url=server.url + "/v1", api_key="the key", model="smol", temperature=0, max_tokens=48, max_retries=0
    )
    prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])
    chain = prompt | model | StrOutputParser()
    assert chain.invoke({"country": "France"}) == PARIS
    assert "".join(chain.stream({"country": "France"})) == PARIS
    countries = [{"country": name} for name in ("Italy", "France", "Spain")]
    assert chain.batch(countries)[1] == PARIS
    assert isinstance(model.with_structured_output(Person).invoke("Bob is 31 years old. Who is it?"), Person)
    add = {"name": "add", "parameters": ADD["function"]["parameters"]}
    [call] = model.bind_tools([add], tool_choice="add").invoke("Add 1 and 2").tool_calls
    assert call["name"] == "add" and set(call["args"]) == {"a", "b"}


def test_dspy(server, tmp_path, monkeypatch):
    """A signature with a demonstration; the server holds the small model to the format that DSPy reads."""
    monkeypatch.setenv("DSPY_CACHEDIR", str(tmp_path))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up on the network at import
    dspy = pytest.importorskip("dspy", reason='needs pip install "minisgl[dev]"')
    form = r"\[\[ ## answer ## \]\]\n[A-Z][a-z]{2,9}\n\n\[\[ ## completed ## \]\]"
    model = dspy.LM("openai/smol", api_base=server.url + "/v1", api_key="the key", temperature=0, max_tokens=40,
                    cache=False, extra_body={"regex": form})  # fmt: skip
    with dspy.context(lm=model, adapter=dspy.ChatAdapter()):
        predict = dspy.Predict("question -> answer: str")
        predict.demos = [dspy.Example(question="What is the capital of Italy?", answer="Rome")]
        assert predict(question="What is the capital of France?").answer == "Paris"
    assert model.history[0]["usage"]["prompt_tokens"] > 100
