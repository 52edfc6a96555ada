"""Activation maximisation by gradient ascent on a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import save_file
from torch import Tensor, nn

from whyformer.errors import FOREIGN_ERRORS, InputError, ModelError, WhyformerError, check_count, check_seed, check_type
from whyformer.explanation.counts import amount
from whyformer.explanation.serialization import written_whole
from whyformer.explanation.views import gaussian_blur
from whyformer.inputs import prepare
from whyformer.inputs.pictures import without_normalisation
from whyformer.maximize.augmentation import Augmentation, total_variation
from whyformer.maximize.canvas import PARAMETRISATIONS, Canvas
from whyformer.maximize.spec import argument_of, ends_of, shape_of
from whyformer.maximize.units import unit_of
from whyformer.models.loading import resolve_model
from whyformer.models.memory import is_out_of_memory
from whyformer.progress import Track, tracking

RECIPES: dict[str, dict[str, Any]] = {
    "feature_visualisation": {
        "parametrisation": "fourier", "decorrelate": True, "bounded": True, "jitter": None, "scale": 0.2,
        "rotate": 15.0, "colour": 0.0, "noise": 0.5, "total_variation": 40.0, "weight_decay": 0.0, "blur": 0.0,
        "learning_rate": 0.05, "steps": 256,
    },
    "plain": {
        "parametrisation": "pixel", "decorrelate": False, "bounded": False, "jitter": 0, "scale": 0.0,
        "rotate": 0.0, "colour": 0.0, "noise": 0.0, "total_variation": 0.0, "weight_decay": 1e-4, "blur": 0.0,
        "learning_rate": 0.05, "steps": 256,
    },
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Maximized:
    """The result of :func:`maximize_activation`.

    Attributes:
        image: ``[C, H, W]`` picture in model space (an input of the model's forward), on the CPU.
        activation: activation S(image), without augmentation.
        history: activation of the augmented picture before each step, and of the final picture.
        unit: name of the unit.
        settings: all settings needed to repeat the run.
        pixels: ``[H, W, 3]`` uint8, the image without normalisation.
    """

    image: Tensor
    activation: float
    history: list[float]
    unit: str
    settings: dict[str, Any]
    pixels: Tensor

    def picture(self, scale: int = 1) -> Image.Image:
        """Return a PIL picture, enlarged by ``scale`` without interpolation."""
        picture = Image.fromarray(self.pixels.numpy())
        return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)

    def save(self, path: str | Path) -> Path:
        """Write a ``.png`` (picture; facts in a text chunk) or ``.safetensors`` (all values) file atomically."""
        path = Path(path)
        facts = {"unit": self.unit, "activation": self.activation, "history": self.history, "settings": self.settings}
        with written_whole(path) as partial:
            if path.suffix == ".png":
                note = PngInfo()
                note.add_itxt("whyformer", json.dumps(facts))
                self.picture().save(partial, format="PNG", pnginfo=note)
            elif path.suffix == ".safetensors":
                tensors = {"image": self.image.contiguous(), "shown": self.pixels.contiguous()}
                save_file(tensors, partial, metadata={"whyformer": json.dumps(facts)})
            else:
                raise InputError(f"{path.name}: use .png (the picture) or .safetensors (tensor and history too)")
        return path


def maximize_activation(
    model: nn.Module | str,
    unit: int | str,
    *,
    recipe: str = "feature_visualisation",
    shape: Sequence[int] | None = None,
    like: Any = None,
    start: str | Tensor = "noise",
    seed: int = 0,
    processor: Any = None,
    progress: bool | Track = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    **settings: Any,
) -> Maximized:
    """Compute argmax_I S(T(I)) − μ TV(I) − λ‖I‖² by gradient ascent (Adam) on a picture I.

    T is a random augmentation, drawn in each step. ``recipe="feature_visualisation"`` (Olah, Mordvintsev, Schubert
    2017; for Vision Transformers Ghiasi et al. 2022) optimizes the spectrum of the picture, scaled by 1/f, in
    decorrelated colours between black and white, with random shifts, rotations and sizes, which suppresses patterns of
    single pixels.
    ``recipe="plain"`` is argmax_I S(I) − λ‖I‖² on the pixels, which gives adversarial noise for most models.

    Args:
        model: a picture model in eval mode, or a name as in :func:`whyformer.explain`. It is not modified.
        unit: activation S. A class (index or name): its logit. ``"module.path:n"``: feature n of the module's output,
            averaged over its tokens (or positions). ``"module.path:t:n"``: feature n of token t (0 is the CLS token, if
            there is one). ``"module.path:t:*"``: mean over the features of token t. ``"module.path:*"``: mean of the
            whole output. Features are on the last axis; for convolutions on axis 1, and tokens are positions in
            row-major order. If a module runs several times in a forward pass, its first output is used.
        recipe: "feature_visualisation" or "plain", the defaults of all settings (``RECIPES``).
        shape: (C, H, W) or (H, W) of the picture; by default that of the model's config.
        like: a tensor ``[..., C, H, W]`` or a PIL picture (with ``processor``) of the wanted shape.
        start: "noise" (N(0, 0.1²) for pixels, N(0, 0.01²) for the spectrum before scaling by 1/f), "zero", or a picture
            as a tensor; if ``bounded``, its colours are clamped to almost black and white.
        seed: seed of the initial noise and of all augmentations; torch's global random state is not used.
        processor: image processor, which defines black and white in the model's space; loaded automatically for a model
            name. Without a processor, the configuration of a timm model is used, otherwise −1 and 1.
        progress: show a progress bar, or a function as in :func:`whyformer.explain`.
        device: device of a model that is loaded by name.
        dtype: data type of a model that is loaded by name.
        **settings: one or more of

            - steps: number of gradient steps.
            - learning_rate: learning rate of Adam.
            - parametrisation: "fourier" (orthonormal real basis, scaled by 1/f) or "pixel".
            - decorrelate: optimize along the principal axes of natural colours, for pictures of three channels.
            - bounded: restrict colours to the range from black to white by a logistic function.
            - jitter: largest shift in pixels, with wrap-around; None is a seventh of the shorter side.
            - scale: the size is multiplied by a factor between 1 − scale and 1 + scale.
            - rotate: largest rotation in degrees.
            - colour: each channel is shifted by up to ± colour and multiplied by up to e^±colour (1 in Ghiasi et al.
              2022).
            - noise: standard deviation of the noise added to each pixel in each step, in the model's units.
            - total_variation: μ; TV is the mean difference of vertical neighbours plus that of horizontal neighbours,
              with black as 0 and white as 1.
            - weight_decay: λ; ‖I‖² is the sum over all channels and pixels.
            - blur: standard deviation in pixels of a Gaussian blur of the picture after each step; 0 is none.

    Raises:
        InputError: the model is a text model, or a unit, setting, shape or start is invalid.
        ModelError: the activation is not finite, or has no gradient with respect to the picture.
    """
    full = _settings(recipe, settings, seed, start)
    model, processor = resolve_model(model, processor, device=device, dtype=dtype)
    argument, goal = argument_of(model), unit_of(model, unit)
    if like is not None and not isinstance(like, Tensor):
        like = prepare(model, like, processor).tensor
    sizes = shape_of(model, start, shape, like)
    if full["jitter"] is None:
        full["jitter"] = max(1, min(sizes[-2:]) // 7)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    ends = ends_of(model, processor, sizes[1])
    free = full["parametrisation"] == "pixel" and not full["decorrelate"] and not full["bounded"]
    canvas = Canvas(
        torch.tensor([[-1.0], [1.0]]).expand(2, sizes[1])[..., None, None] if ends is None else ends,
        full["parametrisation"] == "fourier", full["decorrelate"], full["bounded"],
    )  # fmt: skip
    augmentation = Augmentation(*(full[name] for name in ("jitter", "scale", "rotate", "colour", "noise")))
    draws = torch.Generator().manual_seed(seed)
    # the Fourier transform has no half precision
    wide = parameter.dtype if free else torch.promote_types(parameter.dtype, torch.float32)
    history: list[float] = []
    with torch.inference_mode(False), torch.enable_grad():
        initial = _start(start, sizes, draws, canvas)
        variables = initial.to(parameter.device, wide).clone().requires_grad_()
        optimizer = torch.optim.Adam([variables], lr=full["learning_rate"], maximize=True)

        def measure(picture: Tensor) -> Tensor:
            batch = picture.to(parameter.dtype)
            value = goal.value(model, lambda: _run(model, argument, batch))
            if value.isfinite():
                return value
            raise ModelError(f"the activation of {goal.name} is not finite: check the weights, or use float32")

        for step in tracking(progress)(range(full["steps"]), f"maximizing {goal.name}", full["steps"]):
            picture = canvas.picture(variables)
            value = measure(augmentation.apply(picture, draws))
            history.append(value.item())
            if step == 0 and not bool(torch.autograd.grad(value, variables, retain_graph=True)[0].any()):
                raise ModelError(f"{goal.name} has no gradient with respect to the initial picture: use another start")
            if full["total_variation"]:
                value = value - full["total_variation"] * total_variation(canvas.shares(picture))
            if full["weight_decay"]:
                value = value - full["weight_decay"] * picture.square().sum()
            (variables.grad,) = torch.autograd.grad(value, variables)
            optimizer.step()
            if full["blur"] > 0:
                with torch.no_grad():
                    variables.data = canvas.parameters(gaussian_blur(canvas.picture(variables), full["blur"]))
        with torch.no_grad():
            final = canvas.picture(variables)
            history.append(measure(final).item())
    image = final.detach().to(parameter.dtype).cpu()
    record = {
        "recipe": recipe, **full, "seed": seed, "start": start if isinstance(start, str) else "given",
        "shape": list(image.shape[1:]), "range": "unknown" if ends is None else "known",
    }  # fmt: skip
    shares = canvas.shares(image) if full["bounded"] or ends is not None else image
    # without a processor, the picture is shown as it is, or scaled to its range if it exceeds 0..1
    pixels = without_normalisation(shares.clamp(0, 1) if shares is not image else image, None)
    assert pixels is not None
    return Maximized(image[0], history[-1], history, goal.name, record, pixels[0])


def _run(model: nn.Module, argument: str | None, pictures: Tensor) -> Any:
    """Return the model's output; raise InputError if it fails on pictures ``[B, C, H, W]`` of this shape."""
    try:
        return model(pictures) if argument is None else model(**{argument: pictures})
    except FOREIGN_ERRORS as error:
        if isinstance(error, WhyformerError) or is_out_of_memory(error):
            raise
        channels, height, width = pictures.shape[1:]
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError(
            f"the model fails on a picture of {height}×{width} pixels and {amount(channels, 'channel')} ({message}): "
            "pass the shape of its input, shape=(channels, height, width), or a start of that shape"
        ) from error


def _start(start: Any, sizes: tuple[int, ...], draws: torch.Generator, canvas: Canvas) -> Tensor:
    """Return the initial parameters z ``[1, C, H, W]`` in float64."""
    if isinstance(start, Tensor):
        return canvas.parameters(start.detach().reshape(sizes).double())
    if start not in ("noise", "zero"):
        raise InputError(f'start must be "noise", "zero" or a tensor, not {start!r}')
    spread = {"zero": 0.0, "noise": 0.01 if canvas.fourier else 0.1}[start]
    return torch.randn(sizes, generator=draws, dtype=torch.float64) * spread


# -- settings ----------------------------------------------------------------------------------------------------
def _settings(recipe: str, changes: dict[str, Any], seed: Any, start: Any) -> dict[str, Any]:
    """Return the settings of the recipe with validated changes; the seed and the start are checked too."""
    check_seed("seed", seed)
    check_type("start", start, str | Tensor, '"noise", "zero" or a tensor')
    if recipe not in RECIPES:
        raise InputError(f"recipe must be {' or '.join(map(repr, RECIPES))}, not {recipe!r}")
    unknown = [name for name in changes if name not in RECIPES[recipe]]
    if unknown:
        raise InputError(f"there is no setting {unknown[0]!r}; the settings are {', '.join(RECIPES[recipe])}")
    full = RECIPES[recipe] | changes
    check_count("steps", full["steps"])
    if full["jitter"] is not None:
        check_count("jitter", full["jitter"], 0)
    for name in ("learning_rate", "weight_decay", "total_variation", "blur", "scale", "rotate", "colour", "noise"):
        value = full[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise InputError(f"{name} must be a number of at least 0, not {value!r}")
    if full["scale"] >= 1:
        raise InputError(f"scale must be less than 1, not {full['scale']}")
    if full["parametrisation"] not in PARAMETRISATIONS:
        raise InputError(f"parametrisation must be {' or '.join(PARAMETRISATIONS)}, not {full['parametrisation']!r}")
    for name in ("decorrelate", "bounded"):
        check_type(name, full[name], bool, "True or False")
    return full
