"""Attentions, streams, blocks and readouts of models whose structure is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer
import zoo
from forms import base, layouts
from forms.functions import attentions as ways
from methods import test_golden as golden
from methods.test_gae_of_lxmert import lxmert
from streams import bart, llava, siamese, t5, vilt
from tape.recorded_structure import RecordedStructure, one_hot, read_structure
from whyformer.tape.attentions import Attention
from whyformer.tape.recording import record_call
from whyformer.tape.streams import readout
from whyformer.tape.walking import GRADIENT, walk_back

TARGETS = [1, 3]
SINGLE = list(zoo.ZOO)


def read_zoo(name: str) -> RecordedStructure:
    return read_structure(*zoo.build(name))


# -- short implementations of methods --------------------------------------------------------------------------------
def observe(structure: RecordedStructure, seed: Tensor, start: Callable[[Tensor], None], on_map: Callable[[Attention, Tensor], None]) -> None:
    """Call ``start`` with the readout ``[B, N]``, then ``on_map`` with each attention and ∇A ``[B, H, Q, K]``, last first."""
    gradients: dict[int, Tensor] = {}

    def watcher(attention: Attention, n: int) -> Callable[[Tensor], None]:
        def receive(gradient: Tensor) -> None:
            gradients[n] = gradient
            if set(attention.maps) <= gradients.keys():
                on_map(attention, attention.arrange(*(gradients[m] for m in attention.maps)))

        return receive

    stream = structure.stream
    watch: dict[int, Callable[..., None]] = {m: watcher(a, m) for b in stream.blocks for a in b.attentions for m in a.maps}
    watch[stream.last] = lambda gradient: start(readout(structure.rows, stream.rows, stream.last, gradient))
    walk_back(structure.program, structure.tape, [(GRADIENT, {structure.program.output: seed})], at=watch)


def gae(structure: RecordedStructure, seed: Tensor) -> Tensor:
    """r (I + Ā_L) ⋯ (I + Ā_1), Ā = mean_h (A ⊙ ∇A)⁺"""
    row: list[Tensor] = []

    def on_map(attention: Attention, gradient: Tensor) -> None:
        fused = (structure.maps(attention) * gradient).clamp(min=0).mean(1)
        row.append(row[-1] + torch.einsum("bq,bqk->bk", row[-1], fused))

    observe(structure, seed, row.append, on_map)
    return row[-1]


def rollout(structure: RecordedStructure, _: Tensor) -> Tensor:
    """r Â_L ⋯ Â_1, Â = rownorm(mean_h A + I). Rollout has no class, so r is the readout of ½‖logits‖²."""
    row: list[Tensor] = []

    def on_map(attention: Attention, _: Tensor) -> None:
        fused = structure.maps(attention).mean(1)
        normalised = row[-1] / (1 + fused.sum(-1))
        row.append(normalised + torch.einsum("bq,bqk->bk", normalised, fused))

    observe(structure, structure.tape[structure.program.output], row.append, on_map)
    return row[-1]


METHODS = {"gae": gae, "rollout": rollout}


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SINGLE)
def test_short_implementations_equal_library(name: str, method: str) -> None:
    model, inputs = zoo.build(name)
    structure = read_structure(model, inputs)
    scores = METHODS[method](structure, one_hot(structure, TARGETS))
    result = structure.input_scores("input_ids" if isinstance(inputs, dict) else "x", scores)
    if isinstance(inputs, dict):
        result = result * inputs["attention_mask"]
    expected = whyformer.explain(model, inputs, method, TARGETS).scores.flatten(1)
    assert float((result - expected).abs().max() / expected.abs().max()) < 1e-10


@pytest.mark.parametrize(("which", "family"), [("hf", "vit"), ("timm", "vit"), ("bert", "bert")])
@pytest.mark.parametrize("target", [0, 1])
def test_gae_equals_golden_arrays(which: str, family: str, target: int, shared: Any) -> None:
    model, inputs = golden.build_model(which, "sdpa"), golden.inputs(which)
    structure = read_structure(model, inputs)
    scores = gae(structure, one_hot(structure, golden.golden(family, "targets")[:, target].tolist()))
    expected = golden.golden(family, "GAE_R" if family == "bert" else "GAE")[:, target]
    if family == "bert":
        expected, scores = expected[..., 0, :] * inputs["attention_mask"], scores * inputs["attention_mask"]
    golden.assert_close(scores if family == "bert" else structure.input_scores("x", scores), expected)


# -- attentions, streams and blocks ----------------------------------------------------------------------------------
class OverQueries(nn.Module):
    """One block whose attention weights each value by a softmax over the queries."""

    def __init__(self, weighted: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weighted = weighted
        self.parts = nn.ModuleList(base.linear(f"over queries {i}", 8, 8) for i in range(4))

    def map(self, x: Tensor) -> Tensor:
        return (self.parts[0](x) @ self.parts[1](x).mT).softmax(dim=-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[3]((x + self.weighted(self.map(x), self.parts[2](x)))[:, 0])


@pytest.mark.parametrize(
    "weighted",
    [lambda a, v: a @ v, lambda a, v: (v.mT @ a.mT).mT, lambda a, v: (a[..., None] * v[:, None]).sum(2)],
    ids=["A V", "V' A'", "sum"],
)
def test_rows_of_map_are_those_of_its_product_with_values(weighted: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = OverQueries(weighted).eval(), base.noise("over queries", 4, 5, 8)[:2]
    expected = model.map(x).detach()
    assert torch.allclose(whyformer.attention_maps(model, x).maps[0][:, 0], expected)
    assert torch.allclose(whyformer.explain(model, x, "raw_attention").scores, expected[:, 0])


POOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda w, v: (w[..., None] * v).sum(1),
    "einsum": lambda w, v: torch.einsum("bnh,bnhd->bhd", w, v),
    "W' V": lambda w, v: w.mT @ v[:, :, 0],
    "V' W": lambda w, v: (v[:, :, 0].mT @ w).mT,
    "sum, heads first": lambda w, v: (w.mT[..., None] * v.transpose(1, 2)).sum(2, keepdim=True),
    "head by head": lambda w, v: torch.stack([w[:, None, :, i] @ v[:, :, i] for i in range(3)], 1),
}


class Pool(nn.Module):
    """One block, then a pool by three learned queries, whose weights have the queries as the last axis."""

    def __init__(self, pooled: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.pooled = pooled
        self.parts = nn.ModuleList(base.linear(f"pool {i}", n, 8) for i, n in enumerate((8, 8, 8, 8, 3)))
        self.head = base.linear("pool", 4, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.parts[0](x) @ self.parts[1](x).mT).softmax(-1) @ self.parts[2](x)
        weights, values = self.parts[4](x.tanh()).softmax(1), self.parts[3](x)[:, :, None].expand(-1, -1, 3, -1)
        return self.head(self.pooled(weights, values).flatten(1))


@pytest.mark.parametrize("name", [name for name in POOLS if name != "sum"])
def test_maps_of_learned_queries_in_any_layout(name: str) -> None:
    model, first, x = Pool(POOLS[name]).eval(), Pool(POOLS["sum"]).eval(), base.noise("pool", 2, 5, 8)
    for method in ("rollout", "gae", "transformer_attribution"):
        scores = whyformer.explain(model, x, method, 1).scores
        assert torch.allclose(scores, whyformer.explain(first, x, method, 1).scores)


class WithoutSoftmax(nn.Module):
    """One block whose attention map is an activation of the scores."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation, self.is_constant = activation, False
        self.parts = nn.ModuleList(base.linear(f"without softmax {i}", 8, 8) for i in range(5))

    def map(self, x: Tensor) -> Tensor:
        q, k = (self.parts[i](x).unflatten(-1, (2, 4)).transpose(1, 2) for i in (0, 1))
        map_ = self.activation(q @ k.mT / 2)
        return map_.detach() if self.is_constant else map_

    def forward(self, x: Tensor) -> Tensor:
        v = self.parts[2](x).unflatten(-1, (2, 4)).transpose(1, 2)
        x = x + self.parts[3]((self.map(x) @ v).transpose(1, 2).flatten(2))
        return self.parts[4](x[:, 0])


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda s: torch.sigmoid(s - 1.6),
    "masked sigmoid": lambda s: torch.sigmoid(s).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), 0),
    "relu": lambda s: s.relu() / 5,
    "squared relu": lambda s: s.clamp(min=0) ** 2,
    "normalised softplus": lambda s: functional.softplus(s) / functional.softplus(s).sum(-1, keepdim=True),
    "written-out silu": lambda s: s * torch.sigmoid(s),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activated_scores_are_attention_maps(name: str) -> None:
    model, x = WithoutSoftmax(ACTIVATIONS[name]).eval(), base.noise("without softmax", 2, 5, 8)
    expected = model.map(x).detach()
    assert torch.allclose(whyformer.attention_maps(model, x).maps[0], expected)
    rows = expected.mean(1) + torch.eye(5)
    assert torch.allclose(whyformer.explain(model, x, "rollout").scores, (rows / rows.sum(-1, keepdim=True))[:, 0])
    model.is_constant = True
    variable = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(variable)[:, 1].sum(), variable)
    model.is_constant = False
    assert torch.allclose(whyformer.explain(model, x, "lrp_ah", 1).scores, (x * gradient).sum(-1))


