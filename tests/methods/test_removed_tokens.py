"""Methods of maps on models that remove or merge tokens between their blocks: J ← (I + Ē) S J, where S is the matrix
from the tokens before to those after."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import MethodNotApplicable

D, TOKENS = 12, 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        attention = (q @ k.mT).softmax(-1)
        return x + self.out((attention @ v).transpose(1, 2).flatten(2)), attention

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attend(x)
        return x + self.mlp(x)


def one_hot(kept: Tensor, count: int) -> Tensor:
    return nn.functional.one_hot(kept, count).double()


def scores_of(tokens: Tensor) -> Tensor:
    return tokens.square().sum(-1)


# each reduction returns (the rows after it, the matrix S from the rows before); row 0 is the class token
def pruned(x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    kept = scores_of(x[:, 1:]).topk(4).indices + 1
    kept = torch.cat([torch.zeros_like(kept[:, :1]), kept], 1)
    return x.gather(1, kept[..., None].expand(-1, -1, D)), one_hot(kept, x.shape[1])


def every_second(x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.arange(x.shape[1]) % 2 == 0
    return x[:, mask], one_hot(mask.nonzero()[:, 0].expand(len(x), -1), x.shape[1])


def pruned_and_normed(x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    rows, matrix = every_second(x, attention)
    return nn.functional.layer_norm(rows, (D,)), matrix


def merged_pairs(x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    place = (torch.arange(x.shape[1] - 1) + 1) // 2
    count = int(place.max()) + 1
    index = place[None, :, None].expand(len(x), -1, D)
    rows = torch.zeros(len(x), count, D, dtype=x.dtype).scatter_reduce(1, index, x[:, 1:], "mean", include_self=False)
    matrix = torch.zeros(len(x), count + 1, x.shape[1], dtype=x.dtype)
    matrix[:, 0, 0], matrix[:, 1:, 1:] = 1, one_hot(place, count).T
    return torch.cat([x[:, :1], rows], 1), matrix / matrix.sum(-1, keepdim=True)


def similar_merged(x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    even, odd = x[:, ::2], x[:, 1::2]  # as in token merging (ToMe), the most similar are added to their partners
    unit = nn.functional.normalize(x, dim=-1)
    best, partner = (unit[:, ::2] @ unit[:, 1::2].mT).max(-1)
    order = best.argsort(-1, descending=True)
    gone, stay = order[:, :2], order[:, 2:].sort(-1).values
    to = partner.gather(1, gone)
    wide = lambda index: index[..., None].expand(-1, -1, D)  # noqa: E731
    merged = odd.scatter_reduce(1, wide(to), even.gather(1, wide(gone)), "mean")
    matrix = torch.zeros(len(x), odd.shape[1], x.shape[1], dtype=x.dtype)
    for b in range(len(x)):
        for j in range(odd.shape[1]):
            parts = [2 * j + 1, *(2 * int(i) for i, t in zip(gone[b], to[b], strict=True) if int(t) == j)]
            matrix[b, j, parts] = 1 / len(parts)
    return torch.cat([even.gather(1, wide(stay)), merged], 1), torch.cat([one_hot(2 * stay, x.shape[1]), matrix], 1)


def with_mean(x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    identity = torch.eye(x.shape[1], dtype=x.dtype)
    matrix = torch.cat([identity, identity.mean(0, keepdim=True)])
    return torch.cat([x, x.mean(1, keepdim=True)], 1), matrix.expand(len(x), -1, -1)


REDUCTIONS = (pruned, every_second, pruned_and_normed, merged_pairs, similar_merged, with_mean)


class Reducing(nn.Module):
    """Three blocks, with reductions after the first ones, or inside of them between attention and MLP."""

    def __init__(self, *reductions, inside: bool = False) -> None:
        super().__init__()
        self.inside, self.reductions, self.embedding = inside, reductions, nn.Embedding(30, D)
        self.first, self.position = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, TOKENS + 1, D))
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(D, 4)

    def run(self, ids: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        x = self.embedding(ids)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.position
        maps, matrices = [], []
        for i, block in enumerate(self.blocks):
            x, attention = block.attend(x)
            maps.append(attention)
            x = x if self.inside else x + block.mlp(x)
            if i < len(self.reductions):
                x, matrix = self.reductions[i](x, attention)
                matrices.append(matrix)
            x = x + block.mlp(x) if self.inside else x
        return self.head(x[:, 0]), maps, matrices

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.run(input_ids)[0]


def make(*reductions, inside: bool = False) -> Reducing:
    torch.manual_seed(0)
    return Reducing(*reductions, inside=inside).double().eval()


def through(maps: list[Tensor], matrices: list[Tensor], *, normalize: bool = False) -> Tensor:
    """Return the class token's row of (I + Ē) S (I + Ē) … at the tokens of the text."""
    row = torch.zeros(len(maps[-1]), 1, maps[-1].shape[-1], dtype=torch.float64)
    row[..., 0] = 1
    for i in reversed(range(len(maps))):
        row = row @ matrices[i] if i < len(matrices) else row
        step = maps[i] + torch.eye(maps[i].shape[-1], dtype=torch.float64)
        row = row @ (step / step.sum(-1, keepdim=True) if normalize else step)
    return row[:, 0, 1:]


