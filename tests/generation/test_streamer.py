"""Progress callbacks of a generation receive the text so far and can stop it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import whyformer
from generation.test_generation import PROMPT, SOURCE, model


class StopGenerationError(Exception):
    """Raised by a progress callback."""


def recording_progress(events: list[Any], most: int = 1000) -> Any:
    """A progress callback that appends (description, total, item) to ``events``, and raises at generated token number ``most``."""

    def track(work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterator[Any]:
        for number, item in enumerate(work, 1):
            events.append((description, total, item))
            if description == "writing" and number == most:
                raise StopGenerationError
            yield item

    return track


@pytest.mark.parametrize("name", ["llama_lm", "t5"])
def test_progress_receives_each_token_without_effect_on_the_result(name: str) -> None:
    prompt, events = (PROMPT if name == "llama_lm" else SOURCE), list[Any]()
    result = whyformer.explain_generation(model(name), prompt, method="input_x_gradient", max_new_tokens=4, progress=recording_progress(events))
    expected = whyformer.explain_generation(model(name), prompt, method="input_x_gradient", max_new_tokens=4)
    assert result.ids == expected.ids
    assert torch.equal(result.matrix, expected.matrix)
    assert [s for s in events if s[0] == "writing"] == [("writing", 4, "")] * len(result)  # no text without a tokenizer
    assert [s[0] for s in events].count("input_x_gradient") == len(result)


def test_exception_of_progress_stops_the_generation() -> None:
    events: list[Any] = []
    with pytest.raises(StopGenerationError):
        whyformer.explain_generation(model("llama_lm"), PROMPT, max_new_tokens=20, progress=recording_progress(events, 2))
    assert [s[0] for s in events] == ["writing", "writing"]
    assert len(whyformer.explain_generation(model("llama_lm"), PROMPT, method="input_x_gradient", max_new_tokens=2)) == 2


def test_given_continuation_reports_no_generation() -> None:
    events: list[Any] = []
    whyformer.explain_generation(model("llama_lm"), PROMPT, [8, 11], "input_x_gradient", progress=recording_progress(events))
    assert "writing" not in [s[0] for s in events]


def test_progress_receives_the_text_so_far(shared: Path) -> None:
    events: list[Any] = []
    g = whyformer.explain_generation(str(shared / "weights" / "stories260k"), "Once upon a time", method="input_x_gradient", max_new_tokens=5, progress=recording_progress(events))
    texts = [item for description, _, item in events if description == "writing"]
    assert len(texts) == 5
    assert [len(t) for t in texts] == sorted(len(t) for t in texts)
    assert texts[-1].split() == g.text.split()
