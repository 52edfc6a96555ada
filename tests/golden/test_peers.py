"""Agreement with other authors' code up to rounding (peers/README.md describes the arrays), and known differences."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import whyformer
import zoo
from golden.peers import tiny_models

FOLDER = Path(__file__).parent / "peers"
LENGTHS = zoo.LENGTHS


@cache
def peer(name: str) -> dict[str, NDArray[Any]]:
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return dict(arrays)


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=tolerance * max(1, float(np.abs(theirs).max())))


def build(name: str) -> tuple[nn.Module, Any]:
    return zoo.build(name)


def scores(model: nn.Module, inputs: Any, method: str, target: Any = None, **settings: Any) -> NDArray[np.float64]:
    return whyformer.explain(model, inputs, method, target, **settings).scores.numpy()


def value(metric: str, model: nn.Module, inputs: Any, map_: Any, **settings: Any) -> NDArray[np.float64]:
    return whyformer.evaluate(model, inputs, map_, metric, **settings).values


def bert_with_peer_arrays(name: str) -> tuple[nn.Module, Any, dict[str, NDArray[Any]]]:
    """The zoo's BERT, its sentences and a peer's arrays, after a check that the logits are equal."""
    model, inputs = build("bert")
    assert_close(zoo.call(model, inputs), peer(name)["logits"])
    return model, inputs, peer(name)


# -- vit-explain ---------------------------------------------------------------------------------------------------
def rollout(**settings: Any) -> NDArray[np.float64]:
    """Rollout as vit-explain returns it: a grid with maximum 1."""
    model, inputs = build("timm_vit")
    result = scores(model, inputs, "rollout", 2, **settings).reshape(2, 4, 4)
    return result / result.max((1, 2), keepdims=True)


def test_vit_explain_used_same_model() -> None:
    model, inputs = build("timm_vit")
    assert_close(zoo.call(model, inputs), peer("vit_explain")["logits"])


def test_rollout_with_mean_of_heads_equals_vit_explain() -> None:
    assert_close(rollout(), peer("vit_explain")["published_mean"])


@pytest.mark.parametrize("head_fusion", ["max", "min"])
def test_vit_explain_divides_columns_by_row_sums(head_fusion: str) -> None:
    """This differs if rows do not sum to 1; with rows divided by their sums it agrees."""
    ours = rollout(head_fusion=head_fusion)
    assert np.abs(ours - peer("vit_explain")[f"published_{head_fusion}"]).max() > 0.01
    assert_close(ours, peer("vit_explain")[f"rows_{head_fusion}_0.0"])


@pytest.mark.parametrize("head_fusion", ["mean", "max", "min"])
def test_vit_explain_never_discards_attention_of_cls_to_itself(head_fusion: str) -> None:
    theirs, cases = peer("vit_explain"), []
    for k, share in enumerate((0.0, 0.1, 0.5, 0.9)):
        ours = rollout(head_fusion=head_fusion, discard_ratio=share)
        for sample, spared in enumerate(theirs[f"spared_{head_fusion}"][:, k]):
            differs = np.abs(ours[sample] - theirs[f"rows_{head_fusion}_{share}"][sample]).max() > 1e-12
            assert differs == spared
            cases.append(bool(spared))
    assert set(cases) == {True, False}


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_gradient_rollout_equals_vit_explain(share: float) -> None:
    assert_close(rollout(gradient_weighted=True, discard_ratio=share), peer("vit_explain")[f"gradient_{share}"])


# -- attention flow ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sample", [0, 1])
def test_attention_flow_equals_peer_up_to_scale(sample: int) -> None:
    """Capacities here are integers in millionths, so flows agree up to rounding of these."""
    model, inputs, theirs = bert_with_peer_arrays("attention_flow")
    flows, n = scores(model, inputs, "attention_flow")[sample], LENGTHS[sample]
    assert flows.sum() > 2  # each flow is a separate maximum; the peer divides them by their sum
    assert_close(flows[:n] / flows.sum(), theirs[f"flow_{sample}"], 2e-6)
    assert not flows[n:].any()
    assert_close(scores(model, inputs, "rollout")[sample, :n], theirs[f"joint_{sample}"][0])


# -- Grad-CAM ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [0, 1, 2])
def test_unscaled_grad_cam_equals_peer(block: int) -> None:
    model, inputs = build("timm_vit")
    theirs = peer("grad_cam")
    assert_close(zoo.call(model, inputs), theirs["logits"])
    for k, target in enumerate((1, 2)):
        assert_close(scores(model, inputs, "gradcam", target, blocks=block).reshape(2, 4, 4), theirs[f"block_{block}"][:, k])


# -- norms ---------------------------------------------------------------------------------------------------------
SCOPES = [("emnlp2020", "attention"), ("emnlp2021", "attention"), ("emnlp2021", "residual"), ("emnlp2021", "norm")]


@pytest.mark.parametrize(("version", "scope"), SCOPES)
@pytest.mark.parametrize("block", [0, 1, 2])
def test_norm_attention_equals_peer(version: str, scope: str, block: int) -> None:
    model, inputs = build("bert")
    theirs = peer("norms")
    assert_close(zoo.call(model, inputs), theirs[f"{version}_logits"])
    norms = theirs[f"{version}_{scope}"][block]
    assert_close(scores(model, inputs, "norm_attention", scope=scope, block=block), norms[:, 0])
    columns = scores(model, inputs, "norm_attention", scope=scope, block=block, aggregation={"rows": "column_mean"})
    for sample, n in enumerate(LENGTHS):
        assert_close(columns[sample, :n], norms[sample, :n, :n].mean(0))


@pytest.mark.parametrize("version", ["emnlp2020", "emnlp2021"])
@pytest.mark.parametrize("head", [0, 1, 2])
def test_norm_attention_of_heads_equals_peer(version: str, head: int) -> None:
    model, inputs = build("bert")
    for block, norms in enumerate(peer("norms")[f"{version}_heads"]):
        assert_close(scores(model, inputs, "norm_attention", scope="heads", block=block, aggregation={"heads": head}), norms[:, head, 0])


# -- value zeroing -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sample", [0, 1])
def test_value_zeroing_equals_peer(sample: int) -> None:
    model, inputs = build("bert")
    theirs, n = peer("value_zeroing"), LENGTHS[sample]
    assert_close(zoo.call(model, inputs)[sample], theirs[f"logits_{sample}"])
    for block, map_ in enumerate(theirs[f"maps_{sample}"]):
        assert_close(scores(model, inputs, "value_zeroing", block=block)[sample, :n], map_[0])
        columns = scores(model, inputs, "value_zeroing", block=block, aggregation={"rows": "column_max"})
        assert_close(columns[sample, :n], map_.max(0))
    assert_close(scores(model, inputs, "value_zeroing")[sample, :n], theirs[f"rollout_{sample}"][0])


# -- generic attention explainability --------------------------------------------------------------------------------
def clip() -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = tiny_models.clip()
    model, inputs = model.double(), zoo.to(inputs, torch.float64)
    with torch.no_grad():
        assert_close(model(**inputs).logits_per_image, peer("gae")["clip_logits"])
    return model, inputs


@pytest.mark.parametrize("start", [-1, 0, 1])
@pytest.mark.parametrize("text", [0, 1])
def test_gae_of_clip_equals_peer(start: int, text: int) -> None:
    model, inputs = clip()
    assert_close(scores(model, inputs, "gae", text, start_layer=start), peer("gae")[f"clip_image_{start}"][:, text])
    n = LENGTHS[text]
    for image in (0, 1):
        pair = {**inputs, "pixel_values": inputs["pixel_values"][image : image + 1]}
        words = scores(model, pair, "gae", text, start_layer=start, side="text")
        assert_close(words[0, :n], peer("gae")[f"clip_text_{start}"][image, text, n - 1, :n])  # the row of <eos>


def test_gae_of_detr_with_zero_rows_differs_from_peer() -> None:
    """0/0 in one row makes the peer's whole matrix NaN, which it replaces by 0, so the block is lost."""
    model, images = tiny_models.detr()
    model, images, theirs = model.double(), images.double(), peer("gae")
    assert_close(zoo.call(model, {"pixel_values": images}), theirs["detr_logits"])
    for query in range(tiny_models.QUERIES):
        ours = scores(tiny_models.QueryLogits(model, query), images, "gae", tiny_models.CLASS)
        for i, lost in enumerate(theirs["detr_lost_a_block"][:, query]):
            if lost:
                difference = ours[i] - theirs["detr"][i, query]
                assert difference.min() >= 0
                assert difference.max() > 0.01
            else:
                assert_close(ours[i], theirs["detr"][i, query])
    assert theirs["detr_lost_a_block"].sum() == 1


