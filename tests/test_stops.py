"""Stop strings and patterns in a stream, against a reader who looks again after every single character."""

from __future__ import annotations

import re
import time

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.sampling_params import SamplingParams
from minisgl.stops import MAX_REGEX_HOLD, StopChecker, StopRegexTimeout


def run(checker: StopChecker, deltas) -> list[str]:
    """What is printed after each delta, and at the end; stops feeding after a match as an engine does."""
    printed = []
    for delta in deltas:
        printed.append(checker.feed(delta))
        if checker.matched is not None:
            return printed
    return [*printed, checker.finish()]


# ---- the cases


def test_stop_prefix_streamed():
    checker = StopChecker(["DEFGHIJ"])
    assert run(checker, ["DEF", "G", "HI", "J"]) == ["", "", "", ""]
    assert checker.matched == "DEFGHIJ"

    checker = StopChecker(["DEFGHIJ"])
    assert run(checker, ["DEF", "G", "X"]) == ["", "", "DEFGX", ""]
    assert checker.matched is None


def test_stop_holdback_too_long():
    checker = StopChecker(["b,c"])
    assert run(checker, ["a", ",", "d"]) == ["a", ",", "d", ""]
    # "b" and "b," are beginnings of the stop, nothing else is ever held
    assert run(StopChecker(["b,c"]), ["ab", ",", "d", "cb"]) == ["a", "", "b,d", "c", "b"]


# ---- which stop, and what is printed


def test_stop_inside_a_token():
    checker = StopChecker(["STOP"])
    assert run(checker, ["hello ST", "OP and more"]) == ["hello ", ""]
    assert (checker.matched, checker.matched_text) == ("STOP", "STOP")
    assert checker.feed("later") == checker.finish() == ""


def test_no_stop_trim():
    checker = StopChecker(["STOP"], no_stop_trim=True)
    assert "".join(run(checker, ["hello ST", "OP and more"])) == "hello STOP"


def test_first_completed_stop_wins():
    for stops in (["b", "abc"], ["abc", "b"]):
        checker = StopChecker(stops)
        assert "".join(run(checker, ["xabcb"])) == "xa"  # "b" is complete before "abc"
        assert checker.matched == "b"
    checker = StopChecker(["\n", "\n\n"])
    assert "".join(run(checker, ["one\n\ntwo"])) == "one"
    assert checker.matched == "\n"


def test_longest_of_those_completed_together():
    for stops in (["end", "the end"], ["the end", "end"]):
        checker = StopChecker(stops)
        assert "".join(run(checker, ["this is the", " end."])) == "this is "
        assert checker.matched == "the end"


def test_overlapping_restart():
    """A failed beginning may contain the beginning of the real one."""
    checker = StopChecker(["aab"])
    assert run(checker, list("aaaab")) == ["", "", "a", "a", ""]
    checker = StopChecker(["###END"])
    assert "".join(run(checker, ["##", "##", "#EN", "D"])) == "##"


def test_single_string_and_no_stops():
    assert "".join(run(StopChecker("ab"), ["xa", "b"])) == "x"
    assert run(StopChecker(), ["any", "thing"]) == ["any", "thing", ""]
    assert run(StopChecker([], []), ["any", "thing"]) == ["any", "thing", ""]


def test_text_before_min_new_tokens_is_not_checked():
    checker = StopChecker(["ab"])
    assert checker.feed("ab", check=False) == "ab"
    assert checker.feed("xa", check=False) == "xa"  # no beginning of a stop carries over
    assert checker.feed("b") == "b"
    assert checker.feed("a") == ""
    assert checker.feed("b") == "" and checker.matched == "ab"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"stop": [""]}, "stop must not contain an empty string"),
        ({"stop": [3]}, "stop must be a str or a list of str, not int"),
        ({"stop_regex": [""]}, "stop_regex must not contain an empty string"),
        ({"stop_regex": ["("]}, "stop_regex must be a valid regular expression, got '\\('"),
        ({"stop_regex": ["a*"]}, "stop_regex must be a pattern that does not match the empty text, got 'a\\*'"),
    ],
)
def test_bad_stops(kwargs, message):
    with pytest.raises(ValueError, match=message):
        StopChecker(**kwargs)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:(?:(?:a?){1000}){1000}){1000}b",
        "(a{1000000}){1000000}",
        "((((a?){999}){999}){999}){999}b",
        "(?x)((a?)#\n{9999})#\n{9999}b",
        "(?ix:((a?) {9999}) {9999}b)",
        "((a?(?#b)){9999}(?#c)){9999}b",
        "(" * 90 + "a?" + "){50}" * 90,
        "a{300000}",
        "(?:" * 3000 + "a" + ")" * 3000,
    ],
)
def test_patterns_that_would_fill_the_memory_are_refused(pattern):
    """`regex` writes counted repeats out, gigabytes of them for the first ones."""
    for make in (StopChecker, SamplingParams):
        begin = time.thread_time()
        with pytest.raises(ValueError, match="stop_regex") as error:
            make(stop_regex=[pattern])
        assert "\n" not in str(error.value) and len(str(error.value)) < 250
        assert time.thread_time() - begin < 2


