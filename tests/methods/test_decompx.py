"""DecompX against a reference implementation for BERT, the sum of its shares, and equivalent implementations of a model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer
from whyformer.errors import MethodNotApplicable
from whyformer.rules.shares import ShareRules, Shares
from zoo import LANGUAGE, ZOO, build


def with_bias(parts: Tensor, bias: Tensor) -> Tensor:
    """Distribute a bias ``[D]`` over parts ``[i, j, D]``, in proportion to |⟨x_i←j, b⟩| among j."""
    sizes = (parts * bias).sum(-1).abs()
    return parts + (sizes / sizes.sum(-1, keepdim=True))[..., None] * bias


def normed(parts: Tensor, total: Tensor, norm: nn.LayerNorm) -> Tensor:
    deviation = (total.var(-1, unbiased=False) + norm.eps).sqrt()
    return with_bias((parts - parts.mean(-1, keepdim=True)) / deviation[:, None, None] * norm.weight, norm.bias)


def reference_shares(model: Any, states: Tensor, maps: list[Tensor], label: int) -> Tensor:
    """Shares ``[N]`` of a logit of BERT, given the input ``[N, D]`` of the first block, without padding."""
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
                    values = parts[k] @ value.T
                    if b == 0:
                        values[k] += bias
                    mixed[i] += maps[b][h, i, k] * values @ out.T
        bias = output.dense.bias + (0 if b == 0 else output.dense.weight @ attention.value.bias)
        parts = with_bias(mixed + parts, bias)
        parts = normed(parts, parts.sum(1), output.LayerNorm)
        total = parts.sum(1)
        inner = with_bias(parts @ layer.intermediate.dense.weight.T, layer.intermediate.dense.bias)
        z = layer.intermediate.dense(total)
        inner = inner * (functional.gelu(z) / z)[:, None]
        summed = parts + with_bias(inner @ layer.output.dense.weight.T, layer.output.dense.bias)
        parts = normed(summed, summed.sum(1), layer.output.LayerNorm)
    first, pooler = parts[:1], model.bert.pooler.dense
    pooled = with_bias(first @ pooler.weight.T, pooler.bias)
    pooled = pooled * (pooled.sum(1).tanh() / pooled.sum(1))[:, None]
    return with_bias(pooled @ model.classifier.weight.T, model.classifier.bias)[0, :, label]


@pytest.mark.parametrize("sample", [0, 1])
def test_bert_equals_published_reference(sample: int) -> None:
    model, inputs = build("bert")
    length, label = int(inputs["attention_mask"][sample].sum()), sample + 1
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[0][sample, :length]
        maps = [m[sample, :, :length, :length] for m in whyformer.attention_maps(model, inputs).maps]
        expected = reference_shares(model, states, maps, label)
    shares = whyformer.explain(model, inputs, method="decompx", target=label).scores[sample, :length]
    torch.testing.assert_close(shares, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [*ZOO, *LANGUAGE])
def test_shares_sum_to_the_logit(name: str) -> None:
    """Biases included; float64, relative tolerance 1e-11 (1e-6 for Llama, whose norms transformers computes in float32)."""
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
def test_decompx_without_biases_equals_secant_lrp(name: str) -> None:
    """Without biases all operations are linear in the shares, so forward shares equal backward multipliers."""
    model, inputs = build(name)
    model = without_biases(model)
    decompx, lrp = (
        whyformer.explain(model, inputs, method=m, target=[1, 3], **settings).scores
        for m, settings in {"decompx": {}, "lrp_ah_ln": {"secant": True}}.items()
    )
    torch.testing.assert_close(decompx, lrp)


@pytest.mark.parametrize("name", ["hf_vit", "bert", "llama"])
def test_batch_size_does_not_change_scores(name: str) -> None:
    model, inputs = build(name)
    single, *batched = (whyformer.explain(model, inputs, method="decompx", target=0, batch_size=k).scores for k in (1, 3, 100))
    for scores in batched:
        torch.testing.assert_close(single, scores)


# -- equivalent implementations -------------------------------------------------------------------------------------
class VariantBlock(nn.Module):
    """Attention with one or three layers for queries, keys and values; fused or not; GELU as F.gelu or as a formula."""

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
        attended = self.out(mixed.transpose(1, 2).flatten(2))
        if self.in_place:
            attended += x
            x = attended
        else:
            x = attended + x
        z = self.up(self.second(x))
        z = z * (1 + torch.erf(z / 2**0.5)) / 2 if self.by_hand else functional.gelu(z)
        return x + self.down(z)


class VariantModel(nn.Module):
    def __init__(self, **how: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(20, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList([VariantBlock(**how) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


PLAIN = {"joint": False, "fused": False, "by_hand": False, "in_place": False}


@pytest.mark.parametrize("how", ["joint", "fused", "in_place"])
def test_equivalent_implementation_has_same_scores(how: str) -> None:
    inputs = {"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}
    plain, variant = (
        whyformer.explain(VariantModel(**{**PLAIN, how: value}).double().eval(), inputs, method="decompx", target=1).scores
        for value in (False, True)
    )
    torch.testing.assert_close(plain, variant)


class Multiplied(VariantModel):
    """Pools by a product, which is not a sum of shares."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.cumprod(1)[:, -1])


