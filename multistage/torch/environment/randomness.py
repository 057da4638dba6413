"""States of random generators: torch's, Python's, NumPy's, and a computation's own.

A state is read before and after every stage, so reading must be cheap.  That of
Python's and of NumPy's generator is read from memory, 2 500 bytes in about a
microsecond, where asking takes 16 and 60, and written there, where telling takes 30
and 130.
"""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Container, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

State: TypeAlias = object  # immutable; equal to another if nothing was drawn between
Own: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
_S = TypeVar("_S")
_WORDS = 625  # of the Mersenne Twister: 624 and a position


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
        self._sources: list[_Source[Any]] = [
            _Torch(torch.default_generator, "torch's generator of cpu"),
            _python,
            _numpy,
        ]
        self._sources += [_Device(device) for device in devices]
        self._sources += [_own(name, generator) for name, generator in own]
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

    def to_tensors(self, states: Sequence[State]) -> list[Tensor]:
        """Return states as rows of bytes, each time of the same lengths."""
        rows = [_row(state) for state in states]
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
        return tuple(_of_row(row[8 : 8 + int.from_bytes(row[:8], "little")]) for row in rows)


class _Words(NamedTuple):
    """An array of a state, comparable."""

    dtype: str
    raw: bytes


def _frozen(value: Any) -> Any:
    """Return a state whose arrays can be compared."""
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return _Words(value.dtype.str, value.tobytes())
    return value.item() if isinstance(value, np.generic) else value


def _thawed(value: Any) -> Any:
    """Return what `_frozen` was given."""
    if isinstance(value, dict):
        return {key: _thawed(inner) for key, inner in value.items()}
    return np.frombuffer(value.raw, value.dtype).copy() if isinstance(value, _Words) else value


def _row(state: State) -> bytes:
    """Return a state as JSON, and behind it the bytes in it; nothing that runs when it is read."""
    blobs: list[bytes] = []

    def said(value: Any) -> Any:
        match value:
            case bytes():
                blobs.append(value)
                return ["bytes", len(value)]
            case _Words(dtype, raw):
                return ["words", dtype, said(raw)]
            case tuple():
                return ["tuple", *map(said, value)]
            case dict():
                return {key: said(inner) for key, inner in value.items()}
        return value

    head = json.dumps(said(state)).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *blobs])


def _of_row(row: bytes) -> State:
    at = 8 + int.from_bytes(row[:8], "little")

    def meant(value: Any) -> Any:
        nonlocal at
        match value:
            case ["bytes", length]:
                at += length
                return row[at - length : at]
            case ["words", dtype, raw]:
                return _Words(dtype, meant(raw))
            case ["tuple", *inner]:
                return tuple(map(meant, inner))
            case dict():
                return {key: meant(inner) for key, inner in value.items()}
        return value

    return meant(json.loads(row[8:at]))


def is_generator(value: object) -> TypeGuard[Own]:
    """Whether it is a random generator whose state can be read and put back."""
    return isinstance(
        value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    )


class _Source(Generic[_S]):
    """One generator: its name, and how its state is read and put back."""

    name: str

    def get(self) -> _S:
        raise NotImplementedError

    def set(self, state: _S) -> None:
        raise NotImplementedError

    def draw(self) -> None:
        raise NotImplementedError