@pytest.mark.parametrize("name", SINGLE)
def test_attentions_and_blocks_of_single_stream(name: str) -> None:
    structure = read_zoo(name)
    heads = 4 if name == "llama" else zoo.HEADS
    assert [(a.depth, a.heads, a.is_self, len(a.pieces)) for a in structure.attentions] == [(i, heads, True, 1) for i in (1, 2, 3)]
    stream = structure.stream
    assert stream.is_read
    assert [b.attentions for b in stream.blocks] == [(a,) for a in structure.attentions]
    assert [b.exit for b in stream.blocks[:-1]] == [b.entry for b in stream.blocks[1:]]
    assert {b.entry for b in stream.blocks} | {stream.last} <= set(stream.spine)


BLOCKS = {
    "hf_vit": "vit.layers", "hf_deit": "deit.layers", "bert": "bert.encoder.layer", "roberta": "roberta.encoder.layer",
    "electra": "electra.encoder.layer", "gpt2": "transformer.h", "llama": "model.layers", "timm_vit": "blocks",
    "timm_deit": "blocks", "torchvision_vit": "encoder.layers", "modernbert_cls": "model.layers",
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_block_exits_are_outputs_of_modules(name: str) -> None:
    model, inputs = zoo.build(name)
    structure = read_structure(model, inputs)
    tape, _ = record_call(model, (), inputs, names=True) if isinstance(inputs, dict) else record_call(model, [inputs], names=True)
    path = BLOCKS[name] + (".encoder_layer_" if name == "torchvision_vit" else ".")
    expected = [tape.outputs[f"{path}{i}"][0][0] for i in range(3)]
    assert [b.exit for b in structure.stream.blocks] == expected


def test_blocks_of_several_streams_are_in_order() -> None:
    structure = read_structure(*t5())
    blocks = [b for s in structure.streams for b in s.blocks]
    assert [len(b.attentions) for b in blocks] == [1, 1, 2, 2]
    assert [b.attentions[0].map for b in blocks] == sorted(b.attentions[0].map for b in blocks)


@pytest.mark.parametrize("build", [t5, bart], ids=["t5", "bart"])
def test_streams_of_encoder_and_decoder(build: Any) -> None:
    structure = read_structure(*build())
    encoder, decoder = structure.streams
    assert [s.is_read for s in structure.streams] == [False, True]
    assert [s.names for s in structure.streams] == [("input_ids",), ("decoder_input_ids",) if build is t5 else ("input_ids'",)]
    assert [[a.is_self for a in b.attentions] for s in structure.streams for b in s.blocks] == [[True], [True], [True, False], [True, False]]
    assert [a.depth for a in structure.attentions] == [1, 2, 1, 3, 4, 5]
    for a in structure.attentions:
        assert a.queries is (encoder if a.keys is encoder.rows and a.is_self else decoder).rows


def test_streams_of_whisper() -> None:
    import transformers as hf

    config = hf.WhisperConfig(
        vocab_size=60, num_mel_bins=8, encoder_layers=2, encoder_attention_heads=3, decoder_layers=2, decoder_attention_heads=3,
        decoder_ffn_dim=48, encoder_ffn_dim=48, d_model=24, max_source_positions=20, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = zoo.randomise(hf.WhisperForConditionalGeneration(config)).double()
    sound = torch.randn(2, 8, 40, dtype=torch.float64)
    structure = read_structure(model, {"input_features": sound, "decoder_input_ids": torch.tensor([[3, 5, 6], [3, 7, 8]])})
    assert [(s.names, s.rows.shape[1], s.is_read, len(s.blocks)) for s in structure.streams] == [
        (("input_features",), 20, False, 2),
        (("decoder_input_ids",), 3, True, 2),
    ]


def test_streams_of_clip() -> None:
    import transformers as hf

    tower = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    text = {**tower, "vocab_size": 60, "max_position_embeddings": 16, "eos_token_id": 59, "bos_token_id": 0, "pad_token_id": 1}
    config = hf.CLIPConfig(text_config=text, vision_config={**tower, "image_size": 16, "patch_size": 4}, projection_dim=16)
    model = zoo.randomise(hf.CLIPModel(config)).double()
    ids = torch.tensor([[0, 5, 6, 7, 8, 59, 59], [0, 9, 10, 11, 12, 13, 59], [0, 20, 21, 59, 59, 59, 59]])
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64), "input_ids": ids}
    structure = read_structure(model, inputs, lambda output: output.logits_per_image)
    assert [(s.names, tuple(s.rows.shape), s.is_read, len(s.blocks)) for s in structure.streams] == [
        (("pixel_values",), (2, 17), True, 2),
        (("input_ids",), (3, 7), True, 2),
    ]


