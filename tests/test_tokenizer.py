"""Tokenizer files, token bytes and chat templates, against tokenizers and transformers on the same files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.chat_template import ChatTemplate
from minisgl.tokenizer import ByteTokenizer, ChatTemplateError, Tokenizer

from . import tiny_tokenizers as tiny

HELLO = [{"role": "user", "content": "hello"}]
DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?\n\n1. two\n  2. three"},
    {"role": "assistant", "content": "two — 你好 🌶"},
    {"role": "user", "content": " <|im_end|> injected, <s> too "},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: tiny.save(make(), root / name) for name, make in tiny.FAMILIES.items()}


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {name: Tokenizer(folder) for name, folder in folders.items()}


def reference(folder):
    """transformers' tokenizer of the same folder (the import alone takes seconds)."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def reference_chat(tokenizer, messages, **kwargs) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)


# ---- the cases


def test_missing_chat_template_500(tmp_path):
    tokenizer = Tokenizer(tiny.save(tiny.byte_level(), tmp_path, chat_template=None))
    for call in (tokenizer.apply_chat_template, tokenizer.chat_ids, ByteTokenizer().chat_ids):
        with pytest.raises(ChatTemplateError, match=r"chat_template=.*/v1/completions") as caught:
            call(HELLO)
        assert isinstance(caught.value, ValueError)
        assert "\n" not in str(caught.value)
    # both fixes work
    assert tokenizer.encode("hello").size
    assert tokenizer.apply_chat_template(HELLO, chat_template="{{ messages[0].content }}") == "hello"
    assert Tokenizer(tmp_path, chat_template=tiny.CHAT).chat_ids(HELLO).size


@pytest.mark.parametrize("name", ["byte_level", "llama2"])
def test_double_bos(folders, tokenizers, name):
    tokenizer = tokenizers[name]
    ids = tokenizer.chat_ids(HELLO)
    assert ids.dtype == np.int32
    assert ids.tolist().count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    assert ids.tolist() == reference_chat(reference(folders[name]), HELLO, add_generation_prompt=True)
    # the other road, rendered text that is encoded as any prompt is, ends at the same place
    text = tokenizer.apply_chat_template(HELLO)
    assert text.startswith("<s>")
    assert tokenizer.encode(text).tolist() == ids.tolist()
    assert tokenizer.encode_batch([text, "hello"])[0].tolist() == ids.tolist()
    # what the user wrote is theirs: only the one that was added goes away
    assert tokenizer.encode("<s><s>hello")[:3].tolist().count(tokenizer.bos_id) == 2


def test_double_bos_bytes():
    tokenizer = ByteTokenizer(add_bos=True, chat_template=tiny.CHAT)
    ids = tokenizer.chat_ids(HELLO)
    assert ids.tolist() == tokenizer.encode(tokenizer.apply_chat_template(HELLO)).tolist()
    assert ids.tolist().count(256) == 1 and ids[0] == 256


# ---- encoding and decoding


