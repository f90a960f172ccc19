"""Shared fixtures: GPU tests are skipped without a GPU, tiny random models are made on the fly."""

from __future__ import annotations

import os
import signal

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers side by side: one thread each, set before torch starts
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts tests in the background has them ignore Ctrl-C; the tests of Ctrl-C need Python's own handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run `pytest -m gpu` on a machine that has one")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def default_model_folder():
    """The default model's folder, fetched and prepared on first use."""
    from minisgl.default_model import default_model_folder

    return default_model_folder()