def test_encoder_run_twice_has_two_streams() -> None:
    structure = read_structure(*siamese())
    assert [(s.names, s.rows.shape[1], s.is_read, len(s.blocks)) for s in structure.streams] == [(("first",), 5, True, 2), (("second",), 6, True, 2)]


def test_streams_of_lxmert() -> None:
    model, inputs = lxmert(2, 2, 2)
    named = {k: v for k, v in inputs.items() if k != "visual_pos"}
    structure = read_structure(lambda **kwargs: model(**kwargs, visual_pos=inputs["visual_pos"]), named, lambda output: output.question_answering_score)
    text, boxes = structure.streams
    assert (text.is_read, boxes.is_read) == (True, False)
    assert [[a.is_self for a in b.attentions] for b in text.blocks] == [[True], [True], [False, True], [False, True]]
    assert [[a.is_self for a in b.attentions] for b in boxes.blocks] == [[True], [True], [False, True]]


def test_text_and_patches_of_vilt_share_a_stream() -> None:
    structure = read_structure(*vilt())
    assert structure.stream.names == ("input_ids", "pixel_values")
    assert len(structure.stream.blocks) == 2


def test_streams_of_llava() -> None:
    structure = read_structure(*llava())
    tower, language = structure.streams
    assert (tower.names, language.names) == (("pixel_values",), ("input_ids", "pixel_values"))
    assert (tower.is_read, language.is_read) == (False, True)
    assert [len(s.blocks) for s in structure.streams] == [2, 2]
    assert len(set(language.rows.flatten().tolist()) & set(tower.rows.flatten().tolist())) == 2 * 16


