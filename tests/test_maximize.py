"""Activation maximisation: closed-form optima, every kind of unit, unchanged models."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import zoo
from snapshot import assert_unchanged, snapshot
from whyformer.errors import InputError, LoadError, ModelError
from whyformer.maximize import RECIPES, Maximized, maximize_activation
from whyformer.maximize.augmentation import Augmentation, _turned, total_variation
from whyformer.maximize.canvas import Canvas, amplitudes, hartley

FEW: dict[str, Any] = {"steps": 6}
PLAIN: dict[str, Any] = {"recipe": "plain"}


class Linear(nn.Module):
    """S = ⟨w_c, I⟩: S − λ‖I‖² has its maximum at I = w_c / 2λ."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=4, num_labels=2, id2label={0: "cat", 1: "dog, hound"})
        self.weight = nn.Parameter(torch.randn(2, 48))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    return zoo.build("hf_vit", torch.float32)[0]


def test_maximum_equals_closed_form() -> None:
    model = Linear().eval()
    result = maximize_activation(model, "hound", steps=800, learning_rate=0.02, weight_decay=0.5, **PLAIN)
    assert torch.allclose(result.image.flatten(), model.weight[1] / (2 * 0.5), atol=1e-2)
    assert math.isclose(result.activation, model.weight[1].square().sum().item(), rel_tol=1e-2)
    assert result.unit == "class dog, hound"


def test_first_step_is_a_step_of_adam() -> None:
    """From 0 the first step of Adam is the learning rate times the sign of the gradient."""
    model = Linear().eval()
    result = maximize_activation(model, 0, steps=1, learning_rate=0.25, start="zero", **PLAIN)
    assert torch.allclose(result.image.flatten(), 0.25 * model.weight[0].sign(), atol=1e-4)
    assert result.history[0] == 0
    assert result.history[-1] == result.activation == pytest.approx(0.25 * model.weight[0].abs().sum().item(), rel=1e-3)


@pytest.mark.part
@pytest.mark.parametrize(("recipe", "least"), [("plain", 1.0), ("feature_visualisation", 0.1)])
@pytest.mark.parametrize("name", [*zoo.IMAGES, *zoo.WINDOWED])
def test_class_activation_increases_on_every_image_model(name: str, recipe: str, least: float) -> None:
    model, inputs = zoo.build(name, torch.float32)
    before = snapshot(model)
    result = maximize_activation(model, 3, like=inputs, steps=30, recipe=recipe, noise=0.0)
    assert_unchanged(model, before)
    assert result.image.shape == inputs.shape[1:]
    assert len(result.history) == 31
    assert result.history[-1] > result.history[0] + least
    assert zoo.call(model, result.image[None])[0, 3] == pytest.approx(result.activation, rel=1e-5)


def test_unit_activations_equal_module_outputs(vit: nn.Module) -> None:
    """Each unit against the same number in the output of the module, read by a hook."""
    outputs: dict[str, Tensor] = {}
    places = ("vit.layers.1", "vit.layers.0.mlp.fc1", "vit.embeddings.patch_embeddings.projection")
    result = {}
    for unit in (f"{places[0]}:5", f"{places[0]}:0:5", f"{places[0]}:-1:*", f"{places[1]}:*", f"{places[2]}:3:7", "4"):
        result[unit] = maximize_activation(vit, unit, **FEW, **PLAIN)
        image = result[unit].image[None]
        hooks = [
            vit.get_submodule(p).register_forward_hook(
                lambda m, a, o, p=p: outputs.__setitem__(p, o[0] if isinstance(o, tuple) else o)
            )
            for p in places
        ]
        logits = zoo.call(vit, image)
        for hook in hooks:
            hook.remove()
        block, dense, convolution = (outputs[p][0] for p in places)
        expected = {
            f"{places[0]}:5": block[:, 5].mean(),
            f"{places[0]}:0:5": block[0, 5],
            f"{places[0]}:-1:*": block[-1].mean(),
            f"{places[1]}:*": dense.mean(),
            f"{places[2]}:3:7": convolution[7].flatten()[3],
            "4": logits[0, 4],
        }[unit]
        assert result[unit].activation == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
        assert result[unit].history[-1] > result[unit].history[0]


