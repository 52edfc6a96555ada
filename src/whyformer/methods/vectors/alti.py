"""ALTI (Ferrando et al., EMNLP 2022): how near each token's vector comes to what attention makes of all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.methods.maps.aggregation import Choices
from whyformer.methods.registry import OptionalBlock, method
from whyformer.methods.task import Scores, Task
from whyformer.methods.vectors.mixtures import Mixture
from whyformer.methods.vectors.norms import over_vectors


@method(
    "nearness of each token's vector to the sum that attention makes, rolled out over the blocks",
    family="attention",
    citation="Ferrando et al.: Measuring the Mixing of Contextual Information in the Transformer (ALTI), EMNLP 2022",
    class_specific=False,
)
def alti(task: Task, *, block: OptionalBlock = None, aggregation: Choices = None) -> Scores:
    """c_ij = max(0, ‖y_i‖₁ − ‖T_i(x_j) − y_i‖₁), rows scaled to sum 1; the scores are the readout row of C_L ⋯ C_1.

    T_i(x_j) = LN₁(Σ_h α^h_ij f_h(x_j) + 1[i=j] x_i), the norm acting on a part v as (v − mean v) ⊙ γ / σ_i with the
    true deviation of token i; y_i is what LN₁ really puts out, its β and the output bias included. Pre-norm blocks
    have no norm there: T_i without it, and y_i the residual sum. No identity is added: the residual is in T_i(x_i).

    Args:
        block: the readout row of one block's C_b instead of the product.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; the default is ``{"layers": "product"}``. The heads
            are summed as the model sums them, so there are none to choose.

    Raises:
        MethodNotApplicable: a block that is not attention plus what entered it, windows, or no attention.

    Differs from the authors' code in the last digits only: theirs adds 1e-6 to every difference.
    """
    mask = task.inputs.row_mask

    def fuse(mixture: Mixture) -> Tensor:
        found = contributions(mixture)
        found = found if mask is None else found * mask[:, None]
        sums = found.sum(-1, keepdim=True)
        return found / torch.where(sums > 0, sums, 1)

    return over_vectors(task, block, aggregation, "norm", fuse)


def contributions(mixture: Mixture) -> Tensor:
    """max(0, ‖y_i‖₁ − ‖T_i(x_j) − y_i‖₁) ``[B, N, N]``, the N × D vectors of one token i at a time."""
    outputs = mixture.total()
    size = outputs.abs().sum(-1, keepdim=True)
    away = [(mixture.vectors(i) - outputs[:, i, None]).abs().sum(-1) for i in range(outputs.shape[1])]
    return (size - torch.stack(away, 1)).clamp(min=0)
