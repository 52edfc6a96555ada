"""Gradient ascent on a picture: feature visualisation, and the plain formula."""

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

from whyformer.errors import InputError, ModelError
from whyformer.explanation.storage import written_whole
from whyformer.explanation.views import gaussian_blur
from whyformer.inputs import prepare
from whyformer.inputs.pictures import without_normalisation
from whyformer.maximize.canvas import PARAMETRISATIONS, Canvas
from whyformer.maximize.chances import Chances, total_variation
from whyformer.maximize.ground import argument_of, ends_of, shape_of
from whyformer.maximize.units import unit_of
from whyformer.models.loading import opened
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
    """The outcome of :func:`maximize_activation`.

    Attributes:
        image: ``[C, H, W]`` in model space (as the model's forward takes it), on the CPU.
        activation: S(image), without random changes.
        history: S before each step (of the picture as it was shifted, turned ... in that step) and at the end.
        unit: what was maximised, in words.
        settings: everything needed to repeat it.
        shown: ``[H, W, 3]`` uint8, the image with its normalisation undone.
    """

    image: Tensor
    activation: float
    history: list[float]
    unit: str
    settings: dict[str, Any]
    shown: Tensor

    def picture(self, scale: int = 1) -> Image.Image:
        """As a PIL picture, each pixel ``scale`` times as wide and high."""
        made = Image.fromarray(self.shown.numpy())
        return made.resize((made.width * scale, made.height * scale), Image.Resampling.NEAREST)

    def save(self, path: str | Path) -> Path:
        """Write a ``.png`` (picture; facts in a text chunk) or a ``.safetensors`` (everything): whole or not at all."""
        path = Path(path)
        facts = {"unit": self.unit, "activation": self.activation, "history": self.history, "settings": self.settings}
        with written_whole(path) as partial:
            if path.suffix == ".png":
                note = PngInfo()
                note.add_itxt("whyformer", json.dumps(facts))
                self.picture().save(partial, format="PNG", pnginfo=note)
            elif path.suffix == ".safetensors":
                tensors = {"image": self.image.contiguous(), "shown": self.shown.contiguous()}
                save_file(tensors, partial, metadata={"whyformer": json.dumps(facts)})
            else:
                raise InputError(f"{path.name}: save as .png (the picture) or .safetensors (tensor and history too)")
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
    """argmax_I S(T(I)) − μ TV(I) − λ‖I‖² by gradient ascent (Adam) on the picture I, T a random change in each step.

    ``recipe="feature_visualisation"`` (Olah, Mordvintsev, Schubert 2017; for Vision Transformers Ghiasi et al. 2022)
    climbs on the picture's spectrum, scaled by 1/f, in uncorrelated colours kept between black and white, and shifts,
    turns and resizes it at random, so that what is found is no pattern of single pixels. ``recipe="plain"`` is the
    formula alone, argmax_I S(I) − λ‖I‖² on the pixels: of most models it finds noise that the model answers to.

    Args:
        model: a picture model in eval mode, or a name as in :func:`whyformer.explain`. It is left as it was.
        unit: S. A class number or name: its logit. ``"module.path:n"``: feature n of that module's output, averaged
            over its tokens (or positions). ``"module.path:t:n"``: feature n of token t (0 is the CLS token, where there
            is one). ``"module.path:t:*"``: mean over the features of token t. ``"module.path:*"``: mean of the whole
            output. Features lie on the last axis, for convolutions on axis 1, where tokens are positions row by row. Of
            a module that runs several times in a pass, the first time counts.
        recipe: where settings that are not given come from, "feature_visualisation" or "plain" (``RECIPES``).
        shape: (C, H, W) or (H, W) of the picture; default what the model's config says.
        like: a tensor ``[..., C, H, W]`` or a PIL picture (with ``processor``) that gives the shape.
        start: "noise" (N(0, 0.1²) for pixels, N(0, 0.01²) for the spectrum before 1/f), "zero", or a picture as a
            tensor; where it is ``bounded``, colours beyond black and white become almost black and white.
        seed: of the starting noise and all random changes; torch's own random state is not touched.
        processor: image processor (found by itself for a model given by name), which says what black and white are in
            the model's space; else the model's own data say so (timm), else they are −1 and 1.
        progress: show a progress bar, or a function as in :func:`whyformer.explain`.
        device, dtype: for a model given by name.
        **settings: one or more of

            - steps: gradient steps.
            - learning_rate: of Adam.
            - parametrisation: "fourier" (orthonormal real basis, scaled by 1/f) or "pixel".
            - decorrelate: climb along the principal axes of natural colours, of pictures of three channels.
            - bounded: keep colours between black and white, by a logistic function.
            - jitter: shift by up to so many pixels, around the edge; None is a seventh of the shorter side.
            - scale: size between 1 − scale and 1 + scale times.
            - rotate: turn by up to so many degrees.
            - colour: shift of each channel by up to ± colour, and a factor e^±colour (Ghiasi et al. 2022 take 1).
            - noise: standard deviation of noise that is added to each pixel in each step, in the model's units.
            - total_variation: μ; TV is the mean difference of pixels one above the other plus that side by side, from
              black to white being 1.
            - weight_decay: λ; ‖I‖² sums over all channels and pixels.
            - blur: standard deviation in pixels of a Gaussian blur of the picture after each step; 0 is none.

    Raises:
        InputError: a text model (token ids cannot be climbed), an unknown unit, setting, shape or start.
        ModelError: the activation is not finite or has no gradient to the picture.
    """
    chosen = _settings(recipe, settings)
    model, processor = opened(model, processor, device=device, dtype=dtype)
    argument, goal = argument_of(model), unit_of(model, unit)
    sizes = shape_of(model, start, shape, prepare(model, like, processor).tensor if _is_picture(like) else like)
    if chosen["jitter"] is None:
        chosen["jitter"] = max(1, min(sizes[-2:]) // 7)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    ends = ends_of(model, processor, sizes[1])
    free = chosen["parametrisation"] == "pixel" and not chosen["decorrelate"] and not chosen["bounded"]
    canvas = Canvas(
        torch.tensor([[-1.0], [1.0]]).expand(2, sizes[1])[..., None, None] if ends is None else ends,
        chosen["parametrisation"] == "fourier", chosen["decorrelate"], chosen["bounded"],
    )  # fmt: skip
    chances = Chances(*(chosen[name] for name in ("jitter", "scale", "rotate", "colour", "noise")))
    draws = torch.Generator().manual_seed(seed)
    # a spectrum has no half precision
    wide = parameter.dtype if free else torch.promote_types(parameter.dtype, torch.float32)
    history: list[float] = []
    with torch.inference_mode(False), torch.enable_grad():
        begun = _start(start, sizes, draws, canvas)
        changed = begun.to(parameter.device, wide).clone().requires_grad_()
        climber = torch.optim.Adam([changed], lr=chosen["learning_rate"], maximize=True)

        def measure(picture: Tensor) -> Tensor:
            given = picture.to(parameter.dtype)
            value = goal.value(model, lambda: model(given) if argument is None else model(**{argument: given}))
            if value.isfinite():
                return value
            raise ModelError(f"the activation of {goal.name} is not finite: check the weights, or use float32")

        for step in tracking(progress)(range(chosen["steps"]), f"maximising {goal.name}", chosen["steps"]):
            picture = canvas.picture(changed)
            value = measure(chances.befall(picture, draws))
            history.append(value.item())
            if step == 0 and not bool(torch.autograd.grad(value, changed, retain_graph=True)[0].any()):
                raise ModelError(f"{goal.name} has no gradient to the picture at the start, so there is no way up")
            if chosen["total_variation"]:
                value = value - chosen["total_variation"] * total_variation(canvas.shares(picture))
            if chosen["weight_decay"]:
                value = value - chosen["weight_decay"] * picture.square().sum()
            (changed.grad,) = torch.autograd.grad(value, changed)
            climber.step()
            if chosen["blur"] > 0:
                with torch.no_grad():
                    changed.data = canvas.parameters(gaussian_blur(canvas.picture(changed), chosen["blur"]))
        with torch.no_grad():
            final = canvas.picture(changed)
            history.append(measure(final).item())
    image = final.detach().to(parameter.dtype).cpu()
    kept = {
        "recipe": recipe, **chosen, "seed": seed, "start": start if isinstance(start, str) else "given",
        "shape": list(image.shape[1:]), "range": "unknown" if ends is None else "known",
    }  # fmt: skip
    shares = canvas.shares(image) if chosen["bounded"] or ends is not None else image
    # without a processor: as it is, or stretched to its own range where that is no colour
    shown = without_normalisation(shares.clamp(0, 1) if shares is not image else image, None)
    assert shown is not None
    return Maximized(image[0], history[-1], history, goal.name, kept, shown[0])


def _is_picture(like: Any) -> bool:
    return like is not None and not isinstance(like, Tensor)


def _start(start: Any, sizes: tuple[int, ...], draws: torch.Generator, canvas: Canvas) -> Tensor:
    """Parameters z ``[1, C, H, W]`` to begin with, in float64."""
    if isinstance(start, Tensor):
        return canvas.parameters(start.detach().reshape(sizes).double())
    if start not in ("noise", "zero"):
        raise InputError(f'start must be "noise", "zero" or a tensor, not {start!r}')
    spread = {"zero": 0.0, "noise": 0.01 if canvas.fourier else 0.1}[start]
    return torch.randn(sizes, generator=draws, dtype=torch.float64) * spread


# -- settings ----------------------------------------------------------------------------------------------------
def _settings(recipe: str, given: dict[str, Any]) -> dict[str, Any]:
    """The recipe with what was given, checked."""
    if recipe not in RECIPES:
        raise InputError(f"recipe must be {' or '.join(map(repr, RECIPES))}, not {recipe!r}")
    unknown = [name for name in given if name not in RECIPES[recipe]]
    if unknown:
        raise InputError(f"activation maximisation has no setting {unknown[0]!r}; it has {', '.join(RECIPES[recipe])}")
    chosen = RECIPES[recipe] | given
    _check(steps=(chosen["steps"], 1))
    if chosen["jitter"] is not None:
        _check(jitter=(chosen["jitter"], 0))
    for name in ("learning_rate", "weight_decay", "total_variation", "blur", "scale", "rotate", "colour", "noise"):
        _check(float, **{name: (chosen[name], 0)})
    if chosen["scale"] >= 1:
        raise InputError(f"scale must be below 1, where a picture has no size left, not {chosen['scale']}")
    if chosen["parametrisation"] not in PARAMETRISATIONS:
        raise InputError(f"parametrisation must be {' or '.join(PARAMETRISATIONS)}, not {chosen['parametrisation']!r}")
    for name in ("decorrelate", "bounded"):
        if not isinstance(chosen[name], bool):
            raise InputError(f"{name} must be True or False, not {chosen[name]!r}")
    return chosen


def _check(kind: type = int, /, **numbers: tuple[float, float]) -> None:
    for name, (value, low) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | kind) or not low <= value < float("inf"):
            raise InputError(f"{name} must be a {'whole ' * (kind is int)}number of at least {low}, not {value!r}")
