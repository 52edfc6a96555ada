"""The operations of torch by name, and of what kind each is. Everything else speaks in these names and kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

KINDS: dict[str, str] = {}
"""Operation -> what it is like:

"view" rearranges, copies, drops or writes values; the ordinary adjoint passes anything; "selection" the same, of values
chosen by their size; "linear" in the tensors that carry; "matrix product" the same, of two matrices; "activation"
element by element; "power" x^a and quotients of numbers; "normalisation"; "statistic" a deviation or root, which a
written-out norm divides by; "softmax"; "log_softmax"; "attention" fused; "silent" has no gradient. Of what is not here
nothing is known.
"""


def _kind(kind: str, names: str) -> None:
    KINDS.update(dict.fromkeys(names.split(), kind))


_kind(
    "view",
    """
    H T __getitem__ __setitem__ adjoint as_strided atleast_1d atleast_2d atleast_3d bfloat16 broadcast_to cat
    channel_shuffle chunk clone concat concatenate contiguous copy_ cpu cuda diagonal diagonal_scatter double
    dropout dropout1d dropout2d dropout3d dstack expand expand_as feature_dropout fill_ flatten flip float
    gather half hsplit hstack index_copy index_fill index_put index_select mH mT masked_fill masked_scatter
    masked_select moveaxis movedim narrow pad permute pixel_shuffle pixel_unshuffle ravel real repeat
    repeat_interleave reshape reshape_as roll rot90 scatter select select_scatter slice_scatter split squeeze
    stack swapaxes swapdims t take take_along_dim tensor_split tile to transpose tril triu type type_as unbind
    unflatten unfold unsqueeze view view_as view_as_complex view_as_real vsplit vstack where zero_
    """,
)
_kind(
    "selection",
    """
    amin aminmax cummax cummin fmax fmin kthvalue maximum median min minimum mode msort nanmedian sort topk
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d max_pool2d max_pool3d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    """,
)
_kind("selection", "amax max")
_kind("selection", "scatter_reduce")
_kind("selection", "logsumexp")
_kind("linear", "linear")
_kind("linear", "conv1d conv2d conv3d")
_kind("linear", "conv_transpose1d conv_transpose2d conv_transpose3d")
_kind("linear", "grid_sample")
_kind("linear", "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn")
_kind("linear", "linalg_solve_triangular")
_kind("matrix product", "matmul bmm mm mv")
_kind("linear", "einsum")
_kind("linear", "add sub")
_kind("linear", "mul")
_kind("linear", "div")
_kind(
    "linear",
    """
    _grouped_mm adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d addbmm addcmul addmm addmv
    avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm cumsum embedding fold interpolate lerp mean nansum neg
    rsub sum tensordot
    """,
)
_kind("linear", "index_add scatter_add")
_kind("activation", "gelu")
_kind("activation", "exp")
_kind(
    "activation",
    """
    abs celu clamp clamp_max clamp_min cos elu erf expm1 hardsigmoid hardswish hardtanh leaky_relu log log1p
    logsigmoid mish prelu relu relu6 selu sigmoid silu sin softplus softsign square tanh
    """,
)
_kind("power", "pow")
_kind("power", "rdiv reciprocal")
_kind("normalisation", "layer_norm rms_norm")
_kind("normalisation", "group_norm instance_norm")
_kind("statistic", "linalg_norm linalg_vector_norm norm rsqrt sqrt std var")
_kind("softmax", "softmax")
_kind("log_softmax", "log_softmax")
_kind("attention", "scaled_dot_product_attention")
_kind(
    "silent",
    """
    __bool__ __contains__ __deepcopy__ __delete__ __float__ __format__ __hash__ __int__ __len__ __reduce_ex__
    __repr__ __set__ __str__ _assert _base _set_grad_enabled _version all allclose any argmax argmin data
    data_ptr dense_dim detach device dim dtype element_size empty_like eq equal full_like ge get_device grad
    grad_fn gt has_names is_complex is_contiguous is_cuda is_floating_point is_leaf is_mps is_quantized
    is_inference is_nested is_conj is_neg
    is_same_size is_sparse isfinite isinf isnan item itemsize layout le lt names nbytes ndim ne nelement
    new_empty new_full new_ones new_tensor new_zeros numel numpy ones_like rand_like randn_like register_hook
    requires_grad requires_grad_ retain_grad shape size storage_offset stride tolist zeros_like
    """,
)

_DUNDERS = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__sub__": "sub", "__isub__": "sub_",
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_", "__truediv__": "div", "__div__": "div",
    "__itruediv__": "div_", "__idiv__": "div_", "__matmul__": "matmul", "__neg__": "neg", "__rsub__": "rsub",
    "__rdiv__": "rdiv", "__rtruediv__": "rdiv", "__rmatmul__": "rmatmul", "__pow__": "pow", "__rpow__": "rpow",
    "__ipow__": "pow_", "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__gt__": "gt", "__le__": "le", "__ge__": "ge",
}  # fmt: skip
_SYNONYMS = {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "negative": "neg",
    "special_softmax": "softmax", "special_expit": "sigmoid", "clip": "clamp", "swish": "silu",
    "log_sigmoid": "logsigmoid", "dropout_": "dropout", "alpha_dropout": "dropout",
    "feature_alpha_dropout": "dropout", "grouped_mm": "_grouped_mm", "transformers::grouped_mm_fallback": "_grouped_mm",
    "_native_multi_head_attention": "multi_head_attention_forward",
}  # fmt: skip


@lru_cache(maxsize=4096)
def operation_name(function: Callable[..., Any]) -> str:
    """The name of a torch function, however it was written: ``x + y``, ``x.add(y)`` and ``torch.add`` are "add".

    An attribute of a tensor has its own name ("shape", "T"), an operation of torch.library its full one.
    """
    name = _qualified(function) or getattr(function, "__name__", "") or repr(function)
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    name = _DUNDERS.get(name, name)
    return _SYNONYMS.get(name, name)


def _qualified(function: Any) -> str:
    """The name of an operation of torch.library, "my_ns::op"; those of torch itself need no "aten::"."""
    if isinstance(function, torch._ops.OpOverload):
        function = function.overloadpacket
    return str(getattr(function, "_qualified_op_name", "")).removeprefix("aten::")


def is_in_place(name: str) -> bool:
    """True for ``add_``, ``mul_``, ``__setitem__`` ..."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


@lru_cache(maxsize=4096)
def plain_name(name: str) -> str:
    """The operation that ``name`` does, also where it does so in place."""
    return name[:-1] if is_in_place(name) and name not in KINDS else name


def kind_of(name: str) -> str:
    """Of what kind it is; "" where nothing is known of it."""
    return KINDS.get(plain_name(name), "")


def out_of_place(name: str) -> Callable[..., Tensor] | None:
    """The function that ``name`` does in place, or None."""
    return getattr(torch, name[:-1], None) or getattr(Tensor, name[:-1], None)


def names(*kinds: str) -> frozenset[str]:
    """All operations of these kinds."""
    return frozenset(name for name, kind in KINDS.items() if kind in kinds)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among arguments or results, in lists, tuples and mappings among them too, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found
