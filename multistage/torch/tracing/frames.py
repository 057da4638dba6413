"""Where in a model's `forward` a recording is: in which module, under which modes.

Random generators belong to it: what they draw outside of torch's calls cannot be in a graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _pop_mode_temporarily

from ..environment.randomness import Generators
from .recorded import Modes, UnrecordableError
from .watching import backends_settings


@dataclass(slots=True)
class _Frame:
    """A module whose forward is running."""

    path: str
    settings: tuple[object, ...] = ()


class Frames:
    """The modules whose forward is running, the outermost first, and what they run in."""

    def __init__(self) -> None:
        self._stack: list[_Frame] = []
        self._autocasts: list[tuple[int, dict[str, Any]]] = []
        self._autocasts_made = 0
        self._generators = Generators()
        self._states = self._generators.capture()
        self._random = torch.get_rng_state()
        self._thread = threading.get_ident()
        self._paused = 0

    @property
    def path(self) -> str:
        """Of the innermost module, "" for the model itself."""
        return self._stack[-1].path

    def enter(self, path: str) -> None:
        """Note that the forward of a module begins."""
        self._stack.append(_Frame(path, backends_settings()))

    def leave(self) -> None:
        """Note that the innermost module's forward has ended."""
        self._stack.pop()

    def refused(self, cause: str) -> UnrecordableError:
        """Return an error for what the innermost module does."""
        return UnrecordableError(self.path, cause)

    def recording(self) -> bool:
        """Return whether this thread records, and is not paused."""
        return not self._paused and threading.get_ident() == self._thread

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing meanwhile."""
        self._paused += 1
        try:
            if torch._C._is_torch_function_mode_enabled():
                with _pop_mode_temporarily():
                    yield
            else:
                yield
        finally:
            self._paused -= 1

    # ------------------------------------------------------------------- modes

    def modes(self) -> Modes | None:
        """Return the modes that a call runs in, None if they are those around the model."""
        settings = backends_settings()
        if settings != self._stack[0].settings:
            for outer, inner in zip(self._stack, [*self._stack[1:], None], strict=True):
                if (inner.settings if inner else settings) != outer.settings:
                    raise UnrecordableError(outer.path, "changes settings of torch's backends")
        graded = torch.is_grad_enabled()
        if graded and not self._autocasts:
            return None
        return Modes(graded, tuple(self._autocasts))

    def autocast_left(self) -> None:
        """Take note that the innermost autocast has ended."""
        if self._autocasts:
            self._autocasts.pop()

    def autocast_entered(self, context: torch.autocast) -> None:
        """Take note of an autocast and its settings."""
        self._autocasts_made += 1
        arguments = {
            "device_type": context.device,
            "dtype": context.fast_dtype,
            "enabled": context._enabled,
            "cache_enabled": context._cache_enabled,
        }
        self._autocasts.append((self._autocasts_made, arguments))

    # -------------------------------------------------------------- generators

    def check_generators(self) -> None:
        """Refuse draws from Python's and NumPy's generators since the last look."""
        with self.pause():
            now = self._generators.capture()
        if now[1:] != self._states[1:]:  # the first is torch's
            self._states = now
            raise self.refused("draws from Python's or NumPy's random numbers")

    def check_torch_generator(self) -> None:
        """Refuse draws from torch's generator since the last call of torch."""
        if not torch.equal(torch.get_rng_state(), self._random):
            raise self.refused("draws random numbers, or seeds a generator, unseen by torch")

    def drew(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the call of torch that has just run with these tensors may have drawn."""
        state = torch.get_rng_state()
        if torch.equal(state, self._random) and all(t.device.type != "cuda" for t in tensors):
            return False
        # A draw; on devices, whose generators are not looked at, anything may be one.
        self._random = state
        return True

    def allow_draws(self) -> None:
        """Take all generators as they are now: a module that is called whole may draw."""
        self._states, self._random = self._generators.capture(), torch.get_rng_state()
