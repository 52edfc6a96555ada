"""Names of torch operations, and what kind each is. Rules, audit and composites all speak in these names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Rearrange, copy or drop values; the ordinary adjoint passes gradient, multiplier and relevance alike.
VIEWS = frozenset(
    [
        "__get__",
        "__getitem__",
        "alias",
        "as_strided",
        "broadcast_to",
        "cat",
        "chunk",
        "clone",
        "concat",
        "concatenate",
        "contiguous",
        "cpu",
        "cuda",
        "diagonal",
        "dropout",
        "dropout1d",
        "dropout2d",
        "expand",
        "expand_as",
        "feature_dropout",
        "flatten",
        "flip",
        "gather",
        "identity",
        "index_select",
        "masked_fill",
        "masked_select",
        "movedim",
        "moveaxis",
        "narrow",
        "pad",
        "permute",
        "ravel",
        "repeat",
        "repeat_interleave",
        "reshape",
        "reshape_as",
        "roll",
        "select",
        "hsplit",
        "vsplit",
        "tensor_split",
        "split",
        "squeeze",
        "stack",
        "swapaxes",
        "swapdims",
        "t",
        "take",
        "take_along_dim",
        "tile",
        "to",
        "transpose",
        "tril",
        "triu",
        "type",
        "type_as",
        "unbind",
        "unflatten",
        "unfold",
        "unsqueeze",
        "view",
        "view_as",
        "where",
        "double",
        "float",
        "half",
        "bfloat16",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "scatter",
        "index_put",
        "hstack",
        "vstack",
        "dstack",
        "adjoint",
    ]
)

# Linear in the tensors that carry relevance: autograd already is the multiplier rule.
LINEAR = frozenset(
    [
        "linear",
        "addmm",
        "addmv",
        "addbmm",
        "baddbmm",
        "bmm",
        "mm",
        "mv",
        "matmul",
        "einsum",
        "tensordot",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose2d",
        "add",
        "sub",
        "rsub",
        "neg",
        "mul",
        "div",
        "mean",
        "sum",
        "cumsum",
        "embedding",
        "index_add",
        "scatter_add",
        "avg_pool1d",
        "avg_pool2d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "interpolate",
        "batch_norm",
        "_grouped_mm",
        "lerp",
        "addcmul",
        "nansum",
    ]
)

# One input, element by element.
ACTIVATIONS = frozenset(
    [
        "gelu",
        "relu",
        "silu",
        "mish",
        "tanh",
        "sigmoid",
        "elu",
        "selu",
        "celu",
        "leaky_relu",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "softplus",
        "relu6",
        "erf",
        "logsigmoid",
        "softsign",
        "exp",
        "log",
        "log1p",
        "expm1",
        "square",
        "abs",
        "clamp",
        "clamp_min",
        "clamp_max",
        "sin",
        "cos",
    ]
)

NORMS = frozenset(["layer_norm", "rms_norm", "group_norm", "instance_norm"])

# Values without a gradient, bookkeeping and plumbing: never audited, never touched.
SILENT = frozenset(
    [
        "_set_grad_enabled",
        "__set__",
        "__delete__",
        "detach",
        "item",
        "tolist",
        "numpy",
        "size",
        "dim",
        "numel",
        "stride",
        "is_floating_point",
        "is_complex",
        "data_ptr",
        "register_hook",
        "retain_grad",
        "requires_grad_",
        "is_contiguous",
        "storage_offset",
        "__len__",
        "__repr__",
        "__format__",
        "__str__",
        "__bool__",
        "__int__",
        "__float__",
        "__contains__",
        "__hash__",
        "__reduce_ex__",
        "__deepcopy__",
        "_assert",
        "ne",
        "eq",
        "gt",
        "ge",
        "lt",
        "le",
        "argmax",
        "argmin",
        "isnan",
        "isinf",
        "isfinite",
        "any",
        "all",
        "equal",
        "allclose",
        "new_ones",
        "new_zeros",
        "new_empty",
        "new_full",
        "new_tensor",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "get_device",
        "is_same_size",
        "has_names",
        "element_size",
        "dense_dim",
        "nelement",
    ]
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
    "native_layer_norm": "layer_norm", "log_sigmoid": "logsigmoid", "dropout_": "dropout", "alpha_dropout": "dropout",
    "feature_alpha_dropout": "dropout", "_native_multi_head_attention": "multi_head_attention_forward",
}  # fmt: skip


@lru_cache(maxsize=4096)
def operation_name(function: Callable[..., Any]) -> str:
    """The name of a torch function, however it was written: ``x + y``, ``x.add(y)`` and ``torch.add`` are "add"."""
    name = getattr(function, "__name__", "") or repr(function)
    name = _DUNDERS.get(name, name)
    return _SYNONYMS.get(name, name)


def is_in_place(name: str) -> bool:
    """True for ``add_``, ``mul_``, ``__setitem__`` ..."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def out_of_place(name: str) -> Callable[..., Tensor] | None:
    """The function that ``name`` does in place, or None."""
    return getattr(torch, name[:-1], None) or getattr(Tensor, name[:-1], None)


def bind(names: str, args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Arguments by name, positional ones in the order of ``names``."""
    order = names.split()
    return {**defaults, **dict(zip(order, args, strict=False)), **kwargs}


def tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, and in lists and tuples among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(v for v in value if isinstance(v, Tensor))
    return found
