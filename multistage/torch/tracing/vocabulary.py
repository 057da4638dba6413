"""How the recorder takes calls of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# What code can spell.
LITERALS = (
    *(bool, int, float, complex, str, type(None), type(...), torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# Results that follow from types, shapes and places, which guards compare.
QUERIES = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__"),
    *("is_contiguous", "element_size", "get_device", "is_floating_point", "is_complex"),
    *("is_signed", "is_same_size", "result_type", "can_cast", "promote_types", "__hash__"),
    *("is_inference", "is_pinned", "is_shared", "has_names", "is_conj", "is_neg", "__repr__"),
    *("__str__", "__format__", "__dir__", "__reduce_ex__", "_set_grad_enabled", "_is_view"),
    *("broadcast_shapes", "is_storage", "is_tensor", "is_set_to", "is_coalesced", "dense_dim"),
    *("sparse_dim", "_assert", "_check"),
}
PROPERTIES = {
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda"),
    *("is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_nested", "is_xpu"),
    *("is_mps", "is_mkldnn", "is_xla", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "itemsize"),
    *("nbytes", "names", "grad_fn", "output_nr", "retains_grad"),
}
# They change the graph of gradients, or hand memory to others.
REFUSED = {
    *("backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    *("requires_grad_", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "set_"),
    *("__dlpack__", "share_memory_", "__set__", "__delete__", "resize_", "map_", "apply_"),
}
_SHAPED_BY_VALUES = {
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
    *("nonzero_static", "_unique2", "unique_dim"),
}


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors of a pytree."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    kind = type(value)
    if isinstance(value, Tensor):
        found.append(value)
    elif kind is tuple or kind is list:  # as nearly always, and faster
        for inner in value:
            _collect(inner, found)
    elif kind is dict:
        for inner in value.values():
            _collect(inner, found)
    elif kind not in LITERALS:
        found += [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def shaped_by_values(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether the shape of a call's result follows from values of its arguments."""
    name = getattr(func, "__name__", "")
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        return "output_size" not in kwargs and len(tensors_in((args, kwargs))) > 1
    if name == "__getitem__":
        return any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)
            for x in pytree.tree_leaves(args[1])
        )
    return name in _SHAPED_BY_VALUES


def is_method(func: object) -> bool:
    """Whether a function is a method of tensors."""
    return getattr(torch.Tensor, getattr(func, "__name__", ""), None) is func


def said(func: object) -> str:
    """Return what a function is called in messages."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', name)}"
    return f"Tensor.{name}" if is_method(func) else name
