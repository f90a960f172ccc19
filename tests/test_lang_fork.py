"""os.fork() in a user's code while programs run: the child has none of their threads, and locks as those left them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")

_COMMON = """
import contextlib, os, signal, sys, threading
import minisgl as sgl
from tests.scripted_backend import ScriptedBackend

go = threading.Event()

def reply(prompt):
    if not prompt.text.startswith("0"):
        assert go.wait(100)
    return "ok"

backend = ScriptedBackend(reply)

def hold(*locks):
    # another thread has these locks until the event is set
    entered, leave = threading.Event(), threading.Event()

    def work():
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            entered.set()
            leave.wait(100)

    threading.Thread(target=work, daemon=True).start()
    assert entered.wait(100)
    return leave

def ended(pid):
    return os.waitpid(pid, 0)[1]
"""

_ITERATING = """
@sgl.function
def program(s, number):
    s += str(number) + sgl.gen("a")

states = program.run_batch([(i,) for i in range(3)], backend=backend, generator_style=True)
assert next(states)["a"] == "ok"
leave = hold(states.gi_frame.f_locals["self"]._lock)
pid = os.fork()
if pid == 0:
    signal.alarm(60)  # whoever hangs dies
    try:
        next(states)
    except RuntimeError as error:
        assert "process made with fork()" in str(error), error
    else:
        sys.exit(1)
    sys.exit(0)
leave.set()
assert ended(pid) == 0
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    states.close()  # as the end of the process does
    sys.exit(0)
assert ended(pid) == 0
go.set()
assert [state["a"] for state in states] == ["ok", "ok"]
print("both went on")
"""

_IN_A_BODY = """
@sgl.function
def program(s):
    s += "0"
    leave = hold(s._executor.lock)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        s += " and more"
        s["x"] = s.text()
        os._exit(0 if s["x"] == "0 and more" else 1)
    leave.set()
    s["status"] = ended(pid)
    s += sgl.gen("a")

for state in [program.run(backend=backend), *program.run_batch([{}] * 3, backend=backend)]:
    assert state["status"] == 0 and state.text() == "0ok"
print("both went on")
"""


@pytest.mark.parametrize("code", [_ITERATING, _IN_A_BODY], ids=["iterating", "in"])
def test_a_child_is_told_and_the_parent_goes_on(code):
    command = [sys.executable, "-c", _COMMON + code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=ROOT, env=environment)
    assert done.returncode == 0 and done.stdout == "both went on\n", f"{done.stdout}\n{done.stderr}"