@pytest.mark.parametrize("name", zoo.WINDOWED)
def test_windowed_attention_has_two_streams(name: str) -> None:
    structure = read_zoo(name)
    fine, coarse = structure.streams
    assert [(s.rows.shape[1], s.is_read, len(s.blocks)) for s in structure.streams] == [(256, False, 2), (64, True, 2)]
    for a, windows in zip(structure.attentions, (16, 16, 4, 4), strict=True):
        maps = structure.maps(a)
        assert torch.allclose(maps.sum(-1), torch.ones(maps.shape[:-1], dtype=torch.float64))
        assert int((maps > 0).sum(-1).max()) <= 16, windows
    assert coarse.is_mixed
    assert not fine.is_mixed


def test_maps_equal_those_of_the_model() -> None:
    model, inputs = zoo.build("hf_vit")
    eager, _ = zoo.hf_vit("eager")
    expected = eager.double()(inputs, output_attentions=True).attentions
    structure = read_structure(model, inputs)
    for a, expected_map in zip(structure.attentions, expected, strict=True):
        assert torch.allclose(structure.maps(a), expected_map)


def test_query_key_and_value_reproduce_the_map() -> None:
    structure = read_zoo("gpt2")
    for a in structure.attentions:
        p = a.pieces[0]
        q, k, v = (structure.tape[n] for n in (p.query, p.key, p.value))
        causal = torch.ones(10, 10, dtype=torch.bool).tril()
        scores = (q @ k).masked_fill(~(causal & zoo.text()["attention_mask"].bool()[:, None, None]), -torch.inf)
        assert torch.allclose(scores.softmax(-1), structure.tape[a.map])
        assert torch.allclose(structure.tape[a.map] @ v, structure.tape[a.product])


# -- one block, pooling heads ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_with_one_block(norm_first: bool) -> None:
    model, inputs = zoo.encoder(norm_first=norm_first)
    model.encoder.layers = model.encoder.layers[:1]
    structure = read_structure(model.double(), inputs)
    (block,) = structure.stream.blocks
    assert structure.tape.maker[block.exit].name == ("add" if norm_first else "native_layer_norm")


