"""Hostile chats: messages of every wrong shape; templates that never end, grow without end, or reach for the system.

What must hold: a text, or one line of ChatTemplateError; within the template's budget of time and size.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from minisgl.chat import PLAIN_TEMPLATE, Conversation, plain_render
from minisgl.chat_limits import LONGEST, SECONDS
from minisgl.chat_template import ChatTemplate, ChatTemplateError

from .fuzz import Cpu, Target, one_line
from .tiny_tokenizers import CHAT


class _Role(str, enum.Enum):
    USER = "user"


@dataclasses.dataclass
class _Message:
    role: Any = "user"
    content: Any = "hi"


class _Hostile:
    """An object whose everything raises."""

    def __getattr__(self, name: str) -> Any:
        if name == "_repr_pretty_":  # Hypothesis may show it
            raise AttributeError(name)
        raise RuntimeError("no\nattribute")

    __str__ = __len__ = __iter__ = lambda self: 1 / 0  # pyright: ignore


def _cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3),
    st.sampled_from(["user", "assistant", "system", "tool", "", "\ud800", "{{ 1 }}", "<|im_end|>", "\x00", _Role.USER,
        object(), 1j, {1}, print]),
    st.builds(_Hostile), st.builds(_cycle), st.builds(_deep, st.sampled_from([3, 2000])), st.builds(_Message,
        st.just("user"), st.just("x")),
)  # fmt: skip
_ANY = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text", "type",
        "name", "tool_calls"]), inner, max_size=4)
    | st.dictionaries(st.integers() | st.none() | st.tuples(st.integers()), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | _ANY},
    optional={"content": st.text(max_size=8) | _ANY, "tool_calls": _ANY, "name": _ANY, "x": _ANY},
)
_ROLES = st.sampled_from(["user", "assistant", "system"])
_GOOD = st.fixed_dictionaries({"role": _ROLES, "content": st.text(max_size=8)})
_TEMPLATES = st.sampled_from([CHAT, PLAIN_TEMPLATE, "{{ messages | tojson }}{{ tools | tojson }}",
    "{% for m in messages %}{{ m.content | trim }}{{ m.content[0].text }}{% endfor %}",
                              "{{ messages }}",
                                  "{% for m in messages %}{{ m['content'].split('x')[-1] }}{% endfor %}"])  # fmt: skip


def _guarded(render: Any, *args: Any, **kwargs: Any) -> str:
    try:
        with Cpu(SECONDS + 3):
            text = render(*args, **kwargs)
    except ChatTemplateError as error:
        one_line(error)
        return "refused"
    assert isinstance(text, str) and len(text) <= LONGEST
    return "rendered"


def check_messages(given: tuple[str, Any, dict[str, Any]]) -> str:
    template, messages, options = given
    return _guarded(ChatTemplate(template, {"bos_token": "<s>"}).render, messages, **options)


_OPTIONS = st.fixed_dictionaries({}, optional={
    "add_generation_prompt": st.booleans(), "tools": st.none() | st.lists(_ANY, max_size=2), "documents": _ANY,
    "continue_final_message": st.booleans(), "enable_thinking": _ANY, "bos_token": _ANY,
        "messages_": _ANY})  # fmt: skip

# ---- templates



def _laughs() -> Iterator[str]:
    """A value that contains the last one twice, sixty times over: few objects, but who prints it?"""
    doubled = (
        "[ns.t, ns.t]", "(ns.t, ns.t)", "{1: ns.t, 2: ns.t}", "dict(a=ns.t, b=ns.t)", "[ns.t] * 2",
        "[[ns.t] + [ns.t]]", "{'a': [ns.t], 'b': [ns.t]}.values() | list", "{1: ns.t, 2: ns.t}.items()",
        "[[ns.t, 1] | list, ns.t]", "{'a': ns.t, 'b': ns.t}.copy()", "namespace(a=ns.t, b=ns.t)",
    )  # fmt: skip
    shown = ("ns.t", "ns.t | tojson(indent=9)", "ns.t | string | length", "ns.t ~ 'x'", "'%s' % ns.t", "ns.t | pprint")
    for double, show in itertools.product(doubled, shown):
        body = "{% set ns.t = " + double + " %}"
        yield "{% set ns = namespace(t='x') %}{% for i in range(60) %}" + body + "{% endfor %}{{ " + show + " }}"


BOMBS = [
    "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 10 ** 10 }}", "{{ 10 ** 10 ** 10 }}", "{{ 'abc'.center(10 ** 10) }}", "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
    "{{ '{:9999999999}'.format(1) }}", "{{ '{:{w}}'.format(1, w=9999999999) }}", "{{ 'x' | center(9999999999) }}",
        "{{ [0] * 9999999999 }}",
    "{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
    "{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "{% set ns = namespace(t=9) %}{% for i in range(60) %}{% set ns.t = ns.t * ns.t %}{% endfor %}{{ ns.t }}",
    "{% set ns = namespace(t=[1]) %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t|length }}",
    "{% set x = 'ab' * 100000 %}{{ x.replace('a', x).replace('a', x) }}",
        "{% set x = 'ab' * 100000 %}{{ x | replace('a', x) | length }}",
    "{% set x = 'a' * 1000000 %}{{ x.join('b' * 1000000) | length }}",
        "{% set x = 'a' * 1000000 %}{{ (['b'] * 1000000) | join(x) | length }}",
    "{{ '\\n' * 1000000 | indent(1000000) }}", "{{ ('\\n' * 1000000) | indent(10000) }}",
        "{{ [[0] * 1000] * 1000 | tojson(indent=99999999) }}",
    "{% for x in range(99999) if x not in range(99999) | list %}{% endfor %}",
        "{{ range(99999) | select('in', range(99999) | list) | list | length }}",
    "{{ range(10 ** 9) | list }}", "{{ lipsum }}", "{{ (1).to_bytes(9999999999, 'big') }}",
        "{{ 'x\\t' * 1000 }}{{ ('\\t' * 100000).expandtabs(9999999) }}",
    "{{ cycler }}{% set c = cycler(1, 2) %}{% for i in range(99999) %}{{ c.next() * 9999 }}{% endfor %}",
        "{{ 'a' | batch(9999999999, 'x') | list }}", "{{ 'a' | slice(9999999999) | list }}",
    "{{ joiner() }}{% set j = joiner('x' * 1000000) %}{% for i in range(99999) %}{{ j() }}{% endfor %}",
        "{% raw %}" + "x" * 100, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500, "{% for i in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% set a %}" + "{% for i in range(99999) %}x{{ i }}{% endfor %}" * 20 + "{% endset %}{{ a * 1000 }}",
    "{% filter upper %}{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}{% endfilter %}",
    "{% call(x) f() %}{% endcall %}",
    "{{ strftime_now('%Y' * 100000) }}", "{{ strftime_now('%9999999999Y') }}", "{{ raise_exception('a\\nb') }}",
        "{{ raise_exception('x' * 1000000) }}", "{{ (range(99999) | list) * 200 | sort }}",
    *_laughs(),
    "{% macro f() %}{{ varargs }}{{ f(varargs, varargs) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(x) %}{{ kwargs | length }}{{ f(x, a=kwargs, b=kwargs) }}{% endmacro %}{{ f(1, c=2) }}",
    "{% set a = namespace(t='x') %}{% set b = namespace(t='x') %}{% for i in range(60) %}{% set a.t = [a.t, a.t] %}"
        "{% set b.t = [b.t, b.t] %}{% endfor %}{{ a.t == b.t }}{{ a.t in [b.t] }}{{ {(a.t, 1): 2} }}",
    "{% set a = namespace() %}{% set b = namespace() %}{% set a.t = [b, b] %}{% set b.t = [a, a] %}{{ a }}{{ a.t }}",
    "{% set x = ['x' * 1000000] * 20 %}" + "{{ x | length }}" * 9 + "{{ ('%(a)s' * 1000) % {'a': x} }}",
    "{% set x = ['x' * 1000000] * 19 %}{{ ('{0}' * 1000).format(x) }}", "{{ [10 ** 9999] * 100000 }}",
    "{% set x = 'x' * 1000000 %}{{ [[x] * 19] * 1000 | join(',') | length }}",
    "{% set x = ['x' * 1000000] * 19 %}" + "{{ x == x }}" * 99 + "{{ x ~ x ~ x ~ x }}",
    "{{ [[[1] * 100] * 100] * 100 | pprint }}", "{{ [[[1] * 100] * 100] * 100 | tojson(indent=9999) | length }}",
]  # fmt: skip
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__class__ }}", "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'] }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}", "{{ [].append.__self__.__class__ }}",
        "{{ messages.append(1) }}", "{{ messages.clear() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}", "{{ ('{0.__class__}' | format(1)) }}",
        "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | attr('__class__') }}", "{{ strftime_now.__globals__ }}", "{{ raise_exception.__code__ }}",
        "{{ self._TemplateReference__context.environment }}",
    "{{ namespace.__init__ }}", "{{ joiner.__init__.__globals__ }}", "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}", "{% extends 'x' %}",
    "{{ '%s' | format(messages.__class__) }}", "{{ tools.__class__.__base__ }}",
        "{{ environment }}{{ environment.call }}", "{{ context }}{{ context.environment }}", "{{ caller }}",
    "{{ dict.__subclasses__() }}", "{{ range.__class__ }}", "{{ messages[0].items.__self__ }}",
        "{{ (messages | groupby('role') | first).__class__ }}",
]  # fmt: skip
_SECRETS = ("<class", "<built-in", "<function", "subclass", "__globals__", "root:", "uid=", "<module",
    "<bound method", "object at 0x")
_WORDS = st.lists(
    st.sampled_from(["{{", "}}", "{%", "%}", " for x in messages ", " endfor ", " if ", " endif ", " set a = ",
        " messages ", ".role", "[0]", "|tojson", "|length", " range(9)", "'a'",
                     " * ", " ~ ", " + ", "1", "(", ")", "\n", "-", "macro f() ", " endmacro ", "f()", "|join(", "x",
                         "{#", "#}", " is defined", ".items()", "|list", "break ", "generation ", "endgeneration "]),
    max_size=14,
).map("".join)  # fmt: skip


def check_template(text: str) -> str:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}]
    found = _guarded(lambda: ChatTemplate(text).render(messages, tools=[{"a": 1}]))
    if text in ESCAPES and found == "rendered":
        shown = ChatTemplate(text).render(messages, tools=[{"a": 1}])
        assert not any(secret in shown for secret in _SECRETS), f"{text}: {shown[:200]}"
    assert [message["content"] for message in messages] == ["hello", "x"]
    return found


# ---- conversations, piece by piece


def check_conversation(given: tuple[str, list[tuple[str, str]]]) -> str:
    template, turns = given
    compiled = ChatTemplate(template)
    render = plain_render if template == PLAIN_TEMPLATE else lambda messages, prompt: compiled.render(messages, prompt)
    conversation = Conversation(render)
    try:
        with Cpu(2 * SECONDS):
            for role, content in turns:
                conversation.begin(role)
                conversation.add(content)
                kept, _ = conversation.end(content)
                assert kept >= 0
    except ChatTemplateError as error:
        one_line(error)
        return "refused"
    return "rendered"


_TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "tool", ""]), st.text(max_size=6)),
    max_size=5)
TARGETS = [
    # some good ones, or next to all would be refused for their first message
    Target("messages", st.tuples(_TEMPLATES, _ANY | st.lists(_MESSAGE | _ANY, max_size=4)
        | st.lists(_GOOD, min_size=1, max_size=4), _OPTIONS), check_messages, ("refused", "rendered")),
    Target("template", st.sampled_from(BOMBS + ESCAPES) | _WORDS, check_template, ("refused", "rendered")),
    Target("conversation", st.tuples(_TEMPLATES | _WORDS, _TURNS), check_conversation, ("refused", "rendered")),
]
