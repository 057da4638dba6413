"""Fingerprints: equal where the bits are equal, in a few bytes whatever the size.

Two runs of a model are compared by what they leave behind.  Keeping one run's
gradients until the other has them too would take the parameters' memory once more;
a checksum of 64 bits does not.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Mapping, Set
from types import SimpleNamespace

import torch
from torch import Tensor, nn

# Odd, with bits all over: 2^64 / golden ratio, as Fibonacci hashing has it (Knuth 6.4).
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
# Words at a time: twice as many are memory beside the tensor.
_PIECE = {"cpu": 1 << 12, "cuda": 1 << 20}
_SMALL = 1 << 14  # bytes of tensors of a processor that are hashed at once
_LONGEST = 1000  # items of a container that are looked at
_DEEPEST = 3
_LIBRARIES = {"torch", "numpy", "multistage"}


def fingerprint(value: object, depth: int = 0) -> object:
    """Return something small and hashable that is equal for values of equal bits.

    Tensors by shape, dtype, device and a checksum; numbers, strings and containers by their
    content; generators by their state; other objects by their attributes, a few levels down.
    """
    match value:
        case Tensor():
            return _of_tensor(value)
        case bool() | int() | str() | bytes() | None:
            return value
        case float() | complex():
            return repr(value)  # one nan is like another
        case torch.Generator():
            return "generator", _of_tensor(value.get_state())
        case random.Random():
            return "generator", hash(value.getstate())
        case nn.Module() | type() | torch.device() | torch.dtype():
            return type(value).__qualname__
    if depth == _DEEPEST:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        items = list(value.items())[:_LONGEST]
        pairs = tuple((repr(key), fingerprint(item, depth + 1)) for key, item in items)
        return type(value).__qualname__, len(value), pairs
    if isinstance(value, (list, tuple, deque)):
        found = tuple(fingerprint(item, depth + 1) for item in list(value)[:_LONGEST])
        return type(value).__qualname__, len(value), found
    if isinstance(value, Set):
        return type(value).__qualname__, len(value)
    if hasattr(value, "tobytes") and hasattr(value, "shape"):  # NumPy's arrays
        return type(value).__qualname__, value.shape, hash(value.tobytes())
    if hasattr(value, "bit_generator"):
        return "generator", repr(value.bit_generator.state)
    if not is_helper(value):
        return type(value).__qualname__
    return type(value).__qualname__, fingerprint(vars(value), depth + 1)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype, device and bits."""
    plain = one.layout is other.layout is torch.strided and one.device == other.device
    plain = plain and one.shape == other.shape and one.dtype == other.dtype
    if not plain or one.is_nested or one.is_quantized or one.device.type == "meta":
        return fingerprint(one) == fingerprint(other)
    try:
        return torch.equal(_bytes_of(one), _bytes_of(other))
    except (NotImplementedError, RuntimeError):  # of a subclass
        return fingerprint(one) == fingerprint(other)


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # expanded, or with gaps
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def is_helper(value: object) -> bool:
    """Whether an object is a user's own, that a module may keep state in."""
    kind = type(value)
    if callable(value) or not hasattr(value, "__dict__"):
        return False
    top = kind.__module__.partition(".")[0]
    return kind is SimpleNamespace or not (top in sys.stdlib_module_names or top in _LIBRARIES)


def _of_tensor(tensor: Tensor) -> object:
    kind = tuple(tensor.shape), tensor.dtype, tensor.device
    tensor = tensor.detach()
    if tensor.device.type == "meta":
        return kind
    try:
        if tensor.is_nested:
            tensor = tensor.values()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        return *kind, _checksum(tensor)
    except (NotImplementedError, RuntimeError):  # a layout of which nothing else is known
        return kind


def _checksum(tensor: Tensor) -> int:
    """Return a sum of the tensor's 64-bit words, each with an odd weight of its place."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # Words must be aligned as they are in memory of their own.
    width = tensor.element_size()
    if tensor.storage_offset() * width % 8:
        tensor = tensor.clone()
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.numel() <= _SMALL and type(flat) is Tensor and flat.device.type == "cpu":
        with contextlib.suppress(RuntimeError):  # wrapped by torch.func
            return hash(flat.numpy().tobytes())
    whole = flat.numel() // 8 * 8
    total = int.from_bytes(bytes(flat[whole:].tolist()), "little")
    words = flat[:whole].view(torch.int64)
    if words.numel():
        size = min(_PIECE.get(tensor.device.type, 1 << 20), words.numel())
        weights = torch.arange(size, device=tensor.device).mul_(_FACTOR).bitwise_or_(1)
        for piece in words.split(size):
            found = int((piece * weights[: piece.numel()]).sum())  # modulo 2^64
            total = (total * 0x100000001B3 + found) % (1 << 64)  # FNV's prime
    return total
