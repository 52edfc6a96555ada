"""What the interception cannot see or has no rule for is refused: an error with the cause, the place and the way out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whyformer
from snapshot import assert_unchanged, snapshot
from whyformer.errors import InputError, MethodNotApplicable, ModelError, UnknownOperation, WhyformerError
from whyformer.methods import METHODS
from whyformer.models.readout import plain_logits
from zoo import build, unseen

WIDTH, TOKENS, CLASSES = 8, 5, 3
RELEVANCE = ["transformer_attribution", "lrp"]
MULTIPLIERS = ["lrp_ah_ln", "input_x_gradient", "saliency"]
ALL = [*RELEVANCE, "gae", *MULTIPLIERS]


class Block(nn.Module):
    """A pre-norm block; ``twist`` is what its branch goes through."""

    def __init__(self, twist: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.twist = twist

    def branch(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.dense(self.attention(y, y, y, need_weights=False)[0])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.twist(self.branch, x)


class Model(nn.Module):
    def __init__(self, twist: Any = None, *, head: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(twist or (lambda branch, x: branch(x))) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.after = head
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean(1))
        return logits if self.after is None else self.after(logits)


class Double(torch.autograd.Function):
    """An operation that autograd knows and whyformer does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return unseen(2 * x)

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Tensor:
        return 2 * flows[0]


def gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.7 * x) + x * x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SCRIPTED = torch.jit.script(gate)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH)


def equal(model: nn.Module, written: nn.Module, x: Tensor, method: str) -> None:
    """Both have the same weights, and get the same scores."""
    written.load_state_dict(model.state_dict())
    found, wanted = (whyformer.explain(m, x, method=method).scores for m in (model, written))
    assert torch.allclose(found, wanted, atol=1e-6)


def refuse(model: nn.Module, x: Tensor, method: str, kind: type[WhyformerError], *parts: str) -> None:
    before = snapshot(model)
    with pytest.raises(kind) as caught:
        whyformer.explain(model, x, method=method)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert_unchanged(model, before)


@pytest.mark.parametrize("method", ALL)
def test_the_model_without_a_twist_is_explained(method: str, x: Tensor) -> None:
    assert whyformer.explain(Model(), x, method=method).scores.isfinite().all()


# -- the audit ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", RELEVANCE)
def test_an_operation_without_a_rule(method: str, x: Tensor) -> None:
    """Its name, the module's path (the last block: there relevance arrives first), what to add, and methods that work."""
    model = Model(lambda branch, x: torch.logcumsumexp(branch(x), -1))
    parts = ["module 'blocks.1'", "(Block)", "whyformer.rules.register(", "input_x_gradient"]
    refuse(model, x, method, UnknownOperation, *parts)


@pytest.mark.parametrize("method", ["transformer_attribution", "lrp"])
def test_a_known_operation_in_an_unknown_part(method: str, x: Tensor) -> None:
    model = Model(lambda branch, x: branch(x) / (1 + x.square()))
    refuse(model, x, method, UnknownOperation, "'div'", "quotient", 'whyformer.rules.register(Block, like="gelu")')


def beside(x: Tensor) -> Tensor:
    """Operations that no composite knows: on the way to the target they would be refused."""
    return torch.logcumsumexp(torch.cosine_similarity(x, x.flip(1), -1)[..., None] * x, 1)