def test_forward_stops_at_the_unit(vit: nn.Module) -> None:
    later = []
    hook = vit.vit.layers[1].register_forward_hook(lambda *a: later.append(a))
    maximize_activation(vit, "vit.layers.0:3", **FEW)
    hook.remove()
    assert not later


def test_result_depends_on_seed_only(vit: nn.Module) -> None:
    settings: dict[str, Any] = {"jitter": 3, "blur": 0.5, **FEW}
    torch.manual_seed(1)
    first = maximize_activation(vit, 2, **settings)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = maximize_activation(vit, 2, **settings)
    assert torch.equal(first.image, second.image)
    assert first.history == second.history
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first.image, maximize_activation(vit, 2, seed=1, **settings).image)


def roughness(image: Tensor) -> float:
    return float(image.diff(dim=-1).square().mean() / image.square().mean())


def test_blur_smooths_and_weight_decay_shrinks(vit: nn.Module) -> None:
    sharp = maximize_activation(vit, 1, steps=20, **PLAIN)
    smooth = maximize_activation(vit, 1, steps=20, blur=1.0, **PLAIN)
    assert roughness(smooth.image) < 0.3 * roughness(sharp.image)
    light = maximize_activation(vit, 1, steps=60, weight_decay=1.0, **PLAIN)
    assert light.image.norm() < 0.5 * maximize_activation(vit, 1, steps=60, weight_decay=0.0, **PLAIN).image.norm()


def test_start_and_shape_of_image(vit: nn.Module) -> None:
    start = torch.rand(3, 32, 32)
    result = maximize_activation(vit, 1, start=start, steps=1, learning_rate=1e-6)
    assert torch.allclose(result.image, start, atol=3e-4)  # 1 is "almost white"
    assert result.settings["start"] == "given"
    assert maximize_activation(Linear().eval(), 1, **FEW).image.shape == (3, 4, 4)
    assert maximize_activation(zoo.build("timm_vit")[0], 1, **FEW).image.dtype == torch.float64
    assert maximize_activation(zoo.build("torchvision_vit")[0], 1, **FEW).image.shape == (3, 32, 32)
    assert maximize_activation(vit, 1, shape=(32, 32), **FEW).image.shape == (3, 32, 32)


def test_gradient_mode_of_caller_has_no_effect(vit: nn.Module) -> None:
    plain = maximize_activation(vit, 1, **FEW)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(maximize_activation(vit, 1, **FEW).image, plain.image)


def test_model_is_unchanged_after_an_error(vit: nn.Module) -> None:
    before = snapshot(vit)
    with pytest.raises(InputError, match=r"neuron 99 is out of range: the output of 'vit\.layers\.1' has 24 neurons"):
        maximize_activation(vit, "vit.layers.1:99", **FEW)
    with pytest.raises(InputError, match=r"token 17 is out of range.* 17 tokens"):
        maximize_activation(vit, "vit.layers.1:17:*", **FEW)
    assert_unchanged(vit, before)


def test_concurrent_thread_is_not_disturbed(vit: nn.Module) -> None:
    """Another thread runs the same model while forward passes of this thread stop at a unit."""
    pixels, failures = torch.randn(1, 3, 32, 32), []
    expected = zoo.call(vit, pixels)

    def watch() -> None:
        for _ in range(20):
            try:
                if not torch.equal(zoo.call(vit, pixels), expected):
                    failures.append("another result")
            except Exception as error:  # noqa: BLE001, RUF100
                failures.append(repr(error))

    thread = threading.Thread(target=watch)
    thread.start()
    maximize_activation(vit, "vit.layers.0:3", steps=40)
    thread.join()
    assert not failures


