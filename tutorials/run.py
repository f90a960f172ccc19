"""Run the tutorials top to bottom and store their outputs:  python -m tutorials.run [part of a name ...]

Each notebook gets a fresh kernel and a time limit. What is stored is the notebook with its outputs and nothing of the
machine: no timestamps, no kernel details, and no widget state. (A widget's state is worthless without its kernel, and
a reader that finds it tries to show it instead of the picture. The view's static SVG is kept.)

`tests/test_tutorials.py` runs the same `execute` and compares.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
TIME_LIMIT = 180  # seconds for a whole notebook is the promise; this is what one cell may take
WIDGET = "application/vnd.jupyter.widget"
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebooks() -> list[Path]:
    """The tutorials, in order."""
    return sorted(HERE.glob("[0-9]*.ipynb"))


def execute(path: Path, folder: Path = HERE, time_limit: int = TIME_LIMIT) -> nbformat.NotebookNode:
    """The notebook, run in a fresh kernel whose working directory is `folder`, and cleaned.

    Raises nbclient's CellExecutionError for a cell that fails, and CellTimeoutError for one over `time_limit` seconds.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=time_limit,
        startup_timeout=time_limit,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns of its own transport on stderr
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=_environment())
    return clean(notebook)


def _environment() -> dict[str, str]:
    """The kernel's: the package of this checkout, installed or not, and no progress bars in what is stored."""
    roots = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "TQDM_DISABLE": "1"}


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop what belongs to a machine or a session. Changes the notebook and returns it."""
    notebook.metadata = nbformat.from_dict({"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if "outputs" in cell:
            cell.outputs = [output for output in map(_static, cell.outputs) if output is not None]
    return notebook


def _static(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    """An output without widgets: its picture if it has one, else nothing (a progress bar, say)."""
    if output.output_type in ("display_data", "execute_result"):
        widgets = [kind for kind in output.data if kind.startswith(WIDGET)]
        for kind in widgets:
            del output.data[kind]
        if widgets and set(output.data) <= {"text/plain"}:
            return None
        output.metadata = nbformat.from_dict({})
    return output


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tutorials.run", description="Run tutorials, store their outputs.")
    parser.add_argument("names", nargs="*", help="parts of file names, such as 02 or grammar (default: all)")
    names = parser.parse_args(arguments).names
    chosen = [path for path in notebooks() if not names or any(name in path.name for name in names)]
    if not chosen:
        print(f"no tutorial is called {' or '.join(names)}", file=sys.stderr)
        return 2
    for path in chosen:
        begin = time.perf_counter()
        notebook = execute(path)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
