"""GlobEnc and ALTI against reference implementations over all N × N vectors, and their invariants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import whyformer
from whyformer.errors import InputError, MethodNotApplicable
from whyformer.explaining import open_model
from whyformer.methods.vectors.alti import contributions
from whyformer.methods.vectors.mixtures import AttentionVectors
from zoo import ZOO, build, prepared


def vectors_of(task: Any) -> AttentionVectors:
    """Vectors of all attentions over the sequence that the target reads."""
    return AttentionVectors(task, task.attended())


def heads(x: Tensor, linear: nn.Linear, count: int = 3) -> Tensor:
    return linear(x).unflatten(-1, (count, -1)).transpose(1, 2)


def normed(v: Tensor, true: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Apply a LayerNorm, without β, to parts ``[..., i, j, D]`` of the sum ``true`` ``[..., i, D]``."""
    deviation = (true.var(-1, unbiased=False) + norm.eps).sqrt()
    return (v - v.mean(-1, keepdim=True)) / deviation[..., None, None] * norm.weight


def reference_vectors(model: Any, index: int, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(T_i(x_j), output of LN₁, GlobEnc vectors), each ``[..., D]``, of one block of BERT."""
    layer = model.bert.encoder.layer[index]
    output = layer.attention.output.dense
    values = heads(x, layer.attention.self.value)
    split = output.weight.unflatten(-1, (3, -1))
    n, d = x.shape[1:]
    parts = torch.zeros(len(x), n, n, d, dtype=x.dtype)
    for i in range(n):
        for j in range(n):
            for h in range(3):
                parts[:, i, j] += weights[:, h, i, j, None] * (values[:, h, j] @ split[:, h].T)
            if i == j:
                parts[:, i, j] += x[:, i]
    true = parts.sum(2) + output.bias
    first, second = layer.attention.output.LayerNorm, layer.output.LayerNorm
    through = normed(parts, true, first)
    after = first(true)
    summed = after + layer.output.dense(layer.intermediate.intermediate_act_fn(layer.intermediate.dense(after)))
    return through, after, normed(through, summed, second)


def reference_maps() -> tuple[list[Tensor], list[Tensor]]:
    """(ALTI maps, GlobEnc maps) of BERT, sample 0."""
    model, inputs = build("bert")
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
        maps = whyformer.attention_maps(model, inputs).maps
        maps_of_methods: tuple[list[Tensor], list[Tensor]] = ([], [])
        for b in range(3):
            through, output, twice = reference_vectors(model, b, states[b][:1], maps[b][:1])
            distance = (through - output[:, :, None]).abs().sum(-1)
            proximity = (output.abs().sum(-1, keepdim=True) - distance).clamp(min=0)
            maps_of_methods[0].append(proximity / proximity.sum(-1, keepdim=True))
            maps_of_methods[1].append(twice.norm(dim=-1))
    return maps_of_methods


@pytest.mark.parametrize(("method", "which"), [("alti", 0), ("globenc", 1)])
def test_post_norm_model_equals_reference(method: str, which: int) -> None:
    model, inputs = build("bert")
    maps = reference_maps()[which]
    expected = (maps[2] @ maps[1] @ maps[0])[:, 0]
    scores = whyformer.explain(model, inputs, method=method).scores[:1]
    torch.testing.assert_close(scores, expected)
    block_scores = whyformer.explain(model, inputs, method=method, block=1).scores[:1]
    torch.testing.assert_close(block_scores, maps[1][:, 0])


TEXTS_AND_MEANS = ["bert", "roberta", "distilbert", "electra", "modernbert_mean", "llama", "encoder_first", "timm_vit_mean"]


@pytest.mark.parametrize("name", TEXTS_AND_MEANS)
def test_rows_of_alti_sum_to_one(name: str) -> None:
    """So does the readout row of their product; a row is 0 if no vector is closer to the output than 0 is."""
    scores = whyformer.explain(*build(name), method="alti").scores
    torch.testing.assert_close(scores.sum(1), torch.ones(2, dtype=torch.float64))
    vectors = vectors_of(prepared(*build(name)).task(name="test"))
    for block in vectors.map_pass.attentions:
        mixture = vectors.at(block, "norm")
        assert bool((contributions(mixture) <= mixture.total().abs().sum(-1, keepdim=True) * (1 + 1e-12)).all())


def test_norm_of_a_branch_is_not_a_post_norm() -> None:
    """ModernBERT's first block normalises nothing before its attention."""
    for name, expected in {"modernbert_cls": False, "bert": True, "encoder_mean": True, "encoder_first": False}.items():
        vectors = vectors_of(prepared(*build(name)).task(name="test"))
        for block in vectors.map_pass.attentions:
            summed, normed, output = (vectors.at(block, position).total() for position in ("sum", "norm", "output"))
            assert [torch.equal(summed, normed), torch.equal(normed, output)] == [not expected, not expected]


@pytest.mark.parametrize("name", ["hf_vit", "timm_vit", "torchvision_vit", "gpt2", "llama", "encoder_first"])
def test_globenc_equals_norm_attention_without_post_norms(name: str) -> None:
    model, inputs = build(name)
    for block in range(3):
        globenc, norm_attention = (whyformer.explain(model, inputs, method=m, block=block).scores for m in ("globenc", "norm_attention"))
        torch.testing.assert_close(globenc, norm_attention)


@pytest.mark.parametrize("name", list(ZOO))
def test_vectors_sum_to_a_hidden_state(name: str) -> None:
    """LayerScale included: it scales the attention output before the residual sum."""
    model, inputs = build(name)
    task, states = open_model(model).prepare(inputs).task(name="test"), list[Tensor]()

    class DispatchRecorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            states.append(func(*args, **(kwargs or {})))
            return states[-1]

    with DispatchRecorder():
        task.forward()
    vectors = vectors_of(task)
    for block in vectors.map_pass.attentions:
        mixture = vectors.at(block, "sum")
        total = mixture.total()
        same_size = [s for s in states if isinstance(s, Tensor) and s.numel() == total.numel()]
        candidates = [s.reshape(total.shape) for s in same_size]
        candidates += [s.transpose(0, 1) for s in same_size if s.dim() == 3 and s.shape[1] == len(total)]  # sequence first
        assert min(float((s - total).abs().max()) for s in candidates) < 1e-10
        summed = torch.stack([mixture.vectors(i).sum(1) for i in range(total.shape[1])], 1)
        torch.testing.assert_close(summed if mixture.constant is None else summed + mixture.constant, total)


@pytest.mark.parametrize("name", list(ZOO))
def test_lengths_equal_norms_of_vectors(name: str) -> None:
    vectors = vectors_of(prepared(*build(name)).task(name="test"))
    for block in vectors.map_pass.attentions:
        for position in ("sum", "norm"):
            mixture, lengths = vectors.at(block, position), vectors.lengths(block, position)
            assert lengths is not None
            for mixture_part, lengths_part in ((mixture, lengths), (mixture.of_attention, lengths.of_attention)):
                torch.testing.assert_close(mixture_part.norms(), lengths_part.norms(), rtol=1e-6, atol=1e-9)


class ParallelBlock(nn.Module):
    """Attention and MLP in parallel, added to each other first, so no state is the input plus the attention output."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + (self.attention(y, y, y, need_weights=False)[0] + self.mlp(y).tanh())


class ParallelModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(20, 8), nn.ModuleList([ParallelBlock(), ParallelBlock()])
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


@pytest.mark.parametrize("method", ["alti", "globenc"])
def test_parallel_branches_are_refused(method: str) -> None:
    with pytest.raises(MethodNotApplicable, match="the residual sum adds more than"):
        whyformer.explain(ParallelModel().eval(), {"input_ids": torch.arange(6)[None]}, method=method)


@pytest.mark.parametrize("method", ["alti", "globenc", "value_zeroing"])
def test_heads_aggregation_raises(method: str) -> None:
    with pytest.raises(InputError, match="omit heads in aggregation"):
        whyformer.explain(*build("bert"), method=method, aggregation={"heads": "max"})
