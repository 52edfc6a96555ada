"""Out-of-memory errors are reported with remedies, and other methods of a comparison still run."""

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


def raise_in_methods(monkeypatch: pytest.MonkeyPatch, error: Exception, *methods: str) -> None:
    original = Task.at_work

    def at_work(self: Task) -> Any:
        if self.method in methods:
            raise error
        return original(self)

    monkeypatch.setattr(Task, "at_work", at_work)


def test_free_memory_is_at_most_total_memory() -> None:
    device = torch.device("cpu")
    assert 0 < free_memory(device) <= total_memory(device)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("method", "way"), [("attnlrp", "checkpoint=True"), ("rollout", "input_x_gradient"), ("smoothgrad", "batch_size=1")])
def test_out_of_memory_error_names_a_remedy(error: Exception, method: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_in_methods(monkeypatch, error, method)
    with pytest.raises(TooLarge, match=way) as caught:
        whyformer.explain("bundled:sst2", TEXT, method)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("work", ["attention", "attention_gradient", "audit"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_out_of_memory_error_of_other_work_names_a_remedy(error: Exception, work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_in_methods(monkeypatch, error, work)
    with pytest.raises(TooLarge, match="shorter"):
        if work == "audit":
            whyformer.audit("bundled:sst2", TEXT)
        else:
            whyformer.attention_maps("bundled:sst2", TEXT, gradient=work == "attention_gradient")


@pytest.mark.parametrize("way", [{"checkpoint": True}, {"dtype": "bfloat16"}])
def test_suggested_remedies_work(way: dict[str, Any]) -> None:
    assert torch.isfinite(whyformer.explain("bundled:sst2", TEXT, "attnlrp", **way).scores).all()


def test_other_methods_of_a_comparison_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    raise_in_methods(monkeypatch, ERRORS[0], "rollout")
    comparison = whyformer.compare("bundled:sst2", TEXT, ["rollout", "saliency"])
    assert [e.method for e in comparison.explanations] == ["saliency"]
    assert isinstance(comparison.refusals[0].error, TooLarge)
