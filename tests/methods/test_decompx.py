"""DecompX: written out from a BERT's own weights as published, the sum, and the same function written in several ways."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer
from whyformer.errors import MethodNotApplicable
from whyformer.rules.shares import ShareRules, Shares
from zoo import LANGUAGE, ZOO, build


def shared_out(parts: Tensor, bias: Tensor) -> Tensor:
    """``[i, j, D]`` parts with a bias ``[D]`` shared out among j by |⟨x_i←j, b⟩|."""
    sizes = (parts * bias).sum(-1).abs()
    return parts + (sizes / sizes.sum(-1, keepdim=True))[..., None] * bias


def normed(parts: Tensor, whole: Tensor, norm: nn.LayerNorm) -> Tensor:
    deviation = (whole.var(-1, unbiased=False) + norm.eps).sqrt()
    return shared_out((parts - parts.mean(-1, keepdim=True)) / deviation[:, None, None] * norm.weight, norm.bias)


def written_out(model: Any, states: Tensor, maps: list[Tensor], label: int) -> Tensor:
    """``[N]`` shares of a logit of a BERT, for what entered the first block ``[N, D]``, without padding."""
    n = len(states)
    parts = torch.diag_embed(torch.ones(n, dtype=states.dtype))[..., None] * states[:, None]
    for b, layer in enumerate(model.bert.encoder.layer):
        attention, output, width = layer.attention.self, layer.attention.output, layer.attention.self.attention_head_size
        mixed = torch.zeros_like(parts)
        for h in range(attention.num_attention_heads):
            rows = slice(h * width, (h + 1) * width)
            value, bias, out = attention.value.weight[rows], attention.value.bias[rows], output.dense.weight[:, rows]
            for i in range(n):
                for k in range(n):
                    moved = parts[k] @ value.T
                    if b == 0:
                        moved[k] += bias
                    mixed[i] += maps[b][h, i, k] * moved @ out.T
        bias = output.dense.bias + (0 if b == 0 else output.dense.weight @ attention.value.bias)
        parts = shared_out(mixed + parts, bias)
        parts = normed(parts, parts.sum(1), output.LayerNorm)
        whole = parts.sum(1)
        inner = shared_out(parts @ layer.intermediate.dense.weight.T, layer.intermediate.dense.bias)
        z = layer.intermediate.dense(whole)
        inner = inner * (functional.gelu(z) / z)[:, None]
        behind = parts + shared_out(inner @ layer.output.dense.weight.T, layer.output.dense.bias)
        parts = normed(behind, behind.sum(1), layer.output.LayerNorm)
    first, pooler = parts[:1], model.bert.pooler.dense
    pooled = shared_out(first @ pooler.weight.T, pooler.bias)
    pooled = pooled * (pooled.sum(1).tanh() / pooled.sum(1))[:, None]
    return shared_out(pooled @ model.classifier.weight.T, model.classifier.bias)[0, :, label]


@pytest.mark.parametrize("sample", [0, 1])
def test_written_out_as_published(sample: int) -> None:
    model, inputs = build("bert")
    length, label = int(inputs["attention_mask"][sample].sum()), sample + 1
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[0][sample, :length]
        maps = [m[sample, :, :length, :length] for m in whyformer.attention_maps(model, inputs).maps]
        wanted = written_out(model, states, maps, label)
    got = whyformer.explain(model, inputs, method="decompx", target=label).scores[sample, :length]
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [*ZOO, *LANGUAGE])
def test_shares_sum_to_the_logit(name: str) -> None:
    """Biases included, in float64 to 1e-6 of the shares' size (transformers takes Llama's norms in float32)."""
    model, inputs = build(name)
    e = whyformer.explain(model, inputs, method="decompx", target=[1, 3])
    figure = e.diagnostics["shares"]
    for i, label in enumerate((1, 3)):
        size = sum(map(abs, figure["rows"][i]))
        assert abs(figure["sum"][i] - float(e.logits[i, label])) < (1e-6 if "llama" in name else 1e-11) * size
        if isinstance(inputs, dict):
            assert abs(float(e.scores[i].sum()) - float(e.logits[i, label])) < 1e-6 * size


def without_biases(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta", "encoder_mean", "encoder_first"])
def test_without_biases_it_is_conservative_propagation(name: str) -> None:
    """All operations are then linear in the shares, so that carrying them forward or multipliers backward is the same."""
    model, inputs = build(name)
    model = without_biases(model)
    one, other = (
        whyformer.explain(model, inputs, method=m, target=[1, 3], **settings).scores
        for m, settings in {"decompx": {}, "lrp_ah_ln": {"secant": True}}.items()
    )
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["hf_vit", "bert", "llama"])
def test_how_many_go_together_does_not_matter(name: str) -> None:
    model, inputs = build(name)
    one, *others = (whyformer.explain(model, inputs, method="decompx", target=0, batch_size=k).scores for k in (1, 3, 100))
    for other in others:
        torch.testing.assert_close(one, other)


# -- the same function written in several ways ----------------------------------------------------------------------
class Block(nn.Module):
    """Attention with queries, keys and values by one layer or by three; fused or written out; GELU as F.gelu or by hand."""

    def __init__(self, *, joint: bool, fused: bool, by_hand: bool, in_place: bool) -> None:
        super().__init__()
        self.joint, self.fused, self.by_hand, self.in_place = joint, fused, by_hand, in_place
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.first, self.second = nn.LayerNorm(12), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.joint:
            q, k, v = self.qkv(y).reshape(*y.shape[:2], 3, 2, 6).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
            q, k, v = (functional.linear(y, w, b).unflatten(-1, (2, 6)).transpose(1, 2) for w, b in parts)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = torch.einsum("bhqk,bhkd->bhqd", (q @ k.mT / 6**0.5).softmax(-1), v)
        moved = self.out(mixed.transpose(1, 2).flatten(2))
        if self.in_place:
            moved += x
            x = moved
        else:
            x = moved + x
        z = self.up(self.second(x))
        z = z * (1 + torch.erf(z / 2**0.5)) / 2 if self.by_hand else functional.gelu(z)
        return x + self.down(z)


class Small(nn.Module):
    def __init__(self, **how: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(20, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList([Block(**how) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


PLAIN = {"joint": False, "fused": False, "by_hand": False, "in_place": False}


@pytest.mark.parametrize("how", ["joint", "fused", "in_place"])
def test_the_same_function_written_in_another_way(how: str) -> None:
    inputs = {"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}
    one, other = (
        whyformer.explain(Small(**{**PLAIN, how: value}).double().eval(), inputs, method="decompx", target=1).scores
        for value in (False, True)
    )
    torch.testing.assert_close(one, other)


class Sorted(Small):
    """Sorts what it pools, which is no sum of shares."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.sort(1).values[:, 0])


