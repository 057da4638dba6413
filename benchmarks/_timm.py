"""timm without torchvision, of which there is no build to go with every torch.

timm imports names of torchvision for its data pipelines and for one class of
frozen norms; its models use none of them.  While timm is imported, empty
modules stand in for torchvision, and are taken out again: other libraries look
for torchvision too, and would believe in it.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_NAMES = (
    "torchvision",
    "torchvision.datasets",
    "torchvision.models",
    "torchvision.models.feature_extraction",
    "torchvision.ops",
    "torchvision.ops.misc",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.utils",
)


class _Interpolation(enum.Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Empty(ModuleType):
    """A module that has a class of whatever name, which nothing is an instance of."""

    __path__ = ()  # type: ignore[assignment]  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Interpolation if name == "InterpolationMode" else type(name, (), {})
        setattr(self, name, found)
        return found


@contextmanager
def _standing_in() -> Iterator[None]:
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_torchvision(name)}
    for name in _NAMES:
        module = sys.modules[name] = _Empty(name)
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_torchvision(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_torchvision(name: str) -> bool:
    return name == "torchvision" or name.startswith("torchvision.")


def load_timm() -> Any:
    """Return timm.

    Raises
    ------
    ModuleNotFoundError
        If it is not installed.
    """
    if "timm" not in sys.modules:
        with _standing_in():
            return importlib.import_module("timm")
    return sys.modules["timm"]
