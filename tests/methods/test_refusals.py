"""Operations that cannot be recorded or have no rule raise an error with cause, module and remedy."""

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
    """A pre-norm block; ``twist`` is applied to its branch."""

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


class TwistedModel(nn.Module):
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


class DoubleOutsideTorch(torch.autograd.Function):
    """An operation with a derivative in autograd that is not recorded."""

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


def assert_same_scores(model: nn.Module, reference: nn.Module, x: Tensor, method: str) -> None:
    """Assert that both models with the same weights have the same scores."""
    reference.load_state_dict(model.state_dict())
    result, expected = (whyformer.explain(m, x, method=method).scores for m in (model, reference))
    assert torch.allclose(result, expected, atol=1e-6)


def assert_refused(model: nn.Module, x: Tensor, method: str, kind: type[WhyformerError], *parts: str) -> None:
    before = snapshot(model)
    with pytest.raises(kind) as caught:
        whyformer.explain(model, x, method=method)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert_unchanged(model, before)


@pytest.mark.parametrize("method", ALL)
def test_model_without_twist_is_explained(method: str, x: Tensor) -> None:
    assert whyformer.explain(TwistedModel(), x, method=method).scores.isfinite().all()


# -- operations without a rule -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", RELEVANCE)
def test_operation_without_rule_is_refused(method: str, x: Tensor) -> None:
    """The error names operation, module (the last block, which relevance reaches first), how to register a rule, and other methods."""
    model = TwistedModel(lambda branch, x: torch.logcumsumexp(branch(x), -1))
    parts = ["module 'blocks.1'", "(Block)", "whyformer.rules.register(", "input_x_gradient"]
    assert_refused(model, x, method, UnknownOperation, *parts)


@pytest.mark.parametrize("method", ["transformer_attribution", "lrp"])
def test_known_operation_with_unsupported_operand_is_refused(method: str, x: Tensor) -> None:
    model = TwistedModel(lambda branch, x: branch(x) / (1 + x.square()))
    assert_refused(model, x, method, UnknownOperation, "'div'", "quotient", "whyformer.rules.register(")


def unsupported_branch(x: Tensor) -> Tensor:
    """Operations without a rule in any composite; on the path to the target they would be refused."""
    return torch.logcumsumexp(torch.cosine_similarity(x, x.flip(1), -1)[..., None] * x, 1)


class ModelWithLoss(TwistedModel):
    """Returns a loss besides its logits, as Hugging Face models do when labels are passed."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return {"loss": unsupported_branch(x).sum() + logits.logsumexp(-1).sum(), "logits": logits}


@pytest.mark.parametrize("method", [*RELEVANCE, "lrp_ah_ln"])
def test_unsupported_operations_without_relevance_are_ignored(method: str, x: Tensor) -> None:
    """A loss besides the logits, and a branch that is multiplied by 0."""
    plain, with_loss = TwistedModel(), ModelWithLoss()
    with_loss.load_state_dict(plain.state_dict())
    scores = whyformer.explain(plain, x, method=method).scores
    assert torch.equal(whyformer.explain(with_loss, x, method=method).scores, scores)
    gated = TwistedModel(lambda branch, x: branch(x) + 0 * unsupported_branch(x))
    gated.load_state_dict(plain.state_dict())
    assert torch.allclose(whyformer.explain(gated, x, method=method).scores, scores, atol=1e-6)


@pytest.mark.parametrize("method", ["gae", *MULTIPLIERS])
def test_gradient_methods_support_any_differentiable_operation(method: str, x: Tensor) -> None:
    model = TwistedModel(lambda branch, x: torch.cosine_similarity(branch(x), x.flip(1), -1)[..., None] * x)
    assert whyformer.explain(model, x, method=method).scores.isfinite().all()


@pytest.mark.parametrize("method", [*RELEVANCE, "lrp_ah_ln"])
def test_unsupported_operation_on_constants_is_ignored(method: str, x: Tensor) -> None:
    """For example positions and masks, which do not depend on the input."""
    model = TwistedModel(lambda branch, x: branch(x) * torch.logsumexp(torch.arange(WIDTH).float(), 0) / 10)
    assert whyformer.explain(model, x, method=method).scores.isfinite().all()


@pytest.mark.parametrize("method", [*RELEVANCE, "lrp_ah_ln"])
def test_unsupported_operation_before_comparison_is_ignored(method: str, x: Tensor) -> None:
    """A comparison has no gradient, so its unsupported inputs receive no relevance."""
    model = TwistedModel(lambda branch, x: branch(x) * (torch.argsort(branch(x), -1) >= 0))
    assert whyformer.explain(model, x, method=method).scores.isfinite().all()


# -- operations outside torch--------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", ALL)
def test_activation_checkpointing_does_not_change_scores(method: str, reentrant: bool, x: Tensor) -> None:
    assert_same_scores(TwistedModel(lambda branch, x: checkpoint(branch, x, use_reentrant=reentrant)), TwistedModel(), x, method)


@pytest.mark.parametrize("method", ALL)
def test_autograd_function_outside_torch_is_refused(method: str, x: Tensor) -> None:
    """Its function is unknown, although it defines a backward."""
    assert_refused(TwistedModel(lambda branch, x: DoubleOutsideTorch.apply(branch(x))), x, method, ModelError, "outside of torch", "register_autograd")


class SquareWithWrongBackward(torch.autograd.Function):
    """Its backward is not the derivative of its forward, as for clipped or straight-through gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Tensor:
        return flows[0] * 7


