"""While a model writes, a caller's progress is told the text so far, and may end it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import whyformer
from generation.test_generation import PROMPT, SOURCE, model


class EnoughError(Exception):
    pass


def listening(seen: list[Any], most: int = 1000) -> Any:
    """A progress that keeps (what, item), and raises at the ``most``-th token that is written."""

    def track(work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterator[Any]:
        for number, item in enumerate(work, 1):
            seen.append((description, total, item))
            if description == "writing" and number == most:
                raise EnoughError
            yield item

    return track


@pytest.mark.parametrize("name", ["llama_lm", "t5"])
def test_each_token_is_told_and_nothing_else_changes(name: str) -> None:
    prompt, seen = (PROMPT if name == "llama_lm" else SOURCE), list[Any]()
    told = whyformer.explain_generation(model(name), prompt, method="input_x_gradient", max_new_tokens=4, progress=listening(seen))
    quiet = whyformer.explain_generation(model(name), prompt, method="input_x_gradient", max_new_tokens=4)
    assert told.ids == quiet.ids
    assert torch.equal(told.matrix, quiet.matrix)
    assert [s for s in seen if s[0] == "writing"] == [("writing", 4, "")] * len(told)  # without a tokenizer no text
    assert [s[0] for s in seen].count("input_x_gradient") == len(told)


def test_what_progress_raises_ends_the_writing() -> None:
    seen: list[Any] = []
    with pytest.raises(EnoughError):
        whyformer.explain_generation(model("llama_lm"), PROMPT, max_new_tokens=20, progress=listening(seen, 2))
    assert [s[0] for s in seen] == ["writing", "writing"]
    assert len(whyformer.explain_generation(model("llama_lm"), PROMPT, method="input_x_gradient", max_new_tokens=2)) == 2


def test_a_given_answer_is_not_written() -> None:
    seen: list[Any] = []
    whyformer.explain_generation(model("llama_lm"), PROMPT, [8, 11], "input_x_gradient", progress=listening(seen))
    assert "writing" not in [s[0] for s in seen]


def test_the_text_so_far(shared: Path) -> None:
    seen: list[Any] = []
    g = whyformer.explain_generation(str(shared / "weights" / "stories260k"), "Once upon a time", method="input_x_gradient", max_new_tokens=5, progress=listening(seen))
    texts = [item for what, _, item in seen if what == "writing"]
    assert len(texts) == 5
    assert [len(t) for t in texts] == sorted(len(t) for t in texts)
    assert texts[-1].split() == g.text.split()
