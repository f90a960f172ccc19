"""Hostile chats and templates, briefly (at length: `python -m tests.fuzz`), and the faults that were found."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("hypothesis", reason='needs pip install "minisgl[test]"')

from minisgl import chat_limits
from minisgl.chat_template import ChatTemplate, ChatTemplateError

from . import fuzz, fuzz_chat

TARGETS = {target.name: target for target in fuzz_chat.TARGETS}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(chat_limits, "SECONDS", 0.1)


@pytest.mark.parametrize(("name", "examples"), [("messages", 150), ("template", 60), ("conversation", 80)])
def test_refused_in_one_line_or_rendered(name, examples):
    found = fuzz.campaign(TARGETS[name], examples, shrink=False)
    assert found["refused"] and found["rendered"], found


@pytest.mark.parametrize("template", fuzz_chat.BOMBS)
def test_bombs_end_soon(template):
    """Endless loops and recursion, texts and numbers of any size, made in every way that Jinja has."""
    begin = time.thread_time()
    fuzz_chat.check_template(template)
    assert time.thread_time() - begin < 3


def test_lists_in_lists_are_refused_for_their_weight_not_for_their_time():
    for double in ("[ns.t, ns.t]", "{1: ns.t, 2: ns.t}", "[ns.t] * 2", "dict(a=ns.t, b=ns.t)"):
        body = "{% for i in range(60) %}{% set ns.t = " + double + " %}{% endfor %}"
        for show in ("{{ ns.t }}", "{{ ns.t | length }}"):  # it is refused when it is made
            begin = time.thread_time()
            with pytest.raises(ChatTemplateError, match="a value of more than 20000000 characters or items"):
                ChatTemplate("{% set ns = namespace(t='x') %}" + body + show).render([{"role": "user", "content": "x"}])
            assert time.thread_time() - begin < 3  # about a millisecond


def test_nested_data_of_ordinary_size_is_printed():
    text = "{% set a = [[1, 2], {'b': (3, 'x')}] %}{{ a * 2 + [a] }}|{{ a | tojson(indent=1) }}|{{ a == [[1, 2]] }}"
    a = [[1, 2], {"b": (3, "x")}]
    want = f"{a * 2 + [a]}|{json.dumps(a, indent=1)}|False"
    assert ChatTemplate(text).render([{"role": "user", "content": "x"}]) == want


@pytest.mark.parametrize("template", fuzz_chat.ESCAPES)
def test_nothing_leads_out_of_the_sandbox(template):
    fuzz_chat.check_template(template)


def test_what_ordinary_templates_do_is_within_the_limits(monkeypatch):
    """A long conversation through the loops, filters and methods that models' templates use."""
    monkeypatch.setattr(chat_limits, "SECONDS", 2.0)  # as it is without `short`
    text = (
        "{%- set ns = namespace(last='') -%}{%- for m in messages if m.role != 'system' -%}"
        "{%- set ns.last = m.content | trim -%}{{ '<|' + m.role + '|>' ~ loop.index ~ ('-' * 40) }}"
        "{{ ns.last.replace('x', 'yy').split(' ')[0] ~ ('%05d' % loop.index) }}"
        "{%- if tools %}{{ tools | tojson(indent=4) }}{% endif %}{{ [1, 2] | join(', ') | indent(2) }}{%- endfor -%}"
    )
    messages = [{"role": "user" if i % 2 else "assistant", "content": f"word{i} x " * 200} for i in range(400)]
    begin = time.thread_time()
    for _ in range(3):
        rendered = ChatTemplate(text).render(messages, tools=[{"name": "f", "parameters": {"type": "object"}}])
    assert rendered.count("<|user|>") == 200 and "word399" in rendered and "00400" in rendered
    assert time.thread_time() - begin < 3  # about 0.3 on a quiet machine


def test_the_time_of_one_rendering_is_not_the_nexts():
    template = ChatTemplate("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}done")
    with pytest.raises(ChatTemplateError, match=r"takes longer than 0\.1 s"):
        template.render([{"role": "user", "content": "a"}], n=90_000)
    assert template.render([{"role": "user", "content": "a"}], n=10) == "done"


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user", "content": {(1, 2): "x"}}], [{"role": "user", "content": {None: "x", 3: "y"}}]],
)
def test_keys_that_json_does_not_have_become_text(messages):
    assert "x" in ChatTemplate("{{ messages[0].content }}").render(messages)


def test_messages_that_contain_themselves_are_refused():
    messages: list = [{"role": "user", "content": []}]
    messages[0]["content"].append(messages)
    with pytest.raises(ChatTemplateError, match="refused the messages: maximum recursion"):
        ChatTemplate("{{ messages }}").render(messages)


def test_a_template_nested_too_deeply_is_refused():
    with pytest.raises(ChatTemplateError, match="can't be compiled"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}").render([{"role": "user", "content": "a"}])
