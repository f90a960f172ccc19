"""The tutorials: each one is run from top to bottom in a fresh kernel, and what is committed is what a run gives."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

for package in ("nbclient", "nbformat", "ipykernel", "ipywidgets"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'minisgl[test]'")

import nbformat  # noqa: E402
from nbclient.exceptions import CellExecutionError  # noqa: E402

from tutorials import run as tutorials  # noqa: E402

NOTEBOOKS = tutorials.notebooks()
NAMES = [path.stem for path in NOTEBOOKS]
TIME_LIMIT = 180  # seconds for a whole notebook
ABSOLUTE = re.compile(r"(?<![\w.:/])(/(home|root|tmp|usr|var|opt|work|mnt|Users|private)/\w|[A-Z]:\\\\?\w)")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def text_of(output) -> str:
    """All that an output shows, as text."""
    if output.output_type == "stream":
        return output.text
    return "\n".join(str(value) for value in output.get("data", {}).values())


def problems(notebook) -> list[str]:
    """What must not be in the outputs of a tutorial."""
    found = []
    if set(notebook.metadata) != {"kernelspec", "language_info"} or notebook.metadata.kernelspec.name != "python3":
        found.append(f"metadata has {sorted(notebook.metadata)}")
    for number, cell in enumerate(notebook.cells, 1):
        if cell.metadata:
            found.append(f"cell {number}: metadata {dict(cell.metadata)}")
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                found.append(f"cell {number}: {output.ename}: {output.evalue}")
            if output.output_type == "stream" and output.name != "stdout":
                found.append(f"cell {number}: {output.name}: {output.text[:200]}")
            if any(kind.startswith(tutorials.WIDGET) for kind in output.get("data", {})):
                found.append(f"cell {number}: a widget without its kernel")
            where = ABSOLUTE.search(text_of(output))
            if where:
                found.append(f"cell {number}: an absolute path: {where.group()}...")
    return found


def shape(notebook) -> list[list[str]]:
    """What each code cell puts out: the kinds, since times and samples differ from run to run."""
    kinds = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kinds.append([kind for o in cell.outputs for kind in (sorted(o.data) if "data" in o else [o.name])])
    return kinds


def cells(*sources: str):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


def test_there_are_nine():
    assert [int(name[:2]) for name in NAMES] == list(range(1, 10))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_committed_notebook_is_complete_and_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert problems(notebook) == []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "**Try it.**" in prose and "## Exercise" in prose and "<details><summary>Solution</summary>" in prose
    svg = [o for cell in code for o in cell.outputs if "image/svg+xml" in o.get("data", {})]
    assert svg or path.stem.startswith("06")  # the one on kernels has nothing to draw


@pytest.mark.parametrize("path", [*NOTEBOOKS, tutorials.HERE / "README.md"], ids=[*NAMES, "README"])
def test_links_lead_somewhere(path):
    if path.suffix == ".md":
        texts = [path.read_text(encoding="utf-8")]
    else:
        texts = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown"]
    links = [link for text in texts for link in LINK.findall(text) if "://" not in link]
    assert all((path.parent / link).exists() for link in links), links


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_runs(path, tmp_path, default_model_folder):
    if path.stem.startswith("06"):
        pytest.importorskip("triton", reason="triton is not installed: it exists for Linux only")
    if path.stem.startswith("09"):
        for package in ("openai", "aiohttp", "uvicorn"):
            pytest.importorskip(package, reason=f"{package} is not installed: pip install 'minisgl[test]'")
    shutil.copy(path, tmp_path)
    shutil.copy(tutorials.HERE / "sketch.py", tmp_path)
    begin = time.perf_counter()
    fresh = tutorials.execute(tmp_path / path.name, tmp_path, TIME_LIMIT)
    assert time.perf_counter() - begin < TIME_LIMIT
    assert problems(fresh) == []
    assert shape(fresh) == shape(nbformat.read(path, as_version=4)), "run `python -m tutorials.run` and commit"


def test_what_a_run_must_not_do_is_noticed(tmp_path):
    path = tmp_path / "bad.ipynb"
    noise = "import sys; print('oops', file=sys.stderr)"
    nbformat.write(cells("import os", noise, "print(os.sep + 'tmp' + os.sep + 'x')", "print('fine: a/b, 1/2')"), path)
    found = problems(tutorials.execute(path, tmp_path, 60))
    assert len(found) == 2 and "stderr: oops" in found[0] and "absolute path" in found[1]
    nbformat.write(cells("1 / 0"), path)
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        tutorials.execute(path, tmp_path, 60)


def test_a_widget_leaves_its_picture_and_a_progress_bar_nothing(tmp_path):
    widget = (
        "from IPython.display import display\n"
        "kind = 'application/vnd.jupyter.widget-view+json'\n"
        "display({kind: {'model_id': '1'}, 'text/plain': 'view', 'image/svg+xml': '<svg/>'}, raw=True)"
    )
    bar = "from tqdm.auto import tqdm\nfor _ in tqdm([1, 2]): pass"
    path = tmp_path / "widgets.ipynb"
    nbformat.write(cells(widget, bar, "print('done')"), path)
    notebook = tutorials.execute(path, tmp_path, 60)
    assert shape(notebook) == [["image/svg+xml", "text/plain"], [], ["stdout"]]
    assert problems(notebook) == []


def test_the_command_stores_outputs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tutorials, "HERE", tmp_path)
    nbformat.write(cells("6 * 7"), tmp_path / "01_answer.ipynb")
    assert tutorials.main(["answer"]) == 0
    assert "01_answer.ipynb" in capsys.readouterr().out
    stored = nbformat.read(Path(tmp_path / "01_answer.ipynb"), as_version=4)
    assert stored.cells[0].outputs[0].data == {"text/plain": "42"}
    assert tutorials.main(["nothing"]) == 2
