"""The player in a real browser: a saved page opened from disk, and the widget in JupyterLab served on localhost."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from minisgl.visual import GrammarView, RadixView, figure4

from .browser import chromium, emulate, errors
from .test_visual import big_log

ROOT = Path(__file__).parent.parent


def wait(driver, condition: Callable[[], object], what: str, seconds: float = 120):  # of a machine that has much to do
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds} s; console: {errors(driver)}")


class Page:
    """The player on a page, by what a reader sees and touches."""

    def __init__(self, driver, scope: str = ""):
        self.driver, self.scope = driver, scope

    def all(self, selector: str):
        return self.driver.find_elements("css selector", f"{self.scope} {selector}")

    def one(self, selector: str):
        return self.all(selector)[0]

    def press(self, label: str) -> None:
        self.one(f'button[aria-label="{label}"]').click()

    @property
    def step(self) -> int:
        return int(self.one(".mv").get_attribute("data-step"))

    @property
    def title(self) -> str:
        return self.one(".mv-title").text

    def settled(self) -> dict[int, str]:
        """Node id -> state, once nothing fades any more."""
        script = """return [...document.querySelectorAll(arguments[0])].map(
            (g) => [g.dataset.node, g.dataset.state, g.style.opacity])"""
        selector = f"{self.scope} g[data-node]"

        def read():
            found = self.driver.execute_script(script, selector)
            return [found] if all(float(o) == 1 for _, _, o in found) else None

        return {int(i): state for i, state, _ in wait(self.driver, read, "the animation ends")[0]}

    def texts(self) -> list[str]:
        return [element.text for element in self.all(".mv-node .mv-text")]

    def owners(self) -> dict[str, int]:
        paths = self.all(".mv-pool path[data-owner]")
        return {p.get_attribute("data-owner"): p.get_attribute("d").count("z") for p in paths}


def expected(view: RadixView, position: int) -> dict[int, str]:
    step = view.steps[position]
    words = {"new": "new", "hit": "accessed", "split": "split", "": "cached"}
    nodes = {i: words[step.mark(i)] for i in view.history.state(position).nodes}
    return nodes | {node.id: "evicted" for node in step.gone}


@pytest.fixture(scope="module")
def driver():
    with chromium() as made:
        yield made


# ------------------------------------------------------------------------------------------------- the saved page


def test_the_saved_page_plays_steps_and_scrubs(driver, tmp_path):
    view = figure4()
    view.save(tmp_path / "story.html")
    driver.get(f"file://{tmp_path}/story.html")
    emulate(driver)
    page = Page(driver)
    assert page.step == 0 and page.title.startswith("(1)") and page.settled() == {}
    page.press("Step forward")
    assert page.step == 1 and page.settled() == {1: "new"}
    assert page.texts()[0].startswith("You are a helpful") and page.owners()["tree"] == 8
    for position in range(2, 9):
        page.press("Step forward")
        assert page.settled() == expected(view, position), position
        assert page.title == view.steps[position].title
    page.press("Step back")
    assert page.step == 7 and page.settled() == expected(view, 7)
    page.press("First step")
    page.press("Play")
    wait(driver, lambda: page.step >= 2, "it plays")
    page.press("Pause")
    at = page.step
    time.sleep(1.3)
    assert page.step == at, "it went on after Pause"
    slider = page.one("input[type=range]")
    from selenium.webdriver import ActionChains

    box = slider.rect
    ActionChains(driver).drag_and_drop_by_offset(slider, box["width"] / 2 - 3, 0).perform()  # from its middle
    assert page.step == 8 and page.settled() == expected(view, 8)
    page.all(".mv-log button")[0].click()
    assert page.step == 3
    assert errors(driver) == []


def test_it_is_all_done_with_the_keyboard(driver, tmp_path):
    view = figure4()
    view.save(tmp_path / "story.html")
    driver.get(f"file://{tmp_path}/story.html")
    emulate(driver, still=True)
    page = Page(driver)
    root = page.one(".mv")
    from selenium.webdriver.common.keys import Keys

    root.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.step == 3 and set(page.settled()) == {1, 2, 3, 4}
    assert page.one(".mv-spoken").get_attribute("textContent") == view.steps[3].title
    root.send_keys("]", "]")
    assert page.one(".mv-detail").text.startswith("#2 · 28 tokens")  # the first row's second
    root.send_keys(Keys.END)
    assert page.step == 8
    root.send_keys(Keys.HOME, Keys.ARROW_RIGHT, "i")
    assert page.texts()[0].startswith("0 1 2 3 4 5")  # token ids on demand
    root.send_keys("i", Keys.SPACE)
    wait(driver, lambda: page.step > 1, "space plays")
    root.send_keys(Keys.SPACE)
    names = [b.accessible_name for b in page.all("button, input, select") if b.is_displayed()]
    assert all(names), names
    assert page.one("svg.mv-svg").get_attribute("aria-label").startswith("Radix tree, ")


def test_folding_and_selecting(driver, tmp_path):
    view = figure4()
    view.goto(6).save(tmp_path / "story.html")
    driver.get(f"file://{tmp_path}/story.html")
    emulate(driver, still=True)
    page = Page(driver)
    assert page.step == 6
    driver.execute_script("document.querySelector('#view').view.fold(7)")
    assert set(page.settled()) == {1, 3, 4, 5, 7}
    assert "+4 nodes, 12 tok" in page.one(".mv-node[data-node='7']").text
    page.one(".mv-node[data-node='4'] .mv-text").click()
    detail = page.one(".mv-detail").text
    assert "#4 · 17 tokens · 0 locks" in detail and "User: What can you do?" in detail and "slots" in detail


def test_reduced_motion_and_dark(driver, tmp_path):
    figure4().save(tmp_path / "story.html")
    driver.get(f"file://{tmp_path}/story.html")
    background = "return getComputedStyle(document.querySelector('.mv')).backgroundColor"
    emulate(driver, still=True)
    assert driver.execute_script(background) == "rgb(255, 255, 255)"
    Page(driver).press("Last step")
    opacity = "return [...document.querySelectorAll('g[data-node]')].map((g) => g.style.opacity)"
    assert set(driver.execute_script(opacity)) == {"1"}  # at once
    emulate(driver, dark=True, still=True)
    assert driver.execute_script(background) == "rgb(20, 24, 29)"


def test_two_thousand_nodes_a_frame_takes_less_than_a_tenth_of_a_second(driver, tmp_path):
    view = RadixView(big_log())
    view.save(tmp_path / "big.html")
    driver.get(f"file://{tmp_path}/big.html")
    emulate(driver)
    page = Page(driver)
    assert 250 <= len(page.settled()) <= 300
    script = """const view = document.querySelector('#view').view, times = [];
        for (let i = 0; i < 9; i++) {
          const begin = performance.now();
          view.show(view.last - i, true);
          times.push(performance.now() - begin);
        }
        return times.sort((a, b) => a - b)[4];"""
    median = min(driver.execute_script(script) for _ in range(3))
    assert median < 100, f"{median:.0f} ms"
    back = """const begin = performance.now();
        document.querySelector('#view').view.go(5);
        return performance.now() - begin;"""
    assert driver.execute_script(back) < 1500  # the longest way back there is


def test_a_grammars_page_goes_through_the_text(driver, tmp_path):
    GrammarView("(yes|no), because", text="yes,").save(tmp_path / "grammar.html")
    driver.get(f"file://{tmp_path}/grammar.html")
    page = Page(driver)
    assert page.step == 4
    page.press("Step back")
    assert page.step == 3 and "after 'yes'" in page.one("svg").get_attribute("aria-label")
    assert errors(driver) == []


# ----------------------------------------------------------------------------------------------------- JupyterLab

LIVE = """
import time
from minisgl import Runtime, function, gen
from minisgl.visual import RadixView

