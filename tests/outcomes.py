"""The outcome of each method on each architecture: works, no meaning, not yet, refused, wrong or broken."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import whyformer
from architectures import Architecture
from snapshot import assert_unchanged, snapshot
from tiny_inputs import LENGTHS
from whyformer.errors import MethodNotApplicable, WhyformerError
from whyformer.methods import METHODS
from zoo import to

FEW: dict[str, Any] = {"samples": 2, "steps": 2, "masks": 4, "repeats": 2, "patch": 8}
RECTIFIED = (
    "gradcam",
    "gradcam_attention",
)  # (·)⁺: with random weights a map can be all 0, about which the result warns
# where paths bypass the first block: the module that all paths leave from
AROUND = {
    "causal language model/rwkv": "rwkv.blocks.0.pre_ln",
    "sequence classification/minimax": "model.layers.0.input_layernorm",
    "sequence classification/mra": "mra.encoder.layer.0.attention.output.LayerNorm",
    "sequence classification/funnel": "funnel.embeddings",
    "masked language model/neomme": "model.embedding_norm",
}
# further embedding tables of these, read after that module
TABLES = {"masked language model/neomme": ["model.value_embeddings"]}
# outcomes of a cell from best to worst; "wrong" and "broken" are defects of the library
WORKS, MEANINGLESS, NOT_YET, REFUSED, WRONG, BROKEN = "works", "no meaning", "not yet", "refused", "wrong", "broken"


@dataclass(frozen=True)
class Cell:
    """One architecture explained by one method; ``message`` is the text of the error or of the failed check."""

    architecture: str
    method: str
    outcome: str
    message: str = ""


WRITES = ("causal language model", "sequence to sequence")


def reads_ahead(kind: str, model: nn.Module, inputs: Any) -> bool:
    """Return True if the logits of a language model at a token depend on later tokens, so that there is no next token."""
    if kind not in WRITES:
        return False
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids = inputs[name]
    changed = ids.clone()
    changed[:, -1] = torch.where(ids[:, -1] == 50, 51, 50)
    ones = {"attention_mask": torch.ones_like(inputs["attention_mask"])} if name == "input_ids" else {}
    with torch.no_grad():
        both = [main_logits(model(**{**inputs, **ones, name: value})) for value in (ids, changed)]
    return both[0].shape[1] == ids.shape[1] and not close(both[0][:, :-1], both[1][:, :-1], 1e-6)


def target_of(kind: str, ahead: bool = False) -> Any:
    """A target that fits the head of this kind of model."""
    targets = whyformer.targets
    if ahead:
        return targets.Token(3, 70)
    fitting = {
        "masked language model": lambda: targets.Token(3, 70), "token classification": lambda: targets.Token(3, 1),
        "question answering": lambda: targets.Span(2, 4), "object detection": lambda: targets.Query(1, 1),
        "semantic segmentation": lambda: targets.Pixel(0, 0, 1), "two towers": lambda: targets.Similarity(),
        "multiple choice": lambda: [1, 0], "causal language model": lambda: [70, 81], "sequence to sequence": lambda: [70, 81],
        "vision and language": lambda: [70, 81],
    }  # fmt: skip
    try:
        return fitting.get(kind, lambda: [1, 3])()
    except AttributeError:  # this kind of target does not exist yet
        return None


def row(inputs: dict[str, Tensor], index: int, *, crop: bool) -> dict[str, Tensor]:
    """One sample as a batch of one; ``crop`` removes the padding."""
    samples = len(LENGTHS)
    long = inputs["input_ids"].shape[-1] if "input_ids" in inputs else 0
    real = int(inputs["attention_mask"][index].sum()) if crop and "attention_mask" in inputs else long
    sample = {n: t.unflatten(0, (samples, -1))[index] for n, t in inputs.items()}
    same = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "image_embeds_position_mask")
    beside = ("bbox", "image_attention_mask", "cross_attention_mask")
    return {n: t[..., :real] if n in same else t[:, :real] if n in beside else t for n, t in sample.items()}


def explain(architecture: Architecture, model: nn.Module, inputs: Any, method: str, index: int | None = None) -> Any:
    target = target_of(architecture.kind, reads_ahead(architecture.kind, model, inputs))
    if index is not None and isinstance(target, list):
        target = target[index : index + 1]
    few = {n: FEW[n] for n in METHODS[method].settings if n in FEW}
    return whyformer.explain(model, dict(inputs), method=method, target=target, **few)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    """Equal up to a fraction of the maximum, which is at least the rounding noise of float32 (of a sum that cancels)."""
    noise = 1e-12 if a.dtype == b.dtype == torch.float64 and tolerance <= 1e-4 else 1e-3
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=noise))


def parts_of(explanation: Any) -> dict[str, Any]:
    names = getattr(explanation, "inputs", None)
    return {n: explanation.part(n) for n in names} if names else {"": explanation}


def main_logits(output: Any) -> Tensor:
    for name in ("logits", "logits_per_image", "start_logits"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output if isinstance(output, Tensor) else output[0]


class Study:
    """One architecture, built once, whose explanations by many methods are checked."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        model, inputs = architecture.build()
        self.model, self.inputs = model.double(), to(inputs, torch.float64)
        # explained without it; what prepares a pass without it may support float32 only (FSMT)
        no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        with torch.no_grad():
            try:
                self.logits = main_logits(self.model(**self.inputs, **no_cache))
                if not self.logits.isfinite().all():  # masks filled with the minimum of float32 overflow in float64
                    raise RuntimeError("float32 only")
            except RuntimeError:  # kernels of experts and state-space layers support float32 only
                self.model, self.inputs = model.float(), to(inputs, torch.float32)
                self.logits = main_logits(self.model(**self.inputs))
            self.exact = self.logits.dtype == torch.float64
            single = row(self.inputs, 1, crop=True)
            self.crop = self._same_alone(single)
            self.single = single if self.crop else row(self.inputs, 1, crop=False)
            self.alone = self.crop or self._same_alone(self.single)
        torch.manual_seed(0)
        self.tables: list[nn.Module] = []  # embedding tables that are read after the first block
        self.versions = False  # True if a block takes several versions of each row
        self.before = snapshot(self.model)

    @property
    def tolerance(self) -> float:
        return 1e-4 if self.exact else 5e-3

    def _same_alone(self, single: dict[str, Tensor]) -> bool:
        """Return True if the plain model's logits of the sample alone equal those in the batch."""
        try:
            alone, whole = main_logits(self.model(**single))[0], self.logits.unflatten(0, (2, -1))[1]
        except Exception:
            return False
        whole = whole.squeeze(0) if whole.dim() > alone.dim() else whole
        whole = whole[: alone.shape[0]] if alone.dim() > 1 else whole
        return close(alone, whole, 1e-9 if self.exact else 1e-4)

    def cell(self, method: str) -> Cell:
        outcome, message = self._outcome(method)
        return Cell(self.architecture.name, method, outcome, message)

    def _outcome(self, method: str) -> tuple[str, str]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = explain(self.architecture, self.model, self.inputs, method)
        except MethodNotApplicable as error:
            message = str(error)
            return (MEANINGLESS if "has no meaning" in message else NOT_YET), message
        except WhyformerError as error:
            return REFUSED, f"{type(error).__name__}: {error}"
        except Exception as error:
            return BROKEN, f"{type(error).__name__}: {error}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                complaint = self._complaint(result, method)
        except Exception as error:
            return BROKEN, f"single or hand-made check: {type(error).__name__}: {error}"
        return (WRONG, complaint) if complaint else (WORKS, "")

    def _complaint(self, result: Any, method: str) -> str:
        parts = parts_of(result)
        for name, part in parts.items():
            if not bool(part.scores.isfinite().all()):
                return f"scores of {name or 'the input'} are not finite"
            ids = self.inputs.get(name or "input_ids")
            if (
                part.level == "token"
                and ids is not None
                and not ids.is_floating_point()
                and part.scores.shape != (len(ids), ids.shape[-1])  # a multiple-choice explanation scores the chosen option only
            ):
                return f"{list(part.scores.shape)} scores for {list(ids.shape)} of {name or 'input_ids'}"
        if not any(bool(p.scores.any()) for p in parts.values()) and not (method in RECTIFIED and any(result.warnings)):
            return "all scores are 0"
        if (
            self.logits.dim() == 2
            and result.logits.shape == self.logits.shape
            and not close(result.logits.double(), self.logits.double(), 1e-6 if self.exact else 1e-4)
        ):
            return "logits are not those of the plain model"
        if self.alone and (
            self.crop or "input_ids" not in self.inputs or method != "occlusion"
        ):  # the padding has an effect here, so removed tokens must not become padding
            singles = parts_of(explain(self.architecture, self.model, self.single, method, 1))
            for name, part in parts.items():
                alone, batched = singles[name].scores[0], part.scores[1]
                cut = tuple(slice(n) for n in alone.shape)
                if not close(alone, batched[cut], self.tolerance):
                    return f"a sample alone gets other scores than in the batch ({name or 'the input'})"
        if method == "input_x_gradient":
            return self.misplaced(parts)
        return ""

    # -- places ------------------------------------------------------------------------------------------------------
    def misplaced(self, parts: dict[str, Any]) -> str:
        """Compare input × gradient with autograd at the pixels, or at the input of the first block for text.

        Return a description of the first mismatch, or "".
        """
        for name, part in parts.items():
            visual = part.level != "token"
            name = name or next((n for n, t in self.inputs.items() if t.is_floating_point() == visual), "")
            hand, keep = self.by_hand(name) if name in self.inputs else None, None
            if hand is None:
                continue
            scores, value = part.scores.double(), self.inputs[name]
            if visual:
                channels = (-3,) if hand.dim() == scores.dim() + 1 else tuple(range(1, hand.dim() - 2))
                hand = hand.sum(channels) if channels else hand
            elif value.is_floating_point():
                columns = hand.dim() == 3 and scores.shape[1] == hand.shape[2] != hand.shape[1]  # a spectrogram
                # patches of all samples in one axis, each a vector or a small image
                packed = (hand.dim() == 2 and hand.shape != scores.shape) or hand.dim() > 3
                hand = hand.flatten(1).sum(-1).unflatten(0, (len(scores), -1)) if packed else hand
                hand = hand.sum(1) if columns else hand.flatten(2).sum(-1) if hand.dim() > 2 else hand
                if hand.shape != scores.shape:
                    return f"{list(scores.shape)} scores where {list(hand.shape)} belong to {name}"
            else:
                has_mask = name == "input_ids" and "attention_mask" in self.inputs
                keep = self.inputs["attention_mask"].bool() if has_mask else torch.ones_like(value, dtype=torch.bool)
                keep = keep & ~torch.isin(value, torch.tensor(self.architecture.marks(self.model), dtype=value.dtype))
                if value.dim() == 3:
                    hand, keep = (t.reshape(value.shape)[torch.arange(2), torch.tensor([1, 0])] for t in (hand, keep))
                if hand.shape != scores.shape:
                    return f"{list(scores.shape)} scores where {list(hand.shape)} belong to {name}"
                hand, scores = hand * keep, scores * keep
            agree = hand.shape != scores.shape or close(scores, hand.double(), self.tolerance)
            if not agree and not self.slopes_agree(name, part.scores, keep):
                return f"input × gradient of {name} is not the one computed by hand"
        return ""

    def slopes_agree(self, name: str, scores: Tensor, keep: Tensor | None) -> bool:
        """Return True if scores are the slopes of the target along x, by differences of two passes. Autograd gives other values
        for a model that detaches tensors or has custom backward functions. For text, only the tokens to ``keep`` count.

        A long step may cross kinks (where boxes are read), a short one is lost where part of the model rounds to float32:
        each slope has to agree for one of the two."""
        value, steps = self.inputs[name], (1e-4, 1e-6) if self.exact else (1e-3,)
        behind = AROUND.get(self.architecture.name)
        block = self.model.get_submodule(behind) if behind else None
        block = None if value.is_floating_point() else block or self.first_block(name)
        if block is None and (not value.is_floating_point() or scores.dim() != value.dim() - 1):
            return False
        torch.manual_seed(0)
        for _ in range(3):
            weights = torch.rand(scores.shape, dtype=scores.dtype)
            weights = weights if keep is None else weights * keep
            weighted = (scores * weights).sum()[None]
            slopes = (self.slope(name, block, bool(behind), weights, step)[None] for step in steps)
            if not any(close(weighted, slope, 1e-2 if self.exact else 2e-2) for slope in slopes):
                return False
        return True

    def slope(self, name: str, block: nn.Module | None, behind: bool, weights: Tensor, step: float) -> Tensor:
        """The derivative of the target at h = 0 when an input, or the input of a block, is multiplied by 1 + h weights."""
        ends, value = [], self.inputs[name]
        for h in (step, -step):
            with torch.no_grad():
                if block is None:
                    factor = (1 + h * weights.unsqueeze(-3)).to(value.dtype)
                    output = self.model(**{**self.inputs, name: value * factor})
                else:
                    output = self.scaled(block, 1 + h * weights.unsqueeze(-1), behind)
                ends.append(self.seed(output))
        return (ends[0] - ends[1]) / (2 * step)

    def scaled(self, module: nn.Module, factor: Tensor, behind: bool) -> Any:
        """The model's output when the first input of a module, or its output, is multiplied by a factor, also on paths that
        bypass the module."""
        done: list[bool] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = _hidden(args, kwargs)[1]
            if not done and hidden is not None:
                done.append(True)
                hidden.mul_(factor)

        def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            done.append(True)
            return output * factor if len(done) == 1 else output

        hooks = [module.register_forward_hook(leave) if behind else module.register_forward_pre_hook(enter, with_kwargs=True)]
        hooks += [table.register_forward_hook(lambda _, args, output: output * factor) for table in self.tables]
        try:
            return self.model(**self.inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def seed(self, output: Any) -> Tensor | None:
        logits, kind = main_logits(output), self.architecture.kind
        if kind == "video classification":  # [B, 1, C] of models that could return several rows
            logits = logits.flatten(0, -2)
        both = torch.arange(2)
        if reads_ahead(kind, self.model, self.inputs):
            return logits[both, 3, 70].sum()
        if kind in ("masked language model", "token classification"):
            return logits[both, 3, 70 if kind.startswith("masked") else 1].sum()
        if kind == "question answering":
            return (output.start_logits[:, 2] + output.end_logits[:, 4]).sum()
        if kind == "object detection":
            return logits[:, 1, 1].sum()
        if kind == "semantic segmentation":
            return logits[:, 1, 0, 0].sum()
        if kind == "two towers":
            return None
        if kind in (*WRITES, "vision and language") and "decoder_input_ids" not in self.inputs:
            last = self.inputs["attention_mask"].sum(1) - 1 + logits.shape[1] - self.inputs["attention_mask"].shape[1]
            return logits[both, last.clamp(min=0), torch.tensor([70, 81])].sum()
        if kind in (*WRITES, "vision and language"):
            return logits[both, -1, torch.tensor([70, 81])].sum()
        return (
            logits[both, torch.tensor([1, 0] if kind == "multiple choice" else [1, 3])].sum()
            if logits.dim() == 2
            else None
        )

    def by_hand(self, name: str) -> Tensor | None:
        value = self.inputs[name]
        if value.is_floating_point():
            leaf = value.clone().requires_grad_()
            with torch.enable_grad():
                seed = self.seed(self.model(**{**self.inputs, name: leaf}))
            if seed is None:
                return None
            (gradient,) = torch.autograd.grad(seed, leaf, allow_unused=True)
            return leaf.detach() * (torch.zeros_like(leaf) if gradient is None else gradient)
        if self.architecture.name in AROUND:
            hand = self.returned([self.model.get_submodule(AROUND[self.architecture.name])])
            self.tables = [self.model.get_submodule(path) for path in TABLES.get(self.architecture.name, ())]
            return hand if hand is None else hand + sum(self.returned([table]) for table in self.tables)
        block = self.first_block(name)
        if block is None:  # blocks take another layout of the rows (several versions of each)
            tables = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
            return self.returned(tables, self.inputs[name]) if self.versions else None
        entered: list[Tensor] = []  # the tensor itself, so that a residual around the block is followed as well
        values: list[Tensor] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = _hidden(args, kwargs)[1]
            if not entered and hidden is not None:
                entered.append(hidden if hidden.requires_grad else hidden.requires_grad_())
                values.append(hidden.detach().clone())

        looked_up: dict[nn.Module, Tensor] = {}
        places = torch.isin(value, torch.tensor(self.architecture.marks(self.model), dtype=value.dtype))

        def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            alike = isinstance(args[0], Tensor) and args[0].shape == value.shape and bool(((args[0] == value) | places).all())
            if module in looked_up or not alike:
                return None
            looked_up[module] = output.detach().requires_grad_()
            return looked_up[module].clone()

        handles = [m.register_forward_hook(leave) for m in self.model.modules() if isinstance(m, nn.Embedding)]
        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        try:
            with torch.enable_grad():
                seed = self.seed(self.model(**self.inputs))
        finally:
            for handle in handles:
                handle.remove()
        if seed is None or not entered:
            return None
        further = _behind(seed, entered[0], looked_up)
        self.tables = list(further)
        hand = _relevance(seed, entered[0], values[0])
        return None if hand is None else hand + sum(further.values())

    def returned(self, modules: list[nn.Module], ids: Tensor | None = None) -> Tensor | None:
        """Gradient × value at the output of the first of these modules that is called (with these ids, if given)."""
        leaves: list[Tensor] = []

        def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            other_ids = ids is not None and not (isinstance(args[0], Tensor) and torch.equal(args[0], ids))
            if leaves or other_ids:
                return None
            leaves.append(output.detach().clone().requires_grad_())
            return leaves[0].clone()

        handles = [m.register_forward_hook(leave) for m in modules]
        try:
            with torch.enable_grad():
                seed = self.seed(self.model(**self.inputs))
        finally:
            for handle in handles:
                handle.remove()
        if seed is None or not leaves:
            return None
        return _relevance(seed, leaves[0], leaves[0].detach())

    def first_block(self, name: str) -> nn.Module | None:
        """The first called block whose input has one row per id and changes only in the row of a changed id."""
        if self.inputs[name].dim() != 2 or self.inputs[name].shape[1] < 4:
            return None
        candidates = [
            m[0]
            for m in self.model.modules()
            if isinstance(m, nn.ModuleList) and len(m) and any(True for _ in m[0].children())
        ]
        seen: list[list[tuple[nn.Module, Tensor]]] = []
        ids = self.inputs[name]
        changed_ids = ids.clone()
        at = ids.shape[1] - 2  # in the first sample, which has no padding: a word after all image tokens
        changed_ids[0, at] = 91 if int(ids[0, at]) != 91 else 92
        for value in (ids, changed_ids):
            calls: list[tuple[nn.Module, Tensor]] = []

            def enter(module: nn.Module, args: Any, kwargs: Any, calls: Any = calls) -> None:
                hidden = _hidden(args, kwargs)[1]
                if hidden is not None:
                    calls.append((module, hidden.detach().clone()))
                self.versions |= hidden is None and any(isinstance(v, Tensor) and v.dim() == 4 for v in args)

            handles = [c.register_forward_pre_hook(enter, with_kwargs=True) for c in candidates]
            try:
                with torch.no_grad():
                    self.model(**{**self.inputs, name: value})
            finally:
                for handle in handles:
                    handle.remove()
            seen.append(calls)
        for (block, a), (_, b) in zip(*seen, strict=False):
            if a.dim() == 3 and a.shape[:2] == ids.shape and a.shape == b.shape:
                changed = (a != b).any(-1).nonzero().tolist()
                if changed == [[0, at]]:
                    return block
        return None


def _hidden(args: Any, kwargs: Any) -> tuple[Any, Tensor | None]:
    for where, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor) and value.is_floating_point():
            return (where, value) if value.dim() == 3 else (None, None)
    return None, None


