"""Damaged files of explanations and generations raise WhyformerError, or load as displayable results equal to the saved ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mutations import damaged, mutated
from show.builders import explanation, picture, sentence
from show.test_answers import generation as answer
from whyformer.errors import InputError, LoadError, WhyformerError
from whyformer.explanation.generation import Generation
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.picture_scores import PictureScores
from whyformer.explanation.result import Explanation

PLACED = picture(originals=[Image.new("RGB", (60, 40))], geometry=[Geometry((40, 60), (0.0, 0.0, 60.0, 40.0))])
TRUST = [{"followed": 1, "fractions": [0.0, 1.0], **{key: [0.9, 0.1] for key in ("curve", "lowest", "mean", "highest")}, "verdict": "better", "warnings": []}]
COMMON = {"method": "gae", "settings": {}, "target": torch.tensor([1]), "logits": torch.tensor([[1.0, 2.0]])}
EXPLANATIONS = {
    "a sentence": sentence(unknown=[[1]], extent=[(0, 20)], diagnostics={"warnings": [["odd"]], "input": [["cut off"]], "trust": TRUST}),
    "a picture": PLACED,
    "pixels": picture(torch.linspace(-1, 1, 32 * 48).reshape(32, 48), level="pixel"),
    "two inputs": sentence(input="input_ids", parts={"pixel_values": PLACED}),
    "a video": explanation(level="patch", scores=torch.linspace(0, 1, 48)[None], grid=(4, 6), frames=2, image_size=(32, 48), pictures=torch.zeros(1, 4, 32, 48, 3, dtype=torch.uint8), **COMMON),
    "a sound": explanation(level="token", scores=torch.linspace(0, 1, 40)[None], sounds=torch.rand(1, 1600), sampling_rate=800, durations=[2.0], rate=20.0, **COMMON),
}  # fmt: skip
ANSWERS = {
    "an answer": replace(answer(), turns=[("user", 0, 3), ("assistant", 3, 5)], notes=["a note"]),
    "its words": answer().by("word"),
    "with a picture": replace(answer(), picture_maps={"pixel_values": PictureScores(picture(input="pixel_values"), torch.rand(2, 24))}),
    "of a source": replace(answer(), source=2, part="decoder_input_ids"),
}  # fmt: skip
TENSORS = st.sampled_from([
    torch.zeros(()), torch.zeros(0), torch.zeros(1, 0), torch.zeros(3, 2), torch.zeros(1, 3, 4, 5, dtype=torch.int8), torch.tensor([float("nan")]),
    torch.zeros(1, 200, dtype=torch.float16), torch.tensor([[99]]), torch.tensor([-5]), torch.tensor([99]), torch.zeros(1, 3, dtype=torch.bool),
    torch.zeros(1, 2, 3, dtype=torch.complex64), torch.tensor([1.5]), torch.full((1, 3), float("inf")), torch.zeros(1, 32, 48, 4, dtype=torch.uint8),
])  # fmt: skip
few = settings(max_examples=12, suppress_health_check=list(HealthCheck))
many = settings(max_examples=35, suppress_health_check=list(HealthCheck))


def show(e: Explanation) -> None:
    assert str(e) and repr(e) and e._repr_html_()
    json.dumps(e.to_dict())
    assert [len(sample) for sample in e] == [1] * len(e)
    assert e.top()
    assert all(isinstance(line, str) for line in e.warnings)
    for spatial_map in (e.heatmap, e.placed):
        with contextlib.suppress(InputError):
            spatial_map()


def show_answer(g: Generation) -> None:
    assert str(g) and repr(g) and g._repr_html_()
    json.dumps(g.to_dict())
    for step in g:
        str(step)
    if g.unit == "token":
        assert 0 <= g.probability(0) <= 1
        for unit in ("word", "sentence", "turn"):
            assert str(g.by(unit))


def load_and_show(load: Callable[[], Any]) -> None:
    with contextlib.suppress(WhyformerError):  # any other exception fails
        result = load()
        show_answer(result) if isinstance(result, Generation) else show(result)


def as_json(e: Explanation) -> Any:
    return json.loads(json.dumps(e.to_dict()))


def check_dict(name: str, data: Any) -> None:
    load_and_show(lambda: Explanation.from_dict(data.draw(mutated(as_json(EXPLANATIONS[name])))))


def check_values(name: str, data: Any, path: Any) -> None:
    """Load a file whose metadata and tensors were changed and written again, as by another program."""
    saved = {**EXPLANATIONS, **ANSWERS}[name]
    with safetensors.safe_open(str(saved.save(path / "whole.safetensors")), "pt") as file:
        facts = json.loads(file.metadata()["whyformer"])
        tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    changed = {**tensors, **data.draw(st.dictionaries(st.sampled_from(sorted(tensors)), TENSORS, max_size=2))}
    facts = data.draw(st.just(facts) | mutated(facts))
    damaged_path = path / "odd.safetensors"
    safetensors.torch.save_file({n: tensor.clone() for n, tensor in changed.items()}, damaged_path, {"whyformer": json.dumps(facts)})
    load_and_show(lambda: type(saved).load(damaged_path))


def check_bytes(name: str, data: Any, path: Any) -> None:
    """Load a file with changed bytes: LoadError or the saved result (one changed byte may only remove the checksum)."""
    saved = {**EXPLANATIONS, **ANSWERS}[name]
    damaged_path = path / "odd.safetensors"
    damaged_path.write_bytes(data.draw(damaged(saved.save(path / "whole.safetensors").read_bytes())))
    with contextlib.suppress(LoadError):
        assert type(saved).load(damaged_path).to_dict() == type(saved).load(path / "whole.safetensors").to_dict()


@pytest.mark.parametrize("name", EXPLANATIONS)
@given(data=st.data())
@few
def test_mutated_dict_is_displayable_or_raises(name, data):
    check_dict(name, data)


@pytest.mark.parametrize("name", EXPLANATIONS | ANSWERS)
@given(data=st.data())
@few
def test_mutated_metadata_and_tensors_are_displayable_or_raise(name, data, tmp_path_factory):
    check_values(name, data, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", EXPLANATIONS | ANSWERS)
@given(data=st.data())
@few
def test_damaged_file_raises_or_equals_the_saved_result(name, data, tmp_path_factory):
    check_bytes(name, data, tmp_path_factory.getbasetemp())


@pytest.mark.whole
@pytest.mark.parametrize("name", EXPLANATIONS | ANSWERS)
@given(data=st.data())
@many
def test_many_more_mutations(name, data, tmp_path_factory):
    if name in EXPLANATIONS:
        check_dict(name, data)
    check_values(name, data, tmp_path_factory.getbasetemp())
    check_bytes(name, data, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", EXPLANATIONS | ANSWERS)
def test_changed_bit_of_a_tensor_is_detected(name, tmp_path):
    """Changed scores would otherwise be displayed as those of the method."""
    saved = {**EXPLANATIONS, **ANSWERS}[name]
    path = saved.save(tmp_path / "e.safetensors")
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for offset in range(start, len(content), max(1, (len(content) - start) // 20)):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        with pytest.raises(LoadError, match=r"e\.safetensors is damaged"):
            type(saved).load(path)


def test_file_of_an_older_version_without_checksum_is_read(tmp_path):
    path = PLACED.save(tmp_path / "e.safetensors")
    with safetensors.safe_open(str(path), "pt") as file:
        facts, tensors = file.metadata()["whyformer"], {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    safetensors.torch.save_file(tensors, path, {"whyformer": facts})
    assert Explanation.load(path).to_dict() == PLACED.to_dict()


HOSTILE = {
    "a picture of 10^12 pixels": {"image_size": [10**6, 10**6]},
    "an original of 10^12 pixels": {"geometry": [{"size": [10**6, 10**6], "box": [0, 0, 1, 1]}]},
    "a box without end": {"geometry": [{"size": [4, 4], "box": [float("-inf"), 0, 1, 1]}]},
    "no rows": {"grid": [0, 24]},
    "other patches": {"grid": [5, 6]},
    "steps of time that are not there": {"frames": 7},
    "a number that no tensor holds": {"target": [10**30]},
    "scores that are no numbers": {"scores": [[float("nan")] * 24]},
    "rows of unequal length": {"scores": [[1.0], [1.0, 2.0]]},
    "warnings that are none": {"diagnostics": {"warnings": 3}},
    "figures that are none": {"diagnostics": {"trust": [{"verdict": "good"}]}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_raise(name):
    with pytest.raises(InputError):
        Explanation.from_dict({**as_json(picture()), **HOSTILE[name]})
