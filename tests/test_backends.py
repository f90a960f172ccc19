"""Hosted backends through their official clients, and RuntimeEndpoint, against local servers that speak the formats."""

from __future__ import annotations

import importlib
import json
import sys
import time

import pytest

import minisgl as sgl
from minisgl.backends.base import retry_status, with_retries
from tests.fake_servers import FakeServer, anthropic_api, gemini_api, openai_api, sglang_api

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 8


def openai(server, **options):
    pytest.importorskip("openai")
    return sgl.OpenAI("m", api_key="k", base_url=server.url + "/v1", retry_wait=0.01, **options)


def anthropic(server, **options):
    pytest.importorskip("anthropic")
    return sgl.Anthropic("m", api_key="k", base_url=server.url, retry_wait=0.01, **options)


def gemini(server, **options):
    pytest.importorskip("google.genai")
    return sgl.Gemini("m", api_key="k", base_url=server.url, retry_wait=0.01, **options)


HOSTED = {"openai": (openai, openai_api), "anthropic": (anthropic, anthropic_api), "gemini": (gemini, gemini_api)}


@pytest.fixture(params=HOSTED)
def hosted(request):
    """(name, make server, make backend)"""
    make, api = HOSTED[request.param]
    return request.param, lambda *args, **kwargs: FakeServer(api, *args, **kwargs), make


