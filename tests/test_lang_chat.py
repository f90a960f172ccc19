"""Chat roles: whatever order a program writes them in, the text is what the model's template gives."""

from __future__ import annotations

import itertools

import pytest

import minisgl as sgl
from minisgl.chat import Conversation, plain_render
from minisgl.chat_template import ChatTemplate, ChatTemplateError
from tests.scripted_backend import CHATML, ScriptedBackend, chatml

LLAMA3 = (
    "{% for m in messages %}{% set c = '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>' %}"
    "{% if loop.first %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
LLAMA2 = (  # the system prompt lives in the first user turn; roles must alternate
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>' + messages[0].content + '<</SYS>>' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {{ system if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
THINKING = (  # drops the thinking of earlier turns, and opens the answer's
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|x|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "llama2": LLAMA2}


def renderer(source):
    return ChatTemplate(source, {"bos_token": "<s>"}).render


@sgl.function
def conversation(s, system, turns, answers):
    if system:
        s += sgl.system(system)
    for i, (turn, answer) in enumerate(zip(turns, answers)):
        s += sgl.user(turn)
        s += sgl.assistant(answer if answer is not None else sgl.gen(f"a{i}"))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", ["", "Be kind."])
@pytest.mark.parametrize("generated", [True, False])
def test_the_text_is_what_the_template_gives(name, system, generated):
    render = renderer(TEMPLATES[name])
    space = " " * (name == "llama2")  # its answers begin with a space, as its template writes them
    backend = ScriptedBackend(lambda p: f"{space}answer {len(p.messages)}", render=render)
    turns = ["Hello", "  and spaces around ", "bye"]
    answers = [None] * 3 if generated else ["fixed", " spaced answer \n", "x"]
    state = conversation.run(system, turns, answers, backend=backend)
    assert state.text() == render(state.messages(), False)
    assert [m["role"] for m in state.messages()] == ["system"] * bool(system) + ["user", "assistant"] * 3
    prompts = [job.prompt for job in backend.jobs]
    for i, prompt in enumerate(prompts):  # every prompt is the template's, with the generation prompt
        assert prompt.templated and prompt.text == render(prompt.messages, True), i
    for earlier, later in itertools.pairwise(prompts):
        assert later.text.startswith(earlier.text)


def test_text_before_a_gen_in_an_assistant_message():
    backend = ScriptedBackend(" Paris", render=chatml)
    f = sgl.function(lambda s: s.__iadd__(sgl.user("Capital?") + sgl.assistant("It is" + sgl.gen("a", stop=".") + ".")))
    state = f.run(backend=backend)
    assert backend.jobs[0].prompt.text.endswith("<|im_start|>assistant\nIt is")
    assert backend.jobs[0].prompt.partial == "It is"
    assert state.text() == chatml(state.messages(), False) and state.messages()[-1]["content"] == "It is Paris."


def test_a_trimming_template_costs_the_generated_texts_last_spaces_only():
    backend = ScriptedBackend("word  ", render=renderer(LLAMA3))
    state = conversation.run("", ["q"], [None], backend=backend)
    assert state.text() == renderer(LLAMA3)(state.messages(), False) and state["a0"] == "word  "
    assert state._executor.anchor is None  # its ids cover text that is gone


def test_what_was_generated_from_stays_where_a_template_rewrites_it():
    backend = ScriptedBackend("thought</think>answer", render=renderer(THINKING))
    state = conversation.run("", ["a", "b"], [None, None], backend=backend)
    state.sync()
    first, second = (job.prompt.text for job in backend.jobs)
    assert first == "<|user|>a<|x|><|assistant|><think>"
    assert second == first + "thought</think>answer<|x|><|user|>b<|x|><|assistant|><think>"
    assert state.text() == second + "thought</think>answer<|x|>"


def test_a_model_without_a_template_gets_the_plain_one():
    backend = ScriptedBackend(" fine\nUSER: I go on", render=None)
    state = conversation.run("Be kind.", ["How?"], [None], backend=backend)
    assert state.text() == "SYSTEM: Be kind.\nUSER: How?\nASSISTANT: fine\n"
    assert state.text() == plain_render(state.messages(), False)
    assert backend.jobs[0].params["stop"] == ["\nUSER:"] and not backend.jobs[0].prompt.templated


def test_roles_that_a_template_refuses_are_an_error():
    talk = Conversation(renderer(LLAMA2))
    talk.begin("user")
    talk.add("a")
    talk.end("a")
    talk.begin("user")
    with pytest.raises(ChatTemplateError, match="alternate"):
        talk.require_visible()


def test_copies_are_independent():
    talk = Conversation(chatml)
    talk.begin("user")
    talk.add("a")
    other = talk.copy()
    talk.end("a")
    assert other.role == "user" and not other.messages and other.text.endswith("user\na")


def test_text_outside_of_roles_is_kept_where_it_is():
    backend = ScriptedBackend("A", render=chatml)

    @sgl.function
    def f(s):
        s += "Preface. "
        s += sgl.user("q")
        s += " between "
        s += sgl.assistant(sgl.gen("a"))

    text = f.run(backend=backend).text()
    assert text == ("Preface. <|im_start|>user\nq<|im_end|>\n between <|im_start|>assistant\nA<|im_end|>\n")
    assert not backend.jobs[0].prompt.templated
