"""Agreement with other authors' code to rounding (peers/README.md says what made the arrays), and where it ends."""

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
from golden.peers import small

FOLDER = Path(__file__).parent / "peers"
LENGTHS = zoo.LENGTHS


@cache
def peer(name: str) -> dict[str, NDArray[Any]]:
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return dict(arrays)


def close(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=tolerance * max(1, float(np.abs(theirs).max())))


def build(name: str) -> tuple[nn.Module, Any]:
    return zoo.build(name)


def scores(model: nn.Module, inputs: Any, method: str, target: Any = None, **settings: Any) -> NDArray[np.float64]:
    return whyformer.explain(model, inputs, method, target, **settings).scores.numpy()


def value(metric: str, model: nn.Module, inputs: Any, map_: Any, **settings: Any) -> NDArray[np.float64]:
    return whyformer.evaluate(model, inputs, map_, metric, **settings).values


def evaluated(name: str) -> tuple[nn.Module, Any, dict[str, NDArray[Any]]]:
    """The zoo's BERT, its sentences, and a peer's arrays, which were made for the same logits."""
    model, inputs = build("bert")
    close(zoo.call(model, inputs), peer(name)["logits"])
    return model, inputs, peer(name)


# -- vit-explain ---------------------------------------------------------------------------------------------------
def rollout(**settings: Any) -> NDArray[np.float64]:
    """As vit-explain returns it: a square, its maximum 1."""
    model, inputs = build("timm_vit")
    found = scores(model, inputs, "rollout", 2, **settings).reshape(2, 4, 4)
    return found / found.max((1, 2), keepdims=True)


def test_vit_explain_saw_the_same_model() -> None:
    model, inputs = build("timm_vit")
    close(zoo.call(model, inputs), peer("vit_explain")["logits"])


def test_vit_explain_with_the_mean_of_heads_as_published() -> None:
    close(rollout(), peer("vit_explain")["published_mean"])


@pytest.mark.parametrize("head_fusion", ["max", "min"])
def test_vit_explain_divides_columns_by_the_sums_of_rows(head_fusion: str) -> None:
    """Where rows do not sum to 1 by themselves; with rows divided by their sums it agrees."""
    ours = rollout(head_fusion=head_fusion)
    assert np.abs(ours - peer("vit_explain")[f"published_{head_fusion}"]).max() > 0.01
    close(ours, peer("vit_explain")[f"rows_{head_fusion}_0.0"])


@pytest.mark.parametrize("head_fusion", ["mean", "max", "min"])
def test_vit_explain_never_discards_cls_to_cls(head_fusion: str) -> None:
    theirs, cases = peer("vit_explain"), []
    for k, share in enumerate((0.0, 0.1, 0.5, 0.9)):
        ours = rollout(head_fusion=head_fusion, discard_ratio=share)
        for sample, spared in enumerate(theirs[f"spared_{head_fusion}"][:, k]):
            differs = np.abs(ours[sample] - theirs[f"rows_{head_fusion}_{share}"][sample]).max() > 1e-12
            assert differs == spared
            cases.append(bool(spared))
    assert set(cases) == {True, False}


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_vit_explain_with_each_map_s_own_gradient(share: float) -> None:
    close(rollout(gradient_weighted=True, discard_ratio=share), peer("vit_explain")[f"gradient_{share}"])


# -- attention flow ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sample", [0, 1])
def test_attention_flow_is_the_peers_but_for_its_scale(sample: int) -> None:
    """Capacities are whole millionths here, so flows agree to the sum of their roundings."""
    model, inputs, theirs = evaluated("attention_flow")
    flows, n = scores(model, inputs, "attention_flow")[sample], LENGTHS[sample]
    assert flows.sum() > 2  # each flow is a maximum by itself; the peer divides them by their sum
    close(flows[:n] / flows.sum(), theirs[f"flow_{sample}"], 2e-6)
    assert not flows[n:].any()
    close(scores(model, inputs, "rollout")[sample, :n], theirs[f"joint_{sample}"][0])


