"""Properties that define a method: flow, norms, completeness, conservation, aggregation, cross-attention rules."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import networkx
import pytest
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    LxmertConfig,
    LxmertForQuestionAnswering,
)

import whyformer
from whyformer.baselines import Filling
from whyformer.errors import InputError, MethodNotApplicable
from whyformer.explaining import open_model
from whyformer.inputs import prepare
from whyformer.inputs.removal import fill
from whyformer.methods import METHODS, registry
from whyformer.methods.gradients import input_gradients
from whyformer.methods.maps.aggregation import _valid
from whyformer.methods.maps.flow import flow_to_inputs
from whyformer.methods.maps.gae import normalised_excess
from whyformer.methods.maps.rollout import DiscardRatio
from whyformer.methods.task import Task
from whyformer.methods.vectors.mixtures import AttentionVectors
from zoo import ZOO, build


def vectors_of(task: Any) -> AttentionVectors:
    """Vectors of all attentions over the sequence that the target reads."""
    return AttentionVectors(task, task.attended())


def task_of(model: torch.nn.Module, inputs: Any) -> Task:
    return open_model(model).prepare(inputs).task(name="test")


# -- attention flow ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_attention_flow_equals_networkx(seed: int) -> None:
    torch.manual_seed(seed)
    blocks, n = 3, 5
    capacities = [torch.softmax(3 * torch.randn(n, n, dtype=torch.float64), -1) for _ in range(blocks)]
    capacities = [(c + torch.eye(n)) / 2 for c in capacities]
    row = torch.zeros(n, dtype=torch.float64)
    row[0] = 1
    ours = flow_to_inputs(capacities, row, coo_array, maximum_flow)
    graph = networkx.DiGraph()
    for level, capacity in enumerate(capacities):
        for i in range(n):
            for j in range(n):
                graph.add_edge((level + 1, i), (level, j), capacity=float(capacity[i, j]))
    theirs = [networkx.maximum_flow_value(graph, (blocks, 0), (0, j)) for j in range(n)]
    torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), atol=n * n * 1e-6, rtol=0)


def test_attention_flow_over_limit_raises() -> None:
    model, inputs = ZOO["hf_vit"]()
    with pytest.raises(InputError, match=r"(\d+) tokens × 3 blocks = \d+ is more than limit=4") as refused:
        whyformer.explain(model, inputs, "attention_flow", limit=4)
    tokens, blocks, product = map(int, re.findall(r"\d+", str(refused.value))[:3])
    assert tokens * blocks == product
    assert product > 4
    with pytest.raises(InputError, match=f"limit={product - 1}"):
        whyformer.explain(model, inputs, "attention_flow", limit=product - 1)
    assert bool(whyformer.explain(model, inputs, "attention_flow", limit=product).scores.any())


# -- norms -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bert", "hf_vit", "gpt2", "distilbert", "timm_vit"])
def test_mixed_vectors_sum_to_layer_output(name: str) -> None:
    """Σ_j Σ_h α f_h(x_j) + b_O is the output of the attention's output projection."""
    model, inputs = ZOO[name]()
    model = model.double()
    if isinstance(inputs, dict):
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    elif isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        inputs = inputs.double()
    outputs: list[torch.Tensor] = []
    original = torch.nn.functional.linear
    task = task_of(model, inputs)
    vectors = vectors_of(task)

    class LinearRecorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is original or getattr(func, "__name__", "") in ("linear", "addmm"):
                outputs.append(result)
            return result

    with LinearRecorder():
        task.forward()
    for block in vectors.map_pass.attentions:
        total = vectors.at(block, "sum").of_attention.total()
        candidates = [o.reshape(total.shape) for o in outputs if o.numel() == total.numel()]
        assert min(float((total - o).abs().max()) for o in candidates) < 1e-10


def test_post_norm_vectors_sum_to_normalised_output() -> None:
    model, inputs = ZOO["bert"]()
    model = model.double()
    task = task_of(model, inputs)
    vectors = vectors_of(task)
    for block in vectors.map_pass.attentions:
        norm = model.bert.encoder.layer[block].attention.output.LayerNorm
        torch.testing.assert_close(vectors.at(block, "norm").total(), norm(vectors.at(block, "sum").total()))


