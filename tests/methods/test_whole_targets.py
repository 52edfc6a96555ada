"""All that a target depends on has scores: each text of a multiple choice, and each text that a picture is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import whyformer
from architectures import listed
from whyformer.explanation.joining import joined
from whyformer.explanation.result import Explanation
from whyformer.methods import METHODS
from whyformer.targets import Contrast, LogProbability, Probability
from zoo import HEADS, VOCABULARY, WIDTH, Choice, build, pixels, randomise, to

Given = dict[str, Tensor]
FEW = {"samples": 2, "steps": 3, "noise": 0.0}
TEXT_METHODS = [m for m in sorted(METHODS) if METHODS[m].modality != "image"]


def few(method: str) -> dict[str, Any]:
    return {name: value for name, value in FEW.items() if name in METHODS[method].settings}


# -- models ----------------------------------------------------------------------------------------------------------
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48}
CONFIGS: dict[str, Callable[[], Any]] = {
    "Bert": lambda: transformers.BertConfig(**SIZES, max_position_embeddings=32, pad_token_id=0),
    "DebertaV2": lambda: transformers.DebertaV2Config(**SIZES, max_position_embeddings=32, relative_attention=True, pos_att_type=["c2p", "p2c"],
                                                      position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True),
    "XLNet": lambda: transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=WIDTH, n_layer=2, n_head=HEADS, d_inner=48, summary_type="last"),
}  # fmt: skip
ENTRIES = {"Bert": "bert.encoder.layer.0", "DebertaV2": "deberta.encoder.layer.0", "XLNet": "transformer.layer.0"}


def choices(kind: str = "Bert", count: int = 5, length: int = 8, padded: bool = True) -> tuple[nn.Module, Given]:
    """Two questions of five texts, which have unequal lengths."""
    model = randomise(getattr(transformers, f"{kind}ForMultipleChoice")(CONFIGS[kind]())).double()
    ids = torch.randint(4, VOCABULARY, (2, count, length), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    if padded:
        for row, (i, m) in enumerate(zip(ids.flatten(0, 1), mask.flatten(0, 1), strict=True)):
            i[length - row % 4 :], m[length - row % 4 :] = 0, 0
    return model, {"input_ids": ids, "attention_mask": mask}


def towers(kind: str = "CLIP", pictures: int = 1, texts: int = 3) -> tuple[nn.Module, Given]:
    words = SIZES | {"projection_size": WIDTH, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    seen = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
    ids = torch.randint(4, VOCABULARY, (texts, 6), generator=torch.Generator().manual_seed(3))
    ids[:, -1] = 2
    config: Any
    if kind == "CLIP":
        config = transformers.CLIPConfig(text_config={**words, "max_position_embeddings": 20}, vision_config=seen, projection_dim=16)
    else:
        config = transformers.SiglipConfig(text_config={**words, "max_position_embeddings": 6}, vision_config=seen)
    model = randomise(getattr(transformers, f"{kind}Model")(config)).double()
    with torch.no_grad():
        model.logit_scale.fill_(1.0)
    return model, {"input_ids": ids, "pixel_values": pixels()[:pictures].double()}


# -- by hand ---------------------------------------------------------------------------------------------------------
def value_of(target: Any, logits: Tensor) -> Tensor:
    """``[B]`` the target written out."""
    rows = range(len(logits))

    def at(index: Any, values: Tensor) -> Tensor:
        return torch.stack([values[b, index if isinstance(index, int) else index[b]] for b in rows])

    match target:
        case Contrast():
            return at(target.index, logits) - at(target.other, logits)
        case LogProbability():
            return at(target.index, logits.log_softmax(-1))
        case Probability():
            return at(target.index, logits.softmax(-1))
        case int() | list():
            return at(target, logits)
    return target(logits)


def by_hand(model: nn.Module, inputs: Given, target: Any, entry: str, output: str) -> tuple[Tensor, Tensor, Tensor]:
    """(∂target/∂logits ``[B, C]``, Σ_d x ⊙ ∂target/∂x of what enters a block, that of the pictures or None)."""
    entered: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        entered.append(x)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    handle = model.get_submodule(entry).register_forward_pre_hook(enter, with_kwargs=True)
    fed = {n: v.clone().requires_grad_() if v.is_floating_point() else v for n, v in inputs.items()}
    logits = getattr(model(**fed), output)
    handle.remove()
    (x,) = entered
    leaf = logits.detach().requires_grad_()
    (seed,) = torch.autograd.grad(value_of(target, leaf).sum(), leaf)
    leaves = [x, *([fed["pixel_values"]] if "pixel_values" in fed else [])]
    grads = torch.autograd.grad(value_of(target, logits).sum(), leaves)
    found = [(leaf * grad).detach() for leaf, grad in zip(leaves, grads, strict=True)]
    return seed, found[0].sum(-1), found[1].sum(1) if len(found) > 1 else torch.zeros(0)


def parts_of(e: Explanation) -> dict[str, Tensor]:
    return {name: e.part(name).scores for name in e.inputs}


def expected(seed: Tensor, scores: Tensor, name: str = "input_ids") -> dict[str, Tensor]:
    """The parts of texts by their scores ``[B, C, N]``."""
    first = [max(range(len(own)), key=lambda k, own=own: (own[k] != 0, own[k])) for own in seed.tolist()]
    rows = range(len(seed))
    found = {name: torch.stack([scores[b, first[b]] for b in rows])}
    for k in range(seed.shape[1]):
        mine = [bool(seed[b, k] != 0) and first[b] != k for b in rows]
        if any(mine):
            found[f"{name}[{k}]"] = torch.stack([scores[b, k] * mine[b] for b in rows])
    return found


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    scale = max(float(v.abs().max()) for v in wanted.values())
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9 * scale)


CHOSEN: dict[str, Any] = {
    "contrast": Contrast(3, 4), "contrasts": Contrast([3, 0], [4, 1]), "crossed": Contrast([3, 4], [4, 3]), "log probability": LogProbability(2),
    "probability": Probability([1, 0]), "product": lambda logits: logits[:, 2] * logits[:, 0], "negative": lambda logits: -logits[:, 3],
    "logit": 3, "logits": [4, 0],
}  # fmt: skip


@pytest.mark.parametrize("target", CHOSEN)
@pytest.mark.parametrize("kind", ENTRIES)
def test_choices_by_hand(kind: str, target: str) -> None:
    model, inputs = choices(kind)
    e = whyformer.explain(model, inputs, "input_x_gradient", CHOSEN[target])
    seed, scores, _ = by_hand(model, inputs, CHOSEN[target], ENTRIES[kind], "logits")
    scores = scores.T if kind == "XLNet" else scores  # tokens come before samples there
    scores = scores.unflatten(0, (2, 5)) * inputs["attention_mask"]
    same(parts_of(e), expected(seed, scores))
    torch.testing.assert_close(sum(v.sum(1) for v in parts_of(e).values()), scores.sum((1, 2)))


@pytest.mark.parametrize("padded", [True, False])
def test_parts_are_complete_together(padded: bool) -> None:
    """Integrated gradients: Σ over all texts is f(x) − f(x′), with x′ zero vectors into the first block."""
    model, inputs = choices(padded=padded)
    target = LogProbability([1, 4])
    e = whyformer.explain(model, inputs, "integrated_gradients", target, steps=60)

    def empty(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (torch.zeros_like(args[0]), *args[1:])

    clean = value_of(target, model(**inputs).logits)
    handle = model.bert.encoder.layer[0].register_forward_pre_hook(empty)
    below = value_of(target, model(**inputs).logits)
    handle.remove()
    real = inputs["attention_mask"].sum((1, 2))
    total = sum(v.sum(1) for v in parts_of(e).values())
    if not padded:
        torch.testing.assert_close(total, (clean - below).detach(), rtol=1e-2, atol=1e-3)
    assert real.shape == total.shape and len(e.parts) == 5  # every text but one of each sample; the two differ
    assert not e.warnings


@pytest.mark.part
@pytest.mark.parametrize("kind", ["Bert", "DebertaV2"])
@pytest.mark.parametrize("method", TEXT_METHODS)
def test_each_text_of_a_contrast_has_the_scores_that_it_has_alone(method: str, kind: str) -> None:
    """What speaks against the other choice is what speaks for −1 times its logit."""
    model, inputs = choices(kind)
    options = few(method) | ({"fill_id": 7} if "fill_id" in METHODS[method].settings else {})
    try:
        e = whyformer.explain(model, inputs, method, Contrast(3, 4), **options)
    except whyformer.errors.MethodNotApplicable:
        assert kind == "DebertaV2"
        return
    assert e.inputs == ("input_ids", "input_ids[4]")
    for b in range(2):
        for name, k, sign in (("input_ids", 3, 1), ("input_ids[4]", 4, -1)):
            one = {n: v[b : b + 1, k] for n, v in inputs.items()}
            length = int(one["attention_mask"].sum())
            one = {n: v[:, :length] for n, v in one.items()}
            target: Any = 0 if sign == 1 else lambda logits: -logits[:, 0]
            alone = whyformer.explain(Choice(model).eval(), one, method, target, **options).scores[0]
            found = e.part(name).scores[b]
            torch.testing.assert_close(found[:length], alone, rtol=1e-6, atol=1e-9 * float(alone.abs().max()))
            assert not found[length:].any()


@pytest.mark.part
@pytest.mark.parametrize("target", ["contrasts", "log probability", "product"])
@pytest.mark.parametrize("method", TEXT_METHODS)
def test_a_batch_of_choices_is_single_runs(method: str, target: str) -> None:
    model, inputs = choices()
    options = few(method) | ({"fill_id": 7} if "fill_id" in METHODS[method].settings else {})
    check_single_runs(model, inputs, inputs.keys(), method, CHOSEN[target], options)


def of_sample(target: Any, b: int) -> Any:
    if isinstance(target, Contrast):
        return Contrast(*(v if isinstance(v, int) else v[b] for v in (target.index, target.other)))
    return target[b] if isinstance(target, list) else target


def check_single_runs(model: nn.Module, inputs: Given, own: Any, method: str, target: Any, options: dict[str, Any]) -> None:
    """Every part of each sample is what it is alone; parts of other samples are 0, are no warning, and say why."""
    e = whyformer.explain(model, inputs, method, target, **options)
    singles = []
    for b, shown in enumerate(e):
        one = {n: v[b : b + 1] if n in own else v for n, v in inputs.items()}
        alone = whyformer.explain(model, one, method, of_sample(target, b), **options)
        singles.append(alone)
        wanted = parts_of(alone)
        assert set(wanted) <= set(shown.inputs)
        for name, found in parts_of(shown).items():
            if name in wanted:
                scale = float(wanted[name].abs().max())
                torch.testing.assert_close(found, wanted[name], rtol=1e-5, atol=1e-9 * scale)
            else:
                part = shown.part(name)
                assert not found.any() and part.diagnostics["input"][0] and not part.warnings
        assert shown.warnings == alone.warnings
    again = joined(singles)
    for name, found in parts_of(again).items():
        torch.testing.assert_close(found, e.part(name).scores, rtol=1e-5, atol=1e-9 * float(found.abs().max()))


@pytest.mark.parametrize("method", TEXT_METHODS)
def test_a_logit_of_a_choice_depends_on_its_text_alone(method: str) -> None:
    model, inputs = choices(padded=False)
    options = few(method) | ({"fill_id": 7} if "fill_id" in METHODS[method].settings else {})
    e = whyformer.explain(model, inputs, method, [3, 1], **options)
    assert e.inputs == ("input_ids",) and "unscored" not in e.diagnostics


def test_occlusion_takes_tokens_out_of_every_text() -> None:
    model, inputs = choices()
    target = LogProbability(2)
    e = whyformer.explain(model, inputs, "occlusion", target, fill_id=7)
    assert e.inputs == ("input_ids", *(f"input_ids[{k}]" for k in (0, 1, 3, 4)))
    clean = value_of(target, model(**inputs).logits)
    for k in range(5):
        for j in (0, 3):
            ids = inputs["input_ids"].clone()
            ids[:, k, j] = 7
            drop = clean - value_of(target, model(**{**inputs, "input_ids": ids}).logits)
            found = e.scores if k == 2 else e.part(f"input_ids[{k}]").scores
            torch.testing.assert_close(found[:, j], drop.detach())


def test_shares_of_all_texts_add_up() -> None:
    model, inputs = choices()
    e = whyformer.explain(model, inputs, "decompx", Contrast(3, 4))
    total = sum(v.sum(1) for v in parts_of(e).values())
    torch.testing.assert_close(total, value_of(Contrast(3, 4), model(**inputs).logits).detach())


def test_parts_of_texts_are_kept(tmp_path: Any) -> None:
    e = whyformer.explain(*choices(), "input_x_gradient", Contrast(3, 4))
    for kept in (Explanation.load(e.save(tmp_path / "e.safetensors")), Explanation.from_dict(e.to_dict())):
        same({n: v.double() for n, v in parts_of(kept).items()}, {n: v.float().double() for n, v in parts_of(e).items()})
    assert "input_ids[4]" in e.to_dict()["parts"]


# -- pictures and texts ----------------------------------------------------------------------------------------------
COMPARED: dict[str, Any] = {
    "contrast": Contrast(0, 1), "contrasts": Contrast([0, 1], [1, 2]), "log probability": LogProbability(2), "one text": 1, "own texts": [1, 0],
    "negative": lambda logits: -logits[:, 2],
}  # fmt: skip


def picked(target: Any, pictures: int) -> Any:
    return target if pictures > 1 else of_sample(target, 0)


@pytest.mark.parametrize("target", COMPARED)
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
@pytest.mark.parametrize("pictures", [1, 2])
def test_compared_texts_by_hand(pictures: int, kind: str, target: str) -> None:
    model, inputs = towers(kind, pictures)
    e = whyformer.explain(model, inputs, "input_x_gradient", picked(COMPARED[target], pictures))
    for b in range(pictures):  # texts are fed once for all pictures, whose gradients would add up
        one = {**inputs, "pixel_values": inputs["pixel_values"][b : b + 1]}
        chosen = of_sample(COMPARED[target], b)
        seed, words, seen = by_hand(model, one, chosen, "text_model.encoder.layers.0", "logits_per_image")
        wanted = {"pixel_values": seen, **expected(seed, words[None])}
        found = parts_of(e[b])
        same({n: found[n] for n in wanted}, wanted)
        assert not any(v.any() for n, v in found.items() if n not in wanted)


@pytest.mark.part(times=2)
@pytest.mark.parametrize("target", ["contrasts", "log probability", "one text", "own texts"])
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
@pytest.mark.parametrize("method", [m for m in sorted(METHODS) if METHODS[m].family != "perturbation"])
def test_a_batch_of_pictures_is_single_runs(method: str, kind: str, target: str) -> None:
    model, inputs = towers(kind, 2)
    try:
        check_single_runs(model, inputs, ["pixel_values"], method, COMPARED[target], few(method))
    except whyformer.errors.MethodNotApplicable:
        return


@pytest.mark.parametrize("target", [[1, 1], [0, 1], Contrast(0, 1), Contrast([0, 1], [1, 0])])
def test_packed_patches_are_compared_with_texts(target: Any) -> None:
    """Patches of two pictures of SigLIP 2, each beside the same two texts."""
    model, inputs = next(a for a in listed() if a.name == "two towers/siglip2").build()
    e = whyformer.explain(model, inputs, "input_x_gradient", target)
    assert e.inputs[:2] == ("pixel_values", "input_ids") and bool(e.parts.keys() - {"input_ids"}) == isinstance(target, Contrast)
    for b in range(2):
        one = {n: v if n in ("input_ids", "attention_mask") else v[b : b + 1] for n, v in inputs.items()}
        wanted = parts_of(whyformer.explain(model, one, "input_x_gradient", of_sample(target, b)))
        assert all(bool(v.any()) for v in wanted.values())
        for name, value in wanted.items():
            torch.testing.assert_close(e[b].part(name).scores, value, rtol=1e-4, atol=1e-6)


def test_integrated_gradients_of_pictures_and_texts_are_complete() -> None:
    model, inputs = towers(pictures=2)
    target = Contrast([0, 1], [1, 2])
    e = whyformer.explain(model, inputs, "integrated_gradients", target, steps=160)
    total = sum(v.flatten(1).sum(1) for v in parts_of(e).values())

    def empty(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (torch.zeros_like(args[0]), *args[1:]), kwargs

    clean = value_of(target, model(**inputs).logits_per_image)
    handle = model.text_model.encoder.layers[0].register_forward_pre_hook(empty, with_kwargs=True)
    below = value_of(target, model(**{**inputs, "pixel_values": 0 * inputs["pixel_values"]}).logits_per_image)
    handle.remove()
    torch.testing.assert_close(total, (clean - below).detach(), rtol=0, atol=0.01)
    assert not e.warnings


def test_texts_without_scores_are_named() -> None:
    """Occlusion takes patches of the picture out; the target depends on the texts too."""
    model, inputs = towers()
    e = whyformer.explain(model, inputs, "occlusion", Contrast(0, 1), patch=16)
    assert e.inputs == ("pixel_values",) and e.diagnostics["unscored"] == ["input_ids"]
    assert any("input_ids" in said and "input_x_gradient" in said for said in e.warnings)
    whole = whyformer.explain(model, inputs, "input_x_gradient", Contrast(0, 1))
    assert whole.inputs == ("pixel_values", "input_ids", "input_ids[1]") and "unscored" not in whole.diagnostics


@pytest.mark.parametrize("target", [[1, 1], Contrast(0, 1)])
def test_the_texts_alone(target: Any) -> None:
    """Of pictures that are about one text too."""
    model, inputs = towers(pictures=2)
    e = whyformer.explain(model, inputs, "gae", target, side="text")
    whole = whyformer.explain(model, inputs, "gae", target)
    assert e.inputs == whole.inputs[1:]
    for name in e.inputs:
        torch.testing.assert_close(e.part(name).scores, whole.part(name).scores)


class Words:
    """A tokenizer of numbers."""

    cls_token_id, pad_token_id, vocab_size = 2, 0, VOCABULARY

    def __len__(self) -> int:
        return self.vocab_size

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"t{i}" for i in ids]


def test_tokens_of_each_text() -> None:
    model, inputs = choices()
    inputs["input_ids"][:, :, 0] = 2
    e = whyformer.explain(model, inputs, "input_x_gradient", Contrast([3, 0], [4, 1]), processor=Words())
    shown = {"input_ids": [3, 0], "input_ids[1]": [1, 1], "input_ids[4]": [4, 4]}
    assert set(shown) == set(e.inputs)
    for name, texts in shown.items():
        part = e.part(name)
        assert part.tokens == [[f"t{i}" for i in inputs["input_ids"][b, k].tolist()] for b, k in enumerate(texts)]
        assert part.special == [[0], [0]]
    pictures, fed = towers()
    e = whyformer.explain(pictures, fed, "input_x_gradient", Contrast(2, 1), processor=Words())
    for name, k in (("input_ids", 2), ("input_ids[1]", 1)):
        assert e.part(name).tokens == [[f"t{i}" for i in fed["input_ids"][k].tolist()]]


@pytest.mark.parametrize("name", ["hf_vit", "bert"])
@pytest.mark.parametrize("method", ["transformer_attribution", "lrp", "partial_lrp"])
@pytest.mark.parametrize("target", [Contrast(1, 2), LogProbability(1), Probability(1)], ids=lambda t: type(t).__name__)
def test_opposite_logits_do_not_cancel_under_the_normalised_add_rule(name: str, method: str, target: Any) -> None:
    """Σ ∂target/∂logits is 0, to which the rule would scale the relevance: float32 would only show its rounding."""
    model, inputs = build(name)
    rule = {} if method == "transformer_attribution" else {"rule": "shared"}
    single = whyformer.explain(model.float(), to(inputs, torch.float32), method, target, **rule).scores
    double = whyformer.explain(model.double(), to(inputs, torch.float64), method, target, **rule).scores
    assert (single - double).abs().max() <= 0.01 * double.abs().max()


def test_relevance_of_a_contrast_is_the_difference_of_two_classes() -> None:
    model, inputs = build("hf_vit")
    first, second, contrast = (whyformer.explain(model, inputs, "lrp", t, rule="shared").scores for t in (1, 2, Contrast(1, 2)))
    torch.testing.assert_close(contrast, first - second, rtol=0, atol=1e-6 * float(first.abs().max()))