@pytest.mark.parametrize("method", ["gae", *MULTIPLIERS])
def test_forward_of_autograd_function_is_explained(method: str, x: Tensor) -> None:
    assert_same_scores(TwistedModel(lambda branch, x: SquareWithWrongBackward.apply(branch(x))), TwistedModel(lambda branch, x: (y := branch(x)) * y), x, method)


@pytest.mark.parametrize("method", RELEVANCE)
def test_hidden_operation_on_logits_is_refused(method: str, x: Tensor) -> None:
    """The hidden operation returns the logits."""
    assert_refused(TwistedModel(head=DoubleOutsideTorch.apply), x, method, ModelError, "outside of torch")


@pytest.mark.parametrize("method", ALL)
def test_scripted_function_has_same_scores_as_plain_function(method: str, x: Tensor) -> None:
    assert_same_scores(TwistedModel(lambda branch, x: SCRIPTED(branch(x))), TwistedModel(lambda branch, x: gate(branch(x))), x, method)
    assert_same_scores(TwistedModel(head=SCRIPTED), TwistedModel(head=gate), x, method)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_module_is_refused(x: Tensor) -> None:
    model = TwistedModel()
    model.head = torch.jit.script(model.head)
    assert_refused(model, x, "transformer_attribution", ModelError, "TorchScript", "original")


@pytest.mark.parametrize("method", ALL)
def test_detached_logits_do_not_change_scores(method: str, x: Tensor) -> None:
    assert_same_scores(TwistedModel(head=lambda y: y.detach()), TwistedModel(), x, method)


# -- errors before the forward pass --------------------------------------------------------------------------------------------
class IdentityWithAttributes(nn.Identity):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        vars(self).update(values)


CHANGED = {
    "dropout": lambda: nn.Dropout(0.1),
    "dropout of maps": lambda: nn.Dropout2d(0.1),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.1),
    "drop path": lambda: IdentityWithAttributes(drop_prob=0.1),
    "a rate": lambda: IdentityWithAttributes(attention_dropout=0.1),
    "a router": lambda: IdentityWithAttributes(router_jitter_noise=0.1),
    "batch statistics": lambda: nn.BatchNorm1d(TOKENS),
}


@pytest.mark.parametrize("what", CHANGED)
def test_training_mode_is_refused(what: str, x: Tensor) -> None:
    """Raises if training mode changes the function of the model or of a submodule, and names the module."""
    model = TwistedModel()
    model.extra = CHANGED[what]()
    assert_refused(model.train(), x, "transformer_attribution", ModelError, "training mode", "module 'extra'", "model.eval()")
    model.eval().extra.train()
    assert_refused(model, x, "gae", ModelError, "training mode", "module 'extra'")


@pytest.mark.parametrize("method", ALL)
def test_training_mode_without_effect_is_allowed(method: str, x: Tensor) -> None:
    model = TwistedModel()
    model.extra = nn.ModuleList([nn.Dropout(0.0), IdentityWithAttributes(drop_prob=0.0, drop_last=True)])
    expected = whyformer.explain(model, x, method=method).scores
    model.train()
    before = snapshot(model)
    assert torch.equal(whyformer.explain(model, x, method=method).scores, expected)
    assert_unchanged(model, before)


