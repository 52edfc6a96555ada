"""Pictures that reach a language model through learned vectors (Q-Former, resampler, projector): methods of maps by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.explaining import open_model
from whyformer.methods.maps.streams import begin
from whyformer.methods.vectors.mixtures import AttentionVectors
from zoo import randomise

WIDTH, HEADS, PATCHES, LATENTS, WORDS, CLASSES = 12, 3, 5, 2, 4, 3
Step = tuple[Tensor, list[tuple[Tensor, Tensor]]]
"""Rows that look, and which rows each part of the map is over: (row numbers, map ``[B, H, Q, K]``)."""


class Attend(nn.Module):
    """Attention of x to y, whose map is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(x), self.k(y), self.v(y)))
        self.map = (q @ k.mT / 2).softmax(-1)
        return self.out((self.map @ v).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """Patches attend, learned vectors read them, and enter a prompt, the last row of which is read.

    Args:
        way: "projector", one attention without a sum; "resampler", two that look at the patches and at the vectors;
            "queries", a Q-Former; "words", one that reads the words too, and whose queries alone look at the patches.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.latents, self.embedding = nn.Parameter(torch.zeros(LATENTS, WIDTH)), nn.Embedding(20, WIDTH)
        self.asked = nn.Embedding(20, WIDTH)
        self.tower, self.first, self.across, self.second = Attend(), Attend(), Attend(), Attend()
        self.language = nn.ModuleList(Attend() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def resample(self, x: Tensor, words: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        if self.way == "projector":
            return self.across(latents, x)
        if self.way == "resampler":
            latents = latents + self.first(latents, torch.cat([x, latents], 1))
            return latents + self.second(latents, torch.cat([x, latents], 1))
        rows = torch.cat([latents, words], 1) if self.way == "words" else latents
        rows = rows + self.first(rows, rows)
        queries = rows[:, :LATENTS]
        queries = queries + self.across(queries, x)
        rows = torch.cat([queries, rows[:, LATENTS:]], 1) if self.way == "words" else queries
        rows = rows + self.second(rows, rows)
        return rows[:, :LATENTS]

    def forward(self, x: Tensor, ids: Tensor, question: Tensor) -> Tensor:
        words = self.embedding(ids)
        x = x + self.tower(x, x)
        rows = torch.cat([self.resample(x, self.asked(question)), words], 1)
        for attention in self.language:
            rows = rows + attention(rows, rows)
        return self.head(rows[:, -1])

    def steps(self) -> list[Step]:
        """What looked at what, of the rows patches, latents (and words beside them), rows of the language model."""
        patches, latents = numbers(PATCHES), PATCHES + numbers(LATENTS)
        inside = torch.cat([latents, latents[-1] + 1 + numbers(WORDS)])
        prompt = inside[-1] + 1 + numbers(LATENTS + WORDS)
        first, across, second = (a.map if hasattr(a, "map") else None for a in (self.first, self.across, self.second))
        rows = inside if self.way == "words" else latents
        ways: dict[str, Callable[[], list[Step]]] = {
            "projector": lambda: [(latents, [(patches, across)])],
            "resampler": lambda: [
                (latents, [(patches, m[..., :PATCHES]), (latents, m[..., PATCHES:])]) for m in (first, second)
            ],
            "queries": lambda: [(rows, [(rows, first)]), (latents, [(patches, across)]), (rows, [(rows, second)])],
        }
        ways["words"] = ways["queries"]
        language = [(prompt, [(prompt, a.map)]) for a in self.language]
        return [(patches, [(patches, self.tower.map)]), *ways[self.way](), *language]


def numbers(count: int) -> Tensor:
    return torch.arange(count)


WAYS = ("projector", "resampler", "queries", "words")
ALL = PATCHES + LATENTS + WORDS + LATENTS + WORDS


def built(way: str) -> tuple[Reader, dict[str, Tensor]]:
    model = randomise(Reader(way)).double().eval()
    model.latents.data = torch.randn(LATENTS, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    x = torch.randn(2, PATCHES, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    ids, question = torch.tensor([[[3, 5, 7, 9], [2, 4, 6, 8]], [[8, 3, 1, 4], [5, 5, 2, 7]]])
    return model, {"x": x, "ids": ids, "question": question}


def scores_of(method: str, model: Reader, inputs: dict[str, Tensor], target: int) -> dict[str, Tensor]:
    e = whyformer.explain(model, inputs, method=method, target=target)
    return {e.input: e.scores, **{name: part.scores for name, part in e.parts.items()}}


def enter(relevance: Tensor) -> Tensor:
    """The first rows of the prompt are the latents."""
    copied = relevance.clone()
    start = PATCHES + LATENTS + WORDS
    copied[:, start : start + LATENTS] = relevance[:, PATCHES : PATCHES + LATENTS]
    return copied


@pytest.mark.parametrize("way", WAYS)
def test_rollout(way: str) -> None:
    model, inputs = built(way)
    with torch.no_grad():
        model(**inputs)
    relevance = torch.eye(ALL).double().expand(2, -1, -1)
    for rows, parts in model.steps():
        if int(rows[0]) == PATCHES + LATENTS + WORDS and bool((relevance[:, rows[0], rows[0]] == 1).all()):
            relevance = enter(relevance)
        step = torch.zeros(2, len(rows), ALL).double()
        for keys, map_ in parts:
            step[:, :, keys] += map_.mean(1)
        share = (torch.eye(ALL).double()[rows] + step) / (1 + step.sum(-1, keepdim=True))
        relevance = relevance.clone().index_copy(1, rows, share @ relevance)
    patches = relevance[:, -1, :PATCHES]
    torch.testing.assert_close(scores_of("rollout", model, inputs, 0)["x"], patches, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ["projector", "queries"])
@pytest.mark.parametrize("target", range(CLASSES))
def test_gae(way: str, target: int) -> None:
    model, inputs = built(way)
    logits = model(**inputs)
    steps = model.steps()
    gradients = torch.autograd.grad(logits[:, target].sum(), [m for _, parts in steps for _, m in parts])
    fused = [(m * g).clamp(min=0).mean(1).detach() for (_, m), g in zip((p for _, s in steps for p in s), gradients, strict=True)]
    eye = torch.eye(LATENTS).double()
    tower, *inside, first, second = fused
    patches = torch.eye(PATCHES).double() + tower

    def excess(r: Tensor) -> Tensor:
        more = r - torch.eye(r.shape[-1]).double()
        sums = more.sum(-1, keepdim=True)
        return torch.where(sums != 0, more / torch.where(sums != 0, sums, 1), 0) + torch.eye(r.shape[-1]).double()

    if way == "projector":
        latent = inside[0] @ excess(patches)
    else:
        own, across, last = inside
        latent = excess(eye + own).mT @ across @ excess(patches)
        latent = latent + last @ latent
    prompt = torch.cat([latent, torch.zeros(2, WORDS, PATCHES).double()], 1)
    for map_ in (first, second):
        prompt = prompt + map_ @ prompt
    torch.testing.assert_close(scores_of("gae", model, inputs, target)["x"], prompt[:, -1], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution", "value_zeroing"])
def test_each_sample_alone(way: str, method: str) -> None:
    model, inputs = built(way)
    both = scores_of(method, model, inputs, 1)
    for i in range(2):
        alone = scores_of(method, model, {name: value[i : i + 1] for name, value in inputs.items()}, 1)
        for name, scores in alone.items():
            torch.testing.assert_close(scores, both[name][i : i + 1], rtol=1e-6, atol=1e-9)
            assert bool(scores.any())


@pytest.mark.parametrize("way", WAYS)
def test_the_patch_that_is_looked_at(way: str) -> None:
    """The latents look at patch 3 alone, by a key that it alone has."""
    model, inputs = built(way)
    for attention in (model.across, model.first, model.second):
        looks = attention is model.across or way == "resampler"
        attention.q.weight.data.zero_()
        attention.q.bias.data.fill_(1.0 if looks else 0.0)
        attention.k.weight.data.zero_()
        attention.k.bias.data.zero_()
        if looks:
            attention.k.weight.data[:, 0] = 1.0
    model.tower.out.weight.data.zero_()
    model.tower.out.bias.data.zero_()
    model.latents.data[:, 0] = 0
    inputs["x"][:, :, 0] = 0
    inputs["x"][:, 3, 0] = 30
    model.tower.k.weight.data.zero_()
    assert scores_of("rollout", model, inputs, 0)["x"].argmax(1).tolist() == [3, 3]


def test_norms_of_a_projector_without_a_sum() -> None:
    """The learned vectors hand on nothing but what they read: no residual is part of what they mix."""
    model, inputs = built("projector")
    read: dict[Attend, tuple[Tensor, Tensor]] = {}
    attentions = [model.tower, model.across, *model.language]
    for attention in attentions:
        attention.register_forward_hook(lambda m, args, out: read.__setitem__(m, args))
    with torch.no_grad():
        model(**inputs)
    task = open_model(model.requires_grad_(False)).prepare(inputs).task(name="norm_attention", target=0)
    passed = begin(task).passed
    for number, attention in enumerate(attentions):
        x, y = read[attention]
        values, weight = attention.v(y).unflatten(-1, (HEADS, -1)), attention.out.weight.unflatten(1, (HEADS, -1))
        parts = torch.einsum("bhij,bjhd,ohd->bijo", attention.map, values, weight)
        if attention is not model.across:
            parts = parts + torch.eye(x.shape[1]).double()[..., None] * x[:, :, None]
        for place in ("sum", "norm"):
            mixture = AttentionVectors(task, passed).at(number, place)
            mixture = mixture if x is y else mixture.of_attention
            torch.testing.assert_close(mixture.norms(), parts.norm(dim=-1), rtol=1e-9, atol=1e-12)
    assert not AttentionVectors(task, passed).at(1, "norm").own_norms().any()