# -- canvas and augmentation ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (1, 6)])
def test_hartley_basis_is_real_and_orthonormal(sizes: tuple[int, int]) -> None:
    """Each entry equals cos + sin, and the matrix times its transpose is the identity."""
    height, width = sizes
    count = height * width
    basis = hartley(torch.eye(count, dtype=torch.float64).reshape(count, height, width)).reshape(count, count)
    assert basis.dtype == torch.float64
    assert torch.allclose(basis @ basis.T, torch.eye(count, dtype=torch.float64), atol=1e-12)
    for row in range(count):
        for column in range(count):
            (v, u), (y, x) = divmod(row, width), divmod(column, width)
            angle = 2 * math.pi * (v * y / height + u * x / width)
            assert float(basis[row, column]) == pytest.approx((math.cos(angle) + math.sin(angle)) / count**0.5, abs=1e-12)


def test_amplitudes_decrease_with_frequency() -> None:
    """f = 1/4 and 1/2 cycles per pixel on a row of four; the variance is 1, and the mean has the amplitude of the longest wave."""
    result = amplitudes(1, 4)[0]
    assert torch.allclose(result / result[1], torch.tensor([1, 1, 0.5, 1], dtype=torch.float64))
    assert float(amplitudes(7, 12).square().mean()) == pytest.approx(1)


@pytest.mark.parametrize("fourier", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_canvas_inverts_its_parameters(fourier: bool, bounded: bool, channels: int) -> None:
    ends = torch.tensor([[-2.0], [3.0]]).expand(2, channels)[..., None, None]
    canvas = Canvas(ends, fourier, True, bounded)
    expected = torch.rand(1, channels, 6, 5, dtype=torch.float64) * 4 - 1.5
    assert torch.allclose(canvas.picture(canvas.parameters(expected)), expected, atol=1e-10)
    if bounded:
        extreme = canvas.picture(torch.randn(1, channels, 6, 5, dtype=torch.float64) * 100)
        assert extreme.min() >= -2
        assert extreme.max() <= 3


def test_augmentations() -> None:
    """No augmentation, circular shifts, rotation, scaling, tint and noise."""
    picture, draws = torch.rand(1, 3, 8, 8), torch.Generator()
    assert torch.equal(Augmentation(0, 0, 0, 0, 0).apply(picture, draws), picture)
    shifts = [torch.roll(picture, (y, x), (-2, -1)) for y in range(-2, 3) for x in range(-2, 3)]
    seen = [Augmentation(2, 0, 0, 0, 0).apply(picture, draws.manual_seed(seed)) for seed in range(40)]
    assert all(any(torch.equal(shifted, shift) for shift in shifts) for shifted in seen)
    assert len({shifted.sum(1).flatten().argmax().item() for shifted in seen}) > 10
    assert torch.allclose(_turned(picture, 1.0, math.pi / 2), picture.rot90(-1, (-2, -1)), atol=1e-5) or torch.allclose(
        _turned(picture, 1.0, math.pi / 2), picture.rot90(1, (-2, -1)), atol=1e-5
    )
    wide = torch.zeros(1, 1, 4, 8)
    wide[..., 0, 1] = 1
    assert _turned(wide, 1.0, math.pi)[0, 0, 3, 6] == pytest.approx(1, abs=1e-5)
    middle = torch.zeros(1, 1, 9, 9)
    middle[..., 4, 6] = 1
    assert int(_turned(middle, 2.0, 0.0).argmax()) == 4 * 9 + 8
    grey = torch.full((1, 3, 4, 4), 0.5)
    tinted = Augmentation(0, 0, 0, 1.0, 0).apply(grey, draws)
    assert tinted.flatten(2).std(-1).max() < 1e-6
    assert len(set(tinted[0, :, 0, 0].tolist())) == 3
    specks = Augmentation(0, 0, 0, 0, 0.5).apply(torch.zeros(1, 3, 64, 64), draws)
    assert abs(float(specks.mean())) < 0.02
    assert float(specks.std()) == pytest.approx(0.5, rel=0.03)


def test_total_variation_by_hand() -> None:
    """Mean of |3 − 1| and |4 − 2| vertically plus mean of |2 − 1| and |4 − 3| horizontally."""
    assert total_variation(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])) == 2 + 1
    assert total_variation(torch.ones(1, 3, 1, 1)) == 0


