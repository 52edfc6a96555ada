"""Setup of all tests: no network, one thread, an importable torchvision, and the folder of shared data."""

from __future__ import annotations

import gc
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# for tiny tensors a second thread only waits; also in the processes that tests start
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch
import transformers

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))

# A torchvision without its compiled operators (there is no matching CPU build) fails at import on these two schemas; with a
# torch for CUDA it has them.
if torch.version.cuda is None:
    _TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
    for _name, _arguments in {"nms": "Tensor dets, Tensor scores, float iou_threshold", "qnms": "Tensor dets, Tensor scores, float iou_threshold"}.items():
        try:
            _TORCHVISION.define(f"{_name}({_arguments}) -> Tensor")
        except RuntimeError:
            # already defined: this torchvision has its operators
            pass

# create the log handler now: it keeps the current stderr, and that of a command under test would be closed later
transformers.logging.get_logger()

# the same examples in every run, and no time limit
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from parts import leave_out

    leave_out(items)


def pytest_collection_finish() -> None:
    """Exempt collected tests and imported packages, a million objects, from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and weights next to the checkout; tests that need it are skipped without it."""
    folder = TESTS.parents[1] / "shared"
    if not (folder / "weights" / "deit_tiny_in1k").is_dir():
        pytest.skip(f"needs the real data and weights in {folder}, which are not here")
    return folder


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A free port: tests in several processes would otherwise all try the default port 7860."""

    def find_port() -> int:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    return find_port


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """The tapes of recorded passes."""
    from whyformer.methods import passes

    tapes: list[weakref.ref[Any]] = []
    call = passes.record_call

    def record_call(*args: Any, **kwargs: Any) -> Any:
        tape, output = call(*args, **kwargs)
        tapes.append(weakref.ref(tape))
        return tape, output

    monkeypatch.setattr(passes, "record_call", record_call)
    yield tapes
    gc.collect()
