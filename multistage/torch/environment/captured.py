"""What a stage or a cell must find when it is run again, to do exactly what it did.

The principle.  A stage or cell is a function of its inputs and of an
environment:

- parameters and buffers, as objects, with their versions and their wishes for
  gradients, and which of them share memory;
- the modes, attributes, children and forward hooks of its modules;
- variables that functions take from closures, globals and small helper objects;
- random generators: torch's, Python's, NumPy's, and its own;
- settings: autocast, backends, precision, default dtype, threads, modes.

The environment is captured when a stage first runs, reinstalled when it runs
again, and compared where it cannot be reinstalled: tensors that were written to
meanwhile, by their versions and, in host memory, by checksums of their bits.
Whatever was decided from a sample, such as which buffers a stage changes, is
verified on every run.  A difference is an error that names it, before a number
leaves us.  What a run leaves behind in the environment is put back, so that
running a stage again goes unnoticed.

`Scope` knows which objects belong to an environment, `Generators` and
`Settings` what lies outside of modules.  Costs: a few microseconds for each
module for identities and versions, and a pass over what checksums are taken of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import StateError
from ..tensors.checksums import Memory, digest, fingerprint, same_bits, whole_memory
from .copies import address, addresses, cloned, put_back, version_of
from .places import replacing
from .randomness import Generators, State, random_devices
from .scope import Buffers, Scope, buffers_among


class Environment:
    """What one run of a stage or cell depends on besides its inputs and the settings.

    Parameters
    ----------
    scope : Scope
        Of the stage.
    name : str
        For messages, such as `stage 3 Linear`.
    changing : sequence of (module, buffer name)
        Buffers that the stage changes: kept by value.
    keep_values : bool
        Whether to keep those values; else the caller does, or nothing depends on them.
    by_value : bool
        Whether to notice other bits of the tensors that it must leave alone, by checksums:
        fused optimizers, `.data` and NumPy write to them without a new version.

    Attributes
    ----------
    found : Found
        What it captured, but for values of tensors.
    """

    __slots__ = (
        "_changing",
        "_flags",
        "_generators",
        "_kept",
        "_kept_versions",
        "_name",
        "_places",
        "_pointers",
        "_random",
        "_sums",
        "_tensors",
        "_versions",
        "found",
    )

    def __init__(
        self,
        scope: Scope,
        name: str,
        changing: Buffers = (),
        *,
        keep_values: bool = True,
        by_value: bool = False,
    ) -> None:
        found = scope.look()
        self.found, self._name, self._changing = found, name, changing
        self._generators: Generators | None = None
        self._random: tuple[State | None, ...] | None = None
        own = {id(buffer) for buffer in self._buffers()}
        tensors = found.tensors
        self._tensors: Sequence[Tensor] = (
            [t for t in tensors if id(t) not in own] if own else tensors
        )
        self._versions = [t._version for t in self._tensors]
        self._flags = [t.requires_grad for t in self._tensors]
        self._pointers = addresses(self._tensors)
        self._sums: list[tuple[int, int | None]] = []  # with the bytes that they are of
        self._places: dict[int, int] | None = None
        self._kept: list[Tensor | None] | None = None
        self._kept_versions: list[int] = []
        if keep_values:
            self.keep()
        if by_value:
            self.sum()

    def keep(self) -> None:
        """Keep the present values of the buffers that the stage changes."""
        buffers = self._buffers()
        self._kept = cloned(buffers)
        self._kept_versions = [0 if b is None else version_of(b) for b in buffers]

    def _buffers(self) -> list[Tensor | None]:
        return [module._buffers[key] for module, key in self._changing]

    def sum(self) -> None:
        """Take checksums of the tensors that the stage must leave alone."""
        each = zip(self._tensors, *self._memory(self._pointers), strict=True)
        self._sums = [(nbytes, digest(tensor, memory)) for tensor, nbytes, memory in each]

    # ------------------------------------------------------------- first run

    def drew(
        self,
        generators: Generators,
        before: Sequence[State],
        after: Sequence[State],
        known: Set[str] = frozenset(),
    ) -> bool:
        """Remember the states of generators that the first run drew from; return whether any.

        `known` are names of those that it draws from, though it may leave them as they were.
        """
        self._random = generators.only_drawn(before, after, known)
        self._generators = generators if self._random is not None else None
        return self._random is not None

    def verify(self) -> None:
        """Check after the first run that it changed no tensor but the buffers said to change.

        Raises
        ------
        StateError
            It names the tensor.
        """
        for tensor in self._written():
            what = self.found.name_of(tensor)
            if what.startswith("buffer"):
                raise StateError(
                    _LEFT_ALONE.format(f"{self._name} changed {what}, a buffer that it")
                )
            raise StateError(
                f"{self._name} writes to {what} in place when it runs; running it again would "
                "write once more: register it as a buffer, or write to it outside of the chain"
            )
        buffers = buffers_among(self.found.modules)
        changing = {(id(module), key) for module, key in self._changing} if buffers else set()
        known = {id(tensor) for tensor in self._tensors} if buffers else set()
        for module, key, buffer in buffers:
            if not (id(buffer) in known or (id(module), key) in changing or buffer.is_inference()):
                what = f"exchanged buffer {key!r} of {type(module).__name__}, which it"
                raise StateError(_LEFT_ALONE.format(f"{self._name} {what}"))

    def _written(self) -> list[Tensor]:
        """Return the tensors that have other versions now."""
        return self._others([t._version for t in self._tensors], self._versions)

    def _others(self, now: Sequence[object], before: Sequence[object]) -> list[Tensor]:
        """Return the tensors of which something is other now than before."""
        if now == before:
            return []
        return [t for t, a, b in zip(self._tensors, now, before, strict=True) if a != b]

    def let_graphs_go(self) -> None:
        """Refer to what tensors with graphs hold, no longer to the graphs.

        A loss that a stage left in an attribute would else keep the run alive that
        made it, which keeps the one before, without end.
        """
        if all(t.grad_fn is None for t in self._tensors):
            return
        alone = {
            id(t): t.detach().requires_grad_(t.requires_grad)
            for t in self.found.tensors
            if t.grad_fn is not None
        }
        self._tensors = [alone.get(id(t), t) for t in self._tensors]
        self.found = self.found.holding(
            [replacing(held, lambda value: alone.get(id(value), value)) for held in self.found.held]
        )

    def places(self) -> dict[int, int]:
        """Return the addresses of parameters and unchanged buffers, each with a number."""
        if self._places is not None:
            return self._places
        known = (self._changing, self._pointers, {}) if exchanges_memory() else self.found.addresses
        if known is None or known[0] is not self._changing or known[1] != self._pointers:
            # Copies stand in for the others.
            skipped = {id(module._buffers[key]) for module, key in self._changing}
            held = [
                x
                for m in self.found.modules
                for x in (
                    *m._parameters.values(),
                    *(b for key, b in m._buffers.items() if key not in _STATISTICS),
                )
                if x is not None and id(x) not in skipped
            ]
            found = {at: number for number, x in enumerate(held) if (at := address(x))}
            known = self.found.addresses = self._changing, self._pointers, found
        self._places = known[2]
        return self._places

    # ------------------------------------------------------------- comparing

    def differences(self) -> list[str]:
        """Return the names of what is different now, but for buffers said to change."""
        found = self.found.differences({(id(m._buffers), key) for m, key in self._changing})
        return list(dict.fromkeys([*found, *map(self.found.name_of, self._written())]))

    def undo(self) -> None:
        """Undo the first run: put back attributes, buffers and generators as captured."""
        self.found.put_back()
        assert self._kept is not None
        for (module, key), value, version in zip(
            self._changing, self._kept, self._kept_versions, strict=True
        ):
            buffer = module._buffers[key]
            if buffer is not None:
                assert value is not None  # it was put back to what it was, but for its values
                put_back(buffer, value, version)
        if self._generators is not None and self._random is not None:
            self._generators.restore(self._random)

    def refuse_changed(self, of: Container[int] | None = None) -> None:
        """Raise StateError if a tensor was changed since it was captured; of some alone, by id."""
        at = addresses(self._tensors)
        moved = [] if exchanges_memory() else self._others(at, self._pointers)
        for how, tensors in ((_WRITTEN, self._written()), (_MOVED, moved)):
            for tensor in tensors:
                if of is None or id(tensor) in of:
                    raise self._changed(tensor, how)
        if not self._sums:
            return
        each = zip(self._tensors, self._sums, *self._memory(at), strict=True)
        for tensor, (nbytes, before), now, memory in each:
            # A shard and the whole (FSDP) are not to be compared.
            compared = now == nbytes and before is not None and (of is None or id(tensor) in of)
            if compared and digest(tensor, memory) not in (before, None):
                raise self._changed(tensor, _OTHER_BITS)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return parameters and buffers as they were, by name, for a run that writes to none.

        Raises
        ------
        StateError
            If one of them was changed since.
        """
        found, changing = self.found.by_name(), [key for _, key in self._changing]
        kept = dict(zip(changing, self._kept or [None] * len(changing), strict=True))
        values = {n: found.get(n) if kept.get(n) is None else kept[n] for n in names}
        read = {name: value for name, value in values.items() if value is not None}
        self.refuse_changed({id(value) for value in read.values()})
        return read

    def _memory(self, at: list[int]) -> tuple[list[int], list[Memory | None]]:
        """Return the bytes and the memory of the tensors at some addresses."""
        sizes = [t.nbytes if where else 0 for t, where in zip(self._tensors, at, strict=True)]
        known = self.found.memory
        if known is None or known[0] is not self._changing or known[1:3] != (at, sizes):
            memory = [whole_memory(tensor) for tensor in self._tensors]
            known = self.found.memory = self._changing, at, sizes, memory
        return known[2:]

    def _changed(self, tensor: Tensor, how: str) -> StateError:
        shape = tuple(tensor.shape)
        return StateError(
            f"{self.found.name_of(tensor)} of {self._name}, of shape {shape}, {how}; it cannot "
            "be run again as it was: call backward first"
        )

    # ---------------------------------------------------------- running again

    @contextlib.contextmanager
    def again(self, *, buffers: bool = True, random: bool = True) -> Iterator[None]:
        """Return a context in which everything is as it was; the present is put back at its end.

        Parameters
        ----------
        buffers, random : bool
            Whether to do so with the buffers that change, and with generators;
            else the caller does.

        Raises
        ------
        StateError
            When the context is entered, if a tensor of the environment was changed since.
        """
        self.refuse_changed()
        found, generators = self.found, self._generators
        present = None if found.holds() else found.now()
        flags, exchanged = self.toggled(), list[tuple[dict[str, Tensor | None], str, Any]]()
        drawn = None
        try:
            if present is not None:
                found.put_back()
            for tensor, flag, _ in flags:
                tensor.requires_grad_(flag)
            for owner, key, value in self.stand_ins() if buffers else ():
                exchanged.append((owner, key, owner[key]))
                owner[key] = value
            if generators is not None and random:
                assert self._random is not None
                drawn = generators.capture_those(self._random)
                generators.restore(self._random)
            yield
        finally:
            if drawn is not None and generators is not None:
                generators.restore(drawn)
            for owner, key, value in reversed(exchanged):
                owner[key] = value
            for tensor, _, flag in flags:
                tensor.requires_grad_(flag)
            found.put_back(present)

    def toggled(self) -> list[tuple[Tensor, bool, bool]]:
        """Return tensors with other wishes for gradients now, with the wishes then and now."""
        others = self._others([t.requires_grad for t in self._tensors], self._flags)
        for tensor in others:
            if not tensor.is_leaf:
                raise self._changed(
                    tensor, "was detached, or made part of a graph, between forward and backward"
                )
        return [(tensor, not tensor.requires_grad, tensor.requires_grad) for tensor in others]

    def stand_ins(self) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor | None]]:
        """Yield places of buffers with copies, for a run to write to."""
        if not self._changing and not any(m._buffers for m in self.found.modules):
            return
        # Without values that were kept, any will do.
        kept = self._buffers() if self._kept is None else self._kept
        for (module, key), value in zip(self._changing, cloned(kept), strict=True):
            yield module._buffers, key, value
        changing = {(id(module), key) for module, key in self._changing}
        hidden = [
            (module, key)
            for module in self.found.modules
            if module._buffers
            for key in _STATISTICS
            if key in module._buffers and (id(module), key) not in changing
        ]
        if not hidden:
            return
        # Batch norm's kernels change statistics behind the versions' back: the sample
        # may not have shown it.
        copies = cloned([module._buffers[key] for module, key in hidden])
        for (module, key), value in zip(hidden, copies, strict=True):
            yield module._buffers, key, value


