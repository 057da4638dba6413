"""States of random generators: torch's, Python's, NumPy's, and a computation's own.

A state is read before and after every stage, so reading must be cheap.  That of
Python's and of NumPy's generator is read from memory, 2 500 bytes in about a
microsecond, where asking takes 16 and 60, and written there, where telling takes 30
and 130.  Where it lies is tried out at import; where it is not found, they are asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import StateError

State: TypeAlias = bytes  # equal to another if nothing was drawn between
Own: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
_WORDS = 625  # of the Mersenne Twister: 624 and a position
_LEFT_OVER = struct.Struct("<i4xd")  # whether one of two normal numbers is left over, and it


@dataclass(frozen=True, slots=True)
class Source:
    """One generator: its name, and how its state is read and put back."""

    name: str
    get: Callable[[], State]
    set: Callable[[State], object]
    draw: Callable[[], object]


class Generators:
    """The random generators that a computation may draw from.

    Parameters
    ----------
    devices : sequence of torch.device
        Beside the CPU.
    own : iterable of (str, generator)
        Generators of the computation itself, with names: a `torch.Generator`, a
        `numpy.random.Generator` or `RandomState`, a `random.Random`.
    of_torch : bool
        Whether it calls operations of torch alone, which leave Python's and NumPy's as they are.
    """

    def __init__(
        self,
        devices: Sequence[torch.device] = (),
        own: Iterable[tuple[str, Own]] = (),
        *,
        of_torch: bool = False,
    ) -> None:
        self._sources = [_of_torch("torch's generator of cpu", torch.default_generator)]
        self._sources += [] if of_torch else [_python, _numpy]
        self._sources += [_of_device(device) for device in devices]
        self._sources += [_of_own(name, generator) for name, generator in own]
        self._room: list[int] = []

    @property
    def names(self) -> list[str]:
        """Names of the generators, for messages."""
        return [source.name for source in self._sources]

    def capture(self) -> tuple[State, ...]:
        """Return the present states."""
        return tuple([source.get() for source in self._sources])

    def capture_those(self, states: Sequence[State | None]) -> tuple[State | None, ...]:
        """Return the present states of the generators that have one here, None for others."""
        pairs = zip(self._sources, states, strict=True)
        return tuple([None if state is None else source.get() for source, state in pairs])

    def restore(self, states: Sequence[State | None]) -> None:
        """Give the generators these states; None leaves one alone."""
        for source, state in zip(self._sources, states, strict=True):
            if state is not None:
                source.set(state)

    def drawn(self, before: Sequence[State], after: Sequence[State]) -> list[str]:
        """Return the names of generators that were drawn from between two states."""
        if before == after:
            return []
        found = zip(self._sources, before, after, strict=True)
        return [source.name for source, a, b in found if a != b]

    def only_drawn(
        self, before: Sequence[State], after: Sequence[State], known: Set[str] = frozenset()
    ) -> tuple[State | None, ...] | None:
        """Return the states before of those drawn from, None for others; None if none was.

        `known` are names of generators that are drawn from though the two states may be equal.
        """
        if before == after and not known:
            return None
        found = zip(self._sources, before, after, strict=True)
        return tuple([a if a != b or source.name in known else None for source, a, b in found])

    @contextlib.contextmanager
    def disturbed(
        self, states: Sequence[State], drawn: Set[str], seeded: set[str]
    ) -> Iterator[None]:
        """Run with other states of the generators that are not known to be drawn from.

        Adds the names of those that are not left as they were; restores `states` at the end.
        """
        for source in self._sources:
            if source.name not in drawn:
                source.draw()
        before = self.capture()
        try:
            yield
        finally:
            seeded |= {*self.drawn(before, self.capture())} - drawn
            self.restore(states)

    def to_tensors(self, states: Sequence[State | None]) -> list[Tensor]:
        """Return states as rows of bytes, each time of the same lengths; None as an empty one."""
        rows = [state or b"" for state in states]
        if not self._room:
            # Numbers of many digits may grow by some bytes.
            self._room = [(len(row) + 8 + 255) // 64 * 64 for row in rows]
        return [
            torch.frombuffer(
                bytearray(len(row).to_bytes(8, "little") + row.ljust(room - 8, b"\0")),
                dtype=torch.uint8,
            )
            for row, room in zip(rows, self._room, strict=True)
        ]

    def from_tensors(self, tensors: Sequence[Tensor]) -> tuple[State, ...]:
        """Return the states of `to_tensors`."""
        rows = [tensor.cpu().numpy().tobytes() for tensor in tensors]
        return tuple(row[8 : 8 + int.from_bytes(row[:8], "little")] for row in rows)


def is_generator(value: object) -> TypeGuard[Own]:
    """Whether it is a random generator whose state can be read and put back."""
    return isinstance(
        value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    )


def _row(state: State) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _of_torch(name: str, generator: torch.Generator) -> Source:
    return Source(
        name,
        # Bytes, since comparing tensors takes longer than all the rest.
        lambda: generator.get_state().numpy().tobytes(),
        lambda state: generator.set_state(_row(state)),
        lambda: torch.rand((), generator=generator, device=generator.device),
    )


def _of_device(device: torch.device) -> Source:
    module: Any = torch.get_device_module(device)
    return Source(
        f"torch's generator of {device}",
        lambda: module.get_rng_state(device).numpy().tobytes(),
        lambda state: module.set_rng_state(_row(state), device),
        lambda: torch.rand((), device=device),
    )


def _of_own(name: str, generator: Own) -> Source:
    match generator:
        case torch.Generator():
            return _of_torch(name, generator)
        case random.Random():
            python = generator

            def ask() -> State:
                version, words, following = python.getstate()
                return _asked([version, np.array(words, np.uint64), following])

            def tell(state: State) -> None:
                version, words, following = _told(state)
                python.setstate((version, tuple(words.tolist()), following))

            return Source(name, ask, tell, python.random)
        case np.random.RandomState():
            old = generator
            return Source(
                name,
                lambda: _asked(old.get_state(legacy=False)),
                lambda state: old.set_state(_told(state)),
                old.random,
            )
    bits, draw = generator.bit_generator, generator.random
    return Source(
        name, lambda: _asked(bits.state), lambda state: setattr(bits, "state", _told(state)), draw
    )


def _asked(state: object) -> State:
    """Return a state as JSON; nothing that runs when it is read."""

    def array(value: Any) -> object:
        if isinstance(value, np.generic):
            return value.item()
        return {"dtype": value.dtype.str, "words": value.tobytes().hex()}

    return json.dumps(state, default=array).encode()


def _told(state: State) -> Any:
    """Return what `_asked` was given."""

    def array(found: dict[str, Any]) -> object:
        if "words" not in found:
            return found
        return np.frombuffer(bytes.fromhex(found["words"]), found["dtype"]).copy()

    return json.loads(state, object_hook=array)


def _of_python() -> Source:
    """Return the generator behind `random.random()` and its like."""
    owner: Any = random.getstate.__self__  # type: ignore[attr-defined]
    # An object's head, then the position and the words (CPython 3.11 to 3.14).
    address = id(owner) + object.__basicsize__

    def ask() -> State:
        left = math.nan if owner.gauss_next is None else owner.gauss_next
        return ctypes.string_at(address, 4 * _WORDS) + struct.pack("<d", left)

    def tell(state: State) -> None:
        (left,) = struct.unpack("<d", state[4 * _WORDS :])
        ctypes.memmove(address, state, 4 * _WORDS)
        owner.gauss_next = None if math.isnan(left) else left

    name = "Python's generator (random)"
    enough = type(owner).__mro__[1].__basicsize__ >= object.__basicsize__ + 4 * _WORDS
    _, words, _ = owner.getstate()
    known = np.array([words[-1], *words[:-1]], np.uint32).tobytes()
    if enough and ask()[: 4 * _WORDS] == known:
        return Source(name, ask, tell, random.random)
    return _of_own(name, owner)


def _of_numpy() -> Source:
    """Return the generator behind `numpy.random.rand()` and its like."""
    module: Any = np.random
    at = _left_over_at()
    left_over = id(module.mtrand._rand) + at

    def address() -> int:
        """Return where the words of the Mersenne Twister lie, 0 for another generator."""
        bits = module.get_bit_generator()  # which may be exchanged at any time
        known = at >= 0 and isinstance(bits, np.random.MT19937)
        return bits.ctypes.state_address if known else 0

    def ask() -> State:
        if not (words := address()):
            return _asked(np.random.get_state(legacy=False))
        return ctypes.string_at(words, 4 * _WORDS) + ctypes.string_at(left_over, _LEFT_OVER.size)

    def tell(state: State) -> None:
        if len(state) != 4 * _WORDS + _LEFT_OVER.size:  # of another kind of generator
            np.random.set_state(_told(state))
        elif words := address():
            ctypes.memmove(words, state, 4 * _WORDS)
            ctypes.memmove(left_over, state[4 * _WORDS :], _LEFT_OVER.size)
        else:
            *key, position = np.frombuffer(state, np.uint32, _WORDS).tolist()
            left = _LEFT_OVER.unpack(state[4 * _WORDS :])
            np.random.set_state(("MT19937", np.array(key, np.uint32), position, *left))

    return Source("NumPy's generator (numpy.random)", ask, tell, np.random.random)


def _left_over_at() -> int:
    """Return where in NumPy's object the number left over lies, after its flag; -1 if unknown."""
    probe = np.random.RandomState(0)
    words: Any = probe.get_state()

    def memory(flag: int, number: float) -> bytes:
        probe.set_state((*words[:3], flag, number))
        return ctypes.string_at(id(probe), type(probe).__basicsize__)

    at = memory(1, math.pi).find(_LEFT_OVER.pack(1, math.pi))
    return -1 if any(memory(0, 0.0)[at : at + _LEFT_OVER.size]) else at


