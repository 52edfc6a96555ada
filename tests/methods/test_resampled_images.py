"""Images that enter a language model through learned vectors (Q-Former, resampler, projector): map methods against references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.explaining import open_model
from whyformer.methods.maps.stream_maps import begin
from whyformer.methods.vectors.mixtures import AttentionVectors
from zoo import randomise

WIDTH, HEADS, PATCHES, LATENTS, WORDS, CLASSES = 12, 3, 5, 2, 4, 3
Step = tuple[Tensor, list[tuple[Tensor, Tensor]]]
"""Query rows, and for each part of the map (key rows, map ``[B, H, Q, K]``)."""


class MapAttention(nn.Module):
    """Attention of x to y; stores its map."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(x), self.k(y), self.v(y)))
        self.map = (q @ k.mT / 2).softmax(-1)
        return self.out((self.map @ v).transpose(1, 2).flatten(2))


class ResamplerModel(nn.Module):
    """Self-attention of patches, learned vectors that attend to them, and a prompt with these, whose last row is classified.

    Args:
        variant: "projector", one cross-attention without residual; "resampler", two attentions over patches and vectors;
            "queries", a Q-Former; "words", a Q-Former over queries and words, of which only queries attend to patches.
    """

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.latents, self.embedding = nn.Parameter(torch.zeros(LATENTS, WIDTH)), nn.Embedding(20, WIDTH)
        self.question_embedding = nn.Embedding(20, WIDTH)
        self.tower, self.first, self.across, self.second = MapAttention(), MapAttention(), MapAttention(), MapAttention()
        self.language = nn.ModuleList(MapAttention() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def resample(self, x: Tensor, words: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        if self.variant == "projector":
            return self.across(latents, x)
        if self.variant == "resampler":
            latents = latents + self.first(latents, torch.cat([x, latents], 1))
            return latents + self.second(latents, torch.cat([x, latents], 1))
        rows = torch.cat([latents, words], 1) if self.variant == "words" else latents
        rows = rows + self.first(rows, rows)
        queries = rows[:, :LATENTS]
        queries = queries + self.across(queries, x)
        rows = torch.cat([queries, rows[:, LATENTS:]], 1) if self.variant == "words" else queries
        rows = rows + self.second(rows, rows)
        return rows[:, :LATENTS]

    def forward(self, x: Tensor, ids: Tensor, question: Tensor) -> Tensor:
        words = self.embedding(ids)
        x = x + self.tower(x, x)
        rows = torch.cat([self.resample(x, self.question_embedding(question)), words], 1)
        for attention in self.language:
            rows = rows + attention(rows, rows)
        return self.head(rows[:, -1])

    def steps(self) -> list[Step]:
        """Attention steps over rows in the order patches, latents, words of the question, rows of the language model."""
        patches, latents = indices(PATCHES), PATCHES + indices(LATENTS)
        inside = torch.cat([latents, latents[-1] + 1 + indices(WORDS)])
        prompt = inside[-1] + 1 + indices(LATENTS + WORDS)
        first, across, second = (a.map if hasattr(a, "map") else None for a in (self.first, self.across, self.second))
        rows = inside if self.variant == "words" else latents
        variants: dict[str, Callable[[], list[Step]]] = {
            "projector": lambda: [(latents, [(patches, across)])],
            "resampler": lambda: [
                (latents, [(patches, m[..., :PATCHES]), (latents, m[..., PATCHES:])]) for m in (first, second)
            ],
            "queries": lambda: [(rows, [(rows, first)]), (latents, [(patches, across)]), (rows, [(rows, second)])],
        }
        variants["words"] = variants["queries"]
        language = [(prompt, [(prompt, a.map)]) for a in self.language]
        return [(patches, [(patches, self.tower.map)]), *variants[self.variant](), *language]


def indices(count: int) -> Tensor:
    return torch.arange(count)


VARIANTS = ("projector", "resampler", "queries", "words")
ALL = PATCHES + LATENTS + WORDS + LATENTS + WORDS


def build_model(variant: str) -> tuple[ResamplerModel, dict[str, Tensor]]:
    model = randomise(ResamplerModel(variant)).double().eval()
    model.latents.data = torch.randn(LATENTS, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    x = torch.randn(2, PATCHES, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    ids, question = torch.tensor([[[3, 5, 7, 9], [2, 4, 6, 8]], [[8, 3, 1, 4], [5, 5, 2, 7]]])
    return model, {"x": x, "ids": ids, "question": question}


def scores_of(method: str, model: ResamplerModel, inputs: dict[str, Tensor], target: int) -> dict[str, Tensor]:
    e = whyformer.explain(model, inputs, method=method, target=target)
    return {e.input: e.scores, **{name: part.scores for name, part in e.parts.items()}}


def copy_latents_to_prompt(relevance: Tensor) -> Tensor:
    """Copy the relevance of the latents to the first rows of the prompt."""
    copied = relevance.clone()
    start = PATCHES + LATENTS + WORDS
    copied[:, start : start + LATENTS] = relevance[:, PATCHES : PATCHES + LATENTS]
    return copied


@pytest.mark.parametrize("variant", VARIANTS)
def test_rollout_of_resampled_image_equals_reference(variant: str) -> None:
    model, inputs = build_model(variant)
    with torch.no_grad():
        model(**inputs)
    relevance = torch.eye(ALL).double().expand(2, -1, -1)
    for rows, parts in model.steps():
        if int(rows[0]) == PATCHES + LATENTS + WORDS and bool((relevance[:, rows[0], rows[0]] == 1).all()):
            relevance = copy_latents_to_prompt(relevance)
        step = torch.zeros(2, len(rows), ALL).double()
        for keys, map_ in parts:
            step[:, :, keys] += map_.mean(1)
        share = (torch.eye(ALL).double()[rows] + step) / (1 + step.sum(-1, keepdim=True))
        relevance = relevance.clone().index_copy(1, rows, share @ relevance)
    patches = relevance[:, -1, :PATCHES]
    torch.testing.assert_close(scores_of("rollout", model, inputs, 0)["x"], patches, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", ["projector", "queries"])
@pytest.mark.parametrize("target", range(CLASSES))
def test_gae_of_resampled_image_equals_reference(variant: str, target: int) -> None:
    model, inputs = build_model(variant)
    logits = model(**inputs)
    steps = model.steps()
    gradients = torch.autograd.grad(logits[:, target].sum(), [m for _, parts in steps for _, m in parts])
    fused = [(m * g).clamp(min=0).mean(1).detach() for (_, m), g in zip((p for _, s in steps for p in s), gradients, strict=True)]
    eye = torch.eye(LATENTS).double()
    tower, *inside, first, second = fused
    patches = torch.eye(PATCHES).double() + tower

    def normalised(r: Tensor) -> Tensor:
        off_diagonal = r - torch.eye(r.shape[-1]).double()
        sums = off_diagonal.sum(-1, keepdim=True)
        return torch.where(sums != 0, off_diagonal / torch.where(sums != 0, sums, 1), 0) + torch.eye(r.shape[-1]).double()

    if variant == "projector":
        latent = inside[0] @ normalised(patches)
    else:
        self_map, cross_map, last_map = inside
        latent = normalised(eye + self_map).mT @ cross_map @ normalised(patches)
        latent = latent + last_map @ latent
    prompt = torch.cat([latent, torch.zeros(2, WORDS, PATCHES).double()], 1)
    for map_ in (first, second):
        prompt = prompt + map_ @ prompt
    torch.testing.assert_close(scores_of("gae", model, inputs, target)["x"], prompt[:, -1], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution", "value_zeroing"])
def test_batch_equals_single_samples(variant: str, method: str) -> None:
    model, inputs = build_model(variant)
    batch = scores_of(method, model, inputs, 1)
    for i in range(2):
        single = scores_of(method, model, {name: value[i : i + 1] for name, value in inputs.items()}, 1)
        for name, scores in single.items():
            torch.testing.assert_close(scores, batch[name][i : i + 1], rtol=1e-6, atol=1e-9)
            assert bool(scores.any())


@pytest.mark.parametrize("variant", VARIANTS)
def test_attended_patch_has_highest_rollout(variant: str) -> None:
    """Only the key of patch 3 matches the queries of the latents."""
    model, inputs = build_model(variant)
    for attention in (model.across, model.first, model.second):
        attends_to_patches = attention is model.across or variant == "resampler"
        attention.q.weight.data.zero_()
        attention.q.bias.data.fill_(1.0 if attends_to_patches else 0.0)
        attention.k.weight.data.zero_()
        attention.k.bias.data.zero_()
        if attends_to_patches:
            attention.k.weight.data[:, 0] = 1.0
    model.tower.out.weight.data.zero_()
    model.tower.out.bias.data.zero_()
    model.latents.data[:, 0] = 0
    inputs["x"][:, :, 0] = 0
    inputs["x"][:, 3, 0] = 30
    model.tower.k.weight.data.zero_()
    assert scores_of("rollout", model, inputs, 0)["x"].argmax(1).tolist() == [3, 3]


def test_vector_norms_of_projector_without_residual() -> None:
    """The projector has no residual, so its vectors contain only attention."""
    model, inputs = build_model("projector")
    attention_inputs: dict[MapAttention, tuple[Tensor, Tensor]] = {}
    attentions = [model.tower, model.across, *model.language]
    for attention in attentions:
        attention.register_forward_hook(lambda m, args, out: attention_inputs.__setitem__(m, args))
    with torch.no_grad():
        model(**inputs)
    task = open_model(model.requires_grad_(False)).prepare(inputs).task(name="norm_attention", target=0)
    map_pass = begin(task).map_pass
    for number, attention in enumerate(attentions):
        x, y = attention_inputs[attention]
        values, weight = attention.v(y).unflatten(-1, (HEADS, -1)), attention.out.weight.unflatten(1, (HEADS, -1))
        parts = torch.einsum("bhij,bjhd,ohd->bijo", attention.map, values, weight)
        if attention is not model.across:
            parts = parts + torch.eye(x.shape[1]).double()[..., None] * x[:, :, None]
        for position in ("sum", "norm"):
            mixture = AttentionVectors(task, map_pass).at(number, position)
            mixture = mixture if x is y else mixture.of_attention
            torch.testing.assert_close(mixture.norms(), parts.norm(dim=-1), rtol=1e-9, atol=1e-12)
    assert not AttentionVectors(task, map_pass).at(1, "norm").residual_norms().any()