def test_gradient_checkpointing_of_transformers() -> None:
    """In transformers it has no effect in eval mode, the usual mode after training."""
    from zoo import build

    model, inputs = build("bert")
    expected = {method: whyformer.explain(model, inputs, method=method).scores for method in ALL}
    # transformers 5 renamed the method but not the flag
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    for method, scores in expected.items():
        assert torch.equal(whyformer.explain(model, inputs, method=method).scores, scores)
    assert_refused(model.train(), inputs, "transformer_attribution", ModelError, "training mode")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert_refused(model, inputs, "transformer_attribution", ModelError, "training mode")


@pytest.mark.parametrize("method", ALL)
def test_gradient_checkpointing_of_timm(method: str) -> None:
    from zoo import build

    model, inputs = build("timm_vit")
    expected = whyformer.explain(model, inputs, method=method).scores
    model.set_grad_checkpointing(True)
    assert torch.allclose(whyformer.explain(model, inputs, method=method).scores, expected, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["transformer_attribution", "rollout", "input_x_gradient"])
def test_non_finite_parameter_is_named_in_error(method: str, value: float, x: Tensor) -> None:
    model = TwistedModel()
    with torch.no_grad():
        model.blocks[1].dense.bias[3] = value
    before = model.blocks[1].dense.bias.clone()
    with pytest.raises(ModelError, match=r"blocks\.1\.dense\.bias"):
        whyformer.explain(model, x, method=method)
    assert torch.equal(model.blocks[1].dense.bias.nan_to_num(), before.nan_to_num())


def test_overflowing_activations_are_refused(x: Tensor) -> None:
    assert_refused(TwistedModel(head=lambda y: y * 1e38 * 1e38), x, "transformer_attribution", ModelError, "not finite", "float32")


def test_attention_methods_refuse_model_without_attention() -> None:
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
def test_integer_kernel_is_refused(method: str) -> None:
    from zoo import build

    model, inputs = build("bert", torch.float32)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(WhyformerError, match=r"linear_dynamic.*no derivative|unknown.*Methods that apply: auto, occlusion"):
        whyformer.explain(quantized, inputs, method)


@pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("purpose", ["faithful", "localise"])
@pytest.mark.parametrize("name", ["bert", "hf_vit", "gpt2"])
def test_auto_explains_integer_kernels_by_occlusion(name: str, purpose: str) -> None:
    from zoo import build

    model, inputs = build(name, torch.float32)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    result = whyformer.explain(quantized, inputs, "auto", 1, purpose=purpose)
    assert result.diagnostics["auto"]["method"] == "occlusion"
    assert torch.equal(result.scores, whyformer.explain(quantized, inputs, "occlusion", 1).scores)
    assert all("occlusion" in sample[0] and "linear_dynamic" in sample[0] for sample in result.diagnostics["warnings"])
    with pytest.raises(MethodNotApplicable, match=r"linear_dynamic.*checkpoint"):
        whyformer.explain(quantized, inputs, "auto", 1, purpose=purpose, checkpoint=True)


def test_input_without_gradient_is_refused(x: Tensor) -> None:
    """Raises instead of returning zeros; integrated gradients may be 0 where all derivatives on the path are 0."""

    class RoundedInput(TwistedModel):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.round())

    class DeadRelu(TwistedModel):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.relu(x - 5))

    pixels = torch.randn(1, TOKENS, WIDTH)
    for model in (RoundedInput(), DeadRelu()):
        for method in MULTIPLIERS:
            with pytest.raises(ModelError, match="nothing arrives at the input"):
                whyformer.explain(model, pixels, method)
        assert not whyformer.explain(model, pixels, "integrated_gradients", steps=2).scores.any()