class WithLoss(Model):
    """Computes a loss beside its logits, as Hugging Face models do where they are given labels."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return {"loss": beside(x).sum() + logits.logsumexp(-1).sum(), "logits": logits}


@pytest.mark.parametrize("method", [*RELEVANCE, "lrp_ah_ln"])
def test_what_relevance_never_reaches_disturbs_nobody(method: str, x: Tensor) -> None:
    """A loss beside the logits, and a branch whose part in the target is nothing."""
    plain, with_loss = Model(), WithLoss()
    with_loss.load_state_dict(plain.state_dict())
    scores = whyformer.explain(plain, x, method=method).scores
    assert torch.equal(whyformer.explain(with_loss, x, method=method).scores, scores)
    gated = Model(lambda branch, x: branch(x) + 0 * beside(x))
    gated.load_state_dict(plain.state_dict())
    assert torch.allclose(whyformer.explain(gated, x, method=method).scores, scores, atol=1e-6)


@pytest.mark.parametrize("method", ["gae", *MULTIPLIERS])
def test_gradient_methods_take_any_differentiable_operation(method: str, x: Tensor) -> None:
    model = Model(lambda branch, x: torch.cosine_similarity(branch(x), x.flip(1), -1)[..., None] * x)
    assert whyformer.explain(model, x, method=method).scores.isfinite().all()


@pytest.mark.parametrize("method", [*RELEVANCE, "lrp_ah_ln"])
def test_an_unknown_operation_on_what_carries_nothing_is_fine(method: str, x: Tensor) -> None:
    """Positions, masks and whatever else the model computes beside the path from input to logits."""
    model = Model(lambda branch, x: branch(x) * torch.logsumexp(torch.arange(WIDTH).float(), 0) / 10)
    assert whyformer.explain(model, x, method=method).scores.isfinite().all()


@pytest.mark.parametrize("method", [*RELEVANCE, "lrp_ah_ln"])
def test_an_unknown_operation_whose_result_goes_nowhere_is_fine(method: str, x: Tensor) -> None:
    """Only what comes out carrying is refused: a comparison or an index has no gradient to mislead."""
    model = Model(lambda branch, x: branch(x) * (torch.argsort(branch(x), -1) >= 0))
    assert whyformer.explain(model, x, method=method).scores.isfinite().all()


# -- what cannot be seen ---------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", ALL)
def test_activation_checkpointing(method: str, reentrant: bool, x: Tensor) -> None:
    equal(Model(lambda branch, x: checkpoint(branch, x, use_reentrant=reentrant)), Model(), x, method)


@pytest.mark.parametrize("method", ALL)
def test_a_custom_autograd_function_that_leaves_torch(method: str, x: Tensor) -> None:
    """What it computes is unknown, whatever its backward says."""
    refuse(Model(lambda branch, x: Double.apply(branch(x))), x, method, ModelError, "outside of torch", "register_autograd")


class Squared(torch.autograd.Function):
    """Its backward is not the derivative of its forward, as of a clipped or a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Tensor:
        return flows[0] * 7


@pytest.mark.parametrize("method", ["gae", *MULTIPLIERS])
def test_of_a_custom_autograd_function_the_forward_is_explained(method: str, x: Tensor) -> None:
    equal(Model(lambda branch, x: Squared.apply(branch(x))), Model(lambda branch, x: (y := branch(x)) * y), x, method)


@pytest.mark.parametrize("method", RELEVANCE)
def test_a_hidden_operation_at_the_very_end(method: str, x: Tensor) -> None:
    """No operation follows that could notice."""
    refuse(Model(head=Double.apply), x, method, ModelError, "outside of torch")


@pytest.mark.parametrize("method", ALL)
def test_a_scripted_function_is_what_it_computes(method: str, x: Tensor) -> None:
    equal(Model(lambda branch, x: SCRIPTED(branch(x))), Model(lambda branch, x: gate(branch(x))), x, method)
    equal(Model(head=SCRIPTED), Model(head=gate), x, method)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module(x: Tensor) -> None:
    model = Model()
    model.head = torch.jit.script(model.head)
    refuse(model, x, "transformer_attribution", ModelError, "TorchScript", "original")


@pytest.mark.parametrize("method", ALL)
def test_a_model_that_detaches(method: str, x: Tensor) -> None:
    equal(Model(head=lambda y: y.detach()), Model(), x, method)


# -- refused before anything runs --------------------------------------------------------------------------------------------
class Named(nn.Identity):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        vars(self).update(values)


CHANGED = {
    "dropout": lambda: nn.Dropout(0.1),
    "dropout of maps": lambda: nn.Dropout2d(0.1),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.1),
    "drop path": lambda: Named(drop_prob=0.1),
    "a rate": lambda: Named(attention_dropout=0.1),
    "a router": lambda: Named(router_jitter_noise=0.1),
    "batch statistics": lambda: nn.BatchNorm1d(TOKENS),
}


@pytest.mark.parametrize("what", CHANGED)
def test_training_mode(what: str, x: Tensor) -> None:
    """Refused where it makes the model another function, and the module that does is named; in a part of it too."""
    model = Model()
    model.extra = CHANGED[what]()
    refuse(model.train(), x, "transformer_attribution", ModelError, "training mode", "module 'extra'", "model.eval()")
    model.eval().extra.train()
    refuse(model, x, "gae", ModelError, "training mode", "module 'extra'")


