"""The same attributions by captum and pytorch-grad-cam, beside ours in one run.

    python benchmarks/rivals.py [--models vit bert] [--repeats 5] [--steps 16] [--at-once 8]

Counted in processor time of one thread; of each pair the ratio ours / theirs is the median over rounds that measure
both, one after the other and then the other way round. What is computed is checked to be the same: the largest
difference is printed as a share of the largest score. Theirs are not installed with whyformer:
pip install captum grad-cam.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from speed import MODELS
from torch import Tensor, nn

import whyformer

Pair = tuple[str, Callable[[], Tensor], Callable[[], Tensor]]


class Entering(nn.Module):
    """BERT from what enters its first block on: where captum's attribution begins, as ours does."""

    def __init__(self, model: Any, mask: Tensor) -> None:
        super().__init__()
        self.model, self.mask = model, mask

    def forward(self, rows: Tensor) -> Tensor:
        mask = self.mask.expand(len(rows), -1)
        handle = self.model.bert.embeddings.register_forward_hook(lambda *_: rows)
        try:
            ids = torch.zeros(mask.shape, dtype=torch.long)
            logits: Tensor = self.model(input_ids=ids, attention_mask=mask).logits
        finally:
            handle.remove()
        return logits


class Pixels(nn.Module):
    """The logits of pixels."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=pixels).logits
        return logits


def pairs(name: str, steps: int, at_once: int) -> list[Pair]:
    """(what, ours, theirs), each giving ``[B, ...]`` with channels or width summed."""
    model, inputs = MODELS[name]()
    if "pixel_values" in inputs:
        wrapped, x, axis = Pixels(model), inputs["pixel_values"], 1
    else:
        with torch.no_grad():
            x = model.bert.embeddings(inputs["input_ids"])
        wrapped, axis = Entering(model, inputs["attention_mask"]), -1
    for parameter in model.parameters():  # for both alike: captum computes gradients of the input alone
        parameter.requires_grad_(False)
    explain = partial(whyformer.explain, model, inputs, target=0)
    found: list[Pair] = []
    if importlib.util.find_spec("captum") is None:
        print("captum is not installed (pip install captum): its rows are left out")
    else:
        from captum.attr import InputXGradient, IntegratedGradients

        theirs, path = InputXGradient(wrapped), IntegratedGradients(wrapped, multiply_by_inputs=True)
        options = {"n_steps": steps, "internal_batch_size": at_once, "method": "gausslegendre", "target": 0}
        found.append((
            "input × gradient",
            lambda: explain("input_x_gradient").scores,
            lambda: theirs.attribute(x.clone().requires_grad_(), target=0).sum(axis),
        ))  # fmt: skip
        what = f"integrated gradients, {steps} points, {at_once} at once"

        def ours() -> Tensor:
            return explain("integrated_gradients", steps=steps, batch_size=at_once).scores

        found.append((what, ours, lambda: path.attribute(x, **options).sum(axis)))
        # ours always says how far the scores are from f(x) − f(x′): theirs, too, where it is asked to
        found.append((
            f"{what}, with f(x) and f(x′)", ours,
            lambda: path.attribute(x, return_convergence_delta=True, **options)[0].sum(axis),
        ))  # fmt: skip
    if name == "vit" and importlib.util.find_spec("pytorch_grad_cam") is None:
        print("pytorch-grad-cam is not installed (pip install grad-cam): its row is left out")
    elif name == "vit":
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        side = int((model.vit.embeddings.patch_embeddings.num_patches) ** 0.5)

        def laid(rows: Tensor) -> Tensor:
            return rows[:, 1:].reshape(len(rows), side, side, -1).permute(0, 3, 1, 2)

        block = next(m for n, m in model.named_modules() if n.endswith(".11")).layernorm_before
        cam = GradCAM(wrapped, [block], reshape_transform=laid)
        meant = [ClassifierOutputTarget(0)]
        found.append((
            "Grad-CAM",
            lambda: explain("gradcam").scores,
            lambda: torch.from_numpy(cam(x.clone().requires_grad_(), meant)),
        ))  # fmt: skip
    return found


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    made = work()
    return time.process_time() - start, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit", "bert"], choices=["vit", "bert"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | what | ours / theirs | ours, s | theirs, s | largest difference |")
    print("|---|---|---:|---:|---:|---:|")
    for name in arguments.models:
        for what, ours, theirs in pairs(name, arguments.steps, arguments.at_once):
            times = []
            for turn in range(arguments.repeats + 1):
                order = (ours, theirs) if turn % 2 else (theirs, ours)
                (first, a), (second, b) = seconds(order[0]), seconds(order[1])
                (own, mine), (other, yours) = ((first, a), (second, b)) if turn % 2 else ((second, b), (first, a))
                if turn:  # the first round warms up
                    times.append((own / other, own, other))
            ratio, own, other = (statistics.median(t[i] for t in times) for i in range(3))
            mine, yours, said = mine.detach(), yours.detach(), "of other size"
            if mine.shape == yours.shape:
                said = f"{float((mine - yours).abs().max() / yours.abs().max()):.0e}"
            print(f"| {name} | {what} | {ratio:.3f} | {own:.2f} | {other:.2f} | {said} |", flush=True)


if __name__ == "__main__":
    main()
