"""Set up once for all tests: no network, one thread, a torchvision that imports, and where the shared data lies."""

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

import hypothesis
import pytest
import torch
import transformers

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))

# A torchvision without its compiled operators (no CPU build to match) fails at import on these two schemas; beside a torch for
# CUDA it has them.
if torch.version.cuda is None:
    _TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
    for _name, _arguments in {"nms": "Tensor dets, Tensor scores, float iou_threshold", "qnms": "Tensor dets, Tensor scores, float iou_threshold"}.items():
        try:
            _TORCHVISION.define(f"{_name}({_arguments}) -> Tensor")
        except RuntimeError:
            # defined already: this torchvision came with its operators
            pass

# its log handler keeps the standard error of the moment it is made in: not that of a command under test, closed after it
transformers.logging.get_logger()

# the same examples in every run, and no time limit on a busy machine
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")
# tiny tensors: a second thread only waits, very long on a machine that is busy
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from parts import leave_out

    leave_out(items)


def pytest_collection_finish() -> None:
    """Tests and imported packages, a million objects, stay to the end: the collector of garbage need not visit them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and weights beside the checkout; it is no part of the project, so tests that need it skip without it."""
    folder = TESTS.parents[1] / "shared"
    if not (folder / "weights" / "deit_tiny_in1k").is_dir():
        pytest.skip(f"needs the real data and weights in {folder}, which are not here")
    return folder


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A port that nobody listens on: tests in several processes would otherwise all try the first one, 7860, at once."""

    def found() -> int:
        with socket.create_server(("127.0.0.1", 0)) as door:
            return int(door.getsockname()[1])

    return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """The tapes of recorded passes."""
    from whyformer.methods import passes

    seen: list[weakref.ref[Any]] = []
    call = passes.record_call

    def record_call(*args: Any, **kwargs: Any) -> Any:
        tape, output = call(*args, **kwargs)
        seen.append(weakref.ref(tape))
        return tape, output

    monkeypatch.setattr(passes, "record_call", record_call)
    yield seen
    gc.collect()