# -- Grad-CAM ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [0, 1, 2])
def test_grad_cam_before_it_is_scaled(block: int) -> None:
    model, inputs = build("timm_vit")
    theirs = peer("grad_cam")
    close(zoo.call(model, inputs), theirs["logits"])
    for k, target in enumerate((1, 2)):
        close(scores(model, inputs, "gradcam", target, blocks=block).reshape(2, 4, 4), theirs[f"block_{block}"][:, k])


# -- norms ---------------------------------------------------------------------------------------------------------
SCOPES = [("emnlp2020", "attention"), ("emnlp2021", "attention"), ("emnlp2021", "residual"), ("emnlp2021", "norm")]


@pytest.mark.parametrize(("version", "scope"), SCOPES)
@pytest.mark.parametrize("block", [0, 1, 2])
def test_norms_of_attention(version: str, scope: str, block: int) -> None:
    model, inputs = build("bert")
    theirs = peer("norms")
    close(zoo.call(model, inputs), theirs[f"{version}_logits"])
    norms = theirs[f"{version}_{scope}"][block]
    close(scores(model, inputs, "norm_attention", scope=scope, block=block), norms[:, 0])
    columns = scores(model, inputs, "norm_attention", scope=scope, block=block, aggregation={"rows": "column_mean"})
    for sample, n in enumerate(LENGTHS):
        close(columns[sample, :n], norms[sample, :n, :n].mean(0))


@pytest.mark.parametrize("version", ["emnlp2020", "emnlp2021"])
@pytest.mark.parametrize("head", [0, 1, 2])
def test_norms_of_each_head(version: str, head: int) -> None:
    model, inputs = build("bert")
    for block, norms in enumerate(peer("norms")[f"{version}_heads"]):
        close(scores(model, inputs, "norm_attention", scope="heads", block=block, aggregation={"heads": head}), norms[:, head, 0])


# -- value zeroing -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sample", [0, 1])
def test_value_zeroing(sample: int) -> None:
    model, inputs = build("bert")
    theirs, n = peer("value_zeroing"), LENGTHS[sample]
    close(zoo.call(model, inputs)[sample], theirs[f"logits_{sample}"])
    for block, map_ in enumerate(theirs[f"maps_{sample}"]):
        close(scores(model, inputs, "value_zeroing", block=block)[sample, :n], map_[0])
        columns = scores(model, inputs, "value_zeroing", block=block, aggregation={"rows": "column_max"})
        close(columns[sample, :n], map_.max(0))
    close(scores(model, inputs, "value_zeroing")[sample, :n], theirs[f"rollout_{sample}"][0])


# -- generic attention explainability --------------------------------------------------------------------------------
def clip() -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = small.clip()
    model, inputs = model.double(), zoo.to(inputs, torch.float64)
    with torch.no_grad():
        close(model(**inputs).logits_per_image, peer("gae")["clip_logits"])
    return model, inputs


@pytest.mark.parametrize("start", [-1, 0, 1])
@pytest.mark.parametrize("text", [0, 1])
def test_gae_of_clip(start: int, text: int) -> None:
    model, inputs = clip()
    close(scores(model, inputs, "gae", text, start_layer=start), peer("gae")[f"clip_image_{start}"][:, text])
    n = LENGTHS[text]
    for picture in (0, 1):
        one = {**inputs, "pixel_values": inputs["pixel_values"][picture : picture + 1]}
        words = scores(model, one, "gae", text, start_layer=start, side="text")
        close(words[0, :n], peer("gae")[f"clip_text_{start}"][picture, text, n - 1, :n])  # the row of the end of the text


