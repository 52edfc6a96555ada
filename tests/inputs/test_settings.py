"""The digest of a processor's settings: equal for equal processors, in other processes too, and changed by each setting."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as tv
import transformers as hf

from whyformer.inputs.settings import settings_of
from zoo_evaluate import tiny_bert

SIZE = (32, 32)


class Own:
    """A processor of a user's own, with a function that it calls."""

    means = (0.1, 0.2)

    def __init__(self, sizes: Any = frozenset("abcdef")) -> None:
        self.sizes, self.table = sizes, np.arange(40_000.0)

    def __call__(self, picture: Any) -> Any:
        return self._resized(picture)

    def _resized(self, picture: Any) -> Any:
        return picture.resize(SIZE) if "a" in {"a", "b", "c"} else picture


def tokenizer() -> Any:
    return tiny_bert()[1]


def pictures() -> Any:
    return hf.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32})


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda processor: setattr(processor, name, value)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "size": (pictures, _set("size", {"shortest_edge": 41})),
    "mean": (pictures, _set("image_mean", [0.1, 0.2, 0.3])),
    "rescaling": (pictures, _set("rescale_factor", 1 / 127)),
    "vocabulary": (tokenizer, lambda t: t.add_tokens(["anotherword"])),
    "class token": (tokenizer, _set("cls_token", "good")),
    "longest text": (tokenizer, _set("model_max_length", 9)),
    "padding": (tokenizer, _set("padding_side", "left")),
    "truncation": (tokenizer, _set("truncation_side", "left")),
    "chat template": (tokenizer, _set("chat_template", "{{ messages }}")),
    "tokenizer of two": (lambda: [pictures(), tokenizer()], lambda both: both[1].add_tokens(["anotherword"])),
    "sound": (hf.WhisperFeatureExtractor, _set("mel_filters", np.ones((201, 80)))),
    "torchvision": (lambda: tv.Compose([tv.Resize(40), tv.ToTensor()]), lambda p: setattr(p.transforms[0], "size", 64)),
    "own table": (Own, lambda p: p.table.__setitem__(39_999, 0.0)),
    "own method": (Own, lambda p: setattr(p, "__class__", type("Own", (Own,), {"_resized": lambda self, p: p}))),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_changes_the_digest(name: str) -> None:
    build, change = CHANGES[name]
    processor = build()
    before = settings_of(processor)
    assert before is not None and settings_of(build()) == settings_of(copy.deepcopy(processor)) == before
    change(processor)
    assert settings_of(processor) not in (None, before)


def test_calls_and_moved_folders_keep_the_digest(tmp_path: Path) -> None:
    words = tokenizer()
    for place in ("a", "b"):
        words.save_pretrained(tmp_path / place)
    first, second = (hf.AutoTokenizer.from_pretrained(tmp_path / place) for place in ("a", "b"))
    before = settings_of(first)
    first(["good film " * 40, "bad"], padding=True, truncation=True, max_length=7)
    first("good film " * 400)  # notes that it warned of a long text
    assert settings_of(first) == settings_of(second) == before


def test_constants_that_methods_use_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_of(Own())
    monkeypatch.setattr(sys.modules[__name__], "SIZE", (33, 32))
    assert settings_of(Own()) not in (None, before)


@pytest.mark.parametrize("state", [torch.Generator(), np.random.default_rng(0), iter([1, 2])])
def test_state_that_cannot_be_compared_is_unknown(state: Any) -> None:
    processor = Own()
    processor.state = state
    assert settings_of(processor) is None


@pytest.mark.slow
def test_digests_are_equal_in_another_process() -> None:
    code = "import conftest, test_settings as t; print([t.settings_of(build()) for build, _ in t.CHANGES.values()])"
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests), str(tests.parent), *sys.path])
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed}
    printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str([settings_of(build()) for build, _ in CHANGES.values()])
    assert "None" not in printed
