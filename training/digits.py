"""Train the bundled picture model: a small ViT that predicts which handwritten digits occur in a scene.

    python training/digits.py --work runs/digits

After an interruption, the same command continues from the last checkpoint. Scenes are drawn during the
training, from the digit images of the split "train" only. The checkpoint is the last one, with averaged weights.

Three things make it learn in minutes on a CPU: auxiliary heads that predict from each patch token which digit's
ink it holds, attention that initially looks at neighbouring patches, and a first stage on windows around one
digit (36 of the 196 patches) before whole scenes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from whyformer.datasets import Scene, digit_scenes

ROOT = Path(__file__).resolve().parents[1]
CHOICE = "No held-out digit was used to choose the checkpoint; scenes of training digits showed when to stop."
SIDE, PATCH, GRID = 112, 8, 14
NOTHING, UNSURE = 10, -100
HEADS = 4
SHARP = 1.7
NEAR = (  # how far (down, right) each head of the first layers looks at the beginning
    ((0, 1), (0, -1), (1, 0), (-1, 0)),
    ((1, 1), (1, -1), (-1, 1), (-1, -1)),
    ((0, 2), (0, -2), (2, 0), (-2, 0)),
    ((1, 1), (1, -1), (-1, 1), (-1, -1)),
)
WINDOW = 6
Losses = tuple[torch.Tensor, torch.Tensor]
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": SIDE, "width": SIDE},
}


@dataclass(frozen=True)
class Difficulty:
    """What scenes to draw at some point of the training."""

    min_digits: int
    max_digits: int
    distinct: bool
    clutter: float


def curriculum(progress: float) -> Difficulty:
    """Crowded scenes first, then scenes like those to be told apart."""
    if progress < 0.4:
        return Difficulty(3, 6, False, 1.0)
    return Difficulty(1, 4, True, 1.0) if progress > 0.6 else Difficulty(1, 6, False, 1.0)


def patch_targets(scene: Scene) -> np.ndarray:
    """For each patch, the digit whose ink it holds, NOTHING without ink, UNSURE with very little."""
    blocks = scene.masks.reshape(-1, GRID, PATCH, GRID, PATCH).mean(axis=(2, 4)).reshape(-1, GRID * GRID)
    most = blocks.max(axis=0)
    target = np.array(scene.digits)[blocks.argmax(axis=0)]
    return np.where(most >= 0.1, target, np.where(most > 0, UNSURE, NOTHING))


class Stock:
    """The latest examples drawn; a batch is a sample of them, so that each is used about twice or more."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept: list[tuple[np.ndarray, ...]] = []

    def sample(
        self, new: list[tuple[np.ndarray, ...]], size: int, generator: np.random.Generator
    ) -> list[torch.Tensor]:
        """Take in new examples and return a random batch; colours are shuffled."""
        self.kept = [*self.kept, *new][-self.size :]
        picked = [self.kept[i] for i in generator.choice(len(self.kept), min(size, len(self.kept)), replace=False)]
        columns = [np.stack(column) for column in zip(*picked, strict=True)]
        columns[0] = np.stack([pixels[..., generator.permutation(3)] for pixels in columns[0]])
        return [torch.from_numpy(column) for column in columns]