@pytest.mark.parametrize("method", ALL)
def test_training_mode_that_changes_nothing(method: str, x: Tensor) -> None:
    model = Model()
    model.extra = nn.ModuleList([nn.Dropout(0.0), Named(drop_prob=0.0, drop_last=True)])
    wanted = whyformer.explain(model, x, method=method).scores
    model.train()
    before = snapshot(model)
    assert torch.equal(whyformer.explain(model, x, method=method).scores, wanted)
    assert_unchanged(model, before)


def test_checkpointing_switched_on_in_the_model() -> None:
    """In transformers it does nothing in eval mode (the usual state after training); in timm it does."""
    from zoo import build

    model, inputs = build("bert")
    wanted = {method: whyformer.explain(model, inputs, method=method).scores for method in ALL}
    # renamed in transformers 5; the flag that it sets is not
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    for method, scores in wanted.items():
        assert torch.equal(whyformer.explain(model, inputs, method=method).scores, scores)
    refuse(model.train(), inputs, "transformer_attribution", ModelError, "training mode")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    refuse(model, inputs, "transformer_attribution", ModelError, "training mode")


@pytest.mark.parametrize("method", ALL)
def test_checkpointing_switched_on_in_timm(method: str) -> None:
    from zoo import build

    model, inputs = build("timm_vit")
    wanted = whyformer.explain(model, inputs, method=method).scores
    model.set_grad_checkpointing(True)
    assert torch.allclose(whyformer.explain(model, inputs, method=method).scores, wanted, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["transformer_attribution", "rollout", "input_x_gradient"])
def test_a_parameter_that_is_not_finite_is_named(method: str, value: float, x: Tensor) -> None:
    model = Model()
    with torch.no_grad():
        model.blocks[1].dense.bias[3] = value
    before = model.blocks[1].dense.bias.clone()
    with pytest.raises(ModelError, match=r"blocks\.1\.dense\.bias"):
        whyformer.explain(model, x, method=method)
    assert torch.equal(model.blocks[1].dense.bias.nan_to_num(), before.nan_to_num())


def test_activations_that_overflow(x: Tensor) -> None:
    refuse(Model(head=lambda y: y * 1e38 * 1e38), x, "transformer_attribution", ModelError, "not finite", "float32")


def test_no_attention_at_all() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)])
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x.mean(1))

    model, x = Mixer().eval(), torch.randn(2, TOKENS, WIDTH)
    for method in ("transformer_attribution", "rollout", "gae", "partial_lrp"):
        with pytest.raises(WhyformerError, match=r"no attention|no meaning"):
            whyformer.explain(model, x, method=method)
    assert whyformer.explain(model, x, method="lrp").scores.shape == (2, TOKENS)


# -- integer kernels, precision, transforms ------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("method", [*ALL, "rollout"])
def test_an_integer_kernel_is_an_error_never_a_map_of_zeros(method: str) -> None:
    from zoo import build

    model, inputs = build("bert", torch.float32)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(WhyformerError, match=r"linear_dynamic.*no derivative|unknown.*Methods that apply: occlusion"):
        whyformer.explain(quantised, inputs, method)


def test_an_input_that_is_cut_off_is_an_error(x: Tensor) -> None:
    """No map of zeros; a path to a point where all derivatives are 0 may have them."""

    class Rounded(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.round())

    class Dead(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.relu(x - 5))

    pixels = torch.randn(1, TOKENS, WIDTH)
    for model in (Rounded(), Dead()):
        for method in MULTIPLIERS:
            with pytest.raises(ModelError, match="nothing arrives at the input"):
                whyformer.explain(model, pixels, method)
        assert not whyformer.explain(model, pixels, "integrated_gradients", steps=2).scores.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["hf_vit", "bert", "llama"])