def test_auto_passes_over_methods_that_hold_the_output_constant() -> None:
    """Distances to fixed points are statistics, which rules of multipliers hold constant."""

    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
            self.centres = nn.Parameter(torch.randn(3, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return -torch.cdist(self.layer(x)[:, 0], self.centres)

    model, vectors = Distances().eval(), torch.randn(2, TOKENS, WIDTH)
    with pytest.raises(ModelError, match="nothing arrives at the input"):
        whyformer.explain(model, vectors, "libragrad")
    with pytest.raises(MethodNotApplicable, match="holds constant"):
        whyformer.explain(model, vectors, "decompx")
    e = whyformer.explain(model, vectors)
    assert "libragrad" in e.diagnostics["auto"]["passed_over"]
    assert e.scores.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["hf_vit", "bert", "llama"])
def test_half_precision_model_is_propagated_in_float32(name: str, dtype: torch.dtype) -> None:
    """Equals the float32 model with the same weights; the model keeps its half-precision weights."""
    from zoo import build, to

    model, inputs = build(name, torch.float32)
    half = model.to(dtype)
    for method in ("transformer_attribution", "lrp", "partial_lrp"):
        before = snapshot(half)
        e = whyformer.explain(half, to(inputs, dtype), method, target=1)
        precision = e.diagnostics["precision"]
        assert (precision["model"], precision["relevance"]) == (str(dtype).removeprefix("torch."), "float32")
        assert_unchanged(half, before)
        float_model = copy.deepcopy(half).float()
        expected = whyformer.explain(float_model, to(to(inputs, dtype), torch.float32), method, target=1)
        assert "precision" not in expected.diagnostics
        half_inputs = to(inputs, dtype)
        half_logits = plain_logits(half, *(((), half_inputs) if isinstance(half_inputs, dict) else ((half_inputs,),))).double()
        spread = (expected.logits.amax(-1) - expected.logits.amin(-1)).double()
        logit_change = (half_logits - expected.logits.double()).abs().amax(-1) / spread
        assert 0 < float(logit_change.max()) < 0.1
        assert precision["logits_moved"] == pytest.approx(logit_change.tolist(), rel=1e-4)
        assert precision["same_class"] == (half_logits.argmax(-1) == expected.logits.argmax(-1)).tolist()
        assert torch.allclose(e.scores, expected.scores, rtol=1e-4, atol=1e-4 * float(expected.scores.abs().max()))


def test_half_precision_with_different_class_warns() -> None:
    class PrecisionDependentClass(TwistedModel):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            second_logit = y[:, :1] + (1.0 if x.dtype == torch.bfloat16 else -1.0)
            return torch.cat((y[:, :1], second_logit), 1)

    x = torch.randn(2, 6, 8).to(torch.bfloat16)
    e = whyformer.explain(PrecisionDependentClass().to(torch.bfloat16), x, "lrp", target=0)
    assert e.diagnostics["precision"]["same_class"] == [False, False]
    assert any("predicts another class than in float32" in w for w in e[0].warnings)


@pytest.mark.parametrize("method", ALL)
def test_autocast_changes_scores_only_by_rounding(method: str, x: Tensor) -> None:
    """Autocast inside the model or around the explanation: relevance in float32, gradients in the dtypes of autocast."""
    model = TwistedModel()
    expected = whyformer.explain(model, x, method).scores

    class AutocastModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    inside = whyformer.explain(AutocastModel().eval(), x, method).scores
    with torch.autocast("cpu", torch.bfloat16):
        around = whyformer.explain(model, x, method).scores
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if method == "lrp" else {"rtol": 0.05, "atol": 0.05 * float(expected.abs().max())}
    for scores in (inside, around):
        assert torch.allclose(scores.float(), expected, **tolerance)


@pytest.mark.parametrize("method", ALL)
def test_vmap_in_model_has_same_scores(method: str, x: Tensor) -> None:
    """Also with a parameter used inside vmap."""
    model = TwistedModel(lambda branch, x: torch.vmap(lambda row: torch.tanh(row) * row)(branch(x)))
    plain = TwistedModel(lambda branch, x: (y := branch(x)) * torch.tanh(y))
    plain.load_state_dict(model.state_dict())
    scores = whyformer.explain(model, x, method).scores
    assert torch.allclose(scores, whyformer.explain(plain, x, method).scores, atol=1e-6)
    layered = TwistedModel(lambda branch, x: torch.vmap(model.blocks[0].dense)(branch(x)))
    reference = TwistedModel(lambda branch, x: model.blocks[0].dense(branch(x)))
    reference.load_state_dict(layered.state_dict())
    assert torch.allclose(whyformer.explain(layered, x, method).scores, whyformer.explain(reference, x, method).scores, atol=1e-6)


@pytest.mark.parametrize("method", ALL)
def test_inference_mode_in_model_does_not_change_scores(method: str, x: Tensor) -> None:
    def inside(branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.inference_mode():
            return branch(x)

    assert_same_scores(TwistedModel(inside).double(), TwistedModel().double(), x.double(), method)


@pytest.mark.parametrize("method", ["transformer_attribution", "input_x_gradient"])
def test_module_compiled_in_place_has_same_scores(method: str, x: Tensor) -> None:
    model = TwistedModel()
    expected = whyformer.explain(model, x, method).scores
    model.compile(backend="eager")
    assert torch.equal(whyformer.explain(model, x, method).scores, expected)


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel, lambda m: nn.DataParallel(torch.compile(m, backend="eager"))])
@pytest.mark.parametrize("method", ["transformer_attribution", "input_x_gradient", "rollout"])
def test_compiled_or_parallel_wrapper_has_same_scores(wrap: Callable[[nn.Module], nn.Module], method: str, x: Tensor) -> None:
    model = TwistedModel()
    expected = whyformer.explain(model, x, method).scores
    assert torch.equal(whyformer.explain(wrap(model), x, method).scores, expected)