def test_gram_norms_equal_norms_of_explicit_vectors() -> None:
    model, inputs = ZOO["bert"]()
    task = task_of(model.double(), inputs)
    mixture, normed = (vectors_of(task).at(1, position) for position in ("sum", "norm"))
    vectors = torch.einsum("bhij,bhjd->bijd", mixture.weights, mixture.parts)
    assert mixture.residual is not None
    index = torch.arange(vectors.shape[1])
    vectors[:, index, index] += mixture.residual
    norm = model.bert.encoder.layer[1].attention.output.LayerNorm
    deviation = (mixture.total().var(-1, unbiased=False) + norm.eps).sqrt()
    centred = (vectors - vectors.mean(-1, keepdim=True)) * norm.weight
    torch.testing.assert_close(normed.norms(), centred.norm(dim=-1) / deviation[..., None])


# -- completeness and conservation -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["hf_vit", "bert"])
def test_integrated_gradients_are_complete(name: str) -> None:
    model, inputs = ZOO[name]()
    explanation = whyformer.explain(model.double(), _double(inputs), "integrated_gradients", steps=200)
    figure = explanation.diagnostics["completeness"]
    assert max(figure["error"]) < 1e-3 * max(1e-3, *map(abs, figure["difference"]))


def test_integrated_gradients_support_baselines_of_removal() -> None:
    model, x = ZOO["hf_vit"]()
    model, x = model.double(), x.double()
    prepared = prepare(model, x)
    for name in ("zero", "mean", "blur"):
        start = fill(name, Filling(x, blur=(4.0, None)))
        with torch.no_grad():
            expected = model(x).logits[:, 1] - model(start).logits[:, 1]
        result = whyformer.explain(model, prepared, "integrated_gradients", 1, baseline=name, blur=4.0, steps=5)
        torch.testing.assert_close(torch.tensor(result.diagnostics["completeness"]["difference"], dtype=expected.dtype), expected)
    with pytest.raises(InputError, match="the model's value of black is unknown"):
        whyformer.explain(model, prepared, "integrated_gradients", baseline="black")
    with pytest.raises(InputError, match="its baselines are zero, black, mean, blur"):
        whyformer.explain(model, prepared, "integrated_gradients", baseline="unk")
    bert, inputs = ZOO["bert"]()
    bert = bert.double()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    special = torch.zeros_like(ids, dtype=torch.bool)
    special[:, 0] = True
    prepared = replace(prepare(bert, inputs), special=special, fill_ids=(("unk", 7),))
    with torch.no_grad():
        at_baseline = bert(input_ids=ids.masked_fill(~special & mask.bool(), 7), attention_mask=mask).logits[:, 1]
        expected = bert(**inputs).logits[:, 1] - at_baseline
    result = whyformer.explain(bert, prepared, "integrated_gradients", 1, baseline="unk", steps=5)
    torch.testing.assert_close(torch.tensor(result.diagnostics["completeness"]["difference"], dtype=expected.dtype), expected)
    with pytest.raises(InputError, match="the tokenizer has no mask token"):
        whyformer.explain(bert, prepared, "integrated_gradients", baseline="mask")