@pytest.mark.parametrize(
    "pattern", [r"(\d{1,3}\.){3}\d{1,3}", r"\d{4}-\d{2}-\d{2}T(\d{2}:){2}\d{2}", "x{9999}", "(ab){400}c"]
)
def test_patterns_that_repeat_within_reason(pattern):
    assert SamplingParams(stop_regex=pattern).stop_regex == (pattern,)
    assert StopChecker(stop_regex=pattern).matched is None


# ---- patterns


def test_stop_regex_across_tokens():
    checker = StopChecker(stop_regex=[r"\n\n(Q|A):"])
    assert run(checker, ["yes", "\n", "\nQ", ": more"]) == ["yes", "", "", ""]
    assert (checker.matched, checker.matched_text) == (r"\n\n(Q|A):", "\n\nQ:")
    assert run(StopChecker(stop_regex=[r"\n\n(Q|A):"]), ["yes\n", "\nB"]) == ["yes", "\n\nB", ""]


def test_stop_regex_and_strings_together():
    assert "".join(run(StopChecker("cd", r"\d{3}"), ["ab12", "cd3"])) == "ab12"
    checker = StopChecker("cd", r"\d{3}", no_stop_trim=True)
    assert "".join(run(checker, ["ab12", "34cd"])) == "ab123"
    assert checker.matched == r"\d{3}"


def test_stop_regex_sees_what_was_printed():
    assert "".join(run(StopChecker(stop_regex=r"\bno"), ["pia", "no", " no", " x"])) == "piano "
    assert "".join(run(StopChecker(stop_regex=r"(?<=a)b"), ["b", "a", "b"])) == "ba"
    assert "".join(run(StopChecker(stop_regex=r"^no"), ["x", "no"])) == "xno"
    assert "".join(run(StopChecker(stop_regex=r"^no"), ["n", "o!"])) == ""


def test_stop_regex_that_looks_ahead_waits_one_character():
    pattern = r"\bno\b"
    assert run(StopChecker(stop_regex=pattern), [" no", "thing"]) == [" ", "nothing", ""]
    assert run(StopChecker(stop_regex=pattern), [" no", "."]) == [" ", ""]
    checker = StopChecker(stop_regex=pattern)
    assert run(checker, ["oh no"]) == ["oh ", ""]  # the end of the output counts as well
    assert checker.matched == pattern
    # while one alternative waits, an earlier beginning of the other is held too
    assert run(StopChecker(stop_regex=r"DEFG\b|EF\b"), ["xDEF", "G", "."]) == ["x", "", ""]
    assert run(StopChecker(stop_regex=r"\$5[$]"), ["for $5$"]) == ["for "]  # these look at nothing


def test_stop_regex_hold_is_bounded():
    checker = StopChecker(stop_regex=r"<.*>", no_stop_trim=True)
    printed = checker.feed("a<")
    for _ in range(2 * MAX_REGEX_HOLD):
        printed += checker.feed("x")
        assert len(checker.held) <= MAX_REGEX_HOLD
    assert printed.startswith("a<xxx")
    assert len(printed + checker.finish()) == 2 + 2 * MAX_REGEX_HOLD


def test_stop_regex_cannot_hang():
    checker = StopChecker(stop_regex=r"(x+x+)+y")
    start = time.perf_counter()
    with pytest.raises(StopRegexTimeout, match="takes too long"):
        checker.feed("x" * 4000 + "z")
    assert time.perf_counter() - start < 5