_python, _numpy = _of_python(), _of_numpy()


def random_devices(tensors: Sequence[Tensor]) -> list[torch.device]:
    """Return the devices whose generators a computation on some tensors may draw from.

    Those that the tensors lie on, and the current CUDA device once CUDA is in
    use, since the computation may move there.
    """
    found = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
    if torch.cuda.is_initialized():
        found.add(torch.device("cuda", torch.cuda.current_device()))
    return sorted(found, key=str)


def device_types(tensors: Sequence[Tensor]) -> list[str]:
    """Return the types of the CPU and of the devices a computation on some tensors may run on."""
    return sorted({"cpu", *(device.type for device in random_devices(tensors))})


def cuda_or_cpu(tensors: Iterable[Tensor]) -> torch.device:
    """Return the first CUDA device that some tensors lie on, the CPU if there is none."""
    return next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))


def refuse_hidden_draws(modules: Iterable[object], name: str) -> None:
    """Refuse modules whose random numbers come from a generator that cannot be read.

    Raises
    ------
    StateError
        For dropout between the layers of cuDNN's recurrent networks, which has
        a state of its own that cannot be read or put back.
    """
    cudnn = torch.backends.cudnn
    if not (cudnn.enabled and cudnn.is_available()):
        return
    inner = (m for module in modules if isinstance(module, nn.Module) for m in module.modules())
    for module in inner:
        draws = (
            isinstance(module, nn.RNNBase)
            and module.training
            and module.dropout > 0
            and module.num_layers > 1
        )
        if draws and any(p.device.type == "cuda" for p in module.parameters()):
            raise StateError(
                f"{name} cannot be run again as it was: cuDNN draws the dropout between the layers "
                f"of {type(module).__name__} from a state of its own; give it dropout=0 and "
                "nn.Dropout between modules, or set torch.backends.cudnn.enabled = False"
            )
