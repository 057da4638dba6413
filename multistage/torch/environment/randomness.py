"""States of random generators: torch's, Python's, NumPy's, and a computation's own.

A state is read before and after every stage, so reading must be cheap.  That of
Python's and of NumPy's generator is read from memory, 2 500 bytes in about a
microsecond, where asking takes 16 and 60, and written there, where telling takes 30
and 130.
"""

from __future__ import annotations

import ctypes
import json
import math
import random
import struct
from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import StateError

State: TypeAlias = bytes  # equal to another if nothing was drawn between
Own: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
_WORDS = 625  # of the Mersenne Twister: 624 and a position


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
    """

    def __init__(
        self, devices: Sequence[torch.device] = (), own: Iterable[tuple[str, Own]] = ()
    ) -> None:
        self._sources = [_of_torch("torch's generator of cpu", torch.default_generator)]
        self._sources += [_python.source, _numpy.source]
        self._sources += [_of_device(device) for device in devices]
        self._sources += [_of_own(name, generator) for name, generator in own]
        self._room: list[int] = []
        _numpy.look_again()

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

    def draw(self, names: Container[str]) -> None:
        """Draw from the generators of other names, which gives them other states."""
        for source in self._sources:
            if source.name not in names:
                source.draw()

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
        name,
        lambda: _asked(bits.state),
        lambda state: setattr(bits, "state", _told(state)),
        draw,
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


def _words_at(address: int, following: float | None) -> State:
    """Return the words of a Mersenne Twister, and the normal number that is left over."""
    left = struct.pack("<d", math.nan if following is None else following)
    return ctypes.string_at(address, 4 * _WORDS) + left


def _left_over(state: State) -> float | None:
    (following,) = struct.unpack("<d", state[4 * _WORDS :])
    return None if math.isnan(following) else following


class _Python:
    """The generator behind `random.random()` and its like."""

    def __init__(self) -> None:
        self._owner: Any = random.getstate.__self__  # type: ignore[attr-defined]
        # An object's head, then the position and the words (CPython 3.11 to 3.14).
        self._address = id(self._owner) + object.__basicsize__
        enough = type(self._owner).__mro__[1].__basicsize__ >= object.__basicsize__ + 4 * _WORDS
        _, words, _ = self._owner.getstate()
        known = np.array([words[-1], *words[:-1]], np.uint32).tobytes()
        name = "Python's generator (random)"
        if enough and self._get()[: 4 * _WORDS] == known:
            self.source = Source(name, self._get, self._set, random.random)
        else:
            self.source = _of_own(name, self._owner)

    def _get(self) -> State:
        return _words_at(self._address, self._owner.gauss_next)

    def _set(self, state: State) -> None:
        ctypes.memmove(self._address, state, 4 * _WORDS)
        self._owner.gauss_next = _left_over(state)


class _NumPy:
    """The generator behind `numpy.random.rand()` and its like."""

    def __init__(self) -> None:
        self._bits: Any = None
        self._address = 0
        self._pending = True  # whether a normal number may be left over from a pair
        self._seen = b""
        name = "NumPy's generator (numpy.random)"
        self.source = Source(name, self._get, self._set, np.random.random)

    def look_again(self) -> None:
        """Ask for a number left over at the next reading: the same words may be set with it."""
        if not self._pending:
            self._seen = b""

    def _get(self) -> State:
        module: Any = np.random
        bits: Any = module.get_bit_generator()
        if bits is not self._bits:
            self._bits, self._seen, self._pending = bits, b"", True
            # Of others than the Mersenne Twister it is the address of a pointer.
            twister = isinstance(bits, np.random.MT19937)
            self._address = bits.ctypes.state_address if twister else 0
        if not self._address:
            return _asked(np.random.get_state(legacy=False))
        state = _words_at(self._address, None)
        if self._pending or state != self._seen:
            known: Any = np.random.get_state(legacy=False)
            has = bool(known["has_gauss"])
            # These words may come back with the number and without it.
            self._pending, self._seen = has or (self._pending and state == self._seen), state
            return _words_at(self._address, known["gauss"] if has else None)
        return state

    def _set(self, state: State) -> None:
        if len(state) != 4 * _WORDS + 8:  # of another kind of generator
            np.random.set_state(_told(state))
            return
        now, following = self._get(), _left_over(state)
        if self._address and following is None and _left_over(now) is None:
            ctypes.memmove(self._address, state, 4 * _WORDS)
            self._seen = state
            return
        *words, position = np.frombuffer(state, np.uint32, _WORDS).tolist()
        key = np.array(words, np.uint32)
        has, gauss = following is not None, following or 0.0
        np.random.set_state(("MT19937", key, position, int(has), gauss))
        self._pending, self._seen = has, _words_at(self._address, None)


_python, _numpy = _Python(), _NumPy()


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