class Detached(VariantModel):
    """Detaches half of the pooled sum, which changes no value."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1) + x.detach().mean(1))


class SortedInside(VariantModel):
    """Sorts between the blocks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x.sort(1).values)
        return self.head(x.mean(1))


@pytest.mark.parametrize(("kind", "message"), [(Multiplied, "operation 'cumprod'"), (SortedInside, "no recognizable blocks")])
def test_operation_without_shares_is_refused(kind: type[VariantModel], message: str) -> None:
    with pytest.raises(MethodNotApplicable, match=f"decompx has no meaning.*{message}"):
        whyformer.explain(kind(**PLAIN).eval(), {"input_ids": torch.arange(5)[None]}, method="decompx")


class Selected(VariantModel):
    """Pools the largest values, by their size or by given indices."""

    pool: Callable[[Tensor], Tensor]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(x))


@pytest.mark.parametrize("pool", [lambda x: x.amax(1), lambda x: x.topk(2, 1).values[:, 0], lambda x: x[:, 0].maximum(x[:, 3])])
def test_selection_by_size_equals_selection_by_index(pool: Callable[[Tensor], Tensor]) -> None:
    inputs, model = {"input_ids": torch.arange(5)[None]}, Selected(**PLAIN).double().eval()
    chosen = list[Tensor]()

    def by_size(x: Tensor) -> Tensor:
        chosen.append((x == pool(x)[:, None]).byte().argmax(1, keepdim=True))
        return pool(x)

    model.pool = by_size
    selected = whyformer.explain(model, inputs, method="decompx", target=1)
    indices = chosen[0]
    model.pool = lambda x: x.gather(1, indices)[:, 0]
    expected = whyformer.explain(model, inputs, method="decompx", target=1)
    torch.testing.assert_close(selected.scores, expected.scores)
    torch.testing.assert_close(selected.scores.sum(), selected.logits[0, 1])


def test_detached_operations_are_included() -> None:
    """f(x) + f(x).detach() equals 2 f(x)."""
    inputs, model = {"input_ids": torch.arange(5)[None]}, Detached(**PLAIN).double().eval()
    doubled = VariantModel(**PLAIN).double().eval()
    with torch.no_grad():
        doubled.head.weight *= 2
    detached_scores, doubled_scores = (whyformer.explain(m, inputs, method="decompx", target=1).scores for m in (model, doubled))
    torch.testing.assert_close(detached_scores, doubled_scores)


@pytest.mark.parametrize("name", ["gpt2", "modernbert_cls"])
def test_decomposed_gelu_equals_fused_gelu(name: str) -> None:
    """The GELU of GPT-2 consists of powers and a tanh, whose separate secant slopes would differ."""
    model, inputs = build(name)
    e = whyformer.explain(model, inputs, method="decompx", target=1)
    for module in model.modules():
        for child, submodule in module.named_children():
            if type(submodule).__name__ == "NewGELUActivation":
                setattr(module, child, nn.GELU(approximate="tanh"))
    expected = whyformer.explain(model, inputs, method="decompx", target=1)
    torch.testing.assert_close(e.scores, expected.scores)


def test_shares_are_freed_after_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block needs no more memory than the first."""
    alive: list[int] = []
    rule = ShareRules.__call__

    def counted(self: ShareRules, unit: Any, inputs: dict[int, Shares]) -> dict[int, Shares]:
        outputs = rule(self, unit, inputs)
        alive.append(sum(type(item) is Shares for item in gc.get_objects()))
        return outputs

    monkeypatch.setattr(ShareRules, "__call__", counted)
    for name in ("hf_vit", "bert"):
        alive.clear()
        gc.freeze()  # objects of before are not counted
        whyformer.explain(*build(name), method="decompx", target=1)
        gc.unfreeze()
        half = len(alive) // 2
        assert max(alive[half:]) <= max(alive[:half]) < half