@function
def ask(s, i):
    s += "Answer the question. Question " + "abcdefghij"[i % 10] + str(i) + ": "
    s += gen("answer", max_tokens=64, temperature=0, ignore_eos=True)

runtime = Runtime({folder!r}, kv_capacity=9000, dtype="float32", device="cpu", events=True)
view = RadixView(runtime)
display(view)
"""
RUN = """
begin = time.perf_counter()
results = ask.run_batch([{"i": i} for i in range(100)], backend=runtime)
print("ran", len(results), "programs")
"""
INTERRUPTED = """
try:
    while True:
        ask.run_batch([{"i": i} for i in range(100)], backend=runtime)
except KeyboardInterrupt:
    print("interrupted")
"""


def notebook(*cells: str) -> dict:
    code = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for i, source in enumerate(cells)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": code, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


@contextlib.contextmanager
def jupyter(folder: Path) -> Iterator[str]:
    """JupyterLab over a folder, on a free port of this machine; yields its address."""
    if find_spec("jupyterlab") is None or find_spec("anywidget") is None:
        pytest.skip("needs JupyterLab and anywidget: pip install 'minisgl[notebook]'")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    home = folder / ".home"
    home.mkdir()
    paths = {f"JUPYTER_{n}_DIR": str(home / n.lower()) for n in ("CONFIG", "DATA", "RUNTIME")}
    paths["JUPYTERLAB_SETTINGS_DIR"], paths["JUPYTERLAB_WORKSPACES_DIR"] = str(home / "s"), str(home / "w")
    environment = {**os.environ, **paths, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(home)}
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--port-retries=0",
        "--ip=127.0.0.1", "--IdentityProvider.token=", f"--ServerApp.root_dir={folder}",
        "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=", "--LabApp.extension_manager=readonly",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    log = (home / "log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1500):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/api/status", timeout=2).close()
                break
            assert server.poll() is None, (home / "log").read_text()
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=20)
        log.close()


PANEL = "[...(window.jupyterapp?.shell.widgets('main') ?? [])].find((w) => w.content?.widgets)"


class Lab:
    """A notebook in JupyterLab, driven by its commands and read from its page."""

    def __init__(self, driver, address: str, name: str):
        self.driver = driver
        driver.get(f"{address}/lab/tree/{name}?reset")
        self.wait(f"return !!({PANEL})?.sessionContext?.session?.kernel", "JupyterLab and a kernel")
        driver.execute_script(f"jupyterapp.shell.activateById(({PANEL}).id)")
        self.idle()

    def wait(self, script: str, what: str, seconds: float = 120):
        return wait(self.driver, lambda: self.driver.execute_script(script), what, seconds)

    def idle(self) -> None:
        wait(self.driver, lambda: self.status() == "idle", "the kernel is idle")

    def run(self, cell: int) -> None:
        """Run a cell; does not wait for it."""
        self.driver.execute_script(
            f"const n = ({PANEL}).content; n.activeCellIndex = arguments[0]; n.deselectAll();"
            "jupyterapp.commands.execute('notebook:run-cell')", cell,
        )  # fmt: skip

    def output(self, cell: int) -> str:
        script = f"""const w = ({PANEL}).content.widgets[arguments[0]];
            return w.model.outputs.toJSON().map((o) => o.text || o.evalue || '').join('')"""
        return self.driver.execute_script(script, cell)

    def status(self) -> str:
        return self.driver.execute_script(f"return ({PANEL}).sessionContext.session.kernel.status")


def test_the_widget_in_jupyterlab(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    with jupyter(work) as address, chromium(1280, 1500) as driver:
        write(work)
        lab = Lab(driver, address, "n.ipynb")
        tell_a_story(lab)
        follow_programs(lab)
        clean_up(lab)


def write(work: Path) -> None:
    """The notebook."""
    from .engines import folder

    story = "from minisgl.visual import figure4\nstory = figure4()\nstory"
    cells = (story, "story.goto(4)\nprint(story.step)", LIVE.replace("{folder!r}", repr(str(folder()))), RUN,
             "print(view.step == len(view.steps) - 1, len(view.steps), runtime.stats()['requests'])", INTERRUPTED,
             "import threading; view.close(); story.close(); runtime.shutdown()\n"
             "print([t.name for t in threading.enumerate() if t.name == 'minisgl-view'])")  # fmt: skip
    (work / "n.ipynb").write_text(json.dumps(notebook(*cells)))


def shot(driver, name: str) -> None:
    """A screenshot for a person to look at, when asked for."""
    if shots := os.environ.get("MINISGL_SHOTS"):
        driver.save_screenshot(f"{shots}/{name}.png")


def tell_a_story(lab: Lab) -> None:
    """The widget is shown, is stepped and scrubbed, moves when Python says so, and has JupyterLab's theme."""
    driver, view = lab.driver, figure4()
    lab.run(0)
    lab.wait("return document.querySelectorAll('.jp-OutputArea .mv').length === 1", "the widget appears")
    page = Page(driver, ".jp-OutputArea")
    assert page.step == 0
    page.press("Step forward")
    assert page.settled() == expected(view, 1)
    page.press("Play")
    wait(driver, lambda: page.step >= 3, "it plays")
    page.press("Pause")
    scrub = "const s = document.querySelector('.mv input'); s.value = 7; s.dispatchEvent(new Event('input'))"
    driver.execute_script(scrub)
    assert page.step == 7 and page.settled() == expected(view, 7)
    time.sleep(0.5)  # what the browser does reaches Python after a moment
    lab.run(1)
    wait(driver, lambda: lab.output(1).strip() == "4", "Python moves it")
    wait(driver, lambda: page.step == 4, "and the page with it")
    dark = "return getComputedStyle(document.querySelector('.mv')).backgroundColor"
    theme = "jupyterapp.commands.execute('apputils:change-theme', {theme: arguments[0]})"
    driver.execute_script(theme, "JupyterLab Dark")
    wait(driver, lambda: driver.execute_script(dark) == "rgb(20, 24, 29)", "the dark theme")
    driver.execute_script(theme, "JupyterLab Light")
    wait(driver, lambda: driver.execute_script(dark) == "rgb(255, 255, 255)", "the light theme")
    shot(driver, "lab_story")