# -- metrics -------------------------------------------------------------------------------------------------------
def test_eraser_metrics_equal_peer() -> None:
    model, inputs, theirs = bert_with_peer_arrays("eraser")
    settings = {"rationale": theirs["rationale"]}
    f1 = value("token_f1", model, inputs, theirs["scores"], k=int(theirs["k"]), **settings)
    assert_close(f1, theirs["f1"])
    assert_close(f1.mean(), theirs["f1_macro"])
    assert_close(value("auprc", model, inputs, theirs["scores"], **settings), theirs["auprc"])
    for metric in ("comprehensiveness", "sufficiency"):
        assert_close(value(metric, model, inputs, theirs["scores"], baseline="delete"), theirs[metric])


class UnknownTokenizer:
    """A tokenizer that only defines its unknown token."""

    unk_token_id = int(np.load(FOLDER / "optimus.npz")["unknown"])
    all_special_ids: list[int] = []

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [str(i) for i in ids]


def test_ranked_faithfulness_equals_optimus() -> None:
    model, inputs, theirs = bert_with_peer_arrays("optimus")
    two = tiny_models.FirstClasses(model, 2)
    for target in (0, 1):
        assert_close(value("rft", two, inputs, theirs["scores"], processor=UnknownTokenizer(), target=target), theirs["rft"][:, target])