def ids_of(count: int) -> Tensor:
    return torch.randint(0, 30, (count, TOKENS), generator=torch.Generator().manual_seed(1))


def explained(model: nn.Module, ids: Tensor, method: str, **settings) -> Tensor:
    return whyformer.explain(model, {"input_ids": ids}, method, target=2, **settings).scores


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("count", "inside"), [(1, False), (1, True), (2, True)])
def test_maps_are_multiplied_through_reductions(reduction, count, inside):
    model, ids = make(*[reduction] * count, inside=inside), ids_of(2)
    logits, maps, matrices = model.run(ids)
    gradients = torch.autograd.grad(logits[:, 2].sum(), maps)
    products = [(g * a).clamp(min=0).mean(1) for g, a in zip(gradients, maps, strict=True)]
    means = [a.detach().mean(1) for a in maps]
    for batch in (ids, ids[:1]):
        gae, rollout = (explained(model, batch, name) for name in ("gae", "rollout"))
        torch.testing.assert_close(gae, through(products, matrices)[: len(batch)], rtol=1e-9, atol=1e-12)
        expected = through(means, matrices, normalize=True)[: len(batch)]
        torch.testing.assert_close(rollout, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_single_block_before_a_reduction(reduction):
    model, ids = make(reduction), ids_of(2)
    with torch.no_grad():
        _, maps, (matrix,) = model.run(ids)
    scores = explained(model, ids, "raw_attention", aggregation={"layers": 0})
    torch.testing.assert_close(scores, (matrix @ maps[0].mean(1))[:, 0, 1:])
    scores = explained(model, ids, "raw_attention", aggregation={"layers": "mean"})
    rows = [m.mean(1)[:, 0] for m in maps[1:]]
    parts = [(matrix @ maps[0].mean(1))[:, 0], *((row[:, None] @ matrix)[:, 0] for row in rows)]
    torch.testing.assert_close(scores, torch.stack(parts).mean(0)[:, 1:])


OTHERS = ("transformer_attribution", "agcam", "norm_attention", "value_zeroing")


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_is_its_singles(method, reduction):
    model, ids = make(reduction, reduction, inside=True), ids_of(2)
    singles = [explained(model, ids[i : i + 1], method) for i in range(2)]
    torch.testing.assert_close(explained(model, ids, method), torch.cat(singles), rtol=1e-8, atol=1e-12)


def gated(x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, ::2] * x[:, 1::2].sigmoid(), attention


def weighted(x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([x, (x * scores_of(x)[..., None]).sum(1, keepdim=True)], 1), attention


@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution"])
@pytest.mark.parametrize("reduction", [gated, weighted])
def test_other_changes_between_blocks_are_refused(method, reduction):
    with pytest.raises(MethodNotApplicable, match="removes or merges tokens"):
        explained(make(reduction), ids_of(1), method)


@pytest.mark.parametrize("method", ["globenc", "alti", "attention_flow", "legrad", "attcat", "decompx", "grad_sam"])
def test_methods_of_one_sequence_name_the_reason(method):
    with pytest.raises(MethodNotApplicable, match="removes or merges tokens"):
        explained(make(pruned), ids_of(1), method)
    with pytest.raises(MethodNotApplicable, match="removes or merges tokens"):
        whyformer.attention_maps(make(pruned), {"input_ids": ids_of(1)})


class Constant(nn.Module):
    """Computed rows beside the class token: they depend on the input, so they are not constants."""

    def __init__(self, before: str) -> None:
        super().__init__()
        self.before, self.model = before, make()

    def forward(self, input_ids: Tensor) -> Tensor:
        model = self.model
        x = model.embedding(input_ids)
        index = torch.zeros(len(x), 1, D, dtype=torch.long)
        rows = {
            "sum": lambda: x.new_zeros(len(x), 1, D).scatter_reduce(1, index.expand(-1, TOKENS, -1) * 0, x, "sum"),
            "prod": lambda: x.prod(1, keepdim=True),
            "sorted": lambda: x.sort(1).values[:, :1],
        }[self.before]()
        x = torch.cat([model.first.expand(len(x), -1, -1), rows], 1)
        for block in model.blocks:
            x = block(x)
        return model.head(x[:, 0])


@pytest.mark.parametrize("before", ["sum", "prod", "sorted"])
@pytest.mark.parametrize("method", ["rollout", "gae"])
def test_rows_computed_from_tokens_are_no_constants(before, method):
    with pytest.raises(MethodNotApplicable):
        explained(Constant(before), ids_of(1), method)