def test_relevance_of_half_precision_is_propagated_in_float32(name: str, dtype: torch.dtype) -> None:
    """The same as of the float32 model with the same weights, and the model keeps its own."""
    from zoo import build, to

    model, inputs = build(name, torch.float32)
    half = model.to(dtype)
    for method in ("transformer_attribution", "lrp", "partial_lrp"):
        before = snapshot(half)
        e = whyformer.explain(half, to(inputs, dtype), method, target=1)
        said = e.diagnostics["precision"]
        assert (said["model"], said["relevance"]) == (str(dtype).removeprefix("torch."), "float32")
        assert_unchanged(half, before)
        wide = copy.deepcopy(half).float()
        other = whyformer.explain(wide, to(to(inputs, dtype), torch.float32), method, target=1)
        assert "precision" not in other.diagnostics
        given = to(inputs, dtype)
        own = plain_logits(half, *(((), given) if isinstance(given, dict) else ((given,),))).double()
        spread = (other.logits.amax(-1) - other.logits.amin(-1)).double()
        moved = (own - other.logits.double()).abs().amax(-1) / spread
        assert 0 < float(moved.max()) < 0.1
        assert said["logits_moved"] == pytest.approx(moved.tolist(), rel=1e-4)
        assert said["same_class"] == (own.argmax(-1) == other.logits.argmax(-1)).tolist()
        assert torch.allclose(e.scores, other.scores, rtol=1e-4, atol=1e-4 * float(other.scores.abs().max()))


def test_a_half_precision_model_that_says_another_class_is_told() -> None:
    class Edge(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            other = y[:, :1] + (1.0 if x.dtype == torch.bfloat16 else -1.0)
            return torch.cat((y[:, :1], other), 1)

    x = torch.randn(2, 6, 8).to(torch.bfloat16)
    e = whyformer.explain(Edge().to(torch.bfloat16), x, "lrp", target=0)
    assert e.diagnostics["precision"]["same_class"] == [False, False]
    assert any("predicts another class than in float32" in w for w in e[0].warnings)


@pytest.mark.parametrize("method", ALL)
def test_autocast(method: str, x: Tensor) -> None:
    """Inside of the model, or around the explanation: relevance flows in float32, gradients as autocast has them."""
    model = Model()
    wanted = whyformer.explain(model, x, method).scores

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    inside = whyformer.explain(Cast().eval(), x, method).scores
    with torch.autocast("cpu", torch.bfloat16):
        around = whyformer.explain(model, x, method).scores
    close = {"rtol": 1e-3, "atol": 1e-4} if method == "lrp" else {"rtol": 0.05, "atol": 0.05 * float(wanted.abs().max())}
    for scores in (inside, around):
        assert torch.allclose(scores.float(), wanted, **close)


@pytest.mark.parametrize("method", ALL)
def test_vmap_inside_of_the_model(method: str, x: Tensor) -> None:
    """Those of gradients and multipliers take it; a parameter used inside of it stays a constant."""
    model = Model(lambda branch, x: torch.vmap(lambda row: torch.tanh(row) * row)(branch(x)))
    plain = Model(lambda branch, x: (y := branch(x)) * torch.tanh(y))
    plain.load_state_dict(model.state_dict())
    scores = whyformer.explain(model, x, method).scores
    assert torch.allclose(scores, whyformer.explain(plain, x, method).scores, atol=1e-6)
    layered = Model(lambda branch, x: torch.vmap(model.blocks[0].dense)(branch(x)))
    written = Model(lambda branch, x: model.blocks[0].dense(branch(x)))
    written.load_state_dict(layered.state_dict())
    assert torch.allclose(whyformer.explain(layered, x, method).scores, whyformer.explain(written, x, method).scores, atol=1e-6)


@pytest.mark.parametrize("method", ALL)
def test_an_inner_inference_mode_has_no_part_in_it(method: str, x: Tensor) -> None:
    def inside(branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.inference_mode():
            return branch(x)

    equal(Model(inside).double(), Model().double(), x.double(), method)


@pytest.mark.parametrize("method", ["transformer_attribution", "input_x_gradient"])
def test_compiled_in_place(method: str, x: Tensor) -> None:
    model = Model()
    wanted = whyformer.explain(model, x, method).scores
    model.compile(backend="eager")
    assert torch.equal(whyformer.explain(model, x, method).scores, wanted)


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel, lambda m: nn.DataParallel(torch.compile(m, backend="eager"))])
@pytest.mark.parametrize("method", ["transformer_attribution", "input_x_gradient", "rollout"])
def test_a_compiled_or_a_parallel_model_is_the_one_in_it(wrap: Callable[[nn.Module], nn.Module], method: str, x: Tensor) -> None:
    model = Model()
    wanted = whyformer.explain(model, x, method).scores
    assert torch.equal(whyformer.explain(wrap(model), x, method).scores, wanted)