@pytest.mark.parametrize("method", ALL)
def test_compiled_submodules_have_same_scores(method: str, x: Tensor) -> None:
    model = TwistedModel()
    expected = whyformer.explain(model, x, method).scores
    model.head = torch.compile(model.head, backend="eager")
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    before = snapshot(model)
    assert torch.allclose(whyformer.explain(model, x, method).scores, expected, atol=1e-6)
    assert_unchanged(model, before)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning", "ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize("method", ["transformer_attribution", "rollout", "input_x_gradient"])
def test_flex_attention_has_same_scores_as_sdpa(method: str) -> None:
    from zoo import llama

    result, expected = (whyformer.explain(*llama(attention=attention), method, 1).scores for attention in ("flex_attention", "sdpa"))
    assert torch.allclose(result, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


class EmbeddingBypass(nn.Module):
    """The head reads the final state of the first token and the mean embedding, which no attention map includes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
        self.words, self.encoder, self.head = nn.Embedding(20, 12), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        return self.head(torch.cat([self.encoder(x)[:, 0], x.mean(1)], -1))


@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution", "norm_attention", "value_zeroing", "legrad", "gradcam_attention", "partial_lrp"])
def test_map_methods_refuse_head_that_reads_embeddings(method: str) -> None:
    torch.manual_seed(0)
    model, ids = EmbeddingBypass().double().eval(), torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(MethodNotApplicable, match="reads other values"):
        whyformer.explain(model, ids, method, 0)
    assert whyformer.explain(model, ids, "attnlrp", 0).scores.any()


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class TextAndFeatures(nn.Module):
    """The head reads the final state of the first token and extra features that do not enter the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder, self.head = nn.Embedding(20, 12), encoder(), nn.Linear(17, 3)

    def forward(self, input_ids: Tensor, features: Tensor) -> Tensor:
        return self.head(torch.cat([self.encoder(self.words(input_ids))[:, 0], features], -1))


@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution", "norm_attention"])
def test_map_methods_support_extra_features_in_head(method: str) -> None:
    torch.manual_seed(0)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "features": torch.randn(1, 5).double()}
    e = whyformer.explain(TextAndFeatures().double().eval(), inputs, method, 0)
    assert e.part("input_ids").scores.any()


class ParallelEncoders(nn.Module):
    """Two parallel encoders over patches of the same image in two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Conv2d(3, 12, size, size) for size in (4, 8))
        self.encoders, self.head = nn.ModuleList(encoder() for _ in range(2)), nn.Linear(24, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        stems = (stem(pixel_values).flatten(2).mT for stem in self.stems)
        return self.head(torch.cat([encoder_(x).mean(1) for encoder_, x in zip(self.encoders, stems, strict=True)], -1))


@pytest.mark.parametrize("method", ["rollout", "gae", "raw_attention", "value_zeroing", "norm_attention", "gradcam_attention", "partial_lrp"])
def test_map_methods_refuse_parallel_encoders_over_one_image(method: str) -> None:
    torch.manual_seed(0)
    model, x = ParallelEncoders().double().eval(), torch.randn(1, 3, 16, 16).double()
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
