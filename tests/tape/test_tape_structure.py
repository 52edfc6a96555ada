"""Attentions, streams, blocks and readouts of models whose structure is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
import zoo
from forms import base, layouts
from forms.functions import attentions as ways
from methods import test_golden as golden
from methods.test_gae_of_lxmert import lxmert
from streams import bart, llava, siamese, t5, vilt
from tape.reading import Reading, one_hot, read
from whyformer.tape.recording import record_call
from whyformer.tape.streams import readout
from whyformer.tape.structure import Attention
from whyformer.tape.walking import GRADIENT, walk_back

TARGETS = [1, 3]
SINGLE = list(zoo.ZOO)


def read_zoo(name: str) -> Reading:
    return read(*zoo.build(name))


# -- methods, as short as they can be --------------------------------------------------------------------------------
def observe(reading: Reading, seed: Tensor, start: Callable[[Tensor], None], seen: Callable[[Attention, Tensor], None]) -> None:
    """Call ``start`` with the readout ``[B, N]``, then ``seen`` with each attention and ∇A ``[B, H, Q, K]``, the last first."""
    arrived: dict[int, Tensor] = {}

    def at(attention: Attention, n: int) -> Callable[[Tensor], None]:
        def arrive(flow: Tensor) -> None:
            arrived[n] = flow
            if set(attention.maps) <= arrived.keys():
                seen(attention, attention.arrange(*(arrived[m] for m in attention.maps)))

        return arrive

    stream = reading.stream
    watch: dict[int, Callable[..., None]] = {m: at(a, m) for b in stream.blocks for a in b.attentions for m in a.maps}
    watch[stream.last] = lambda flow: start(readout(reading.rows, stream.rows, stream.last, flow))
    walk_back(reading.program, reading.tape, [(GRADIENT, {reading.program.output: seed})], at=watch)


def gae(reading: Reading, seed: Tensor) -> Tensor:
    """r (I + Ā_L) ⋯ (I + Ā_1), Ā = mean_h (A ⊙ ∇A)⁺"""
    row: list[Tensor] = []

    def seen(attention: Attention, gradient: Tensor) -> None:
        fused = (reading.maps(attention) * gradient).clamp(min=0).mean(1)
        row.append(row[-1] + torch.einsum("bq,bqk->bk", row[-1], fused))

    observe(reading, seed, row.append, seen)
    return row[-1]


def rollout(reading: Reading, _: Tensor) -> Tensor:
    """r Â_L ⋯ Â_1, Â = rownorm(mean_h A + I). The map is of no class, so r reads what ½‖logits‖² reads."""
    row: list[Tensor] = []

    def seen(attention: Attention, _: Tensor) -> None:
        fused = reading.maps(attention).mean(1)
        own = row[-1] / (1 + fused.sum(-1))
        row.append(own + torch.einsum("bq,bqk->bk", own, fused))

    observe(reading, reading.tape[reading.program.output], row.append, seen)
    return row[-1]


METHODS = {"gae": gae, "rollout": rollout}


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SINGLE)
def test_methods_agree_with_the_library(name: str, method: str) -> None:
    model, inputs = zoo.build(name)
    reading = read(model, inputs)
    scores = METHODS[method](reading, one_hot(reading, TARGETS))
    got = reading.at("input_ids" if isinstance(inputs, dict) else "x", scores)
    if isinstance(inputs, dict):
        got = got * inputs["attention_mask"]
    wanted = whyformer.explain(model, inputs, method, TARGETS).scores.flatten(1)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-10


@pytest.mark.parametrize(("which", "family"), [("hf", "vit"), ("timm", "vit"), ("bert", "bert")])
@pytest.mark.parametrize("target", [0, 1])
def test_gae_of_the_authors(which: str, family: str, target: int, shared: Any) -> None:
    model, inputs = golden.built(which, "sdpa"), golden.inputs(which)
    reading = read(model, inputs)
    scores = gae(reading, one_hot(reading, golden.golden(family, "targets")[:, target].tolist()))
    wanted = golden.golden(family, "GAE_R" if family == "bert" else "GAE")[:, target]
    if family == "bert":
        wanted, scores = wanted[..., 0, :] * inputs["attention_mask"], scores * inputs["attention_mask"]
    golden.assert_close(scores if family == "bert" else reading.at("x", scores), wanted)


# -- what is found ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SINGLE)
def test_single_streams(name: str) -> None:
    reading = read_zoo(name)
    heads = 4 if name == "llama" else zoo.HEADS
    assert [(a.depth, a.heads, a.is_self, len(a.pieces)) for a in reading.attentions] == [(i, heads, True, 1) for i in (1, 2, 3)]
    stream = reading.stream
    assert stream.is_read
    assert [b.attentions for b in stream.blocks] == [(a,) for a in reading.attentions]
    assert [b.exit for b in stream.blocks[:-1]] == [b.entry for b in stream.blocks[1:]]
    assert {b.entry for b in stream.blocks} | {stream.last} <= set(stream.spine)


BLOCKS = {
    "hf_vit": "vit.layers", "hf_deit": "deit.layers", "bert": "bert.encoder.layer", "roberta": "roberta.encoder.layer",
    "electra": "electra.encoder.layer", "gpt2": "transformer.h", "llama": "model.layers", "timm_vit": "blocks",
    "timm_deit": "blocks", "torchvision_vit": "encoder.layers", "modernbert_cls": "model.layers",
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_block_exits_are_what_the_modules_return(name: str) -> None:
    model, inputs = zoo.build(name)
    reading = read(model, inputs)
    tape, _ = record_call(model, (), inputs, names=True) if isinstance(inputs, dict) else record_call(model, [inputs], names=True)
    path = BLOCKS[name] + (".encoder_layer_" if name == "torchvision_vit" else ".")
    wanted = [tape.outputs[f"{path}{i}"][0][0] for i in range(3)]
    assert [b.exit for b in reading.stream.blocks] == wanted


def test_blocks_of_several_streams_in_order() -> None:
    reading = read(*t5())
    blocks = [b for s in reading.streams for b in s.blocks]
    assert [len(b.attentions) for b in blocks] == [1, 1, 2, 2]
    assert [b.attentions[0].map for b in blocks] == sorted(b.attentions[0].map for b in blocks)


@pytest.mark.parametrize("build", [t5, bart], ids=["t5", "bart"])
def test_encoder_and_decoder(build: Any) -> None:
    reading = read(*build())
    encoder, decoder = reading.streams
    assert [s.is_read for s in reading.streams] == [False, True]
    assert [s.names for s in reading.streams] == [("input_ids",), ("decoder_input_ids",) if build is t5 else ("input_ids'",)]
    assert [[a.is_self for a in b.attentions] for s in reading.streams for b in s.blocks] == [[True], [True], [True, False], [True, False]]
    assert [a.depth for a in reading.attentions] == [1, 2, 1, 3, 4, 5]
    for a in reading.attentions:
        assert a.queries is (encoder if a.keys is encoder.rows and a.is_self else decoder).rows


def test_whisper() -> None:
    import transformers as hf

    config = hf.WhisperConfig(
        vocab_size=60, num_mel_bins=8, encoder_layers=2, encoder_attention_heads=3, decoder_layers=2, decoder_attention_heads=3,
        decoder_ffn_dim=48, encoder_ffn_dim=48, d_model=24, max_source_positions=20, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = zoo.randomise(hf.WhisperForConditionalGeneration(config)).double()
    sound = torch.randn(2, 8, 40, dtype=torch.float64)
    reading = read(model, {"input_features": sound, "decoder_input_ids": torch.tensor([[3, 5, 6], [3, 7, 8]])})
    assert [(s.names, s.rows.shape[1], s.is_read, len(s.blocks)) for s in reading.streams] == [
        (("input_features",), 20, False, 2),
        (("decoder_input_ids",), 3, True, 2),
    ]


def test_two_towers() -> None:
    import transformers as hf

    tower = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    text = {**tower, "vocab_size": 60, "max_position_embeddings": 16, "eos_token_id": 59, "bos_token_id": 0, "pad_token_id": 1}
    config = hf.CLIPConfig(text_config=text, vision_config={**tower, "image_size": 16, "patch_size": 4}, projection_dim=16)
    model = zoo.randomise(hf.CLIPModel(config)).double()
    ids = torch.tensor([[0, 5, 6, 7, 8, 59, 59], [0, 9, 10, 11, 12, 13, 59], [0, 20, 21, 59, 59, 59, 59]])
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64), "input_ids": ids}
    reading = read(model, inputs, lambda output: output.logits_per_image)
    assert [(s.names, tuple(s.rows.shape), s.is_read, len(s.blocks)) for s in reading.streams] == [
        (("pixel_values",), (2, 17), True, 2),
        (("input_ids",), (3, 7), True, 2),
    ]


def test_one_encoder_run_twice() -> None:
    reading = read(*siamese())
    assert [(s.names, s.rows.shape[1], s.is_read, len(s.blocks)) for s in reading.streams] == [(("first",), 5, True, 2), (("second",), 6, True, 2)]


def test_lxmert() -> None:
    model, inputs = lxmert(2, 2, 2)
    named = {k: v for k, v in inputs.items() if k != "visual_pos"}
    reading = read(lambda **given: model(**given, visual_pos=inputs["visual_pos"]), named, lambda output: output.question_answering_score)
    text, boxes = reading.streams
    assert (text.is_read, boxes.is_read) == (True, False)
    assert [[a.is_self for a in b.attentions] for b in text.blocks] == [[True], [True], [False, True], [False, True]]
    assert [[a.is_self for a in b.attentions] for b in boxes.blocks] == [[True], [True], [False, True]]


def test_text_and_patches_in_one_stream() -> None:
    reading = read(*vilt())
    assert reading.stream.names == ("input_ids", "pixel_values")
    assert len(reading.stream.blocks) == 2


def test_patches_among_words() -> None:
    reading = read(*llava())
    tower, language = reading.streams
    assert (tower.names, language.names) == (("pixel_values",), ("input_ids", "pixel_values"))
    assert (tower.is_read, language.is_read) == (False, True)
    assert [len(s.blocks) for s in reading.streams] == [2, 2]
    assert len(set(language.rows.flatten().tolist()) & set(tower.rows.flatten().tolist())) == 2 * 16


@pytest.mark.parametrize("name", zoo.WINDOWED)
def test_windows(name: str) -> None:
    reading = read_zoo(name)
    fine, coarse = reading.streams
    assert [(s.rows.shape[1], s.is_read, len(s.blocks)) for s in reading.streams] == [(256, False, 2), (64, True, 2)]
    for a, windows in zip(reading.attentions, (16, 16, 4, 4), strict=True):
        found = reading.maps(a)
        assert torch.allclose(found.sum(-1), torch.ones(found.shape[:-1], dtype=torch.float64))
        assert int((found > 0).sum(-1).max()) <= 16, windows
    assert coarse.is_mixed
    assert not fine.is_mixed


def test_map_entries_are_those_of_the_model() -> None:
    model, inputs = zoo.build("hf_vit")
    eager, _ = zoo.hf_vit("eager")
    wanted = eager.double()(inputs, output_attentions=True).attentions
    reading = read(model, inputs)
    for a, want in zip(reading.attentions, wanted, strict=True):
        assert torch.allclose(reading.maps(a), want)


def test_query_key_and_value() -> None:
    reading = read_zoo("gpt2")
    for a in reading.attentions:
        p = a.pieces[0]
        q, k, v = (reading.tape[n] for n in (p.query, p.key, p.value))
        causal = torch.ones(10, 10, dtype=torch.bool).tril()
        scores = (q @ k).masked_fill(~(causal & zoo.text()["attention_mask"].bool()[:, None, None]), -torch.inf)
        assert torch.allclose(scores.softmax(-1), reading.tape[a.map])
        assert torch.allclose(reading.tape[a.map] @ v, reading.tape[a.product])


# -- one block, pooling heads ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm_first", [True, False])
def test_one_block(norm_first: bool) -> None:
    model, inputs = zoo.encoder(norm_first=norm_first)
    model.encoder.layers = model.encoder.layers[:1]
    reading = read(model.double(), inputs)
    (block,) = reading.stream.blocks
    assert reading.tape.maker[block.exit].name == ("add" if norm_first else "native_layer_norm")


class Pooled(nn.Module):
    """A learned query reads the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.query = zoo.encoder(norm_first=True)[0], nn.Parameter(torch.randn(1, 1, zoo.WIDTH))
        self.attention = nn.MultiheadAttention(zoo.WIDTH, zoo.HEADS, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.encoder.encoder(self.encoder.words(input_ids))
        return self.encoder.head(self.attention(self.query.expand(len(hidden), -1, -1), hidden, hidden)[0][:, 0])


def test_learned_queries() -> None:
    reading = read(zoo.randomise(Pooled()).double(), {"input_ids": zoo.text()["input_ids"]})
    assert [a.is_learned for a in reading.attentions] == [False, False, False, True]
    assert (reading.stream.names, reading.stream.is_read, len(reading.stream.blocks)) == (("input_ids",), True, 3)
    assert reading.maps(reading.attentions[-1]).shape == (2, zoo.HEADS, 1, 10)


def test_a_choice_of_experts_is_no_attention() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.choice, self.experts = zoo.encoder()[0], nn.Linear(zoo.WIDTH, 2), nn.Linear(zoo.WIDTH, 2 * zoo.CLASSES)

        def forward(self, input_ids: Tensor) -> Tensor:
            hidden = self.inner.encoder(self.inner.words(input_ids)).mean(1)
            made = self.experts(hidden).unflatten(-1, (2, -1))
            return (self.choice(hidden).softmax(-1)[:, None] @ made)[:, 0]

    reading = read(Experts().double().eval(), {"input_ids": zoo.text()["input_ids"]})
    assert len(reading.attentions) == 3


# -- one attention written in many ways --------------------------------------------------------------------------------
# the map is no value of these, or its softmax is written in several calls
NO_MAP = {"divided behind the product", "sum as a column of values", "flash-like", "exp over sum"}
LAYOUTS = {**{f"layouts: {n}": w for n, w in layouts.PRODUCTS.items()}, **{n: w for n, w in ways.PRODUCTS.items() if n not in NO_MAP}}
OTHERS = {**{f"shared: {n}": w for n, w in ways.SHARED.items()}, **{f"talking: {n}": w for n, w in ways.TALKING.items()}}


def agree(model: nn.Module, plain: nn.Module, shape: tuple[int, int]) -> None:
    """A batch written one way has the structure, maps and GAE of its samples written plainly."""
    ids = torch.randint(1, base.VOCABULARY, shape, generator=torch.Generator().manual_seed(3))
    targets = [i % 3 for i in range(len(ids))]
    got = read(model, ids)
    scores = gae(got, one_hot(got, targets))
    for i, target in enumerate(targets):
        want = read(plain, ids[i : i + 1])
        assert [(a.depth, a.heads, a.is_self) for a in got.attentions] == [(a.depth, a.heads, a.is_self) for a in want.attentions]
        assert len(got.stream.blocks) == len(want.stream.blocks)
        for a, b in zip(got.attentions, want.attentions, strict=True):
            assert torch.allclose(got.maps(a)[i], want.maps(b)[0])
        assert torch.allclose(scores[i], gae(want, one_hot(want, [target]))[0], rtol=1e-10, atol=0)


@pytest.mark.part
@pytest.mark.parametrize("shape", [(3, 5), (2, 6), (1, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("way", LAYOUTS)
def test_layouts(way: str, shape: tuple[int, int]) -> None:
    agree(layouts._plain("ids", LAYOUTS[way]), layouts._plain("ids", ways.plain), shape)


@pytest.mark.parametrize("way", OTHERS)
def test_shared_and_talking_heads(way: str) -> None:
    plain = ways.SHARED["repeat_interleave"] if way.startswith("shared") else ways.TALKING["einsum"]
    agree(layouts._plain("ids", OTHERS[way]), layouts._plain("ids", plain), (2, 6))


@pytest.mark.parametrize("layer", layouts._layers())
def test_tokens_before_samples(layer: str) -> None:
    agree(layouts._turned("ids", layouts._layers()[layer], False), layouts._plain("ids", ways.plain), (2, 6))