@pytest.mark.parametrize("name", list(tiny.FAMILIES))
def test_same_ids_and_text_as_transformers(folders, tokenizers, name):
    tokenizer, expected = tokenizers[name], reference(folders[name])
    texts = [*tiny.CORPUS[:3], "", " ", "  two  spaces ", "a<|im_end|>b </s>", "né <tool call>"]
    for text in texts:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids.dtype == np.int32 and ids.ndim == 1
            assert ids.tolist() == expected.encode(text, add_special_tokens=special)
            assert [tokenizer.encode_batch([text], special)[0].tolist()] == [ids.tolist()]
            for skip in (True, False):
                # clean-up of spaces is transformers' own affair (and off for every language model)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected.decode(
                    ids.tolist(), skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
    assert tokenizer.bos_id == expected.bos_token_id
    assert tokenizer.eos_ids == {expected.eos_token_id}
    assert tokenizer.vocab_size == len(expected)


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma"])
def test_any_text_round_trips(tokenizers, name):
    tokenizer = tokenizers[name]

    @settings(max_examples=150, deadline=None)
    @given(st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=30))
    def check(text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert (
            b"".join(map(tokenizer.token_bytes, ids.tolist()))
            .decode()
            .removeprefix(" " if name == "llama2" else "")
            == text
        )

    check()


def test_decode_takes_any_integers(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("hello world")
    for same in (ids.tolist(), tuple(ids.tolist()), ids.astype(np.int64), iter(ids.tolist())):
        assert tokenizer.decode(same) == "hello world"
    assert tokenizer.decode([*ids.tolist(), 10**7, -1]) == "hello world"
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode(ids, spaces_between_special_tokens=False) == "hello world"


@pytest.mark.parametrize("method", ["encode", "encode_batch"])
def test_bad_text(tokenizers, method):
    for tokenizer in (tokenizers["byte_level"], ByteTokenizer()):
        call = getattr(tokenizer, method)
        wrap = (lambda x: [x]) if method == "encode_batch" else (lambda x: x)
        with pytest.raises(TypeError, match="text must be a str, not int"):
            call(wrap(3))
        with pytest.raises(ValueError, match="lone surrogate at position 2"):
            call(wrap("ab\ud800c"))


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    backend = tiny.byte_level()
    plain = Tokenizer(tiny.save(backend, tmp_path / "plain"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer(tiny.save(backend, tmp_path / "cut"))
    text = "hello world, the quick brown fox"
    assert tokenizer.encode(text).tolist() == plain.encode(text).tolist()
    assert tokenizer.encode_batch([text, "a"])[1].tolist() == plain.encode("a").tolist()


def test_threads_share_a_tokenizer(folders):
    tokenizer = Tokenizer(folders["byte_level"])
    texts = [f"hello world {n}" for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: tokenizer.decode(tokenizer.encode(text)), texts)) == texts


# ---- token bytes


def test_token_bytes(tokenizers):
    byte_level, llama2 = tokenizers["byte_level"], tokenizers["llama2"]
    pieces = byte_level._backend.get_vocab()
    assert byte_level.token_bytes(pieces["Ġ"]) == b" "
    assert byte_level.token_bytes(pieces["Ċ"]) == b"\n"
    assert byte_level.token_bytes(pieces["<tool call>"]) == b"<tool call>"  # not in the alphabet: text
    assert byte_level.token_bytes(pieces["né"]) == b"n\xe9"  # in it: as its decoder has it
    assert {byte_level.token_bytes(pieces[s]) for s in tiny.SPECIALS} == {b""}
    pieces = llama2._backend.get_vocab()
    assert llama2.token_bytes(pieces["▁▁"]) == b"  "
    assert llama2.token_bytes(pieces["▁the"]) == b" the"
    assert llama2.token_bytes(pieces["<0xE2>"]) == b"\xe2"
    assert llama2.token_bytes(pieces["<unk>"]) == b""
    assert llama2.token_text(pieces["▁the"]) == " the"
    assert (llama2.token_text(pieces["<0xE2>"]), llama2.token_text(10**6)) == ("\ufffd", "")
    assert byte_level.token_text(byte_level.bos_id) == "<s>"
    for tokenizer in (*tokenizers.values(), ByteTokenizer(["ab"])):
        table = tokenizer.all_token_bytes()
        assert table is tokenizer.all_token_bytes()
        assert len(table) == tokenizer.vocab_size
        assert all(table[i] == b"" for i in tokenizer.special_ids)
        for bad in (-1, tokenizer.vocab_size):
            with pytest.raises(IndexError, match="out of range"):
                tokenizer.token_bytes(bad)


@pytest.mark.parametrize("name", list(tiny.FAMILIES))
def test_every_token_adds_its_bytes(tokenizers, name):
    """Bytes are what the library's decoder adds after some text; broken ones are U+FFFD on both sides."""
    tokenizer = tokenizers[name]
    anchor = max(
        i for i, data in enumerate(tokenizer.all_token_bytes()) if data == b"a"
    )  # not the byte token
    for token in range(tokenizer.vocab_size):
        whole = tokenizer._backend.decode([anchor, token, anchor])
        assert whole == "a" + tokenizer.token_bytes(token).decode(errors="replace") + "a"


def test_all_bytes_are_there(tokenizers):
    for name in ("byte_level", "llama2", "gemma"):
        single = {data for data in tokenizers[name].all_token_bytes() if len(data) == 1}
        assert len(single) == 256


def test_token_bytes_refused_without_byte_rule(tmp_path):
    tokenizer = Tokenizer(tiny.save(tiny.word_piece(), tmp_path))
    assert tokenizer.text_rule is None
    with pytest.raises(ValueError, match="doesn't concatenate bytes"):
        tokenizer.all_token_bytes()
    assert tokenizer.decode(tokenizer.encode("the quick brown fox, hello")) == "the quick brown fox, hello"


def test_byte_tokenizer():
    tokenizer = ByteTokenizer(["DEF", b"\xf0\x9f"])
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode("né<eos>").tolist() == [0x6E, 0xC3, 0xA9, 257]
    assert tokenizer.decode([258, 257, 65]) == "DEFA"
    assert tokenizer.decode([258, 257, 65], skip_special_tokens=False) == "DEF<eos>A"
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, {257})


# ---- folders


def test_stop_ids_come_from_the_model_files(tmp_path):
    folder = tiny.save(tiny.byte_level(), tmp_path)
    (folder / "config.json").write_text('{"eos_token_id": 9}')
    assert Tokenizer(folder).eos_ids == {9, 1}
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    assert Tokenizer(folder).eos_ids == {3, 7, 1}


def test_the_post_processor_decides_about_bos(tmp_path):
    """add_bos_token in tokenizer_config.json belongs to the slow tokenizers: tokenizer.json knows better."""
    folder = tiny.save(tiny.byte_level(), tmp_path, add_bos_token=False, add_eos_token=True)
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("hello").tolist()
    assert (ids[0], ids[-1] in tokenizer.eos_ids) == (tokenizer.bos_id, False)
    assert reference(folder).encode("hello") == ids


def test_tokens_that_only_the_config_knows(tmp_path):
    backend = tiny.byte_level()
    size = backend.get_vocab_size()
    added = {str(size): {"content": "<|eot|>", "special": True}, str(size + 1): {"content": "<plain>"}}
    folder = tiny.save(backend, tmp_path, added_tokens_decoder=added, eos_token="<|eot|>", pad_token="<pad>")
    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_ids == {size}
    assert tokenizer.encode("a<|eot|><plain>", add_special_tokens=False).tolist()[1:] == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<plain>"
    assert tokenizer.vocab_size == size + 3 and size + 2 in tokenizer.special_ids


def test_folder_without_config(tmp_path):
    tiny.byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (None, set(), None)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer in .*expected tokenizer.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer that this version can read"):
        Tokenizer(tmp_path)
    tiny.save(tiny.byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer(tmp_path)


def test_folder_without_tokenizer_json_is_converted(tmp_path):
    """vocab.json + merges.txt, as GPT-2 and Qwen2 were published: transformers converts them."""
    backend = tiny.byte_level()
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    text = "hello world 你好"
    assert tokenizer.encode(text, False).tolist() == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == {1}


def test_import_needs_neither_torch_nor_transformers():
    code = "import sys, minisgl.tokenizer, minisgl.stops; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


# ---- chat templates


def test_chat_ids_equal_transformers(folders, tokenizers):
    for name in ("byte_level", "llama2", "gemma"):
        expected = reference(folders[name])
        for generate in (True, False):
            ids = tokenizers[name].chat_ids(DIALOGUE, add_generation_prompt=generate)
            assert ids.tolist() == reference_chat(expected, DIALOGUE, add_generation_prompt=generate)


RICH = """{%- if tools %}
    {{- 'tools: ' + (tools | tojson(indent=2)) + ' ' + (tools | tojson) }}
{%- endif %}
{% for message in messages %}
    {% if loop.index0 > 5 %}{% break %}{% endif %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns = namespace(n=0) %}
    {{ bos_token }}{{ message['role'] | upper }}: {{ message.content | trim }}{{ eos_token }}
    {% generation %}{{ message.content[:3] }}{% endgeneration %}
{% endfor %}
{{ strftime_now('%Y') | length }} {{ extra }}
"""


def test_template_features_equal_transformers(folders):
    tool = {"name": "f", "note": "<é> & 'q'"}
    kwargs = {"tools": [tool], "extra": [1, {"a": None}], "add_generation_prompt": False}
    tokenizer = Tokenizer(folders["byte_level"], chat_template=RICH)
    expected = reference(folders["byte_level"]).apply_chat_template(
        DIALOGUE, chat_template=RICH, tokenize=False, **kwargs
    )
    assert tokenizer.apply_chat_template(DIALOGUE, **kwargs) == expected


def test_continue_final_message_equals_transformers(folders, tokenizers):
    chat = [*HELLO, {"role": "assistant", "content": "Sure: "}]
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    expected = reference(folders["byte_level"])
    for template in (tiny.CHAT, tiny.CHAT.replace("m.content", "m.content | trim")):
        text = tokenizers["byte_level"].apply_chat_template(chat, chat_template=template, **kwargs)
        assert text == expected.apply_chat_template(chat, chat_template=template, tokenize=False, **kwargs)
        assert text.endswith("Sure:" if "trim" in template else "Sure: ")
    with pytest.raises(ChatTemplateError, match="add_generation_prompt=False"):
        tokenizers["byte_level"].apply_chat_template(chat, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="drops the last message"):
        tokenizers["byte_level"].apply_chat_template(chat, chat_template="x", **kwargs)


def test_where_templates_come_from(tmp_path):
    backend = tiny.byte_level()
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = Tokenizer(tiny.save(backend, tmp_path / "named", chat_template=named))
    assert tokenizer.apply_chat_template(HELLO) == "D"
    assert tokenizer.apply_chat_template(HELLO, tools=[{"name": "f"}]) == "T"
    assert tokenizer.apply_chat_template(HELLO, chat_template="tool_use") == "T"
    assert tokenizer.apply_chat_template(HELLO, chat_template="{{ 1 + 1 }}") == "2"

    folder = tiny.save(backend, tmp_path / "file", chat_template="config")
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer(folder).apply_chat_template(HELLO) == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert Tokenizer(folder).apply_chat_template(HELLO) == "file"
    assert Tokenizer(folder).apply_chat_template(HELLO, chat_template="rag") == "R"
    assert Tokenizer(folder, chat_template="mine").apply_chat_template(HELLO) == "mine"
    assert Tokenizer(folder, chat_template={"default": "mine"}).apply_chat_template(HELLO) == "mine"

    with pytest.raises(ChatTemplateError, match="no default among"):
        ChatTemplate({"a": "1", "b": "2"}).render(HELLO)


def test_python_functions_as_tools(tokenizers):
    def add(a: int, b: int) -> int:
        """Adds numbers.

        Args:
            a: one
            b: other
        """
        return a + b

    text = tokenizers["byte_level"].apply_chat_template(
        HELLO, tools=[add], chat_template="{{ tools[0].function.name }}"
    )
    assert text == "add"


def test_message_objects(tokenizers):
    @dataclasses.dataclass
    class Message:
        role: str
        content: str | None
        tool_calls: None = None

    class Pydantic:
        def model_dump(self):
            return {"role": "user", "content": "hello"}

    expected = tokenizers["byte_level"].apply_chat_template(HELLO)
    for message in (Message("user", "hello"), Pydantic()):
        assert tokenizers["byte_level"].apply_chat_template([message]) == expected
    text = tokenizers["byte_level"].apply_chat_template(
        [{"role": "assistant", "content": None}], chat_template="{{ 'content' in messages[0] }}"
    )
    assert text == "False"
    assert HELLO == [{"role": "user", "content": "hello"}]  # the caller's messages are left alone


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ([], "x", "messages is empty"),
        ("hello", "x", "messages must be a list of messages, not str"),
        ([{"content": "hello"}], "x", r'messages\[0\] must be a dict with a "role"'),
        (HELLO, "{{ raise_exception('roles must\\n alternate') }}", "roles must alternate"),
        (HELLO, "{% if %}", "chat_template: line 1"),
        (HELLO, "{{ messages[0].content + 1 }}", "chat template refused the messages"),
        (HELLO, "{{ ''.__class__.__mro__ }}", "chat template refused the messages"),
        (HELLO, "{{ messages.append(1) }}", "chat template refused the messages"),
        (HELLO, "{% for i in range(10**9) %}{% endfor %}", "chat template refused the messages"),
    ],
)
def test_refused_chats(tokenizers, messages, template, message):
    with pytest.raises(ChatTemplateError, match=message) as caught:
        tokenizers["byte_level"].apply_chat_template(messages, chat_template=template)
    assert "\n" not in str(caught.value)


def test_bad_template_override(folders):
    for bad in ("{% if %}", {}, [{"name": "default"}], 3):
        with pytest.raises(ChatTemplateError, match="chat_template"):
            Tokenizer(folders["byte_level"], chat_template=bad)


# ---- the default model's tokenizer


def test_default_model_equals_transformers(default_model_folder):
    tokenizer, expected = Tokenizer(default_model_folder), reference(default_model_folder)
    assert tokenizer.vocab_size == len(expected) == 49152
    assert tokenizer.eos_ids == {2} and tokenizer.bos_id == 1
    texts = [*tiny.CORPUS[:3], "\n\n1. one\n\n2. two  3", "x = 12 345", "<|im_start|>user\nhi<|im_end|>"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts)):
        assert ids.tolist() == expected.encode(text)
        assert tokenizer.decode(ids, False) == expected.decode(ids.tolist()) == text
    for chat in (HELLO, DIALOGUE):
        for generate in (True, False):
            ids = tokenizer.chat_ids(chat, add_generation_prompt=generate)
            assert ids.tolist() == reference_chat(expected, chat, add_generation_prompt=generate)