@sgl.function
def chat(s, question, **params):
    s += sgl.system("Be brief.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("a", **params))
    s += sgl.user("And?")
    s += sgl.assistant(sgl.gen("b"))


def test_multi_turn_chat_stop_and_usage(hosted):
    name, serve, make = hosted
    with serve("Paris. It is big") as server:
        backend = make(server)
        state = chat.run("Capital?", stop=".", max_tokens=50, backend=backend, temperature=0.5, top_p=0.9)
        assert (state["a"], state["b"]) == ("Paris", "Paris")
        meta = state.get_meta_info("a")
        assert meta["finish_reason"]["type"] == "stop"
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (11, 5)
        info = sgl.get_server_info(backend)
        assert (info["calls"], info["prompt_tokens"], info["completion_tokens"]) == (2, 22, 10)
        assert state.messages()[1:3] == [
            {"role": "user", "content": "Capital?"},
            {"role": "assistant", "content": "Paris"},
        ]
        body = server.bodies[-1]
    if name == "openai":
        assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
        assert body["temperature"] == 0.5 and body["top_p"] == 0.9 and body["max_tokens"] == 128
        assert server.bodies[0]["stop"] == "." and server.bodies[0]["max_tokens"] == 50
    elif name == "anthropic":
        assert server.bodies[0]["temperature"] == 0.5 and server.bodies[0]["top_p"] == 0.9
        assert body["system"] == "Be brief." and [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
        assert server.bodies[0]["stop_sequences"] == ["."] and body["max_tokens"] == 128
    else:
        assert body["systemInstruction"]["parts"][0]["text"] == "Be brief."
        assert [c["role"] for c in body["contents"]] == ["user", "model", "user"]
        assert server.bodies[0]["generationConfig"]["stopSequences"] == ["."]


def test_streaming(hosted):
    _, serve, make = hosted
    with serve("Hello world") as server:
        backend = make(server)
        state = chat.run("q", backend=backend, stream=True)
        assert list(state.text_iter("a")) == ["He", "ll", "o ", "wo", "rl", "d"]
        assert state["b"] == "Hello world"
        assert backend.usage.calls == 2 and backend.usage.completion_tokens == 10


def test_several_outputs(hosted):
    name, serve, make = hosted
    counter = iter("xyz")
    with serve((lambda body: next(counter)) if name == "anthropic" else ["x", "y", "z"]) as server:
        f = sgl.function(lambda s: s.__iadd__(sgl.user("q") + sgl.assistant(sgl.gen("a", n=3))))
        assert f.run(backend=make(server))["a"] == ["x", "y", "z"]


def test_a_program_without_roles_is_one_user_message(hosted):
    _name, serve, make = hosted
    with serve(" 4") as server:
        f = sgl.function(lambda s: s.__iadd__("2+2=" + sgl.gen("a") + " and 3+3=" + sgl.gen("b")))
        assert f.run(backend=make(server)).text() == "2+2= 4 and 3+3= 4"
        body = json.dumps(server.bodies[-1])
        assert "2+2= 4 and 3+3=" in body


def test_select(hosted):
    name, serve, make = hosted
    answers = {"openai": '{"choice": "yes"}', "anthropic": {"choice": "yes"}, "gemini": "yes"}
    f = sgl.function(lambda s, m=None: s.__iadd__(
        sgl.user("Well?") + sgl.assistant(sgl.select("c", choices=["no", "yes"], choices_method=m))
    ))  # fmt: skip
    with serve(lambda body: answers[name]) as server:
        assert f.run(backend=make(server))["c"] == "yes"
        assert '"no", "yes"' in json.dumps(server.bodies[0])
        with pytest.raises(ValueError, match="choices_method"):
            f.run(sgl.greedy_token_selection, backend=make(server)).sync()
    wrong = {"openai": "{}", "anthropic": {"choice": "maybe"}, "gemini": "maybe"}
    with serve(lambda body: wrong[name]) as server, pytest.raises(RuntimeError, match="none of the choices"):
        f.run(backend=make(server)).sync()


def test_json_schema(hosted):
    name, serve, make = hosted
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    with serve(lambda body: {"n": 3} if name == "anthropic" else '{"n": 3}') as server:
        f = sgl.function(lambda s: s.__iadd__(sgl.user("q") + sgl.assistant(sgl.gen("a", json_schema=schema))))
        assert json.loads(f.run(backend=make(server))["a"]) == {"n": 3}
        assert '"integer"' in json.dumps(server.bodies[0]).lower()


def test_api_errors_surface(hosted):
    _, serve, make = hosted
    f = sgl.function(lambda s: s.__iadd__(sgl.user("q") + sgl.assistant(sgl.gen("a"))))
    for status in (400, 401):
        with serve(failures=(status,)) as server:
            with pytest.raises(Exception, match=f"failed with {status}"):
                f.run(backend=make(server))["a"]
            assert len(server.requests) == 1  # trying again is of no use


def test_retries_after_429_and_5xx_with_backoff(hosted):
    _, serve, make = hosted
    f = sgl.function(lambda s: s.__iadd__(sgl.user("q") + sgl.assistant(sgl.gen("a"))))
    with serve("fine", failures=(429, 503, 500)) as server:
        assert f.run(backend=make(server))["a"] == "fine"
        assert len(server.requests) == 4
    with serve("fine", failures=(503,)) as server:
        assert "".join(f.run(backend=make(server), stream=True).text_iter("a")) == "fine"
    with serve(failures=(500,) * 9) as server:
        with pytest.raises(Exception, match="500"):
            f.run(backend=make(server, max_retries=2))["a"]
        assert len(server.requests) == 3


def test_what_the_api_has_not_is_refused_by_name(hosted):
    name, serve, make = hosted
    refused = {"openai": [], "anthropic": ["min_p", "frequency_penalty", "seed"], "gemini": ["min_p"]}[name]
    with serve() as server:
        for param in refused:
            f = sgl.function(lambda s, p=param: s.__iadd__(sgl.user("q") + sgl.assistant(sgl.gen("a", **{p: 1}))))
            with pytest.raises(ValueError, match=param):
                f.run(backend=make(server))["a"]
        with pytest.raises(ValueError, match="assistant"):
            sgl.function(lambda s: s.__iadd__(sgl.user("q" + sgl.gen("a")))).run(backend=make(server)).sync()
        assert not server.requests


def test_images(hosted, tmp_path):
    _name, serve, make = hosted
    (tmp_path / "a.png").write_bytes(PNG)
    with serve("a cat") as server:
        f = sgl.function(
            lambda s: s.__iadd__(sgl.user(sgl.image(str(tmp_path / "a.png")) + "What?") + sgl.assistant(sgl.gen("a")))
        )
        assert f.run(backend=make(server))["a"] == "a cat"
        text = json.dumps(server.bodies[0])
        assert "image/png" in text and "What?" in text and "iVBORw0KGgo" in text


def test_text_before_a_gen():
    f = sgl.function(lambda s: s.__iadd__(sgl.user("q") + sgl.assistant("It is " + sgl.gen("a"))))
    with FakeServer(anthropic_api, " Paris") as server:
        assert f.run(backend=anthropic(server)).messages()[-1]["content"] == "It is Paris"
        assert server.bodies[0]["messages"][-1] == {"role": "assistant", "content": "It is"}
    with FakeServer(openai_api) as server, pytest.raises(ValueError, match="cannot go on from the text 'It is '"):
        f.run(backend=openai(server)).sync()


def test_api_speculation_makes_three_fields_one_call():
    @sgl.function(num_api_spec_tokens=64)
    def f(s):
        s += "Harry Potter is a wizard.\n"
        s += "Name:" + sgl.gen("name", stop="\n") + "\nHouse:" + sgl.gen("house", stop="\n")
        s += "\nWand:" + sgl.gen("wand", stop="\n")

    answer = " Harry\nHouse: Gryffindor\nWand: holly\nThe end"
    with FakeServer(openai_api, answer) as server:
        for chat_model in (True, False):
            backend = openai(server, is_chat_model=chat_model)
            state = f.run(backend=backend)
            fields = (state["name"], state["house"], state["wand"])
            assert fields == (" Harry", " Gryffindor", " holly") and backend.usage.calls == 1


def test_openai_text_completion_models():
    with FakeServer(openai_api, " Paris. More") as server:
        backend = openai(server, is_chat_model=False)
        f = sgl.function(lambda s: s.__iadd__("The capital is" + sgl.gen("a", stop=".") + "." + sgl.gen("b")))
        assert f.run(backend=backend).text() == "The capital is Paris. Paris. More"
        assert server.bodies[0]["prompt"] == "The capital is"
        streamed = f.run(backend=backend, stream=True)
        assert "".join(streamed.text_iter("a")) == " Paris"
        g = sgl.function(lambda s: s.__iadd__("The capital is" + sgl.select("c", choices=[" Rome", " Paris"])))
        state = g.run(backend=backend)
        assert state["c"] == " Paris" and state.get_meta_info("c")["scores"][1] == pytest.approx(-0.1)


def test_openai_logprobs_and_the_official_base_url(monkeypatch):
    with FakeServer(openai_api, "x") as server:
        f = sgl.function(
            lambda s: s.__iadd__(sgl.user("q") + sgl.assistant(sgl.gen("a", return_logprob=True, top_k=3)))
        )
        state = f.run(backend=openai(server))
        assert state.get_meta_info("a")["output_token_logprobs"] == [(-0.5, None, "x")]
        assert server.bodies[0]["top_k"] == 3  # another server than OpenAI's: passed on
        monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/v1")
        with pytest.raises(ValueError, match="top_k"):
            f.run(backend=sgl.OpenAI("m", api_key="k"))["a"]


def test_calls_run_in_parallel_up_to_the_limit():
    with FakeServer(openai_api, delay=0.2) as server:
        f = sgl.function(lambda s, x: s.__iadd__(sgl.user(x) + sgl.assistant(sgl.gen("a"))))
        begin = time.perf_counter()
        states = f.run_batch([str(i) for i in range(16)], backend=openai(server, parallelism=16))
        assert [s["a"] for s in states] == ["ok"] * 16 and time.perf_counter() - begin < 2.5


def test_litellm(monkeypatch):
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("litellm is not installed")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    with FakeServer(openai_api, "Paris. More", failures=(429,)) as server:
        backend = sgl.LiteLLM("openai/m", api_key="k", base_url=server.url + "/v1", retry_wait=0.01)
        state = chat.run("q", stop=".", backend=backend)
        assert (state["a"], state["b"]) == ("Paris", "Paris") and backend.usage.calls == 2
        streamed = chat.run("q", backend=backend, stream=True)
        assert "".join(streamed.text_iter("a")) == "Paris. More"


def test_a_missing_client_is_an_error_that_gives_the_pip_command(monkeypatch):
    for package, make in {
        "openai": lambda: sgl.OpenAI("m"), "anthropic": lambda: sgl.Anthropic("m"),
        "google.genai": lambda: sgl.Gemini("m"), "litellm": lambda: sgl.LiteLLM("m"),
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match="pip install " + package.replace("google.", "google-")):
            make()


def test_wrong_options_are_value_errors():
    pytest.importorskip("openai")
    for match, options in {
        "model": {"model": ""},
        "parallelism": {"parallelism": 0},
        "max_retries": {"max_retries": -1},
    }.items():
        with pytest.raises(ValueError, match=match):
            sgl.OpenAI(**{"model": "m", "api_key": "k", **options})


# ---- retries ---------------------------------------------------------------------------------------------------------


def test_backoff_doubles_and_obeys_retry_after():
    class Error(Exception):
        status_code = 429

        def __init__(self, after=None):
            self.response = type("R", (), {"headers": {"retry-after": after} if after else {}})

    errors = [Error(), Error(), Error("3"), Error()]
    waits = []

    def call():
        if errors:
            raise errors.pop(0)
        return "done"

    assert with_retries(call, retryable=retry_status, attempts=5, first_wait=1.0, sleep=waits.append) == "done"
    assert 0.5 <= waits[0] <= 1 and 1 <= waits[1] <= 2 and 3 <= waits[2] <= 4 and 4 <= waits[3] <= 8


# ---- RuntimeEndpoint -------------------------------------------------------------------------------------------------


def endpoint(server, **options):
    return sgl.RuntimeEndpoint(server.url, retry_wait=0.01, **options)


def test_endpoint_generates_streams_and_returns_n_outputs():
    with FakeServer(sglang_api, "abc def") as server:
        backend = endpoint(server, api_key="k")
        f = sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a", stop=" ", regex="a.*") + sgl.gen("b", n=2)))
        state = f.run(backend=backend, temperature=0)
        assert state["a"] == "abc" and state["b"] == ["abc def"] * 2 and state.text() == "xabcabc def"
        body = server.bodies[2]
        assert body["text"] == "x" and body["sampling_params"] == {
            "max_new_tokens": 128, "temperature": 0, "stop": " ", "regex": "a.*",
        }  # fmt: skip
        assert list(f.run(backend=backend, stream=True).text_iter("a")) == ["a", "b", "c"]
        assert backend.parallelism == 7 and sgl.get_server_info(backend) == {"max_running_requests": 7}
        sgl.flush_cache(backend)
        assert server.requests[-1][0] == "/flush_cache"


def test_endpoint_uses_the_servers_chat_template():
    with FakeServer(sglang_api, "hi") as server:
        server.template = (
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        f = sgl.function(lambda s: s.__iadd__(sgl.user("q") + sgl.assistant(sgl.gen("a"))))
        assert f.run(backend=endpoint(server)).text() == "<s>[user]q[assistant]hi"


@pytest.mark.parametrize("prompt", ["x>>>", "a longer prompt than the window of sixteen, x>>>"])
def test_endpoint_select_scores_from_the_token_that_differs(prompt):
    with FakeServer(sglang_api) as server:
        server.logprob = lambda context, token: -0.1 if token == 100_001 else -1.0
        backend = endpoint(server)
        for method, score in ((sgl.token_length_normalized, -0.1), (sgl.unconditional_likelihood_normalized, -0.1)):
            f = sgl.function(
                lambda s, m=method: s.__iadd__(prompt + sgl.select("c", choices=["get", "all"], choices_method=m))
            )
            state = f.run(backend=backend)
            assert state["c"] == ("all" if method is sgl.token_length_normalized else state["c"])
            assert state.get_meta_info("c")["scores"][1] == pytest.approx(score)
        batch = next(body for body in server.bodies if isinstance(body.get("text"), list))
        assert batch["text"] == [prompt, prompt + "get", prompt + "all"]


def test_endpoint_errors_and_retries():
    f = sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a")))
    with FakeServer(sglang_api, "fine") as server:
        backend = endpoint(server)
        server.failures = [503, 429]
        assert f.run(backend=backend)["a"] == "fine"
        server.failures = [400]
        with pytest.raises(ValueError, match="failed with 400"):
            f.run(backend=backend)["a"]
        with pytest.raises(ValueError, match="vision"):
            sgl.function(lambda s: s.__iadd__(sgl.image("a.png"))).run(backend=backend).sync()
    with pytest.raises(ConnectionError, match="no server answers"):
        sgl.RuntimeEndpoint(server.url)


def test_endpoint_requests_of_a_stopped_program_are_aborted():
    with FakeServer(sglang_api, delay=0.0) as server:
        backend = endpoint(server)
        server.delay = 0.3
        state = sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a"))).run(backend=backend)
        time.sleep(0.1)
        state._executor.fail(KeyboardInterrupt())
        for _ in range(100):
            if any(path == "/abort_request" for path, _ in server.requests):
                break
            time.sleep(0.01)
        rids = [body.get("rid") for path, body in server.requests if path in ("/generate", "/abort_request")]
        assert len(rids) == 2 and rids[0] == rids[1] is not None
