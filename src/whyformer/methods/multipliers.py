"""Gradient × input under named composites, at the model's input or summed over the inputs of blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from whyformer.methods.gradients.input_gradients import conserved, explain_roots, multiply
from whyformer.methods.map_passes import MapPass, RowsName
from whyformer.methods.registry import Checked, method
from whyformer.methods.roots import nothing_arrives
from whyformer.methods.task import Scores, Task
from whyformer.rules.multipliers import COMPOSITES, WITH_SECANTS, CompositeName
from whyformer.tape.walking import Composite

_UP_TO_ONE: Checked = ("a number from 0 to 1", lambda v: not isinstance(v, bool) and 0 <= v <= 1)
BlockShare = Annotated[float, _UP_TO_ONE]


def over_blocks(task: Task, composite: Composite, share: float) -> Scores:
    """S_j = Σ_b Σ_d h_b[j, d] · m_b[j, d] over the first ``share`` of the blocks, with h_b the input of block b and m_b
    the composite's multipliers there; for all blocks, FullGrad⁺ (Mehri et al., CVPR 2025) without its bias terms. One
    forward and one backward pass.

    Raises:
        MethodNotApplicable: no blocks, or blocks with different rows.
        ModelError: nothing arrives at any block.
    """
    products = defaultdict[RowsName, list[Tensor]](list)
    map_pass = task.block_pass(row_alone=task.structure.is_plain)
    if task.structure.merges:
        raise task.refuse("its blocks have different rows, so their products cannot be summed")

    def observe(key: RowsName, value: Tensor, flow: Tensor) -> None:
        products[key].append((value.float() * flow if value.dtype.itemsize < 4 else value * flow).sum(-1))

    logits = _walk_to_blocks(task, map_pass, composite, share, observe)
    if bool(task.seed(logits).any()) and not any(bool(part.any()) for parts in products.values() for part in parts):
        raise nothing_arrives(composite)
    summed = {}
    for key, parts in products.items():
        if any(part.dim() != 2 or part.shape != parts[0].shape for part in parts):
            raise task.refuse("its blocks have different rows, so their products cannot be summed")
        summed[key] = torch.stack(parts).sum(0)
    figure = _conservation(task, logits, products)
    return task.of_sources(summed, logits, figure)


def _walk_to_blocks(
    task: Task,
    map_pass: MapPass,
    composite: Composite,
    share: float,
    observe: Callable[[RowsName, Tensor, Tensor], None],
) -> Tensor:
    """Walk back to the inputs of the first ``share`` of each stream's blocks, and return the logits ``[B, C]``.
    ``observe`` is called with the name of the rows, a block's input, and the flow that arrives there, ``[B, N, D]``."""
    at: dict[int, Callable[..., None]] = {}
    for stream in (s for s in map_pass.layout.streams if not s.is_learned):
        count = math.ceil(round(share * len(stream.all_blocks), 9))  # 0.28 · 25 is 7.000000000000001
        for block in stream.all_blocks[: max(1, count)]:
            if not map_pass.holds(block.entry, stream):
                raise task.refuse("its blocks have different rows, so their products cannot be summed")
            at[block.entry] = map_pass.arriving(stream, block.entry, partial(observe, map_pass.name_of(stream)))
    map_pass.walk(task.seed(map_pass.logits), [composite], at=at)
    return map_pass.logits


def _conservation(task: Task, logits: Tensor, products: dict[RowsName, list[Tensor]]) -> dict[str, Any]:
    """Return, for a single stream, the mean over blocks of the sum of the products, and the target's value."""
    if len(products) != 1:
        return {}
    (parts,) = products.values()
    target = task.value(logits.detach()).double()
    rows = torch.stack([part.double().sum(-1) for part in parts]).mean(0)
    total = rows.reshape(task.inputs.batch, -1).sum(-1).to(target.device)  # sums over the texts of multiple choice
    return conserved(total, target)


# -- methods -------------------------------------------------------------------------------------------------------
@method(
    "Σ over blocks of h ⊙ ∂f/∂h under LibraGrad's rules (FullGrad⁺)",
    family="gradient",
    signed=True,
    checkpoint=True,
    citation="Mehri et al.: LibraGrad, CVPR 2025",
)
def libragrad(task: Task, *, share: BlockShare = 1.0, composite: CompositeName = "libra") -> Scores:
    """S_j = Σ_b Σ_d h_b ⊙ ∂f/∂h_b with h_b the input of block b; signed. Attention probabilities and the norms'
    deviations are held constant, activations are replaced by secants, and products of two branches are halved, so that
    each block's products sum to the logit on a model without biases.

    Args:
        share: fraction of the blocks that is used, from the first; 0 uses the first block only.
        composite: the rules of the backward pass, see :mod:`whyformer.rules.multipliers`.
    """
    return over_blocks(task, COMPOSITES[composite], share)


