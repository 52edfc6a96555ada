"""The kinds of ATen calls, by name.

The kind selects the rule of a composite. Some kinds depend on which operands carry relevance and are refined in
:mod:`whyformer.tape.units`: a ``linear`` call is a ``layer``, a ``weighted sum`` or a ``product``; an ``add`` with one
branch is a ``shift``; a ``mul`` is a ``scale`` with one branch, and a ``gate``, ``activated gate`` or ``quotient`` with
two. Names that are not listed have the kind ``other``: their adjoint is that of autograd, and composites that propagate
relevance refuse them.
"""

from __future__ import annotations

KINDS: dict[str, str] = {}


def name_set(text: str) -> frozenset[str]:
    """Return the names in a string, separated by spaces."""
    return frozenset(text.split())


def _set_kind(kind: str, names: str) -> None:
    KINDS.update(dict.fromkeys(names.split(), kind))


# rearrange, copy or fill: each element of the result is an element of an operand, or a constant
_set_kind(
    "view",
    "view _unsafe_view _reshape_alias reshape transpose t permute expand expand_as clone unsqueeze squeeze select "
    "diag_embed slice alias lift_fresh lift contiguous _to_copy to split split_with_sizes chunk unbind cat stack "
    "index gather roll flip rot90 constant_pad_nd pad reflection_pad1d reflection_pad2d replication_pad1d "
    "replication_pad2d pixel_shuffle pixel_unshuffle channel_shuffle unfold im2col as_strided diagonal repeat "
    "index_select overlay narrow copy fill slice_scatter select_scatter diagonal_scatter view_as masked_fill "
    "masked_scatter masked_select where index_put _unsafe_index take take_along_dim dropout native_dropout "
    "repeat_interleave tril triu scatter index_copy nan_to_num movedim real imag view_as_real view_as_complex _conj "
    "conj _neg_view resolve_conj resolve_neg upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "_jagged_to_padded_dense_forward _padded_dense_to_jagged_forward",
)
# no relevance: piecewise constant, or dependent only on the shape of an operand
_set_kind(
    "silent",
    "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty "
    "new_empty_strided sign sgn floor ceil round trunc fix argmax argmin floor_divide causal_mask zero heaviside "
    "isnan isinf",
)
# each element of the result is an element of an operand that is selected by its value
_set_kind(
    "selection",
    "max min amax amin sort msort topk kthvalue maximum minimum fmax fmin median nanmedian mode cummax cummin aminmax "
    "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d",
)
_set_kind(
    "linear",
    "mm bmm addmm baddbmm addbmm mv addmv dot vdot matmul linear convolution _convolution embedding _grouped_mm",
)
_set_kind(
    "mean",
    "mean sum nansum cumsum avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa scatter_add index_add scatter_reduce col2im segment_reduce trace "
    "_embedding_bag _fft_r2c _fft_c2c _fft_c2r",
)
_set_kind("add", "add sub rsub")
_set_kind("mul", "mul div")
_set_kind("scale", "neg native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm")
_set_kind("rectifier", "relu leaky_relu _prelu_kernel prelu abs relu6 rrelu_with_noise")
_set_kind(
    "activation",
    "gelu silu tanh sigmoid mish elu hardswish hardsigmoid softplus erf erfc exp exp2 expm1 log log2 log10 log1p sin "
    "cos tan asin acos atan sinh cosh square celu selu log_sigmoid_forward special_ndtr special_erfcx softshrink "
    "hardshrink logaddexp logaddexp2",
)
_set_kind("clip", "clamp clamp_min clamp_max hardtanh threshold")
_set_kind("norm", "native_layer_norm _fused_rms_norm native_group_norm")
_set_kind("statistic", "rsqrt sqrt linalg_vector_norm norm std var reciprocal")
_set_kind("moments", "std_mean var_mean")  # compute a deviation and a mean
_set_kind("sampling", "grid_sampler_2d grid_sampler_3d")
_set_kind("solve", "linalg_solve_triangular linalg_solve")
_set_kind("softmax", "_softmax _safe_softmax")
_set_kind("log softmax", "_log_softmax")
_set_kind("logsumexp", "logsumexp")

STRAIGHT = name_set("add sub rsub mul div neg _to_copy clone dropout addcmul addcdiv lerp")
"""Elementwise calls that are linear in each operand."""

CURVED = name_set(
    "pow tanh sigmoid erf exp exp2 log log2 log1p expm1 softplus relu silu gelu mish abs erfc sqrt rsqrt reciprocal "
    "square sinh cosh tan atan logaddexp clamp clamp_min clamp_max maximum minimum where hardtanh hardsigmoid "
    "hardswish elu leaky_relu sin cos special_ndtr log_sigmoid_forward threshold celu selu"
)
"""Elementwise calls that are nonlinear."""

ELEMENTWISE = STRAIGHT | CURVED

REDUCTIONS = name_set("mean sum var std var_mean std_mean linalg_vector_norm norm amax max logsumexp")
"""Calls that reduce axes to one number."""

EXPONENTIALS = name_set("exp exp2 expm1 _softmax _safe_softmax _log_softmax pow logsumexp")

COMPARISONS = name_set(
    "gt lt ge le eq ne logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or any all isnan isinf hypot "
    "full scalar_tensor"
)
"""Calls that compute masks, and constants for them."""

RESHAPES = name_set("view _unsafe_view reshape _reshape_alias unsqueeze squeeze clone alias")
"""Calls that keep all elements of their operand, in the same order."""

EXTENSIONS = name_set("cat constant_pad_nd")
"""Calls that extend a value by constants."""

PRODUCTS = name_set("mm bmm addmm baddbmm matmul")
"""Calls that multiply matrices."""

COPIES = name_set("_to_copy clone nan_to_num alias detach contiguous lift_fresh")

MIXING = name_set("mm bmm addmm baddbmm mv matmul linear convolution embedding")
"""Linear calls that can be part of a norm, a softmax or an activation if their weights are fixed."""

SOFTMAXES = name_set("_softmax _safe_softmax")