def _double(inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        return inputs.double()
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def bias_free_bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """BERT without biases; the pooler's tanh is left to the secant rule (methods.md §8 #21)."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=48, num_labels=3)
    model = BertForSequenceClassification(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_() if name.endswith("bias") else parameter.mul_(5)
    return model, {"input_ids": torch.randint(3, 50, (2, 9))}


def test_lrp_ah_ln_is_conservative_only_with_secant() -> None:
    model, inputs = bias_free_bert()
    with_secant = whyformer.explain(model, inputs, "lrp_ah_ln", 1, secant=True)
    assert max(with_secant.diagnostics["conservation"]["error"]) < 1e-10
    torch.testing.assert_close(with_secant.scores.sum(-1), with_secant.logits[:, 1], rtol=1e-10, atol=1e-12)
    plain = whyformer.explain(model, inputs, "input_x_gradient", 1)
    assert min(plain.diagnostics["conservation"]["error"]) > 1e-2
    without_secant = whyformer.explain(model, inputs, "lrp_ah_ln", 1)
    assert min(without_secant.diagnostics["conservation"]["error"]) > 1e-6


def test_transformer_attribution_is_conservative_in_every_block() -> None:
    model, inputs = ZOO["bert"]()
    figure = whyformer.explain(model.double(), inputs, "transformer_attribution").diagnostics["conservation"]
    assert figure["start"] == [1.0, 1.0]
    assert max(figure["error"]) < 1e-9


# -- aggregation -------------------------------------------------------------------------------------------------
def test_aggregation_applies_to_every_map_method() -> None:
    model, inputs = ZOO["hf_vit"]()
    shared = {"heads": 1, "layers": [0, 1], "rows": "column_mean"}
    names = [m.name for m in whyformer.list_methods() if "aggregation" in m.settings]
    assert {"raw_attention", "rollout", "gae", "norm_attention", "value_zeroing"} <= set(names)
    for name in names:
        settings = {} if name != "norm_attention" else {"scope": "heads"}
        aggregation = {k: v for k, v in shared.items() if k != "heads" or name not in ("value_zeroing", "alti", "globenc")}  # these have no heads
        result = whyformer.explain(model, inputs, name, aggregation=aggregation, **settings).scores
        assert result.shape == whyformer.explain(model, inputs, name).scores.shape
        assert not torch.equal(result, whyformer.explain(model, inputs, name).scores)


def test_aggregations_equal_reference_on_maps_of_model() -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=48)
    model = BertForSequenceClassification._from_config(config, attn_implementation="eager").double().eval()
    ids = torch.randint(3, 50, (2, 7))
    maps = torch.stack(model(ids, output_attentions=True).attentions).detach()  # [L, B, H, N, N]
    eye = torch.eye(7, dtype=torch.float64)

    def scores(**aggregation: Any) -> torch.Tensor:
        return whyformer.explain(model, {"input_ids": ids}, "rollout", aggregation=aggregation).scores

    fused = maps.mean(2)
    torch.testing.assert_close(scores(layers="mean"), fused.mean(0)[:, 0])
    torch.testing.assert_close(scores(layers=1, heads=2), maps[1, :, 2, 0])
    torch.testing.assert_close(scores(layers="product"), (fused[2] @ fused[1] @ fused[0])[:, 0])
    full = (fused[2] + eye) @ (fused[1] + eye) @ (fused[0] + eye)
    torch.testing.assert_close(scores(layers="sum_product", rows="column_mean"), full.mean(1))
    torch.testing.assert_close(scores(layers="sum_product", rows="column_max"), full.amax(1))
    torch.testing.assert_close(scores(layers=[0, 2], heads="max"), maps.amax(2)[[0, 2]].mean(0)[:, 0])
    torch.testing.assert_close(scores(layers=[0, 2, 0], heads=[1, 2, -1]), maps[[0, 2]][:, :, 1:].mean((0, 2))[:, 0])


@pytest.mark.parametrize("bad", [{"layers": "all"}, {"heads": 9}, {"layers": 7}, {"rows": "cls"}, {"other": 1}, "mean"])
def test_invalid_aggregation_raises(bad: Any) -> None:
    model, inputs = ZOO["hf_vit"]()
    with pytest.raises(InputError, match="aggregation"):
        whyformer.explain(model, inputs, "rollout", aggregation=bad)


# -- GAE with cross-attention ------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["rollout", "gae"])
def test_aggregation_layer_ignores_start_layer_and_applies_discard_ratio(method: str) -> None:
    model, inputs = ZOO["bert"]()
    single = whyformer.explain(model, inputs, method, aggregation={"layers": 1})
    for layers in (1, -2, [1], [1, 1]):
        result = whyformer.explain(model, inputs, method, start_layer=2, aggregation={"layers": layers})
        torch.testing.assert_close(result.scores, single.scores)
    if method == "rollout":
        pruned = whyformer.explain(model, inputs, method, aggregation={"layers": 1}, discard_ratio=0.9).scores
        assert int((pruned > 0).sum()) < int((single.scores > 0).sum())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fusion", ["mean", "max"])
def test_padding_does_not_count_among_discarded_entries(weighted: bool, fusion: str) -> None:
    model, inputs = ZOO["bert"]()
    settings = {"gradient_weighted": weighted, "head_fusion": fusion, "discard_ratio": 0.7}
    batch = whyformer.explain(model, inputs, "rollout", [1, 3], **settings).scores
    length = int(inputs["attention_mask"][1].sum())
    alone = {name: values[1:, :length] for name, values in inputs.items()}
    single = whyformer.explain(model, alone, "rollout", 3, **settings).scores
    assert length < batch.shape[1]
    torch.testing.assert_close(batch[1:, :length], single)


def test_normalised_excess_of_zero_row_is_identity() -> None:
    relevance = torch.tensor([[1.0, 0.0], [0.5, 1.5]])
    torch.testing.assert_close(normalised_excess(relevance), torch.tensor([[1.0, 0.0], [0.5, 1.5]]))


def bart() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=50, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=30, num_labels=3, init_std=0.3,
    )  # fmt: skip
    model = BartForSequenceClassification._from_config(config, attn_implementation="eager").double().eval()
    ids = torch.randint(4, 50, (1, 8))
    ids[:, -1] = 2
    return model, ids


def test_gae_of_encoder_decoder_equals_reference() -> None:
    """The update rules of the paper on eager attention maps and their autograd gradients."""
    model, ids = bart()
    output = model(ids, output_attentions=True)
    groups = (output.encoder_attentions, output.decoder_attentions, output.cross_attentions)
    flat = [a for group in groups for a in group]
    gradients = torch.autograd.grad(output.logits[0, 1], flat)
    fused = iter([(a * g).clamp(min=0).mean(1)[0].detach() for a, g in zip(flat, gradients, strict=True)])
    encoder, self_maps, cross_maps = ([next(fused) for _ in group] for group in groups)
    n, q = 8, self_maps[0].shape[-1]
    r_ii, r_qq, r_qi = torch.eye(n).double(), torch.eye(q).double(), torch.zeros(q, n).double()
    for a in encoder:
        r_ii = r_ii + a @ r_ii
    for a, c in zip(self_maps, cross_maps, strict=True):
        r_qi, r_qq = r_qi + a @ r_qi, r_qq + a @ r_qq

        def excess(r: torch.Tensor) -> torch.Tensor:
            off_diagonal = r - torch.eye(len(r)).double()
            total = off_diagonal.sum(-1, keepdim=True)
            return torch.where(total == 0, 0, off_diagonal / total) + torch.eye(len(r)).double()

        r_qi = r_qi + excess(r_qq).T @ c @ excess(r_ii)
    explanation = whyformer.explain(model, {"input_ids": ids}, "gae", 1)
    torch.testing.assert_close(explanation.scores[0], r_qi[-1], rtol=1e-8, atol=1e-12)  # the <eos> row is classified
    torch.testing.assert_close(explanation.part("decoder_input_ids").scores[0], r_qq[-1])


def clip() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    text = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 50,
            "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).double().eval()
    ids = torch.randint(3, 50, (3, 6))
    ids[:, -1] = 2
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 32, 32).double()}


def test_gae_of_clip_with_image_and_text_side() -> None:
    model, inputs = clip()
    image = whyformer.explain(model, inputs, "gae", [0, 2])
    assert (image.level, image.grid, tuple(image.scores.shape)) == ("patch", (4, 4), (2, 16))
    single = whyformer.explain(model, {**inputs, "pixel_values": inputs["pixel_values"][1:]}, "gae", 2)
    torch.testing.assert_close(image.scores[1], single.scores[0])
    other_target = whyformer.explain(model, inputs, "gae", [1, 2])
    assert not torch.allclose(image.scores[0], other_target.scores[0])
    text = whyformer.explain(model, inputs, "gae", [0, 2], side="text")
    assert (text.level, tuple(text.scores.shape)) == ("token", (2, 6))
    shared = whyformer.explain(model, inputs, "gae", [1, 1], side="text")
    for i in range(2):
        pair = {**inputs, "pixel_values": inputs["pixel_values"][i : i + 1]}
        torch.testing.assert_close(shared.scores[i], whyformer.explain(model, pair, "gae", 1, side="text").scores[0])


@pytest.mark.parametrize("method", ["raw_attention", "norm_attention", "gradcam_attention", "grad_sam"])
def test_both_towers_have_scores(method: str) -> None:
    """The scores of a text come from its tower, which does not depend on the image."""
    model, inputs = clip()
    explanation = whyformer.explain(model, inputs, method, [0, 2])
    assert tuple(explanation.part("pixel_values").scores.shape) == (2, 16)
    text = explanation.part("input_ids").scores
    assert tuple(text.shape) == (2, 6)
    assert bool(text.any(1).all())
    if not METHODS[method].class_specific:
        swapped = whyformer.explain(model, {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}, method, [0, 2])
        row = text / text.sum(1, keepdim=True)
        swapped_text = swapped.part("input_ids").scores
        torch.testing.assert_close(swapped_text / swapped_text.sum(1, keepdim=True), row)


@pytest.mark.parametrize(("method", "settings"), [("raw_attention", {"block": 2}), ("grad_sam", {"start_layer": 2})])
def test_block_missing_in_one_tower_warns(method: str, settings: dict[str, Any]) -> None:
    model, inputs = clip()  # three image blocks and two text blocks
    e = whyformer.explain(model, inputs, method, [0, 2], aggregation={"rows": "column_mean"}, **settings)
    assert e.inputs == ("pixel_values",)
    assert any("input_ids" in warning for warning in e.warnings)


@pytest.mark.parametrize("method", ["gae", "rollout", "transformer_attribution", "norm_attention", "value_zeroing", "raw_attention"])
def test_zero_gradient_warns_and_scores_are_zero(method: str) -> None:
    """The head reads a saturated value."""

    class Saturated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
            self.words, self.head = torch.nn.Embedding(20, 12), torch.nn.Linear(12, 3)
            self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head((1e4 * self.encoder(self.words(input_ids))[:, 0]).tanh())

    torch.manual_seed(0)
    e = whyformer.explain(Saturated().eval(), torch.tensor([[1, 2, 3, 4]]), method, 0)
    assert not e.scores.any()
    assert any("all scores are 0" in warning for warning in e.warnings)


def test_side_with_single_tower_raises() -> None:
    model, inputs = ZOO["hf_vit"]()
    with pytest.raises(InputError, match="tower"):
        whyformer.explain(model, inputs, "gae", side="text")


UNSUPPORTED = {"globenc": "several sequences", "alti": "several sequences", "attention_flow": "several sequences"}


@pytest.mark.part
@pytest.mark.parametrize("boxes", [6, 10])  # also as many as words, so all maps have the same size
@pytest.mark.parametrize("method", UNSUPPORTED)
def test_co_attention_is_refused_with_reason(method: str, boxes: int) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48, "num_qa_labels": 5, "visual_feat_dim": 8}
    model = LxmertForQuestionAnswering(LxmertConfig(**sizes, l_layers=2, r_layers=2, x_layers=2)).eval()
    inputs = {**build("bert")[1], "visual_feats": torch.randn(2, boxes, 8), "visual_pos": torch.rand(2, boxes, 4)}
    with pytest.raises(MethodNotApplicable, match=rf"not supported yet.*{UNSUPPORTED[method]}.*input_x_gradient") as refused:
        whyformer.explain(model, inputs, method, 1)
    assert "windows" not in str(refused.value)


def test_encoder_and_decoder_of_equal_length_are_separate_sequences() -> None:
    model, ids = bart()
    with pytest.raises(MethodNotApplicable, match="several sequences"):
        whyformer.explain(model, {"input_ids": ids}, "attention_flow", 1)


# -- valid values of settings --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("Natural", 0, 2**32 - 1), ("Count", 1, 10_000), ("OptionalCount", 1, 10_000)],
)
def test_integer_setting_types(name: str, low: int, high: int) -> None:
    description, allowed = get_args(getattr(registry, name))[1]
    optional = name.startswith("Optional")
    assert description == f"{'None or ' if optional else ''}a whole number of at least {low} and at most {high:,}"
    assert [allowed(value) for value in (low, high, low - 1, high + 1, low + 0.5, True)] == [True, True, *[False] * 4]
    assert not optional or allowed(None)


def test_amount_setting_accepts_floats() -> None:
    description, allowed = get_args(registry.Amount)[1]
    assert description == "a number of at least 0 and at most 1,000"
    assert [allowed(value) for value in (0, 0.5, 1000, -0.1, 1000.1, True)] == [True, True, True, False, False, False]


def test_share_setting_is_at_least_0_and_below_1() -> None:
    _, allowed = get_args(DiscardRatio)[1]
    assert [allowed(value) for value in (0, 0.99, 1, -0.1, True, False)] == [True, True, False, False, False, False]


@pytest.mark.parametrize("number", [3, 4, -4])
def test_start_layer_outside_model_raises(number: int) -> None:
    model, inputs = ZOO["hf_vit"]()
    with pytest.raises(InputError, match=rf"start_layer={number} is outside the model, which has 3 blocks \(0 to 2\)"):
        whyformer.explain(model, inputs, "rollout", start_layer=number)
    first, last = (whyformer.explain(model, inputs, "rollout", start_layer=n).scores for n in (-3, 2))
    assert torch.equal(first, whyformer.explain(model, inputs, "rollout", start_layer=0).scores)
    assert torch.equal(last, whyformer.explain(model, inputs, "rollout", start_layer=-1).scores)
    assert not torch.allclose(first, last)


@pytest.mark.parametrize("weighting", ["gradient", "attention", "none"])
def test_weighting_of_transformer_attribution(weighting: str) -> None:
    model, inputs = ZOO["bert"]()
    record = whyformer.record(model, inputs)
    attention_unit = record.attentions[2]
    attention = record.attention_map(attention_unit)
    gradient, relevance = (
        record.attention_map(attention_unit, {v.number: t for v, t in record.walk_back(attention_unit.maps, 1, rules).items()}.__getitem__)
        for rules in ("plain", "deep_taylor")
    )
    factor = {"gradient": gradient, "attention": attention, "none": torch.ones_like(attention)}[weighting]
    expected = (factor * relevance).clamp(min=0).mean(1)[:, 0]
    result = whyformer.explain(model, inputs, "transformer_attribution", target=1, weighting=weighting, block=2).scores
    torch.testing.assert_close(result, expected.to(result), rtol=1e-5, atol=1e-12)


def test_range_of_noise_excludes_padding() -> None:
    x = torch.tensor([[[1.0, 2], [5, 0], [100, -100]], [[1, 2], [5, 0], [9, -1]]])
    real = torch.tensor([[True, True, False], [True, True, True]])
    assert input_gradients._range(x, real, 1).flatten().tolist() == [5, 10]
    assert input_gradients._range(x, None, 1).flatten().tolist() == [200, 10]


@pytest.mark.parametrize("choice", [[], [0.5], [True], ["mean", 0], 1.5, None])
def test_invalid_heads_and_layers_of_aggregation(choice: Any) -> None:
    for key in ("heads", "layers"):
        assert _valid({key: 0}) and _valid({key: [0, -1]}) and _valid({key: (1,)})
        assert not _valid({key: choice})


@pytest.mark.parametrize(("name", "level"), [("hf_vit", "patch"), ("bert", "token")])
def test_level_of_occlusion(name: str, level: str) -> None:
    model, inputs = ZOO[name]()
    assert whyformer.explain(model, inputs, "occlusion", target=1).level == level


def test_unknown_setting_error_lists_valid_settings() -> None:
    expected = "Its settings and defaults: head_fusion='mean', discard_ratio=0.0, start_layer=0"
    with pytest.raises(InputError, match=expected):
        registry.METHODS["rollout"].complete({"no_such": 1})