@pytest.mark.parametrize("method", ALL)
def test_a_compiled_part(method: str, x: Tensor) -> None:
    model = Model()
    wanted = whyformer.explain(model, x, method).scores
    model.head = torch.compile(model.head, backend="eager")
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    before = snapshot(model)
    assert torch.allclose(whyformer.explain(model, x, method).scores, wanted, atol=1e-6)
    assert_unchanged(model, before)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning", "ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize("method", ["transformer_attribution", "rollout", "input_x_gradient"])
def test_flex_attention_is_explained(method: str) -> None:
    from zoo import llama

    found, wanted = (whyformer.explain(*llama(attention=attention), method, 1).scores for attention in ("flex_attention", "sdpa"))
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


class Bypassed(nn.Module):
    """The head reads the first token's last state and the mean of all embeddings, which no attention map shows."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
        self.words, self.encoder, self.head = nn.Embedding(20, 12), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        return self.head(torch.cat([self.encoder(x)[:, 0], x.mean(1)], -1))


@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution", "norm_attention", "value_zeroing", "legrad", "gradcam_attention", "partial_lrp"])
def test_a_head_that_reads_embeddings_beside_the_last_state(method: str) -> None:
    torch.manual_seed(0)
    model, ids = Bypassed().double().eval(), torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(MethodNotApplicable, match="reads other values"):
        whyformer.explain(model, ids, method, 0)
    assert whyformer.explain(model, ids, "attnlrp", 0).scores.any()


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Fused(nn.Module):
    """The head reads the first token's last state and features that no attention reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder, self.head = nn.Embedding(20, 12), encoder(), nn.Linear(17, 3)

    def forward(self, input_ids: Tensor, features: Tensor) -> Tensor:
        return self.head(torch.cat([self.encoder(self.words(input_ids))[:, 0], features], -1))


@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution", "norm_attention"])
def test_features_beside_a_text_do_not_bypass_its_blocks(method: str) -> None:
    torch.manual_seed(0)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "features": torch.randn(1, 5).double()}
    e = whyformer.explain(Fused().double().eval(), inputs, method, 0)
    assert e.part("input_ids").scores.any()


class Beside(nn.Module):
    """Two encoders read the same picture in patches of two sizes, neither after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Conv2d(3, 12, size, size) for size in (4, 8))
        self.encoders, self.head = nn.ModuleList(encoder() for _ in range(2)), nn.Linear(24, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        stems = (stem(pixel_values).flatten(2).mT for stem in self.stems)
        return self.head(torch.cat([own(x).mean(1) for own, x in zip(self.encoders, stems, strict=True)], -1))


@pytest.mark.parametrize("method", ["rollout", "gae", "raw_attention", "value_zeroing", "norm_attention", "gradcam_attention", "partial_lrp"])
def test_encoders_beside_each_other_over_one_picture(method: str) -> None:
    torch.manual_seed(0)
    model, x = Beside().double().eval(), torch.randn(1, 3, 16, 16).double()
    settings = {"block": -1} if "block" in METHODS[method].settings else {}
    with pytest.raises(MethodNotApplicable, match="beside each other"):
        whyformer.explain(model, x, method, 0, **settings)
    assert whyformer.explain(model, x, "attnlrp", 0).scores.any()


class _NoEmptyPictures(torch.nn.Module):
    """A classifier that takes a picture of zeros for padding, as Idefics3 does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("hf_vit")[0]
        self.config = self.inner.config

    def forward(self, pixel_values):
        if not pixel_values.any():
            raise ValueError("no pictures")
        return self.inner(pixel_values=pixel_values)


def test_baseline_that_the_model_refuses_names_others():
    model, inputs = _NoEmptyPictures().eval(), build("hf_vit")[1]
    with pytest.raises(InputError, match="another baseline") as caught:
        whyformer.explain(model, inputs, "integrated_gradients", steps=2)
    assert "mean" in str(caught.value)
    assert whyformer.explain(model, inputs, "integrated_gradients", steps=2, baseline="mean").scores.any()