_SHARE = """

Args:
    share: 0 for x ⊙ m at the model's input, the published form; else Σ_b h_b ⊙ m_b over the inputs of this fraction of
        the blocks, from the first, as in FullGrad⁺.
"""


def _register(summary: str, citation: str) -> Callable[[Callable[..., Scores]], Callable[..., Scores]]:
    facts = {"family": "propagation", "level": "pixel or token"}
    return method(summary, citation=citation, **facts, anywhere=True, signed=True, checkpoint=True)


def _named(name: str, summary: str, citation: str, formula: str, composite: CompositeName) -> None:
    """Register gradient × input under a composite."""

    def explained(task: Task, *, share: BlockShare = 0.0) -> Scores:
        return _at_or_over(task, composite, share)

    explained.__name__, explained.__doc__ = name, formula + _SHARE
    _register(summary, citation)(explained)


def _at_or_over(task: Task, composite: CompositeName, share: float) -> Scores:
    """Compute gradient × input at the model's input, or summed over blocks if ``share`` is not 0."""
    if share:
        return over_blocks(task, COMPOSITES[composite], share)
    return multiply(task, *explain_roots(task, COMPOSITES[composite]))


_named(
    "attnlrp",
    "attention-aware relevance: gradient × input with products shared and softmax differentiated",
    "Achtibat et al.: AttnLRP, ICML 2024; Arras et al. 2025 for this form",
    "R = Σ_d x ⊙ m: norms' deviations held constant, activations replaced by secants, products of two branches (gates, "
    "A·V, QKᵀ) halved, softmax differentiated. The sum is not the logit, because softmax absorbs a part.",
    "attnlrp",
)
_named(
    "cp_lrp",
    "gradient × input with attention, norms' deviations and gates held constant",
    "Ali et al., ICML 2022, as baseline CP-LRP of Achtibat et al., ICML 2024",
    "R = Σ_d x ⊙ m: attention probabilities, norms' deviations and the activated branch of a gate held constant, "
    "activations replaced by secants. Sums to the logit on a model without biases.",
    "cp_lrp",
)
_named(
    "gim",
    "gradient × input with softmax differentiated at temperature 2, and products shared",
    "Edin et al.: Gradient Interaction Modifications, 2025",
    "R = Σ_d x ⊙ m: norms' deviations held constant, products of two branches halved, softmax differentiated at "
    "temperature 2, against redundant keys that compensate for one another. One attention map is in memory at a time.",
    "gim",
)

_ALI = "Ali et al.: XAI for Transformers: Better Explanations through Conservative Propagation, ICML 2022"
_SECANT = """

Args:
    secant: also replace the slope g'(x) of activations by the secant g(x)/x, and halve products of two branches.
"""


def _conservative(name: str, constant: str, formula: str, composite: CompositeName) -> None:
    """Register a method of Ali et al. 2022."""

    def explained(task: Task, *, secant: bool = False) -> Scores:
        return multiply(task, *explain_roots(task, (WITH_SECANTS if secant else COMPOSITES)[composite]))

    explained.__name__, explained.__doc__ = name, formula + _SECANT
    summary = f"gradient × input with {constant} held constant"
    _register(summary, _ALI)(explained)


_conservative(
    "lrp_ah",
    "attention probabilities",
    "LRP(AH): R(x_i) = Σ_j x_i p_ij / Σ_i' x_i' p_i'j · R(y_j), with the attention probabilities p held constant.",
    "ah",
)
_conservative(
    "lrp_ln",
    "LayerNorm's standard deviation",
    "LRP(LN): in y = (x − mean) / std, the standard deviation is held constant, and the mean is not.",
    "ln",
)
_conservative(
    "lrp_ah_ln",
    "attention and LayerNorm's deviation",
    "LRP(AH+LN): attention probabilities and LayerNorm's standard deviation are held constant. With ``secant=True``, "
    "the scores of a model without biases sum to the target.",
    "ah_ln",
)