def test_gae_of_detr_keeps_what_the_peer_loses_to_rows_of_zeros() -> None:
    """0/0 in one row makes the peer's whole matrix NaN, which it then takes for 0: that block's share is lost."""
    model, pictures = small.detr()
    model, pictures, theirs = model.double(), pictures.double(), peer("gae")
    close(zoo.call(model, {"pixel_values": pictures}), theirs["detr_logits"])
    for query in range(small.QUERIES):
        ours = scores(small.OneQuery(model, query), pictures, "gae", small.CLASS)
        for picture, lost in enumerate(theirs["detr_lost_a_block"][:, query]):
            if lost:
                gained = ours[picture] - theirs["detr"][picture, query]
                assert gained.min() >= 0
                assert gained.max() > 0.01
            else:
                close(ours[picture], theirs["detr"][picture, query])
    assert theirs["detr_lost_a_block"].sum() == 1


# -- metrics -------------------------------------------------------------------------------------------------------
def test_eraser() -> None:
    model, inputs, theirs = evaluated("eraser")
    given = {"rationale": theirs["rationale"]}
    f1 = value("token_f1", model, inputs, theirs["scores"], k=int(theirs["k"]), **given)
    close(f1, theirs["f1"])
    close(f1.mean(), theirs["f1_macro"])
    close(value("auprc", model, inputs, theirs["scores"], **given), theirs["auprc"])
    for metric in ("comprehensiveness", "sufficiency"):
        close(value(metric, model, inputs, theirs["scores"], baseline="delete"), theirs[metric])


class Unknown:
    """Of a tokenizer only what names the token that stands for others."""

    unk_token_id = int(np.load(FOLDER / "optimus.npz")["unknown"])
    all_special_ids: list[int] = []

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [str(i) for i in ids]


def test_ranked_faithfulness_of_optimus() -> None:
    model, inputs, theirs = evaluated("optimus")
    two = small.FirstClasses(model, 2)
    for target in (0, 1):
        close(value("rft", two, inputs, theirs["scores"], processor=Unknown(), target=target), theirs["rft"][:, target])


def test_segmentation_of_transformer_explainability() -> None:
    theirs = peer("cvpr")
    pictures = small.photographs() * 2 - 1
    objects = theirs["objects"].repeat(16, 1).repeat(16, 2)
    ious = [theirs[f"intersection_{part}"] / theirs[f"union_{part}"] for part in ("background", "object")]
    wanted = {"pixel_accuracy": theirs["correct"] / theirs["labelled"], "miou": np.mean(ious, 0), "map": theirs["average_precision"]}
    for metric, figures in wanted.items():
        close(value(metric, small.Pooled(), pictures, theirs["maps"], mask=objects), 100 * figures)


class Half:
    """The processor of the published ViT, as far as its normalisation goes."""

    image_mean = image_std = [0.5, 0.5, 0.5]


@pytest.mark.parametrize("metric", ["positive", "negative"])
def test_perturbation_of_transformer_explainability(metric: str) -> None:
    theirs, model, pictures = peer("cvpr"), small.Pooled(), small.photographs() * 2 - 1
    close(zoo.call(model, pictures), theirs["logits"])
    found = whyformer.evaluate(model, pictures, theirs["maps"], metric, Half(), label=theirs["label"])
    hits = np.column_stack([theirs["clean_hits"], theirs[f"{metric}_hits"]])
    assert found.curves is not None
    np.testing.assert_array_equal(found.curves, hits)
    assert 0 < hits.mean() < 1


def test_quantus() -> None:
    theirs, model = peer("quantus"), small.Pooled(channels=1)
    pictures, maps, objects = torch.from_numpy(theirs["pictures"])[:, None], theirs["maps"], theirs["objects"]
    steps = theirs["pixel_flipping"].shape[1]
    flipped = whyformer.evaluate(model, pictures, maps, "deletion", target=theirs["classes"], steps=steps, baseline="zero")
    assert flipped.curves is not None
    close(flipped.curves[:, 1:], theirs["pixel_flipping"])  # the peer leaves out the clean picture
    close(value("pointing_game", model, pictures, maps, mask=objects), theirs["pointing_game"].astype(float))
    assert set(theirs["pointing_game"].tolist()) == {True, False}
    # the peer adds 1e-9 to the sum that it divides by
    close(value("energy", model, pictures, maps, mask=objects), theirs["attribution_localisation"], 1e-9)
    close(value("energy", model, pictures, np.abs(maps), mask=objects), theirs["relevance_mass_of_size"])


