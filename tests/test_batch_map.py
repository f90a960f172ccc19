"""`minisgl.batch.map`: limits, retries, and a job that is killed in the middle and goes on."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import minisgl as sgl
from minisgl import batch
from minisgl.checkpoint import Checkpoint

from .scripted_backend import ScriptedBackend

ROOT = Path(__file__).parents[1]


@sgl.function
def ask(s, question):
    s += question + ":" + sgl.gen("answer", max_tokens=20)
    return s["answer"].upper()


def echo(**options):
    return ScriptedBackend(lambda prompt: f"<{prompt.text[:-1]}>", **options)


def questions(n):
    return [ask.bind(question=f"q{i}") for i in range(n)]


def run(programs, **options):
    return batch.map(programs, **{"backend": echo(), "progress_bar": False, **options})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("minisgl.batch_map.FIRST_WAIT", 0.001)


def test_rows_come_in_the_order_of_the_programs():
    rows = run(questions(50), max_concurrency=7)
    assert [row.index for row in rows] == list(range(50))
    assert [row.value for row in rows] == [f"<Q{i}>" for i in range(50)]
    assert rows[3].text == "q3:<q3>" and rows[3].variables == {"answer": "<q3>"} and rows[3].error is None


def test_no_programs_are_no_rows():
    assert run([]) == []


def test_concurrency_is_limited():
    backend = echo(delay=0.01)
    run(questions(30), backend=backend, max_concurrency=3)
    assert backend.peak == 3


def test_running_programs_share_the_token_budget_and_a_big_one_runs_alone():
    running, seen = [], []
    lock = threading.Lock()
    needs = {f"q{i}": 40 if i % 3 else 100 for i in range(12)}
    needs["q5"] = 500  # more than the budget

    @sgl.function
    def note(s, question):
        with lock:
            running.append(needs[question])
            seen.append(list(running))
        time.sleep(0.005)
        s += question + ":" + sgl.gen("answer")
        s.text()
        with lock:
            running.remove(needs[question])

    programs = [note.bind(question=f"q{i}") for i in range(12)]
    rows = run(programs, token_budget=120, tokens=lambda p: needs[p.bound["question"]], max_concurrency=8)
    assert len(rows) == 12
    assert all(sum(now) <= 120 or len(now) == 1 for now in seen)
    assert any(len(now) > 1 for now in seen) and [500] in seen


def test_the_estimate_weighs_long_arguments_more():
    assert batch.map.__module__ == "minisgl.batch_map"
    from minisgl.batch_map import estimate

    short, long = ask.bind(question="why"), ask.bind(question="why " * 300)
    assert estimate(short, 10) == 11 and estimate(long, 10) == 410


class Shaky(ScriptedBackend):
    """Fails the first `times` jobs of every prompt."""

    def __init__(self, times, error=ConnectionError):
        super().__init__("ok")
        self.left = collections.defaultdict(lambda: times)
        self.error = error

    def _generate(self, job, number):
        if self.left[job.prompt.text] > 0:
            self.left[job.prompt.text] -= 1
            raise self.error("try again")
        return super()._generate(job, number)


def test_what_fails_is_tried_again():
    rows = run(questions(5), backend=Shaky(2), retries=2)
    assert [(row.value, row.attempts, row.error) for row in rows] == [("OK", 3, None)] * 5


def test_failures_are_raised_at_the_end_and_the_others_are_there():
    class OneBad(ScriptedBackend):
        def _generate(self, job, number):
            if job.prompt.text.startswith("q2"):
                raise ConnectionError("no line")
            return super()._generate(job, number)

    with pytest.raises(batch.BatchError, match=r"1 of 4 programs failed; row 2: ConnectionError: no line") as caught:
        run(questions(4), backend=OneBad(), retries=1)
    assert [row.error is None for row in caught.value.rows] == [True, True, False, True]
    rows = run(questions(4), backend=OneBad(), retries=0, raises=False)
    assert rows[2].error == "ConnectionError: no line" and rows[2].attempts == 1


def test_a_program_that_raises_stop_iteration_fails_like_any_other():
    @sgl.function
    def first_of_none(s):
        next(iter([]))

    (row,) = run([first_of_none.bind()], backend=ScriptedBackend(), retries=0, raises=False)
    assert row.error == "RuntimeError: the program raised StopIteration()" and row.attempts == 1


def test_wrong_arguments_are_not_tried_again():
    backend = Shaky(9, ValueError)
    rows = run(questions(1), backend=backend, retries=5, raises=False)
    assert rows[0].attempts == 1 and "ValueError" in rows[0].error


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_concurrency": 0}, ValueError, "max_concurrency"),
        ({"retries": -1}, ValueError, "retries"),
        ({"token_budget": True}, ValueError, "token_budget"),
        ({"temprature": 1}, TypeError, "temprature"),
        ({"programs": ["text"]}, ValueError, r"programs\[0\]"),
        ({"programs": [ask]}, TypeError, "question"),
    ],
)
def test_wrong_arguments_are_refused_at_once(options, error, words):
    with pytest.raises(error, match=words):
        run(**{"programs": questions(2), **options})


def test_it_works_inside_a_running_loop_and_can_be_awaited():
    async def notebook():
        blocking = run(questions(3))
        awaited = await batch.amap(questions(3), backend=echo(), progress_bar=False)
        return blocking, awaited

    blocking, awaited = asyncio.run(notebook())
    assert blocking == awaited


def test_cancelling_stops_what_runs():
    async def main():
        backend = echo(delay=30)
        task = asyncio.create_task(batch.amap(questions(8), backend=backend, progress_bar=False, max_concurrency=4))
        while backend.running < 4:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return backend

    backend = asyncio.run(main())
    assert len(backend.jobs) == 4 == len(backend.cancelled)


@pytest.mark.parametrize("early", ["before it runs", "before its workers are there"])
def test_a_job_that_is_stopped_early_starts_nothing(tmp_path, monkeypatch, early):
    """Ctrl-C may come at any moment, also while a job's thread begins."""
    from minisgl.batch_map import _Job

    backend = echo()
    job = _Job(questions(4), backend, 4, None, None, 0, tmp_path / "rows.jsonl", False, {})
    if early == "before it runs":
        job.stop()
    else:
        monkeypatch.setattr(job, "_resume", lambda checkpoint: job.stop() or {})
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(job.run())
    assert not backend.jobs