def test_total_variation_and_fourier_basis_smooth_the_image(vit: nn.Module) -> None:
    plain = maximize_activation(vit, 1, steps=20, **PLAIN)
    result = maximize_activation(vit, 1, steps=20)
    assert roughness(result.image) < 0.5 * roughness(plain.image)
    assert result.settings["jitter"] == 32 // 7
    assert result.settings["recipe"] == "feature_visualisation"
    rough, smooth = (maximize_activation(vit, 1, steps=20, total_variation=weight) for weight in (0.0, 50.0))
    assert roughness(smooth.image) < roughness(rough.image)


def test_bounded_image_stays_between_black_and_white() -> None:
    processor = SimpleNamespace(image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.2], do_normalize=True)
    result = maximize_activation(Linear().eval(), 1, steps=60, learning_rate=1.0, noise=0.0, processor=processor)
    black, white = torch.tensor([-1, -1.6, -1.5]), torch.tensor([1, 2.4, 3.5])
    assert (result.image.amin((1, 2)) >= black - 1e-5).all()
    assert (result.image.amax((1, 2)) <= white + 1e-5).all()
    # black is 0 and white 255, by the range of the processor and not by that of the image
    shares = (result.image.permute(1, 2, 0) - black) / (white - black)
    assert torch.equal(result.pixels, (shares * 255).round().to(torch.uint8))
    assert result.settings["range"] == "known"
    unknown = maximize_activation(Linear().eval(), 1, steps=60, learning_rate=1.0, noise=0.0)
    assert unknown.image.abs().max() <= 1
    assert unknown.settings["range"] == "unknown"


# -- the image -----------------------------------------------------------------------------------------------------
def test_picture_undoes_the_normalisation(tmp_path: Path) -> None:
    processor = SimpleNamespace(image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.2], do_normalize=True)
    start = torch.zeros(3, 4, 4)
    result = maximize_activation(Linear().eval(), 1, start=start, steps=1, learning_rate=1e-9, processor=processor)
    assert result.picture().size == (4, 4)
    assert result.picture().getpixel((0, 0)) == (128, 102, 76)
    assert result.picture(scale=3).size == (12, 12)
    path = result.save(tmp_path / "hound.png")
    with Image.open(path) as saved:
        assert saved.getpixel((3, 3)) == (128, 102, 76)
        note = json.loads(saved.text["whyformer"])
    assert note["unit"] == "class dog, hound"
    assert note["settings"]["learning_rate"] == 1e-9
    assert [p.name for p in tmp_path.iterdir()] == ["hound.png"]


def test_saved_safetensors_hold_image_and_history(tmp_path: Path, vit: nn.Module) -> None:
    from safetensors import safe_open

    result = maximize_activation(vit, 1, **FEW)
    with safe_open(result.save(tmp_path / "a.safetensors"), "pt") as file:
        assert torch.equal(file.get_tensor("image"), result.image)
        assert json.loads(file.metadata()["whyformer"])["history"] == result.history
    with pytest.raises(InputError, match=r"use \.png"):
        result.save(tmp_path / "a.gif")
    with pytest.raises(LoadError, match="cannot write"):
        result.save(tmp_path / "nowhere" / "a.png")
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_maximized_is_immutable(vit: nn.Module) -> None:
    result = maximize_activation(vit, 1, **FEW)
    assert isinstance(result, Maximized)
    with pytest.raises(AttributeError):
        result.unit = "another"  # type: ignore[misc]


# -- invalid arguments ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_text_model_raises(name: str) -> None:
    with pytest.raises(InputError, match="token ids do not have: use a model for pictures"):
        maximize_activation(zoo.build(name)[0], 1)


