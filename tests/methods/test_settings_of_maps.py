"""Settings of methods over attention maps, on a padded batch, against formulas for each of its texts alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer
from zoo import randomise

WIDTH, HEADS, LENGTHS, CLASSES = 12, 2, (6, 4), [1, 3]
# A: attention is constant, D: deviations are constant, S: secants, H: products are halved, T: softmax at temperature 2
RULES = {"plain": "", "ah": "A", "ln": "D", "ah_ln": "AD", "libra": "ADSH", "attnlrp": "DSH", "cp_lrp": "ADSH", "gim": "DHT"}


def half(x: Tensor) -> Tensor:
    return (x + x.detach()) / 2


class Norm(nn.LayerNorm):
    def forward(self, x: Tensor, rules: str = "") -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        deviation = (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return x / (deviation.detach() if "D" in rules else deviation) * self.weight + self.bias


class Encoder(nn.Module):
    """Pre-norm blocks that read the mean of all tokens; ``seen`` receives (input, norm, map) of each block and the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, WIDTH)
        norms = {"norm": Norm(WIDTH), "middle": Norm(WIDTH)}
        self.blocks = nn.ModuleList(
            nn.ModuleDict({**{n: nn.Linear(WIDTH, WIDTH) for n in ("q", "k", "v", "o", "up", "down")}, **norms}) for _ in range(3)
        )
        self.norm, self.head = Norm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, rules: str = "", seen: list[Any] | None = None) -> Tensor:
        real, h = attention_mask.bool(), self.words(input_ids)
        halved = half if "H" in rules and "A" not in rules else lambda x: x
        for block in self.blocks:
            x = block["norm"](h, rules)
            q, k, v = (block[n](x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
            scores = (halved(q) @ halved(k).mT / (WIDTH / HEADS) ** 0.5).masked_fill(~real[:, None, None], float("-inf"))
            p = scores.softmax(-1)
            if "T" in rules:
                warm = 2 * (scores / 2).softmax(-1)
                p = p.detach() + warm - warm.detach()
            p = p.detach().requires_grad_() if "A" in rules else p
            if seen is not None:
                seen.append((h, x, p))
            h = h + block["o"]((halved(p) @ halved(v)).transpose(1, 2).flatten(2))
            u = block["up"](block["middle"](h, rules))
            h = h + block["down"](u * (functional.gelu(u) / u).detach() if "S" in rules else functional.gelu(u))
        if seen is not None:
            seen.append(h)
        weights = real / real.sum(1, keepdim=True)
        return self.head((self.norm(h, rules) * weights[..., None]).sum(1))


def padded() -> dict[str, Tensor]:
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": torch.randint(1, 30, mask.shape, generator=torch.Generator().manual_seed(0)) * mask, "attention_mask": mask}


def check(method: str, settings: dict[str, Any], formula: Callable[..., Tensor], target: str = "Contrast") -> None:
    """Compare each sample with formula(model, states, norms, maps, ∇ (a function), readout of f, readout of ½‖logits‖²)."""
    model, inputs = randomise(Encoder()).double(), padded()
    rules = RULES[settings.get("composite", "plain")]
    other = [(c + 1) % 4 for c in CLASSES]
    goal = f"Contrast({CLASSES}, {other})" if target == "Contrast" else CLASSES
    scores = whyformer.explain(model, inputs, method, goal, **settings).scores
    for i, (length, c) in enumerate(zip(LENGTHS, CLASSES, strict=True)):
        seen: list[Any] = []
        logits = model(inputs["input_ids"][i : i + 1, :length], inputs["attention_mask"][i : i + 1, :length], rules, seen)[0]
        states, norms, maps = zip(*seen[:-1], strict=True)
        f = logits[c] - logits[other[i]] if target == "Contrast" else logits[c]

        def gradients(values: Any, f: Tensor = f) -> list[Tensor]:
            return [g[0] for g in torch.autograd.grad(f, values, retain_graph=True)]

        sizes = [gradients(seen[-1], y)[0].norm(dim=-1) for y in (f, logits.square().sum() / 2)]
        readouts = [size / size.sum() for size in sizes]
        expected = formula(model, [h[0] for h in states], norms, maps, gradients, *readouts).detach()
        torch.testing.assert_close(scores[i, :length], expected, rtol=1e-6, atol=1e-9)
        assert not scores[i, length:].any()


@pytest.mark.parametrize("composite", RULES)
def test_gradients_of_maps_follow_the_composite(composite: str) -> None:
    def largest_head(_: Any, __: Any, ___: Any, maps: Any, gradients: Any, readout: Tensor, ____: Any) -> Tensor:
        rolled = torch.eye(maps[0].shape[-1], dtype=torch.float64)
        for p, g in zip(maps, gradients(maps), strict=True):
            rolled = rolled + (p[0] * g).clamp(min=0).amax(0) @ rolled
        return readout @ rolled

    check("gae", {"composite": composite, "aggregation": {"heads": "max"}}, largest_head)


@pytest.mark.parametrize("composite", RULES)
def test_gradcam_of_several_blocks_follows_the_composite(composite: str) -> None:
    def mean_of_scaled(_: Any, __: Any, norms: Any, *rest: Any) -> Tensor:
        chosen = norms[0], norms[2]
        cams = [(x[0] @ g.mean(0)).clamp(min=0) for x, g in zip(chosen, rest[1](chosen), strict=True)]
        return torch.stack([cam / cam.max().clamp(min=1e-300) for cam in cams]).mean(0)

    check("gradcam", {"composite": composite, "blocks": [0, -1]}, mean_of_scaled)


def contributions(block: Any, h: Tensor, x: Tensor, p: Tensor, scope: str) -> Tensor:
    """‖v_ij‖ ``[N, N]``, ``[H, N, N]`` for "heads"."""
    parts = block["v"](x[0]).unflatten(-1, (HEADS, -1)).transpose(0, 1) @ block["o"].weight.T.unflatten(0, (HEADS, -1))
    vectors = torch.einsum("hij,hjd->hijd", p[0], parts)
    if scope != "heads":
        vectors = vectors.sum(0) + (torch.eye(len(h), dtype=h.dtype)[..., None] * h if scope == "residual" else 0)
    return vectors.norm(dim=-1)


@pytest.mark.parametrize("layers", ["rollout", "product", "mean", 1, [0, 2]])
@pytest.mark.parametrize("scope", ["heads", "attention", "residual"])
def test_norms_of_vectors_under_every_aggregation(scope: str, layers: Any) -> None:
    def norms_of(model: Any, states: Any, norms: Any, maps: Any, _: Any, __: Any, readout: Tensor) -> Tensor:
        sizes = [contributions(*each, scope) for each in zip(model.blocks, states, norms, maps, strict=True)]
        sizes = [m.amin(0) if scope == "heads" else m / m.sum(-1, keepdim=True) if scope == "residual" else m for m in sizes]
        if layers in ("rollout", "product"):
            one = torch.eye(len(readout), dtype=torch.float64)
            steps = [(m + one) / (m + one).sum(-1, keepdim=True) if layers == "rollout" else m for m in sizes]
            return readout @ steps[2] @ steps[1] @ steps[0]
        chosen = sizes if layers == "mean" else [sizes[b] for b in ([layers] if isinstance(layers, int) else layers)]
        return readout @ torch.stack(chosen).mean(0)

    aggregation = {"layers": layers, **({"heads": "min"} if scope == "heads" else {})}
    check("norm_attention", {"scope": scope, "aggregation": aggregation}, norms_of)


def test_gradcam_attention_of_pooled_rows() -> None:
    """Head weights are means over the whole map; negative values are set to 0 after the readout."""
    def cam(_: Any, __: Any, ___: Any, maps: Any, gradients: Any, readout: Tensor, ____: Any) -> Tensor:
        weights = gradients(maps)[1].mean((1, 2))
        return (readout @ (weights[:, None, None] * maps[1][0]).mean(0)).clamp(min=0)

    check("gradcam_attention", {"block": 1}, cam, "class")
