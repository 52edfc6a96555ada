"""Methods that change the input and watch the output: occlusion and ViT-CX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.hooks import batch_first
from whyformer.engine.probes import Features
from whyformer.errors import InputError, MissingExtra
from whyformer.explanation import views
from whyformer.inputs.removal import PICTURE_BASELINES, TEXT_BASELINES, Removal, logits_without, removal, values_of
from whyformer.methods.registry import at_least, method, one_of
from whyformer.methods.task import Scores, Task
from whyformer.targets import Logit, Probability

# -- occlusion -----------------------------------------------------------------------------------------------------
_COUNT = "a whole number of at least 1"


def _whole(value: Any) -> bool:
    return _natural(value) and value >= 1


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@method(
    "drop of the target when a patch or token is replaced by a baseline",
    family="perturbation",
    citation="Zeiler, Fergus: Visualizing and Understanding Convolutional Networks, ECCV 2014; survey 2.3",
    anywhere=True,
    checks={
        "baseline": one_of(None, *PICTURE_BASELINES, *TEXT_BASELINES),
        "window": (_COUNT, _whole),
        "stride": ("None or " + _COUNT, lambda v: v is None or _whole(v)),
        "batch_size": (_COUNT, _whole),
        "patch": ("None or a whole number of pixels", lambda v: v is None or _whole(v)),
        "fill_id": ("None or a token id", lambda v: v is None or _natural(v)),
    },
)
def occlusion(
    task: Task,
    *,
    baseline: str | None = None,
    window: int = 1,
    stride: int | None = None,
    batch_size: int = 16,
    patch: int | None = None,
    fill_id: int | None = None,
) -> Scores:
    """score_i = mean over the windows w that hold feature i of f(x) − f(x with w replaced by the baseline).

    f is the target: a logit by default, a probability with :class:`whyformer.targets.Probability`. The black-box
    reference: it needs nothing but forward passes, one for each window.

    Args:
        baseline: pictures: "zero" (0 in model space, which is the processor's mean colour; default), "mean" (each
            channel's mean over this picture), "blur" (the picture blurred with σ = one window). Text: "mask", "unk",
            "pad" (that token of the tokenizer; default the first it has) or "delete" (the token is taken out and the
            others move up; the default without a tokenizer, where there is an attention mask). Vectors: "zero", "mean".
        window: patches along each side, or tokens, replaced at once. Special tokens and padding are never replaced.
        stride: patches or tokens from one window to the next; default ``window``, and never more.
        batch_size: forward passes at once.
        patch: side of a patch in pixels; default what the model's config says (16 if nothing), doubled until there are
            no more than 2048 patches (Swin's are 4 pixels wide).
        fill_id: id of the token that stands in, instead of ``baseline``.

    Raises:
        InputError: a baseline that does not fit the input or that the tokenizer lacks, or stride > window.
    """
    stride = window if stride is None else stride
    if stride > window:
        raise InputError(f"{task.method}: stride={stride} is more than window={window}, which would skip features")
    removed = removal(task, baseline, fill_id=fill_id, patch=patch, window=window)
    logits = task.forward()
    jobs = [(b, w) for b in range(task.inputs.batch) for w in _windows(removed, b, window, stride)]
    rows = logits_without(task, removed, jobs, batch_size, "occlusion")
    target = task.resolve(logits)
    clean = target(logits)
    owners = [b for b, _ in jobs]
    drops = (clean[owners] - values_of(target, rows, owners, logits)).cpu()
    total = torch.zeros(removed.features.shape, dtype=clean.dtype)
    count = torch.zeros_like(total)
    for (b, w), drop in zip(jobs, drops, strict=True):
        total[b, list(w)] += drop
        count[b, list(w)] += 1
    diagnostics: dict[str, Any] = {"forwards": len(jobs) + len(logits), "baseline": removed.baseline}
    if removed.cell is not None:
        diagnostics["cell"] = "{}×{} pixels".format(*removed.cell)
    kind = "token" if removed.grid is None else "patch"
    return Scores(total / count.clamp(min=1), logits, kind, diagnostics, removed.grid)


def _windows(removed: Removal, sample: int, window: int, stride: int) -> Iterator[list[int]]:
    """Features of each window; the last windows are cut at the border."""
    if removed.grid is None:
        positions = removed.features[sample].nonzero()[:, 0].tolist()
        yield from (positions[i : i + window] for i in _starts(len(positions), window, stride))
        return
    rows, columns = removed.grid
    for top in _starts(rows, window, stride):
        for left in _starts(columns, window, stride):
            across = range(left, min(left + window, columns))
            yield [r * columns + c for r in range(top, min(top + window, rows)) for c in across]


def _starts(length: int, window: int, stride: int) -> range:
    """Where windows begin, until one reaches the end."""
    return range(0, max(length - window + stride, 1) if length else 0, stride)


# -- ViT-CX --------------------------------------------------------------------------------------------------------
@method(
    "causal score of masks made from the last block's features",
    family="perturbation",
    citation="Xie, Li, Cao, Zhang: ViT-CX: Causal Explanation of Vision Transformers, IJCAI 2023; survey 2.2",
    level="pixel",
    modality="image",
    anywhere=True,
    checks={
        "noise": at_least(0),
        "distance_threshold": at_least(0),
        "seed": ("a whole number of at least 0", _natural),
        "batch_size": (_COUNT, _whole),
        "output": one_of("probability", "target"),
    },
)
def vit_cx(
    task: Task,
    *,
    noise: float = 0.1,
    distance_threshold: float = 0.1,
    seed: int = 0,
    batch_size: int = 16,
    output: str = "probability",
) -> Scores:
    """S = (1/K) Σ_i s_i M_i / Σ_k M_k at each pixel, s_i = p(X⊙M_i + Z_i⊙(1−M_i)) − p(X + Z_i⊙(1−M_i)) + p(X).

    The K masks M_i come from the d feature maps of the last block's first normalisation (its input in post-norm
    models), prefix tokens left out: each is resized to the picture and scaled to [0, 1]; maps closer than
    ``distance_threshold`` (1 − cosine, complete linkage) are added up and the sum is scaled to [0, 1] again.
    Costs 2K + 1 forward passes; K is usually tens to a few hundred.

    Args:
        noise: standard deviation of Z_i ~ N(0, noise²) in each pixel, in model space.
        distance_threshold: clusters are merged up to this distance.
        seed: of the noise; each sample draws the same noise, wherever it stands in the batch.
        batch_size: forward passes at once.
        output: what p is for a class: its "probability" (published) or the "target" itself (a logit, by default).
            A callable target is always taken as it is.

    Raises:
        MissingExtra: scikit-learn is not installed.

    Differs from the reference code: seeded; constant maps are left out instead of becoming NaN; a pixel under no mask
    gets 0 instead of 0/0.
    """
    try:
        from sklearn.cluster import AgglomerativeClustering as solver  # noqa: N813
    except ImportError as error:
        raise MissingExtra('vit_cx needs scikit-learn: pip install "whyformer[methods]"') from error
    if not task.blocks():
        raise task.refuse("its blocks are not in an nn.ModuleList or nn.Sequential, so the last block is unknown")
    recording = task.record(GRADIENT, Features((task.block(-1, "block"),)))
    if not recording.roots:
        raise task.refuse("its last block was not entered, so there are no features")
    logits, target = recording.logits.detach(), task.resolve(recording.logits.detach())
    if output == "probability" and isinstance(target, Logit):
        several = getattr(getattr(task.model, "config", None), "problem_type", None) == "multi_label_classification"
        target = Probability(target.index, several or logits.shape[-1] == 1)
    if task.inputs.tensor.dim() != 4:
        raise task.refuse(f"its input of shape {list(task.inputs.tensor.shape)} is no [batch, channels, height, width]")
    features = _feature_grid(task, batch_first(recording.roots[-1].detach(), recording.run).flatten(1, -2))
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
        # one draw a mask, so that the noise does not depend on batch_size
        z = [torch.randn(x.tensor.shape[1:], generator=draws, dtype=torch.float64) * noise for _ in some]
        hidden = torch.stack(z).to(x.tensor) * (1 - some)
        rows = task.forward(x.with_tensor(torch.cat([x.tensor * some + hidden, x.tensor + hidden])))
        kept, added = values_of(target, rows, [b] * len(rows), logits).chunk(2)
        scores.append((kept - added + clean[b]).to(masks.dtype))
        if start + step >= counts[b]:
            cover = masks.sum(0)
            weighted = torch.einsum("k,khw->hw", torch.cat(scores), masks)
            saliency[b] = torch.where(cover > 0, weighted / torch.where(cover > 0, cover, 1), 0) / counts[b]
    return Scores(saliency, logits, "pixel", {"masks": counts, "forwards": [2 * k + 1 for k in counts]})


def _feature_grid(task: Task, features: Tensor) -> Tensor:
    """``[B, d, rows, columns]`` from the last block's ``[B, N, d]``; tokens of no cell are left out."""
    places = task.places(features.shape[1], task.block(-1))
    if places.grid is None:
        raise task.refuse("its input is no picture")
    features = features if features.dtype in (torch.float32, torch.float64) else features.float()
    return features[:, places.rows].transpose(1, 2).unflatten(2, places.grid)


def _scaled(maps: Tensor) -> Tensor:
    """Each of ``[k, H, W]`` brought to [0, 1]; constant maps become 0 (what is left of rounding is no pattern)."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    width = high - low
    flat = width <= 64 * torch.finfo(maps.dtype).eps * torch.maximum(low.abs(), high.abs())
    return torch.where(flat, 0, (maps - low) / torch.where(flat, 1, width))


def _clusters(maps: Tensor, threshold: float, clustering: Any) -> list[list[int]]:
    """Members of each cluster of scaled maps ``[d, H, W]``, constant ones left out."""
    flat = maps.flatten(1).double()
    alive = flat.any(1).nonzero()[:, 0].tolist()
    if len(alive) < 2:
        return [[i] for i in alive]
    unit = nn.functional.normalize(flat[alive], dim=1)
    distance = (1 - unit @ unit.T).clamp(min=0)
    distance.fill_diagonal_(0)
    found = clustering(n_clusters=None, metric="precomputed", linkage="complete", distance_threshold=threshold)
    labels = found.fit(distance.cpu().numpy()).labels_.tolist()
    return [[a for a, label in zip(alive, labels, strict=True) if label == k] for k in range(max(labels) + 1)]