# ---------------------------------------------------------------- checkpoints


def test_a_second_call_runs_nothing(tmp_path):
    file = tmp_path / "rows.jsonl"
    first = run(questions(20), checkpoint=file)
    backend = echo()
    assert run(questions(20), checkpoint=file, backend=backend) == first and not backend.jobs
    assert len(file.read_text().splitlines()) == 20


def test_failed_rows_are_tried_again_by_the_next_call(tmp_path):
    file = tmp_path / "rows.jsonl"
    run(questions(3), checkpoint=file, backend=Shaky(1), retries=0, raises=False)
    assert file.read_text() == ""
    assert [row.value for row in run(questions(3), checkpoint=file)] == ["<Q0>", "<Q1>", "<Q2>"]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_line_is_run_again(tmp_path, cut):
    file = tmp_path / "rows.jsonl"
    whole = run(questions(4), checkpoint=file, max_concurrency=1)
    file.write_bytes(file.read_bytes()[:-cut])
    backend = echo()
    assert run(questions(4), checkpoint=file, backend=backend) == whole
    assert len(backend.jobs) == 1 and len(file.read_text().splitlines()) == 4


def test_another_job_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    run(questions(3), checkpoint=file)
    for programs, options in ((questions(2), {}), ([ask.bind(question="else")] * 3, {}),
                              (questions(3), {"temperature": 0})):  # fmt: skip
        with pytest.raises(ValueError, match="another program or other arguments"):
            run(programs, checkpoint=file, **options)
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.parametrize("content", ["a story\n", "a story", '{"index": 0}\n', "[1]\n"])
def test_another_file_is_refused_and_left_alone(tmp_path, content):
    file = tmp_path / "notes.txt"
    file.write_text(content)
    with pytest.raises(ValueError, match="checkpoint"):
        run(questions(1), checkpoint=file)
    assert file.read_text() == content


def test_two_jobs_cannot_write_one_file(tmp_path):
    held = Checkpoint(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="another process is writing"):
        run(questions(1), checkpoint=tmp_path / "rows.jsonl")
    held.close()
    assert len(run(questions(1), checkpoint=tmp_path / "rows.jsonl")) == 1


def test_values_that_json_cannot_hold_are_that_rows_error(tmp_path):
    @sgl.function
    def odd(s, question):
        s += question
        return {1, 2} if question == "bad" else (1, 2)

    programs = [odd.bind(question="bad"), odd.bind(question="good")]
    rows = run(programs, checkpoint=tmp_path / "rows.jsonl", raises=False)
    assert "checkpoint cannot hold" in rows[0].error and rows[1].value == [1, 2]


CHILD = """
import sys
sys.path.insert(0, {root!r})
from minisgl import batch
from tests.test_batch_map import echo, questions
backend = echo(delay=0.002)
batch.map(questions(2000), backend=backend, checkpoint={file!r}, max_concurrency=16, progress_bar=False)
"""


def test_killed_in_the_middle_and_resumed_every_row_is_there_once(tmp_path):
    file = tmp_path / "rows.jsonl"
    child = CHILD.format(root=str(ROOT), file=str(file))
    kills = 0
    for most in (400, 1000):  # kill it twice, each time in the middle of its work
        process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while not file.exists() or file.read_bytes().count(b"\n") < most:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        kills += process.returncode == -signal.SIGKILL
    before = file.read_bytes().count(b"\n")
    assert kills == 2 and 1000 <= before < 2000
    backend = echo()
    rows = run(questions(2000), backend=backend, checkpoint=file)
    assert [row.value for row in rows] == [f"<Q{i}>" for i in range(2000)]
    saved = [json.loads(line)["index"] for line in file.read_text().splitlines()]
    assert sorted(saved) == list(range(2000))
    assert len(backend.jobs) == 2000 - before
