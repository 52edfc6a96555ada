"""GlobEnc (Modarressi et al., NAACL 2022): norms of the vectors that a whole encoder block mixes."""

from __future__ import annotations

from whyformer.methods.maps.aggregation import Choices
from whyformer.methods.registry import OptionalBlock, method
from whyformer.methods.task import Scores, Task
from whyformer.methods.vectors.norms import over_vectors


@method(
    "norms of each token's contribution to a block's output, including both residuals and LayerNorms",
    family="attention",
    citation="Modarressi et al.: GlobEnc, NAACL 2022",
    class_specific=False,
)
def globenc(task: Task, *, block: OptionalBlock = None, aggregation: Choices = None) -> Scores:
    """N_b[i, j] = ‖LN₂(LN₁(Σ_h α^h_ij f_h(x_j) + 1[i=j] x_i))‖ of every block; the readout row of N_L ⋯ N_1.

    f_h(x_j) = (x_j W_V^h + b_V^h) W_O^h. A LayerNorm maps a part v to (v − mean v) ⊙ γ / σ_i with the true deviation
    σ_i of token i: LN₁ after the residual sum of attention, LN₂ after that of the MLP, which itself is left out. As
    published, rows are not scaled to sum 1 and no identity is added, so only ratios of scores are meaningful.
    Pre-norm blocks have no norm after a sum: there N_b is ‖Σ_h α^h_ij f_h(x_j) + 1[i=j] x_i‖, which is
    ``norm_attention`` of that block.

    Args:
        block: use the readout row of this block's N_b instead of the product.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; the default is ``{"layers": "product"}``. Heads are
            summed as in the model and cannot be chosen.

    Raises:
        MethodNotApplicable: other terms in the residual sum of a block than its input and attention, windows, or no
            attention.
    """

    return over_vectors(task, block, aggregation, "output", lambda mixture, _: mixture.norms())