def test_segmentation_metrics_equal_transformer_explainability() -> None:
    theirs = peer("cvpr")
    images = tiny_models.photographs() * 2 - 1
    objects = theirs["objects"].repeat(16, 1).repeat(16, 2)
    ious = [theirs[f"intersection_{part}"] / theirs[f"union_{part}"] for part in ("background", "object")]
    expected = {"pixel_accuracy": theirs["correct"] / theirs["labelled"], "miou": np.mean(ious, 0), "map": theirs["average_precision"]}
    for metric, figures in expected.items():
        assert_close(value(metric, tiny_models.PooledModel(), images, theirs["maps"], mask=objects), 100 * figures)


class HalfNormalisation:
    """The normalisation of the processor of the published ViT."""

    image_mean = image_std = [0.5, 0.5, 0.5]


@pytest.mark.parametrize("metric", ["positive", "negative"])
def test_perturbation_curves_equal_transformer_explainability(metric: str) -> None:
    theirs, model, images = peer("cvpr"), tiny_models.PooledModel(), tiny_models.photographs() * 2 - 1
    assert_close(zoo.call(model, images), theirs["logits"])
    result = whyformer.evaluate(model, images, theirs["maps"], metric, HalfNormalisation(), label=theirs["label"])
    hits = np.column_stack([theirs["clean_hits"], theirs[f"{metric}_hits"]])
    assert result.curves is not None
    np.testing.assert_array_equal(result.curves, hits)
    assert 0 < hits.mean() < 1


def test_metrics_equal_quantus() -> None:
    theirs, model = peer("quantus"), tiny_models.PooledModel(channels=1)
    images, maps, objects = torch.from_numpy(theirs["pictures"])[:, None], theirs["maps"], theirs["objects"]
    steps = theirs["pixel_flipping"].shape[1]
    flipped = whyformer.evaluate(model, images, maps, "deletion", target=theirs["classes"], steps=steps, baseline="zero")
    assert flipped.curves is not None
    assert_close(flipped.curves[:, 1:], theirs["pixel_flipping"])  # the peer omits the clean image
    assert_close(value("pointing_game", model, images, maps, mask=objects), theirs["pointing_game"].astype(float))
    assert set(theirs["pointing_game"].tolist()) == {True, False}
    # the peer adds 1e-9 to its divisor
    assert_close(value("energy", model, images, maps, mask=objects), theirs["attribution_localisation"], 1e-9)
    assert_close(value("energy", model, images, np.abs(maps), mask=objects), theirs["relevance_mass_of_size"])