def _behind(seed: Tensor, entered: Tensor, looked_up: dict[nn.Module, Tensor]) -> dict[nn.Module, Tensor]:
    """Gradient × vector of each token for the tables that reach the output on paths that bypass the first block."""
    further = {}
    if len(looked_up) > 1:
        flow, *gradients = torch.autograd.grad(seed, [entered, *looked_up.values()], retain_graph=True, allow_unused=True)
        for (module, x), gradient in zip(looked_up.items(), gradients, strict=True):
            if gradient is not None and flow is not None:
                (inside,) = torch.autograd.grad(entered, x, flow, retain_graph=True, allow_unused=True)
                left = gradient if inside is None else gradient - inside
                if float(left.abs().max()) > (1e-9 if left.dtype == torch.float64 else 1e-4) * float(gradient.abs().max()):
                    further[module] = (x * left).sum(-1).detach()
    return further


def _relevance(seed: Tensor, at: Tensor, value: Tensor) -> Tensor | None:
    """Gradient × value of each row; None if the seed does not depend on it."""
    try:
        (gradient,) = torch.autograd.grad(seed, at, allow_unused=True)
    except RuntimeError:  # the model writes a state in place, which autograd does not allow
        return torch.full_like(value.sum(-1), torch.nan)
    return None if gradient is None else (value * gradient).sum(-1)


def study(architecture: Architecture, methods: list[str]) -> list[Cell]:
    """All cells of one architecture, and one more if the model was changed."""
    try:
        subject = Study(architecture)
    except Exception as error:
        return [Cell(architecture.name, "(build)", BROKEN, f"{type(error).__name__}: {error}")]
    cells = [subject.cell(m) for m in methods if METHODS[m].modality in ("both", subject.architecture.modality)]
    torch.manual_seed(0)
    try:
        assert_unchanged(subject.model, subject.before)
    except AssertionError as error:
        cells.append(Cell(architecture.name, "(model as found)", WRONG, str(error)[:300]))
    return cells