@pytest.mark.parametrize(
    ("unit", "match"),
    [
        (9, "class 9 is out of range: the model has 5 classes"),
        (True, "a unit is a class"),
        ("vit.nowhere:3", "no module 'vit.nowhere'"),
        ("vit.layers.1:x", "a unit is a class"),
        ("vit.layers.1:0:1:2", "a unit is a class"),
        ("vit.layers.1:*:3", "a unit is a class"),
        ("zebra", "no class 'zebra'"),
    ],
)
def test_unknown_unit_raises(vit: nn.Module, unit: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        maximize_activation(vit, unit)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"learning_rate": -1}, "learning_rate must be a number"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"jitter": 1.5}, "jitter must be an integer"),
        ({"blur": True}, "blur"),
        ({"start": "black"}, "start must be"),
        ({"shape": (4, 8, 8, 8)}, "the shape of a picture must be"),
        ({"shape": (8,)}, "the shape of a picture must be"),
        ({"start": torch.zeros(2, 3, 32, 32)}, "the shape of a picture must be"),
        ({"device": "cpu"}, "models loaded by name"),
        ({"shape": (3, 5, 5)}, "the model fails on a picture of 5×5 pixels and 3 channels"),
        ({"start": torch.zeros(1, 3, 4, 4)}, "the model fails on a picture of 4×4 pixels and 3 channels"),
        ({"start": np.zeros((3, 32, 32))}, "start must be"),
        ({"seed": "a"}, "seed must be an integer"),
        ({"seed": 2**70}, "seed must be an integer"),
        ({"recipe": "pretty"}, "recipe must be 'feature_visualisation' or 'plain', not 'pretty'"),
        ({"parametrisation": "wavelet"}, "parametrisation must be fourier or pixel, not 'wavelet'"),
        ({"bounded": 1}, "bounded must be True or False, not 1"),
        ({"scale": 1.0}, "scale must be less than 1"),
        ({"rotate": -3}, "rotate must be a number of at least 0, not -3"),
        ({"sharpness": 3}, "no setting 'sharpness'; the settings are parametrisation, "),
    ],
)
def test_invalid_setting_raises(vit: nn.Module, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        maximize_activation(vit, 1, **settings)


def test_model_without_gradient_or_image_size_raises() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(1, 2) + 0 * x.sum()

    with pytest.raises(InputError, match="size of the model's pictures is unknown"):
        maximize_activation(Constant().eval(), 1)
    with pytest.raises(ModelError, match="no gradient with respect to the initial picture"):
        maximize_activation(Constant().eval(), 1, shape=(8, 8))
    model = Linear().eval()
    with torch.no_grad():
        model.weight[1, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        maximize_activation(model, 1)
    with pytest.raises(ModelError, match="training mode"):
        maximize_activation(nn.Sequential(Linear(), nn.Dropout(0.5)), 1)


def test_detector_has_neurons_but_no_class() -> None:
    from test_output_targets import MODELS

    model = MODELS["yolos"]()[0].float()
    with pytest.raises(InputError, match=r"not a row of logits.*module.path:neuron"):
        maximize_activation(model, 1, steps=1)
    assert maximize_activation(model, "vit.encoder.layer.1:3:0", steps=1).unit



def test_bundled_model_by_name() -> None:
    for recipe in RECIPES:
        result = maximize_activation("bundled:digits", "3", steps=10, learning_rate=0.1, start="zero", recipe=recipe)
        assert result.picture().size == (112, 112)
        assert result.history[-1] > result.history[0] + 1
    # its processor maps 0 to mid-grey and 1 to white
    assert result.pixels.float().sub(127.5).div(127.5).sub(result.image.permute(1, 2, 0).clamp(-1, 1)).abs().max() < 0.01
    with pytest.raises(InputError, match="model for pictures"):
        maximize_activation("bundled:sst2", "positive")