_WRITTEN = "was changed in place between forward and backward"
_MOVED = (
    "was given other memory between forward and backward (by .data, .to(), .double() or the like)"
)
_OTHER_BITS = (
    "holds other numbers than in the forward pass, though no version says so: a fused optimizer's "
    "step, .data, NumPy, or the stage itself wrote to it"
)
_LEFT_ALONE = (
    "{} left alone when it was profiled; profile it in the mode it is trained in, or keep its tape"
)
_STATISTICS = ("running_mean", "running_var")


def exchanges_memory() -> bool:
    """Whether parameters may come and go with the memory they lie in (sharded ones)."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def generators_of(scopes: Sequence[Scope], tensors: Sequence[Tensor]) -> Generators:
    """Return the generators that stages may draw from when they run on some tensors."""
    involved = [*tensors, *(p for scope in scopes for p in scope.parameters())]
    own = {id(g): (name, g) for scope in scopes for name, g in scope.look().generators}
    return Generators(random_devices(involved), own.values())


class Snapshot:
    """Generators and what a scope holds as they were; a context restores them.

    Buffers and tensors in attributes are put back by value: code that shares them sees it.

    Parameters
    ----------
    scope : Scope
        Of what runs meanwhile.
    tensors : sequence of Tensor
        That it runs on.
    """

    def __init__(self, scope: Scope, tensors: Sequence[Tensor]) -> None:
        self._found = found = scope.look()
        self._generators = generators_of([scope], tensors)
        self._states = self._generators.capture()
        values = {id(b): b for _, _, b in buffers_among(found.modules)}
        values |= {
            id(x): x
            for place, held in zip(found.places, found.held, strict=True)
            if place.name.startswith("attribute")
            for x in (held.values() if isinstance(held, dict) else held)
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
        }
        self._values = [
            (t, t.detach().clone(), version_of(t))
            for t in values.values()
            if t.device.type != "meta"
        ]

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Make it so again."""
        self._generators.restore(self._states)
        self._found.put_back()
        for tensor, value, version in self._values:
            if version_of(tensor) != version or not same_bits(tensor, value):
                put_back(tensor, value, version)


def left_behind(scope: Scope, tensors: Sequence[Tensor]) -> dict[str, object]:
    """Return what distinguishes generators, buffers and attributes of what ran, by name."""
    generators = generators_of([scope], tensors)
    found: dict[str, object] = dict(zip(generators.names, generators.capture(), strict=True))
    for place in scope.look().places:
        if place.name.startswith(("attribute", "buffer", "class attribute")):
            held = place.read()
            if not isinstance(held, dict):
                found[place.name] = len(held)
            # Sets have no order.
            for name, value in () if isinstance(place.owner, set) else place.entries(held):
                if not isinstance(value, nn.Parameter):
                    found[name] = fingerprint(value)
    return found