def follow_programs(lab: Lab) -> None:
    """It follows the engine while the cell of the programs runs, the page answers meanwhile, and Ctrl-C works."""
    driver, page = lab.driver, Page(lab.driver, ".jp-OutputArea")
    lab.run(2)
    lab.wait("return document.querySelectorAll('.jp-OutputArea .mv').length === 2", "the live widget appears")
    live = Page(driver, ".jp-Cell:nth-child(3) .jp-OutputArea")
    lab.idle()
    lab.run(3)
    wait(driver, lambda: live.step > 3, "it follows")
    assert "ran" not in lab.output(3), "the programs ended before the page had shown any of it"
    seen = live.step
    begin = time.monotonic()
    page.press("Step forward")
    assert page.step == 5 and time.monotonic() - begin < 2
    wait(driver, lambda: live.step > seen or "ran" in lab.output(3), "and goes on")
    wait(driver, lambda: "ran 100 programs" in lab.output(3), "the programs end")
    lab.run(4)
    found = wait(driver, lambda: lab.output(4).split(), "the figures")
    assert found[0] == "True" and found[2] == "100"
    wait(driver, lambda: live.step == int(found[1]) - 1, "the page shows the newest step")
    shot(driver, "lab_live")
    lab.run(5)
    wait(driver, lambda: lab.status() == "busy" and live.step > int(found[1]), "it runs again")
    driver.execute_script(f"({PANEL}).sessionContext.session.kernel.interrupt(); return 0")
    wait(driver, lambda: "interrupted" in lab.output(5), "it is interrupted")


def clean_up(lab: Lab) -> None:
    """A re-run cell has one widget, and in the end no thread is left."""
    lab.run(2)
    lab.idle()
    lab.wait("return document.querySelectorAll('.jp-OutputArea .mv').length === 2", "has one widget")
    lab.run(6)
    wait(lab.driver, lambda: lab.output(6).strip() == "[]", f"no thread is left: {lab.output(6)}")