class AttentionPooling(nn.Module):
    """A learned query with cross-attention to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.query = zoo.encoder(norm_first=True)[0], nn.Parameter(torch.randn(1, 1, zoo.WIDTH))
        self.attention = nn.MultiheadAttention(zoo.WIDTH, zoo.HEADS, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.encoder.encoder(self.encoder.words(input_ids))
        return self.encoder.head(self.attention(self.query.expand(len(hidden), -1, -1), hidden, hidden)[0][:, 0])


def test_learned_query_attention() -> None:
    structure = read_structure(zoo.randomise(AttentionPooling()).double(), {"input_ids": zoo.text()["input_ids"]})
    assert [a.is_learned for a in structure.attentions] == [False, False, False, True]
    assert (structure.stream.names, structure.stream.is_read, len(structure.stream.blocks)) == (("input_ids",), True, 3)
    assert structure.maps(structure.attentions[-1]).shape == (2, zoo.HEADS, 1, 10)


def test_expert_router_is_not_an_attention() -> None:
    class ExpertHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.choice, self.experts = zoo.encoder()[0], nn.Linear(zoo.WIDTH, 2), nn.Linear(zoo.WIDTH, 2 * zoo.CLASSES)

        def forward(self, input_ids: Tensor) -> Tensor:
            hidden = self.inner.encoder(self.inner.words(input_ids)).mean(1)
            outputs = self.experts(hidden).unflatten(-1, (2, -1))
            return (self.choice(hidden).softmax(-1)[:, None] @ outputs)[:, 0]

    structure = read_structure(ExpertHead().double().eval(), {"input_ids": zoo.text()["input_ids"]})
    assert len(structure.attentions) == 3


# -- equivalent implementations of attention ---------------------------------------------------------------------------
# these do not compute the map as a value, or their softmax consists of several calls
WITHOUT_MAP = {"divided behind the product", "sum as a column of values", "flash-like", "exp over sum"}
LAYOUTS = {**{f"layouts: {n}": w for n, w in layouts.PRODUCTS.items()}, **{n: w for n, w in ways.PRODUCTS.items() if n not in WITHOUT_MAP}}
OTHERS = {**{f"shared: {n}": w for n, w in ways.SHARED.items()}, **{f"talking: {n}": w for n, w in ways.TALKING.items()}}


def assert_same_structure(model: nn.Module, plain: nn.Module, shape: tuple[int, int]) -> None:
    """Assert that a batch has the structure, maps and GAE of its single samples in the plain implementation."""
    ids = torch.randint(1, base.VOCABULARY, shape, generator=torch.Generator().manual_seed(3))
    targets = [i % 3 for i in range(len(ids))]
    batch = read_structure(model, ids)
    scores = gae(batch, one_hot(batch, targets))
    for i, target in enumerate(targets):
        single = read_structure(plain, ids[i : i + 1])
        assert [(a.depth, a.heads, a.is_self) for a in batch.attentions] == [(a.depth, a.heads, a.is_self) for a in single.attentions]
        assert len(batch.stream.blocks) == len(single.stream.blocks)
        for a, b in zip(batch.attentions, single.attentions, strict=True):
            assert torch.allclose(batch.maps(a)[i], single.maps(b)[0])
        assert torch.allclose(scores[i], gae(single, one_hot(single, [target]))[0], rtol=1e-10, atol=0)


@pytest.mark.part
@pytest.mark.parametrize("shape", [(3, 5), (2, 6), (1, 4), (4, 4), (3, 1)], ids=str)
@pytest.mark.parametrize("variant", LAYOUTS)
def test_layouts_have_same_structure(variant: str, shape: tuple[int, int]) -> None:
    assert_same_structure(layouts._plain("ids", LAYOUTS[variant]), layouts._plain("ids", ways.plain), shape)


@pytest.mark.parametrize("variant", OTHERS)
def test_shared_and_talking_heads_have_same_structure(variant: str) -> None:
    plain = ways.SHARED["repeat_interleave"] if variant.startswith("shared") else ways.TALKING["einsum"]
    assert_same_structure(layouts._plain("ids", OTHERS[variant]), layouts._plain("ids", plain), (2, 6))


@pytest.mark.parametrize("layer", layouts._layers())
def test_token_first_layers_have_same_structure(layer: str) -> None:
    assert_same_structure(layouts._turned("ids", layouts._layers()[layer], False), layouts._plain("ids", ways.plain), (2, 6))
