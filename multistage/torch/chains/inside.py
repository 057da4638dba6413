"""Stages that differentiate what they compute, inside of their forward."""

from __future__ import annotations

from torch import Tensor

from ...errors import StateError


class Inside:
    """What a stage saves while it runs, for the gradients it computes itself.

    Parameters
    ----------
    name : str
        Of the stage.
    differentiates : bool
        Whether it does; else nothing is kept.
    """

    __slots__ = ("_differentiates", "_kept", "_name")

    def __init__(self, name: str, differentiates: bool) -> None:
        self._name, self._differentiates = name, differentiates
        self._kept: list[tuple[Tensor, int]] = []

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor that the stage saves, should it ask for it."""
        if self._differentiates:
            self._kept.append((tensor, tensor._version))

    def close(self) -> None:
        """Keep nothing any more: graphs refer to this by their hooks, and would never go."""
        self._kept.clear()

    def give(self, number: int) -> Tensor:
        """Return the tensor that was saved as the `number`-th.

        Raises
        ------
        StateError
            If the stage is not known to differentiate.
        RuntimeError
            If the tensor was written to since.
        """
        if not self._differentiates:
            raise StateError(
                f"stage {self._name} computes gradients inside of its forward, which it did not "
                "do when it was profiled, or while it writes to its input; write it without the "
                "operation in place, or raise the memory limit until its tape is kept"
            )
        tensor, version = self._kept[number]
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor that stage {self._name} saved for its gradient has been modified by an "
                "inplace operation; plain training fails here too"
            )
        return tensor