class _Torch(_Source[bytes]):
    def __init__(self, generator: torch.Generator, name: str) -> None:
        self._generator, self.name = generator, name

    def get(self) -> bytes:
        # Bytes, since comparing tensors takes longer than all the rest.
        return self._generator.get_state().numpy().tobytes()

    def set(self, state: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def draw(self) -> None:
        torch.rand((), generator=self._generator, device=self._generator.device)


class _Device(_Source[bytes]):
    def __init__(self, device: torch.device) -> None:
        self._device, self.name = device, f"torch's generator of {device}"
        self._module: Any = torch.get_device_module(device)

    def get(self) -> bytes:
        state: Tensor = self._module.get_rng_state(self._device)
        return state.numpy().tobytes()

    def set(self, state: bytes) -> None:
        row = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        self._module.set_rng_state(row, self._device)

    def draw(self) -> None:
        torch.rand((), device=self._device)


class _Python(_Source[tuple[bytes, float | None]]):
    """The generator behind `random.random()` and its like."""

    name = "Python's generator (random)"

    def __init__(self) -> None:
        self._owner: Any = random.getstate.__self__  # type: ignore[attr-defined]
        # An object's head, then the position and the words (CPython 3.11 to 3.14).
        self._address = id(self._owner) + object.__basicsize__
        enough = type(self._owner).__mro__[1].__basicsize__ >= object.__basicsize__ + 4 * _WORDS
        self._direct = enough and self._read() == self._asked()

    def _read(self) -> tuple[bytes, float | None]:
        raw = ctypes.string_at(self._address, 4 * _WORDS)
        return raw, self._owner.gauss_next

    def _asked(self) -> tuple[bytes, float | None]:
        _, words, following = self._owner.getstate()
        return np.array([words[-1], *words[:-1]], np.uint32).tobytes(), following

    def get(self) -> tuple[bytes, float | None]:
        return self._read() if self._direct else self._asked()

    def set(self, state: tuple[bytes, float | None]) -> None:
        raw, following = state
        if self._direct:
            ctypes.memmove(self._address, raw, len(raw))
            self._owner.gauss_next = following
            return
        position, *words = np.frombuffer(raw, np.uint32).tolist()
        self._owner.setstate((3, (*words, position), following))

    def draw(self) -> None:
        random.random()


class _NumPy(_Source[Any]):
    """The generator behind `numpy.random.rand()` and its like."""

    name = "NumPy's generator (numpy.random)"

    def __init__(self) -> None:
        self._bits: Any = None
        self._address = 0
        self._pending = True  # whether a normal number may be left over from a pair
        self._seen = b""

    def look_again(self) -> None:
        """Ask for a number left over at the next reading: the same words may be set with it."""
        if not self._pending:
            self._seen = b""

    def get(self) -> Any:
        module: Any = np.random
        bits: Any = module.get_bit_generator()
        if bits is not self._bits:
            self._bits, self._seen, self._pending = bits, b"", True
            # Of others than the Mersenne Twister it is the address of a pointer.
            twister = isinstance(bits, np.random.MT19937)
            self._address = bits.ctypes.state_address if twister else 0
        if not self._address:
            return _frozen(np.random.get_state(legacy=False))
        raw = ctypes.string_at(self._address, 4 * _WORDS)
        if self._pending or raw != self._seen:
            known: Any = np.random.get_state(legacy=False)
            has = bool(known["has_gauss"])
            # These words may come back with the number and without it.
            self._pending, self._seen = has or (self._pending and raw == self._seen), raw
            return raw, known["gauss"] if has else None
        return raw, None

    def set(self, state: Any) -> None:
        if isinstance(state, dict):
            np.random.set_state(_thawed(state))
            return
        raw, following = state
        now = self.get()
        if isinstance(now, tuple) and now[1] is following is None:
            ctypes.memmove(self._address, raw, len(raw))
            self._seen = raw
            return
        *words, position = np.frombuffer(raw, np.uint32).tolist()
        key = np.array(words, np.uint32)
        has, gauss = following is not None, following or 0.0
        np.random.set_state(("MT19937", key, position, int(has), gauss))
        self._pending, self._seen = has, raw

    def draw(self) -> None:
        np.random.random()


class _Asked(_Source[Any]):
    """A generator of Python's or NumPy's kind that a computation owns."""

    def __init__(
        self, generator: random.Random | np.random.Generator | np.random.RandomState, name: str
    ) -> None:
        self._generator, self.name = generator, name

    def get(self) -> Any:
        match self._generator:
            case random.Random():
                return self._generator.getstate()
            case np.random.RandomState():
                return _frozen(self._generator.get_state(legacy=False))
        return _frozen(self._generator.bit_generator.state)

    def set(self, state: Any) -> None:
        match self._generator:
            case random.Random():
                self._generator.setstate(state)
            case np.random.RandomState():
                self._generator.set_state(_thawed(state))
            case _:
                self._generator.bit_generator.state = _thawed(state)

    def draw(self) -> None:
        self._generator.random()


def _own(name: str, generator: Own) -> _Source[Any]:
    if isinstance(generator, torch.Generator):
        return _Torch(generator, name)
    return _Asked(generator, name)


_python, _numpy = _Python(), _NumPy()


@dataclass(slots=True)
class RandomState:
    """States of the random generators of the CPU and of some devices."""

    cpu: Tensor
    devices: list[tuple[torch.device, Tensor]]

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> RandomState:
        """Return the present states."""
        return cls(torch.get_rng_state(), [(d, _module(d).get_rng_state(d)) for d in devices])

    def restore(self) -> None:
        """Give the generators these states."""
        # A copy of a slice: torch reads from the start of the storage, and crashes (2.13).
        torch.set_rng_state(self.cpu.clone() if self.cpu.storage_offset() else self.cpu)
        for device, state in self.devices:
            _module(device).set_rng_state(state.clone(), device)

    def same_as(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two."""
        return torch.equal(self.cpu, other.cpu) and all(
            torch.equal(a, b) for (_, a), (_, b) in zip(self.devices, other.devices, strict=True)
        )


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


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


def cuda_or_cpu(tensors: Sequence[Tensor]) -> torch.device:
    """Return the first CUDA device that some tensors lie on, the CPU if there is none."""
    return next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))