class Windows(Dataset):
    """Batches for the first stage: windows of 6 x 6 patches around a digit, with little ink of others.

    Each is pixels, the digit in the middle, what is on each patch, and the numbers of the patches in the scene.
    """

    def __init__(self, steps: int, size: int, seed: int) -> None:
        self.steps, self.size, self.seed = steps, size, seed
        self.stock = Stock(30 * size)

    def __len__(self) -> int:
        return self.steps

    def draw(self, count: int, seed: int, clutter: float) -> list[tuple[np.ndarray, ...]]:
        """Cut windows out of crowded scenes."""
        found = []
        places = np.arange(GRID * GRID).reshape(GRID, GRID)
        drawn = digit_scenes(
            count, seed=seed, split="train", min_digits=3, max_digits=5, distinct=False, clutter=clutter, wobble=1.3
        )
        for scene in drawn:
            pixels, patches = np.asarray(scene.image), patch_targets(scene).reshape(GRID, GRID)
            for number, (digit, mask) in enumerate(zip(scene.digits, scene.masks, strict=True)):
                corner = []
                for axis in (1, 0):
                    ink = np.flatnonzero(mask.any(axis=axis))
                    start = round(((ink[0] + ink[-1] + 1) / 2 - WINDOW * PATCH / 2) / PATCH)
                    corner.append(min(max(0, start), GRID - WINDOW))
                y, x = corner
                area = (slice(y, y + WINDOW), slice(x, x + WINDOW))
                box = (slice(y * PATCH, (y + WINDOW) * PATCH), slice(x * PATCH, (x + WINDOW) * PATCH))
                others = np.delete(scene.masks, number, axis=0).any(axis=0)[box]
                if others.sum() > 0.5 * mask[box].sum():
                    continue
                foreign = others.reshape(WINDOW, PATCH, WINDOW, PATCH).any(axis=(1, 3))
                target = np.where(foreign, UNSURE, patches[area])
                found.append((pixels[box], np.array(digit), target.ravel(), places[area].ravel()))
        return found

    def __getitem__(self, step: int) -> list[torch.Tensor]:
        clutter = min(1.0, 0.3 + 1.5 * step / self.steps)
        count = max(1, self.size // 8) if self.stock.kept else 3 * self.size
        seed = (self.seed + 1) * 10_000_000 + step
        generator = np.random.default_rng(seed)
        return self.stock.sample(self.draw(count, seed, clutter), self.size, generator)


class Scenes(Dataset):
    """Batches for the second stage: pixels, which digits are there, and what is on each patch."""

    def __init__(self, steps: int, size: int, seed: int) -> None:
        self.steps, self.size, self.seed = steps, size, seed
        self.stock = Stock(8 * size)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> list[torch.Tensor]:
        level = curriculum(step / self.steps)
        seed = (self.seed + 1) * 10_000_000 + 5_000_000 + step
        count = self.size // 2 if self.stock.kept else 2 * self.size
        new = []
        for scene in digit_scenes(count, seed=seed, split="train", wobble=1.3, **vars(level)):
            present = np.isin(np.arange(10), scene.digits).astype(np.float32)
            new.append((np.asarray(scene.image), present, patch_targets(scene)))
        return self.stock.sample(new, self.size, np.random.default_rng(seed))


def local_start(model: ViTForImageClassification) -> None:
    """Start with sine-cosine positions and heads of the first layers that look at neighbouring patches.

    The positions hold, for either axis, sines and cosines of several frequencies. A head whose keys copy some of
    them, and whose queries copy them rotated by the frequency times a distance, attends at that distance.
    """
    hidden, layers = model.config.hidden_size, model.vit.layers
    half, share = hidden // 2, hidden // HEADS // 2
    frequencies = torch.linspace(0.1, 1.8, half // 2)
    angles = torch.arange(GRID)[:, None] * frequencies
    axis = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    places = torch.cat([axis[:, None].expand(-1, GRID, -1), axis[None].expand(GRID, -1, -1)], dim=-1)
    embeddings = model.vit.embeddings
    with torch.no_grad():
        for layer in layers:
            for name, weight in layer.named_parameters():
                if weight.ndim == 2:
                    inward = any(part in name for part in ("v_proj", "fc1"))
                    nn.init.xavier_uniform_(weight, gain=1.0 if inward else 0.3)
        nn.init.normal_(embeddings.patch_embeddings.projection.weight, std=0.05)
        nn.init.normal_(embeddings.cls_token, std=0.5)
        embeddings.position_embeddings.zero_()
        embeddings.position_embeddings[0, 1:] = places.reshape(GRID * GRID, hidden)
        for layer, distances in zip(layers, NEAR, strict=False):
            query, key = layer.attention.q_proj.weight, layer.attention.k_proj.weight
            for head, distance in enumerate(distances):
                for side in range(2):
                    for number, wave in enumerate(range(head, half // 2, HEADS)):
                        row = head * 2 * share + side * share + 2 * number
                        column = side * half + 2 * wave
                        turn = frequencies[wave] * distance[side]
                        cos, sin = float(turn.cos()), float(turn.sin())
                        key[row : row + 2, column : column + 2] += SHARP * torch.eye(2)
                        query[row : row + 2, column : column + 2] += SHARP * torch.tensor([[cos, sin], [-sin, cos]])


def build(args: argparse.Namespace) -> ViTForImageClassification:
    """A fresh model."""
    names = {number: str(number) for number in range(10)}
    config = ViTConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        intermediate_size=args.inner,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=names,
        label2id={name: number for number, name in names.items()},
        problem_type="multi_label_classification",
    )
    model = ViTForImageClassification(config)
    local_start(model)
    return model


def rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 5 %, then a cosine to a hundredth of the peak."""
    warm = max(1, round(0.05 * steps))
    cosine = 0.5 * (1 + math.cos(math.pi * max(0.0, (step - warm) / max(1, steps - warm))))
    return peak * min(1.0, step / warm) * (0.01 + 0.99 * cosine)


def scaled(pixels: torch.Tensor) -> torch.Tensor:
    """What the image processor makes of pixels."""
    return pixels.permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


def patch_loss(heads: nn.ModuleList, states: list[torch.Tensor], patches: torch.Tensor) -> torch.Tensor:
    """The loss of the throw-away heads, which say what is on a patch, after each of the last two layers."""
    parts = [
        functional.cross_entropy(head(state[:, 1:]).flatten(0, 1), patches.flatten(), ignore_index=UNSURE)
        for head, state in zip(heads, states, strict=True)
    ]
    return torch.stack(parts).mean()


def window_losses(model: ViTForImageClassification, heads: nn.ModuleList, batch: list[torch.Tensor]) -> Losses:
    """Losses on windows: their patches alone, at their places in the scene, go through the layers."""
    pixels, digits, patches, places = batch
    vit = model.vit
    state = vit.embeddings.patch_embeddings.projection(scaled(pixels)).flatten(2).transpose(1, 2)
    positions = vit.embeddings.position_embeddings[0]
    first = (vit.embeddings.cls_token + positions[:1]).expand(len(pixels), -1, -1)
    state = torch.cat([first, state + positions[1:][places]], dim=1)
    states = []
    for layer in vit.layers:
        state = layer(state)
        states.append(state)
    logits = model.classifier(vit.layernorm(state)[:, 0])
    return 0.5 * functional.cross_entropy(logits, digits), patch_loss(heads, states[-2:], patches)


def scene_losses(model: ViTForImageClassification, heads: nn.ModuleList, batch: list[torch.Tensor]) -> Losses:
    """Losses on whole scenes: which digits are there, and what is on each patch."""
    pixels, present, patches = batch
    output = model(pixel_values=scaled(pixels), output_hidden_states=True)
    whole = functional.binary_cross_entropy_with_logits(output.logits, present)
    return 4 * whole, patch_loss(heads, output.hidden_states[-2:], patches)


def scores(told: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """F1 over all digits, the lowest F1 of one digit, and how often the whole set is right."""
    hits, both = (told & truth).sum(axis=0), told.sum(axis=0) + truth.sum(axis=0)
    each = 2 * hits / np.maximum(both, 1)
    exact = float((told == truth).all(axis=1).mean())
    return {"f1": float(2 * hits.sum() / both.sum()), "lowest_f1": float(each.min()), "exact": exact}


@torch.inference_mode()
def quick(model: ViTForImageClassification, scenes: list[Scene], device: torch.device) -> dict[str, float]:
    """Scores of a model in training."""
    pixels = torch.from_numpy(np.stack([np.asarray(scene.image) for scene in scenes])).to(device)
    inputs = scaled(pixels)
    logits = torch.cat([model(pixel_values=part).logits for part in inputs.split(128)])
    truth = np.array([[digit in scene.digits for digit in range(10)] for scene in scenes])
    return scores((logits > 0).cpu().numpy(), truth)


@torch.inference_mode()
def measure(folder: Path, count: int, seed: int) -> dict[str, float]:
    """Scores of the saved model with its own image processor on held-out scenes."""
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    told, truth = [], []
    scenes = list(digit_scenes(count, seed=seed))
    for start in range(0, count, 100):
        part = scenes[start : start + 100]
        logits = model(**processor([scene.image for scene in part], return_tensors="pt")).logits
        told.append((logits > 0).numpy())
        truth.append(np.array([[digit in scene.digits for digit in range(10)] for scene in part]))
    return scores(np.concatenate(told), np.concatenate(truth))


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal (Jordan et al., 2024), for the matrices inside the layers.

    Equally shaped matrices go through the Newton-Schulz iteration together, in 32 bits, which a CPU likes.
    """

    def __init__(self, matrices: list[nn.Parameter], scale: float, momentum: float = 0.95) -> None:
        shapes = sorted({tuple(matrix.shape) for matrix in matrices})
        groups = [{"params": [matrix for matrix in matrices if tuple(matrix.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": 0.0, "scale": scale, "momentum": momentum, "weight_decay": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            if not matrices:
                continue
            for matrix in matrices:
                state = self.state[matrix]
                if "speed" not in state:
                    state["speed"] = torch.zeros_like(matrix)
                state["speed"].lerp_(matrix.grad, 1 - group["momentum"])
            speeds = torch.stack([self.state[matrix]["speed"] for matrix in matrices])
            grads = torch.stack([matrix.grad for matrix in matrices])
            rows, columns = matrices[0].shape
            steps = orthogonal(grads.lerp(speeds, group["momentum"])) * max(1.0, rows / columns) ** 0.5
            for matrix, change in zip(matrices, steps, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"] * group["scale"])


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Bring all singular values of each matrix near to one (Newton-Schulz, five rounds)."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


class Trainer:
    """A plain training loop that can be interrupted and keeps an average of the weights."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device = args, device
        self.model = build(args).to(device)
        heads = (nn.Sequential(nn.LayerNorm(args.hidden), nn.Linear(args.hidden, 11)) for _ in range(2))
        self.whole = nn.ModuleDict({"model": self.model, "heads": nn.ModuleList(heads).to(device)})
        self.average = build(args).to(device).eval()
        self.average.load_state_dict(self.model.state_dict())
        self.optimizers = self.fresh_optimizers()
        self.stage, self.step = 0, 0
        self.file = args.work / "state.pt"
        self.watched = list(digit_scenes(256, seed=4_000_000, split="train"))
        if self.file.exists():
            state = torch.load(self.file, map_location=device, weights_only=True)
            self.whole.load_state_dict(state["whole"])
            self.average.load_state_dict(state["average"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.stage, self.step = state["stage"], state["step"]

    def fresh_optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for most matrices of the layers; AdamW for the rest, and for where heads look: that should stay near."""
        named = list(self.whole.named_parameters())
        looks = ("q_proj", "k_proj")
        inner = {n for n, p in named if p.ndim == 2 and ".layers." in n and not any(look in n for look in looks)}
        plain = {n for n, p in named if p.ndim < 2 or "position" in n or "cls_token" in n}
        groups = [
            {"params": [p for n, p in named if n not in plain | inner], "weight_decay": 0.05},
            {"params": [p for n, p in named if n in plain], "weight_decay": 0.0},
        ]
        muon = Muon([p for n, p in named if n in inner], self.args.muon)
        return [muon, torch.optim.AdamW(groups, betas=(0.9, 0.98))]

    def save(self) -> None:
        """Write a checkpoint."""
        state = {"whole": self.whole.state_dict(), "average": self.average.state_dict()}
        more = {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "stage": self.stage,
            "step": self.step,
        }
        torch.save({**state, **more}, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)

    def update(self, parts: Losses, learning: float) -> None:
        """One step of the optimizer and of the average."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning
        self.whole.zero_grad(set_to_none=True)
        sum(parts).backward()
        nn.utils.clip_grad_norm_(self.whole.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        keep = min(self.args.ema, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1 - keep)

    def run_stage(self, data: Dataset, losses: Callable[..., Losses], steps: int, peak: float) -> None:
        """Train through one stage, from where it stands."""
        workers = self.args.workers
        loader = DataLoader(
            data,
            batch_size=None,
            sampler=range(self.step, steps),
            num_workers=workers,
            prefetch_factor=6 if workers else None,
        )
        begin, sums = time.perf_counter(), []
        self.model.train()
        for batch in loader:
            parts = losses(self.model, self.whole["heads"], [item.to(self.device) for item in batch])
            self.update(parts, rate(self.step + 1, steps, peak))
            sums.append([part.item() for part in parts])
            if self.step % 50 == 0 or self.step == steps:
                shown = ", ".join(f"{value:.4f}" for value in np.mean(sums, axis=0))
                print(
                    f"stage {self.stage}, {self.step}/{steps}: {shown} {time.perf_counter() - begin:.0f}s", flush=True
                )
                sums.clear()
            if self.step % 200 == 0 or self.step == steps:
                self.save()
                if self.stage == 1:
                    print(quick(self.average, self.watched, self.device), "on scenes of training digits", flush=True)
        self.stage, self.step = self.stage + 1, 0
        self.optimizers = self.fresh_optimizers()

    def run(self) -> ViTForImageClassification:
        """Train, or go on training; returns the model with averaged weights, without the throw-away heads."""
        args = self.args
        if self.stage == 0:
            data = Windows(args.window_steps, 2 * args.batch, args.seed)
            self.run_stage(data, window_losses, args.window_steps, args.window_rate)
        if self.stage == 1:
            self.run_stage(Scenes(args.steps, args.batch, args.seed), scene_losses, args.steps, args.rate)
        return self.average


def card(model: ViTForImageClassification, found: dict[str, float], count: int) -> str:
    """The model card."""
    config = model.config
    shape = (
        f"ViT, {config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads, "
        f"inner width {config.intermediate_size}, patches of 8 x 8 (14 x 14 of them)"
    )
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: image-classification
---

# A small classifier of the handwritten digits in a scene

A small multi-label `ViTForImageClassification`: it predicts which of the digits 0 to 9 occur in a 112 x 112 picture
of one to four handwritten digits on a cluttered background. A digit is predicted if its logit is above 0. The model
comes with `whyformer`, so that there is a model to explain without a download, and explanations can be checked:
`whyformer.datasets.digit_scenes` draws such pictures with a mask of the ink of every digit. The background does not
depend on the digits, so only the ink shows which digits are in the picture.

- **Architecture**: {shape};
  {model.num_parameters():,} parameters, stored as 32-bit safetensors.
- **Data**: scenes made of the 1797 digit images that scikit-learn ships (`load_digits`), which are from the UCI data
  set *Optical Recognition of Handwritten Digits* (E. Alpaydin and C. Kaynak, 1998), CC BY 4.0. The data is not
  shipped here. A fifth of the images (by digit, at random) is held out; `split_indices()` lists them.
- **Training**: windows around single digits first, then whole scenes. Auxiliary heads on the patch tokens were trained
  to predict the digit whose ink each patch holds, and removed. The weights are the running average at the last step.
- **Licence of the weights**: Apache-2.0.

## Measured

On {count} scenes of held-out digit images with 1 to 4 different digits each:

| | |
| --- | --- |
| F1 over all digits | **{found["f1"]:.1%}** |
| F1 of the hardest digit | {found["lowest_f1"]:.1%} |
| exactly the right set of digits | **{found["exact"]:.1%}** of the scenes |

    python training/digits.py --measure --scenes {count}

{CHOICE}

## Retrain

    python training/digits.py

See `training/README.md` for the time it takes.

## Limits

It recognises light digits on a darker background, about 28 to 40 pixels high and hardly rotated, like those of
`digit_scenes`; on photographs or other handwriting its predictions mean little. The digits were written by few people.
Each digit counts once, however often it occurs in the picture.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "src/whyformer/bundled/digits")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/digits", help="folder of checkpoints")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: as many as PyTorch likes)")
    parser.add_argument("--workers", type=int, default=1, help="processes that draw scenes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--inner", type=int, default=256)
    parser.add_argument("--window-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--window-rate", type=float, default=1.5e-3)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--muon", type=float, default=7.0, help="Muon's rate as a multiple of AdamW's")
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument("--scenes", type=int, default=4000, help="held-out scenes to measure on")
    parser.add_argument("--measure", action="store_true", help="only measure the model in --out")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    if not args.measure:
        args.work.mkdir(parents=True, exist_ok=True)
        model = Trainer(args, torch.device(automatic if args.device == "auto" else args.device)).run()
        model.cpu().save_pretrained(args.out)
        (args.out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n", encoding="utf-8")
    found = measure(args.out, args.scenes, seed=2026)
    if not args.measure:
        text = card(model, found, args.scenes)
        (args.out / "README.md").write_text(text, encoding="utf-8")
    print(", ".join(f"{name} {value:.4f}" for name, value in found.items()), f"on {args.scenes} held-out scenes")


if __name__ == "__main__":
    main()