# -- ViT-CX --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threshold", [0.1, 0.3])
def test_vit_cx_with_same_noise_equals_peer(threshold: float) -> None:
    model, inputs = build("timm_vit")
    theirs = peer("vit_cx")
    assert_close(zoo.call(model, inputs), theirs["logits"])
    for k, target in enumerate((1, 2)):
        expected = theirs[f"saliency_{threshold}"][:, k]
        np.testing.assert_allclose(scores(model, inputs, "vit_cx", target, distance_threshold=threshold), expected, rtol=0, atol=1e-14)


# -- Ali et al. ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "method"), [("none", "input_x_gradient"), ("ah", "lrp_ah"), ("ln", "lrp_ln"), ("ah_ln", "lrp_ah_ln")])
def test_conservative_propagation_equals_peer(name: str, method: str) -> None:
    model, inputs = tiny_models.attention_only()
    model, theirs = model.double(), peer("ali")
    assert_close(model(**inputs).detach(), theirs["logits"])
    for target in range(zoo.CLASSES):
        assert_close(scores(model, inputs, method, target), theirs[f"relevance_{name}"][:, target])


def test_column_sums_of_ali_equal_scaled_column_means() -> None:
    model, inputs = build("bert")
    theirs = peer("ali")
    assert_close(zoo.call(model, inputs), theirs["bert_logits"])
    columns = {"aggregation": {"rows": "column_mean"}}
    assert_close(10 * zoo.HEADS * scores(model, inputs, "raw_attention", **columns)[0], theirs["last_block_columns"])
    assert_close(10 * scores(model, inputs, "rollout", **columns)[0], theirs["rollout_columns"])


@pytest.mark.parametrize(("metric", "curve"), [("auac", "generate"), ("au_mse", "pruning")])
def test_curves_of_ali_equal_peer_with_exact_fractions(metric: str, curve: str) -> None:
    """The peer's fractions come from numpy.linspace, so 3/10, 6/10 and 7/10 of ten words round up to one more word."""
    model, inputs = build("bert")
    theirs = peer("ali")
    result = whyformer.evaluate(model, zoo.rows(inputs, 0), theirs["scores"][None], metric, UnknownTokenizer())
    assert result.curves is not None
    assert_close(result.curves[0], theirs[f"{curve}_written"])
    assert np.flatnonzero(np.abs(result.curves[0] - theirs[f"{curve}_linspace"]) > 1e-12).tolist() == [3, 6, 7]


# -- captum, which runs in the test ---------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [False, True])
def test_infidelity_times_mean_square_change_equals_captum(scale: bool) -> None:
    metrics = pytest.importorskip("captum.metrics")
    from whyformer.evaluation.metrics.relevance import random_subsets

    model, target, subsets = tiny_models.PooledModel(channels=1), 2, 40
    image, map_ = (torch.from_numpy(peer("quantus")[name][0])[None, None] for name in ("pictures", "maps"))
    is_removed = torch.from_numpy(random_subsets(64, subsets, share=0.2, seed=7)).reshape(subsets, 1, 8, 8)
    removed = torch.where(is_removed, 0, image)
    # scores are already multiplied by the feature, so a removed feature counts as 1
    theirs = metrics.infidelity(model, lambda x: (is_removed.double(), removed), image, map_, target=target, n_perturb_samples=subsets,
                                max_examples_per_batch=subsets, normalize=scale)  # fmt: skip
    with torch.no_grad():
        changes = (model(image) - model(removed))[:, target]
    settings = {"subsets": subsets, "share": 0.2, "seed": 7, "scale": scale, "baseline": "zero"}
    ours = value("infidelity", model, image, map_[0], target=target, **settings)
    assert_close(ours * changes.square().mean().item(), theirs.numpy())