class Detached(Small):
    """Half of what is read out is detached, which changes no value."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1) + x.detach().mean(1))


class SortedInside(Small):
    """The same in the midst of the blocks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x.sort(1).values)
        return self.head(x.mean(1))


@pytest.mark.parametrize(("kind", "said"), [(Sorted, "operation 'sort'"), (SortedInside, "no recognizable blocks")])
def test_what_cannot_be_followed_is_refused(kind: type[Small], said: str) -> None:
    with pytest.raises(MethodNotApplicable, match=f"decompx has no meaning.*{said}"):
        whyformer.explain(kind(**PLAIN).eval(), {"input_ids": torch.arange(5)[None]}, method="decompx")


def test_what_is_detached_is_what_it_computes() -> None:
    """f(x) + f(x) is 2 f(x), whether autograd sees both or one."""
    inputs, model = {"input_ids": torch.arange(5)[None]}, Detached(**PLAIN).double().eval()
    doubled = Small(**PLAIN).double().eval()
    with torch.no_grad():
        doubled.head.weight *= 2
    one, other = (whyformer.explain(m, inputs, method="decompx", target=1).scores for m in (model, doubled))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["gpt2", "modernbert_cls"])
def test_hand_written_activations_and_norms_are_known(name: str) -> None:
    """GPT-2's GELU is written with powers and a tanh, whose own slopes from zero would be others."""
    model, inputs = build(name)
    e = whyformer.explain(model, inputs, method="decompx", target=1)
    for module in model.modules():
        for child, one in module.named_children():
            if type(one).__name__ == "NewGELUActivation":
                setattr(module, child, nn.GELU(approximate="tanh"))
    same = whyformer.explain(model, inputs, method="decompx", target=1)
    torch.testing.assert_close(e.scores, same.scores)


def test_shares_are_let_go_of_behind_their_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a second block does not need more memory than the first."""
    alive: list[int] = []
    rule = ShareRules.__call__

    def counted(self: ShareRules, unit: Any, given: dict[int, Shares]) -> dict[int, Shares]:
        made = rule(self, unit, given)
        alive.append(sum(type(one) is Shares for one in gc.get_objects()))
        return made

    monkeypatch.setattr(ShareRules, "__call__", counted)
    for name in ("hf_vit", "bert"):
        alive.clear()
        whyformer.explain(*build(name), method="decompx", target=1)
        half = len(alive) // 2
        assert max(alive[half:]) <= max(alive[:half]) < half

