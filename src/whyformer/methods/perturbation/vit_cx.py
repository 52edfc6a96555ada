"""ViT-CX: masks from the last block's features, scored by the target's value on masked inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whyformer.errors import MissingExtra
from whyformer.explanation import views
from whyformer.inputs.removal import values_of
from whyformer.methods.registry import Amount, Count, Natural, method
from whyformer.methods.structure import NOT_YET
from whyformer.methods.task import Scores, Task
from whyformer.tape.places import Elements
from whyformer.targets import Logit, Probability


@method(
    "causal score of masks made from the last block's features",
    family="perturbation",
    citation="Xie, Li, Cao, Zhang: ViT-CX: Causal Explanation of Vision Transformers, IJCAI 2023",
    level="pixel",
    modality="image",
    anywhere=True,
)
def vit_cx(
    task: Task,
    *,
    noise: Amount = 0.1,
    distance_threshold: Amount = 0.1,
    seed: Natural = 0,
    batch_size: Count = 16,
    output: Literal["probability", "target"] = "probability",
) -> Scores:
    """S = (1/K) Σ_i s_i M_i / Σ_k M_k at each pixel, s_i = p(X⊙M_i + Z_i⊙(1−M_i)) − p(X + Z_i⊙(1−M_i)) + p(X).

    The K masks M_i are computed from the d feature maps of the last block's first normalisation (of its input in
    post-norm models), without prefix tokens: each map is resized to the picture and scaled to [0, 1]; maps closer than
    ``distance_threshold`` (1 − cosine, complete linkage) are summed, and the sum is scaled to [0, 1] again.
    Costs 2K + 1 forward passes; K is usually tens to a few hundred.

    Args:
        noise: standard deviation of Z_i ~ N(0, noise²) in each pixel, in model space.
        distance_threshold: clusters are merged up to this distance.
        seed: seed of the noise, which is the same for each sample wherever it is in the batch.
        batch_size: forward passes at once.
        output: value of p for a class: its "probability" (published) or the "target" itself (a logit, by default).
            A callable target is always used unchanged.

    Raises:
        MissingExtra: scikit-learn is not installed.

    Differs from the reference code: seeded; constant maps are left out instead of becoming NaN; a pixel under no mask
    gets 0 instead of 0/0.
    """
    try:
        from sklearn.cluster import AgglomerativeClustering as solver  # noqa: N813
    except ImportError as error:
        raise MissingExtra('vit_cx needs scikit-learn: pip install "whyformer[methods]"') from error
    task.blocks("the last block")
    logits, rows, places = _features(task)
    target = outcome(task, logits, output)
    if task.inputs.tensor.dim() != 4:
        shape = list(task.inputs.tensor.shape)
        raise task.refuse(f"its input has shape {shape}, not [batch, channels, height, width]")
    features = _feature_grid(task, rows.to(task.inputs.tensor.device), places)
    size = task.inputs.image_size
    assert size is not None
    clean = target(logits)
    saliency = torch.zeros(task.inputs.batch, *size, dtype=features.dtype, device=features.device)
    clusters = [_clusters(_scaled(views.resize(f, size)), distance_threshold, solver) for f in features]
    counts = [len(c) for c in clusters]
    step = max(1, batch_size // 2)
    work = [(b, i) for b, k in enumerate(counts) for i in range(0, k, step)]
    masks, scores, draws = saliency, [clean], torch.Generator()
    for b, start in task.progress(work, "ViT-CX", len(work)):
        if start == 0:
            maps = _scaled(views.resize(features[b], size))
            masks = _scaled(torch.stack([maps[members].sum(0) for members in clusters[b]]))
            draws, scores = torch.Generator().manual_seed(seed), []
        x = task.inputs.select(slice(b, b + 1))
        some = masks[start : start + step].to(x.tensor.dtype)[:, None]
        # one draw per mask, so that the noise does not depend on batch_size
        z = [torch.randn(x.tensor.shape[1:], generator=draws, dtype=torch.float64) * noise for _ in some]
        noises = torch.stack(z).to(x.tensor) * (1 - some)
        rows = task.forward(x.with_tensor(torch.cat([x.tensor * some + noises, x.tensor + noises])))
        masked, noisy = values_of(target, rows, [b] * len(rows), logits).chunk(2)
        scores.append((masked - noisy + clean[b]).to(masks.dtype))
        if start + step >= counts[b]:
            cover = masks.sum(0)
            weighted = torch.einsum("k,khw->hw", torch.cat(scores), masks)
            saliency[b] = torch.where(cover > 0, weighted / torch.where(cover > 0, cover, 1), 0) / counts[b]
    return Scores(saliency, logits, "pixel", {"masks": counts, "forwards": [2 * k + 1 for k in counts]})


def _features(task: Task) -> tuple[Tensor, Tensor, Elements]:
    """Return (logits, features ``[B, N, D]`` after the last block's first normalisation, places of their rows in the
    picture)."""
    map_pass = task.main_pass()
    stream, block = map_pass.blocks_of(task.inputs.name)[-1]
    number = map_pass.input_of_attention(stream, block)
    if not map_pass.holds(number, stream):
        raise task.refuse("the input of its last block holds other rows than those that attend there", verdict=NOT_YET)
    features = map_pass.features_of(stream, number, map_pass.recording.tape[number])
    return map_pass.logits, features, task.cells(task.inputs.name, map_pass.name_of(stream))


def outcome(task: Task, logits: Tensor, output: str) -> Callable[[Tensor], Tensor]:
    """Return the function evaluated on changed inputs: the target, or its probability if it is a class."""
    target, activation = task.target(logits), task.activation(logits)
    if output != "probability" or not isinstance(target, Logit) or activation == "identity":
        return target
    return Probability(target.index, activation == "sigmoid")


def _feature_grid(task: Task, features: Tensor, places: Elements) -> Tensor:
    """Arrange those of the features ``[B, N, d]`` that belong to cells as ``[B, d, rows, columns]``."""
    if places.grid is None or len(places.grid) != 2:
        raise task.refuse("its input is not a picture")
    features = features if features.dtype in (torch.float32, torch.float64) else features.float()
    rows = places.rows.to(features.device).expand(len(features), -1)[..., None].expand(-1, -1, features.shape[-1])
    return features.gather(1, rows).transpose(1, 2).unflatten(2, places.grid)


def _scaled(maps: Tensor) -> Tensor:
    """Scale each of ``[k, H, W]`` to [0, 1]; maps that are constant up to rounding become 0."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    width = high - low
    flat = width <= 64 * torch.finfo(maps.dtype).eps * torch.maximum(low.abs(), high.abs())
    return torch.where(flat, 0, (maps - low) / torch.where(flat, 1, width))


def _clusters(maps: Tensor, threshold: float, clustering: Any) -> list[list[int]]:
    """Cluster scaled maps ``[d, H, W]``, without constant ones; return the members of each cluster."""
    flat = maps.flatten(1).double()
    nonzero = flat.any(1).nonzero()[:, 0].tolist()
    if len(nonzero) < 2:
        return [[i] for i in nonzero]
    unit = nn.functional.normalize(flat[nonzero], dim=1)
    distance = (1 - unit @ unit.T).clamp(min=0)
    distance.fill_diagonal_(0)
    solver = clustering(n_clusters=None, metric="precomputed", linkage="complete", distance_threshold=threshold)
    labels = solver.fit(distance.cpu().numpy()).labels_.tolist()
    return [[i for i, label in zip(nonzero, labels, strict=True) if label == k] for k in range(max(labels) + 1)]