# -- ViT-CX --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threshold", [0.1, 0.3])
def test_vit_cx_with_the_same_noise(threshold: float) -> None:
    model, inputs = build("timm_vit")
    theirs = peer("vit_cx")
    close(zoo.call(model, inputs), theirs["logits"])
    for k, target in enumerate((1, 2)):
        wanted = theirs[f"saliency_{threshold}"][:, k]
        np.testing.assert_allclose(scores(model, inputs, "vit_cx", target, distance_threshold=threshold), wanted, rtol=0, atol=1e-14)


# -- Ali et al. ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "method"), [("none", "input_x_gradient"), ("ah", "lrp_ah"), ("ln", "lrp_ln"), ("ah_ln", "lrp_ah_ln")])
def test_conservative_propagation(name: str, method: str) -> None:
    model, inputs = small.attention_only()
    model, theirs = model.double(), peer("ali")
    close(model(**inputs).detach(), theirs["logits"])
    for target in range(zoo.CLASSES):
        close(scores(model, inputs, method, target), theirs[f"relevance_{name}"][:, target])


def test_columns_of_ali_are_sums_and_ours_means() -> None:
    model, inputs = build("bert")
    theirs = peer("ali")
    close(zoo.call(model, inputs), theirs["bert_logits"])
    columns = {"aggregation": {"rows": "column_mean"}}
    close(10 * zoo.HEADS * scores(model, inputs, "raw_attention", **columns)[0], theirs["last_block_columns"])
    close(10 * scores(model, inputs, "rollout", **columns)[0], theirs["rollout_columns"])


@pytest.mark.parametrize(("metric", "curve"), [("auac", "generate"), ("au_mse", "pruning")])
def test_curves_of_ali(metric: str, curve: str) -> None:
    """Its fractions come from numpy.linspace, where 3/10, 6/10 and 7/10 of ten words round up to one word more."""
    model, inputs = build("bert")
    theirs = peer("ali")
    found = whyformer.evaluate(model, zoo.rows(inputs, 0), theirs["scores"][None], metric, Unknown())
    assert found.curves is not None
    close(found.curves[0], theirs[f"{curve}_written"])
    assert np.flatnonzero(np.abs(found.curves[0] - theirs[f"{curve}_linspace"]) > 1e-12).tolist() == [3, 6, 7]


# -- captum, which is installed, so that it can be asked itself -----------------------------------------------------
@pytest.mark.parametrize("scale", [False, True])
def test_infidelity_of_captum_is_divided_by_the_size_of_the_changes(scale: bool) -> None:
    metrics = pytest.importorskip("captum.metrics")
    from whyformer.evaluation.metrics.relevance import random_subsets

    model, target, subsets = small.Pooled(channels=1), 2, 40
    picture, map_ = (torch.from_numpy(peer("quantus")[name][0])[None, None] for name in ("pictures", "maps"))
    gone = torch.from_numpy(random_subsets(64, subsets, share=0.2, seed=7)).reshape(subsets, 1, 8, 8)
    without = torch.where(gone, 0, picture)
    # scores of a feature are already times the feature, so what is taken out counts as 1
    theirs = metrics.infidelity(model, lambda x: (gone.double(), without), picture, map_, target=target, n_perturb_samples=subsets,
                                max_examples_per_batch=subsets, normalize=scale)  # fmt: skip
    with torch.no_grad():
        changes = (model(picture) - model(without))[:, target]
    settings = {"subsets": subsets, "share": 0.2, "seed": 7, "scale": scale, "baseline": "zero"}
    ours = value("infidelity", model, picture, map_[0], target=target, **settings)
    close(ours * changes.square().mean().item(), theirs.numpy())