def test_many_slow_patterns_share_one_budget():
    """Each of them is quick enough alone: together they may not take longer than one would."""
    slow = [rf"(x+x+)+{chr(ord('a') + i % 20)}{i}" for i in range(1000)]
    start = time.thread_time()
    with pytest.raises(StopRegexTimeout, match="takes too long"):
        StopChecker(stop_regex=slow).feed("x" * 22 + "z")
    assert time.thread_time() - start < 2


def test_a_slow_pattern_cannot_be_slow_at_every_token():
    """Scans that stay under the limit for one piece of text, for hundreds of pieces."""

    def seconds(size: int) -> float:
        start = time.thread_time()
        StopChecker(stop_regex=r"(x+x+)+y").feed("x" * size + "z")
        return time.thread_time() - start

    size = next(n for n in range(10, 400, 2) if seconds(n) > 0.02)
    checker, start, pieces = StopChecker(stop_regex=r"(x+x+)+y"), time.thread_time(), 0
    with pytest.raises(StopRegexTimeout, match="takes too long"):
        while pieces < 500:
            checker.feed("x" * size + "z")
            pieces += 1
    assert 2 < pieces < 100 and time.thread_time() - start < 3


def test_long_outputs_have_time_for_their_patterns():
    checker = StopChecker(stop_regex=[rf"\nEND{i}\b" for i in range(20)])
    printed = "".join(checker.feed(f" word{i}\n") for i in range(4000))
    assert checker.matched is None and len(printed + checker.finish()) == sum(len(f" word{i}\n") for i in range(4000))


def test_stop_strings_take_linear_time():
    """The worst case of backing up: every character fails against a long beginning."""

    def seconds(n: int) -> float:
        checker = StopChecker(["a" * 300 + "b", "a" * 299 + "c"])
        start = time.thread_time()
        for _ in range(n):
            checker.feed("aaaa")
        return time.thread_time() - start

    seconds(1000)
    assert min(seconds(20000) for _ in range(3)) < 40 * min(seconds(2000) for _ in range(3))


# ---- property tests

text = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(data, whole: str) -> list[str]:
    edges = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    return [whole[a:b] for a, b in zip([0, *edges], [*edges, len(whole)])]


def first_completed(stops, whole: str):
    """(start, end, stop) as a reader finds it who looks after every character; None without a match."""
    for end in range(len(whole) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if whole[:end].endswith(stop):
                return end - len(stop), end, stop
    return None


def longest_beginning(stops, shown: str) -> int:
    prefixes = {stop[:n] for stop in stops for n in range(len(stop))}
    return max(n for n in range(len(shown) + 1) if shown[len(shown) - n :] in prefixes)


@settings(max_examples=200, deadline=None)
@given(stops, text, st.booleans(), st.data())
def test_strings_equal_the_naive_reader(stops, whole, no_trim, data):
    checker = StopChecker(stops, no_stop_trim=no_trim)
    printed, fed = "", ""
    for delta in cut(data, whole):
        printed += checker.feed(delta)
        fed += delta
        if checker.matched is not None:
            break
        assert printed + checker.held == fed
        assert len(checker.held) == longest_beginning(stops, fed)  # no more and no less
    printed += checker.finish()
    found = first_completed(stops, whole)
    if found is None:
        assert (printed, checker.matched) == (whole, None)
    else:
        start, end, stop = found
        assert (printed, checker.matched) == (whole[: end if no_trim else start], stop)


atoms = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", ".", "ab"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=5,
).filter(lambda pattern: not re.fullmatch(pattern, ""))


@settings(max_examples=150, deadline=None)
@given(patterns, text, st.booleans(), st.data())
def test_patterns_equal_the_naive_reader(pattern, whole, no_trim, data):
    checker = StopChecker(stop_regex=[pattern], no_stop_trim=no_trim)
    printed, fed = "", ""
    for delta in cut(data, whole):
        printed += checker.feed(delta)
        fed += delta
        if checker.matched is not None:
            break
        assert printed + checker.held == fed
    printed += checker.finish()
    ends = (end for end in range(len(whole) + 1) if regex.search(pattern, whole[:end]))
    end = next(ends, None)
    if end is None:
        assert (printed, checker.matched) == (whole, None)
    else:
        match = regex.search(pattern, whole[:end])
        assert (printed, checker.matched) == (whole[: match.end() if no_trim else match.start()], pattern)
