"""Memory that runs out is told when it does, with what takes less; smaller batches and other methods go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whyformer
from whyformer.errors import TooLarge
from whyformer.methods.task import Task
from whyformer.models.memory import free_memory, is_out_of_memory, total_memory

TEXT = "A charming film, though it drags."
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
]


def full(monkeypatch: pytest.MonkeyPatch, error: Exception, *methods: str) -> None:
    original = Task.at_work

    def at_work(self: Task) -> Any:
        if self.method in methods:
            raise error
        return original(self)

    monkeypatch.setattr(Task, "at_work", at_work)


def test_what_there_is() -> None:
    place = torch.device("cpu")
    assert 0 < free_memory(place) <= total_memory(place)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("method", "way"), [("attnlrp", "checkpoint=True"), ("rollout", "input_x_gradient"), ("smoothgrad", "batch_size=1")])
def test_the_way_out_is_told(error: Exception, method: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, error, method)
    with pytest.raises(TooLarge, match=way) as told:
        whyformer.explain("bundled:sst2", TEXT, method)
    assert is_out_of_memory(told.value)


@pytest.mark.parametrize("way", [{"checkpoint": True}, {"dtype": "bfloat16"}])
def test_the_ways_out_exist(way: dict[str, Any]) -> None:
    assert torch.isfinite(whyformer.explain("bundled:sst2", TEXT, "attnlrp", **way).scores).all()


def test_other_methods_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, ERRORS[0], "rollout")
    found = whyformer.compare("bundled:sst2", TEXT, ["rollout", "saliency"])
    assert [e.method for e in found.explanations] == ["saliency"]
    assert isinstance(found.refusals[0].error, TooLarge)
