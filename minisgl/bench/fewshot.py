"""Few-shot multiple choice: the workload on which RadixAttention pays most.

Every question of a subject stands behind the same worked examples:

    | header and ~30 examples of "capitals", ~1,000 tokens | question 1, ~35 tokens | -> one answer token
    |                    the same                          | question 2             | -> one answer token
    | header and ~30 examples of "verbs"                   | question 3             | -> one answer token

An engine without a prefix cache computes 1,035 tokens per question, one with it 35, and the 1,000 once per
subject. The requests arrive shuffled, so subjects have to be found by the tree, not by the order of arrival.

Three sources of questions: `tasks` (12 subjects, written for this project), a folder in MMLU's own CSV
layout, and random token ids of the same shape, for models without a tokenizer and for comparing with engines
elsewhere.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from .tasks import SUBJECTS, Question, Subject
from .workloads import BenchError, BenchRequest, Setting, random_ids, workload

PREFIX_TOKENS = 1000  # examples are added while the prefix is nearer to this with one more
LETTERS = "ABCD"
MMLU_SHOTS = 5


@workload(
    "fewshot",
    "multiple-choice questions behind ~1,000 shared tokens per subject; one output token",
    options=["shots", "data", "random_ids"],
)
def fewshot(setting: Setting) -> list[BenchRequest]:
    """168 questions on a CPU, 640 on a GPU, evenly over the subjects, in random order."""
    if setting.data is not None:
        return mmlu(setting, setting.data)
    if setting.random_ids or setting.tokenizer is None:
        return fewshot_ids(setting)
    return fewshot_tasks(setting)


def _count(setting: Setting) -> int:
    return setting.count(gpu=640, cpu=168, quick=16)


def _shuffled(by_subject: Iterable[list[BenchRequest]], count: int, rng: random.Random) -> list[BenchRequest]:
    """`count` requests, taken in turn from every subject, in random order."""
    in_turn = [request for request in chain(*zip_longest(*by_subject)) if request is not None][:count]
    rng.shuffle(in_turn)
    return in_turn


# ---------------------------------------------------------------- our own questions


def fewshot_tasks(setting: Setting) -> list[BenchRequest]:
    """Questions of `tasks.SUBJECTS`, scored by the first token of the right option."""
    rng = setting.rng(0)
    subjects = list(SUBJECTS.values())[: 2 if setting.quick else None]
    per_subject = -(-_count(setting) // len(subjects))
    by_subject = [
        subject_requests(subject, per_subject, setting, random.Random(rng.getrandbits(64))) for subject in subjects
    ]
    return _shuffled(by_subject, _count(setting), rng)


def subject_requests(
    subject: Subject, count: int, setting: Setting, rng: random.Random
) -> list[BenchRequest]:
    """`count` different questions of one subject behind its examples.  No example is asked as a question."""
    items = list(subject.items)
    rng.shuffle(items)
    prefix, used = _examples(subject, items, setting, rng)
    if not items[used:]:
        raise BenchError(f"--shots: {subject.name} has {len(items)} questions, one must be left to be asked")
    requests: list[BenchRequest] = []
    seen: set[str] = set()
    # Once every item was asked, they are asked again with other options.
    for attempt in range(50 * count):
        if len(requests) == count:
            break
        question = subject.ask(items[used + attempt % (len(items) - used)], rng)
        answer = _answer_token(question, setting)
        if question.prompt in seen or answer is None:
            continue
        seen.add(question.prompt)
        prompt = _encode(setting, prefix + question.prompt)
        requests.append(BenchRequest(prompt, 1, answer, subject.name))
    if not requests:
        raise BenchError(
            f"the tokenizer gives the options of {subject.name!r} the same first token: use --random-ids"
        )
    return requests


def _examples(subject: Subject, items: list, setting: Setting, rng: random.Random) -> tuple[str, int]:
    """Header and worked examples, and how many items they used: `--shots`, or as many as fill
    `PREFIX_TOKENS`.

    Three quarters of the items at most become examples by default, so that something is left to ask.
    """
    text, length = subject.header, len(_encode(setting, subject.header))
    limit = setting.shots if setting.shots is not None else len(items) * 3 // 4
    for used, item in enumerate(items[:limit]):
        shot = subject.ask(item, rng).shot
        tokens = len(_encode(setting, f"{shot}Question")) - 1  # what follows decides how line ends are cut
        if setting.shots is None and length + tokens / 2 > PREFIX_TOKENS:
            return text, used
        text, length = text + shot, length + tokens
    return text, min(limit, len(items))


def _encode(setting: Setting, text: str) -> np.ndarray:
    return np.asarray(setting.tokenizer.encode(text), np.int32)


def _answer_token(question: Question, setting: Setting) -> int | None:
    """The token that answers right: the first of the right option.  None if two options begin with the same
    token."""
    stem = _encode(setting, question.stem)
    first: list[int] = []
    for option in question.options:
        ids = _encode(setting, f"{question.stem} {option}")
        if len(ids) <= len(stem) or not np.array_equal(ids[: len(stem)], stem):
            return None  # the option merges with the word before it
        first.append(int(ids[len(stem)]))
    return first[question.answer] if len(set(first)) == len(first) else None


# ---------------------------------------------------------------- MMLU's files


def mmlu(setting: Setting, folder: Path) -> list[BenchRequest]:
    """Questions from `folder`/dev, /test and /val in MMLU's layout: <subject>_dev.csv and so on, no header
    line, rows of question, four options, letter.  The examples are the first `--shots` (5) of dev, the
    questions those of test, or of val where there is no test; the format is that of the MMLU authors' own
    evaluation."""
    rng = setting.rng(0)
    names = sorted(path.name.removesuffix("_dev.csv") for path in (folder / "dev").glob("*_dev.csv"))
    if not names:
        raise BenchError(f"--data: {folder} has no dev/<subject>_dev.csv")
    count = _count(setting)
    if count < len(names):
        names = sorted(rng.sample(names, count))
    by_subject = [_mmlu_subject(setting, folder, name, -(-count // len(names))) for name in names]
    return _shuffled(by_subject, count, rng)


def _mmlu_subject(setting: Setting, folder: Path, name: str, count: int) -> list[BenchRequest]:
    dev = _rows(folder / "dev" / f"{name}_dev.csv")
    test = folder / "test" / f"{name}_test.csv"
    rows = _rows(test if test.exists() else folder / "val" / f"{name}_val.csv")[:count]
    shots = MMLU_SHOTS if setting.shots is None else setting.shots
    if shots > len(dev):
        raise BenchError(f"--shots: {name}_dev.csv has {len(dev)} examples, {shots} were asked for")
    header = f"The following are multiple choice questions (with answers) about {name.replace('_', ' ')}.\n\n"
    while True:  # the longest question must fit: fewer examples, the same for all questions of the subject
        prefix = header + "".join(f"{_mmlu_text(row)} {row[5]}\n\n" for row in dev[:shots])
        prompts = [_encode(setting, prefix + _mmlu_text(row)) for row in rows]
        if shots == 0 or max(map(len, prompts), default=0) < setting.max_context:
            break
        shots -= 1
    bare = _encode(setting, "Answer:")
    answers = {letter: int(_encode(setting, f"Answer: {letter}")[len(bare)]) for letter in LETTERS}
    return [BenchRequest(prompt, 1, answers[row[5]], name) for prompt, row in zip(prompts, rows)]


def _mmlu_text(row: list[str]) -> str:
    options = "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, row[1:5]))
    return f"{row[0]}{options}\nAnswer:"


def _rows(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except FileNotFoundError:
        raise BenchError(f"--data: no file {path}") from None
    for number, row in enumerate(rows, 1):
        if len(row) != 6 or row[5] not in set(LETTERS):
            raise BenchError(f"--data: {path}, row {number}: expected question, four options, letter A to D")
    return rows


# ---------------------------------------------------------------- random token ids


def fewshot_ids(
    setting: Setting, shots: tuple[int, int] = (1000, 1500), question: tuple[int, int] = (40, 160)
) -> list[BenchRequest]:
    """The same shape in random ids: 10 groups with U`shots` shared tokens, U`question` of their own, one
    output token.

    640 requests on any device make the workload that other engines were measured on (seed 1); scored by
    nobody.
    """
    rng = setting.rng(1)
    count, groups = _count(setting), 10
    per_group = [count // groups + (i < count % groups) for i in range(groups)]
    requests = []
    for group, size in enumerate(per_group):
        prefix = random_ids(rng, rng.randint(*shots), setting.vocab_size)
        for _ in range(size):
            ids = prefix + random_ids(rng, rng.randint(*question), setting.vocab_size)
            requests.append(BenchRequest(np.array(ids, np.int32), 1, group=f"group {group}"))
    rng.shuffle(requests)
    return requests
