"""GlobEnc (Modarressi et al., NAACL 2022): what a whole encoder block mixes, by the norms of its vectors."""

from __future__ import annotations

from whyformer.methods.maps.aggregation import Choices
from whyformer.methods.registry import OptionalBlock, method
from whyformer.methods.task import Scores, Task
from whyformer.methods.vectors.mixtures import Mixture
from whyformer.methods.vectors.norms import over_vectors


@method(
    "norms of what each token adds to a block's output, both residuals and both LayerNorms included",
    family="attention",
    citation="Modarressi et al.: GlobEnc, NAACL 2022",
    class_specific=False,
)
def globenc(task: Task, *, block: OptionalBlock = None, aggregation: Choices = None) -> Scores:
    """N_b[i, j] = ‖LN₂(LN₁(Σ_h α^h_ij f_h(x_j) + 1[i=j] x_i))‖ of every block; the readout row of N_L ⋯ N_1.

    f_h(x_j) = (x_j W_V^h + b_V^h) W_O^h. A LayerNorm acts on a part v as (v − mean v) ⊙ γ / σ_i with the true deviation
    σ_i of token i: LN₁ on the sum behind attention, LN₂ on the sum behind the MLP, which itself is left out. As
    published, rows are not scaled to sum 1 and no identity is added, so only ratios of scores mean something.
    Pre-norm blocks have no norm behind a sum: there N_b is ‖Σ_h α^h_ij f_h(x_j) + 1[i=j] x_i‖, which is
    ``norm_attention`` of that block.

    Args:
        block: the readout row of one block's N_b instead of the product.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; the default is ``{"layers": "product"}``. The heads
            are summed as the model sums them, so there are none to choose.

    Raises:
        MethodNotApplicable: a block that is not attention plus what entered it, windows, or no attention.
    """

    return over_vectors(task, block, aggregation, "output", Mixture.norms)
