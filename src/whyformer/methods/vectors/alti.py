"""ALTI (Ferrando et al., EMNLP 2022): how close each token's vector is to the output of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.methods.maps.aggregation import Choices
from whyformer.methods.registry import OptionalBlock, method
from whyformer.methods.task import Scores, Task
from whyformer.methods.vectors.mixtures import Mixture
from whyformer.methods.vectors.norms import over_vectors


@method(
    "closeness of each token's vector to the output of attention, rolled out over the blocks",
    family="attention",
    citation="Ferrando et al.: Measuring the Mixing of Contextual Information in the Transformer (ALTI), EMNLP 2022",
    class_specific=False,
)
def alti(task: Task, *, block: OptionalBlock = None, aggregation: Choices = None) -> Scores:
    """c_ij = max(0, ‖y_i‖₁ − ‖T_i(x_j) − y_i‖₁), rows scaled to sum 1; the scores are the readout row of C_L ⋯ C_1.

    T_i(x_j) = LN₁(Σ_h α^h_ij f_h(x_j) + 1[i=j] x_i), where the norm maps a part v to (v − mean v) ⊙ γ / σ_i with the
    true deviation of token i; y_i is the output of LN₁, including its β and the output bias. Pre-norm blocks have no
    norm there: T_i is without it, and y_i is the residual sum. No identity is added: the residual is in T_i(x_i).

    Args:
        block: use the readout row of this block's C_b instead of the product.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; the default is ``{"layers": "product"}``. Heads are
            summed as in the model and cannot be chosen.

    Raises:
        MethodNotApplicable: other terms in the residual sum of a block than its input and attention, windows, or no
            attention.

    Differs from the authors' code only in the last digits, because theirs adds 1e-6 to every difference.
    """
    def fuse(mixture: Mixture, real: Tensor) -> Tensor:
        parts = contributions(mixture) * real[:, None]
        sums = parts.sum(-1, keepdim=True)
        return parts / torch.where(sums > 0, sums, 1)

    return over_vectors(task, block, aggregation, "norm", fuse)


def contributions(mixture: Mixture) -> Tensor:
    """Return max(0, ‖y_i‖₁ − ‖T_i(x_j) − y_i‖₁) ``[B, N, N]``, with the N × D vectors of one i in memory at a time."""
    outputs = mixture.total()
    size = outputs.abs().sum(-1, keepdim=True)
    distances = [(mixture.vectors(i) - outputs[:, i, None]).abs().sum(-1) for i in range(outputs.shape[1])]
    return (size - torch.stack(distances, 1)).clamp(min=0)
