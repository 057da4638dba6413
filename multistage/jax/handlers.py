"""What compiled programs call: the C core's handlers of loops (`native/xla.c`), known to XLA."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, NoReturn, TypeAlias, cast
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import native
from ..backends.urls import TierName, TierUrl, open_store
from ..errors import ArgumentError
from ..report import Report
from ..support.units import format_bytes, format_seconds
from ..support.values import folder_path

_SECOND_NS = 1e-9
new_site = partial(next, itertools.count(1))  # or two equal loops would share their runs

Arrays: TypeAlias = tuple[jax.Array, ...]
Loaded: TypeAlias = tuple[jax.Array, jax.Array, Arrays]


def shaped(shape: tuple[int, ...], dtype: object, *, weak: bool = False) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array; JAX's own class has no annotations."""
    made: jax.ShapeDtypeStruct = cast(Any, jax.ShapeDtypeStruct)(shape, dtype, weak_type=weak)
    return made


# A loop inside a compiled program, and where its states go; what a run of such a loop did.
Options, Seen = map(native.HEADER.structure, ("loop_options_t", "loop_report_t"))


@dataclass(frozen=True, slots=True)
class LoopReport:
    """What the last complete run of a loop did, forward and back.

    Attributes
    ----------
    steps, every : int
        Steps, and those of a block: the state before each block was offered to the tier.
    state_bytes : int
        Bytes of a state, of a whole batch under `vmap`.
    kept, refused : int
        States that the tier took; those left out, since it was behind or full.
    lost, late : int
        States that could not be read back, or not in time.
    again : int
        Loads of states that were missing: they were made again from one further back.
    bytes_written, bytes_read : int
        By the tier meanwhile.
    forward_s, reverse_s, waited_s : float
        Seconds from the first save to the first load, and on to the load of state 0; those of
        waiting for reads.
    step_s, write_s, read_s : float
        Seconds of a forward step, and of a state to the tier and back; 0 if nothing moved.
    """

    steps: int
    every: int
    state_bytes: int
    kept: int
    refused: int
    lost: int
    late: int
    again: int
    bytes_written: int
    bytes_read: int
    forward_s: float
    reverse_s: float
    waited_s: float
    step_s: float
    write_s: float
    read_s: float

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in blocks of {self.every}, states of "
            f"{format_bytes(self.state_bytes)}: {self.kept} to the tier, {self.refused} left "
            f"out, {self.lost + self.late} lost; forward "
            f"{format_seconds(self.forward_s)}, reverse {format_seconds(self.reverse_s)}, "
            f"{format_seconds(self.waited_s)} of it waiting"
        )


# Of the loop that was last run from Python, with the number of the last run in a program by then.
_driven: list[tuple[Callable[[], Report], int]] = []


def remember(report: Callable[[], Report]) -> None:
    """Let `last_report` return this report, until a loop in a program ends."""
    _driven[:] = [(report, _last_seen().run)]


def _last_seen() -> Any:
    """Return what the loop in a program did that ended last; its number is 0 if none has."""
    found = Seen()
    if native.LIBRARY is not None:
        native.LIBRARY.ms_loop_report(ctypes.byref(found))
    return found


def last_report() -> LoopReport | Report:
    """Return what the loop that ended last did, in this process.

    A run ends with its reverse sweep.  JAX runs programs in the background: call
    `jax.block_until_ready` on a result first.

    Returns
    -------
    LoopReport or Report
        Of a loop inside a compiled program; of one that was run from Python what
        `Reversal.report` returns, with the plan.  Steps are blocks there.

    Raises
    ------
    ArgumentError
        If none has ended.
    """
    found = _last_seen()
    for report, run in _driven:
        if run == found.run:
            return report()
    if not found.run:
        raise ArgumentError("no loop has run forward and back yet; call its gradient first")
    return LoopReport(
        steps=found.steps,
        every=found.every,
        state_bytes=found.record_bytes,
        kept=found.kept,
        refused=found.refused,
        lost=found.lost,
        late=found.late,
        again=found.again,
        bytes_written=found.bytes_written,
        bytes_read=found.bytes_read,
        forward_s=found.forward_ns * _SECOND_NS,
        reverse_s=found.reverse_ns * _SECOND_NS,
        waited_s=found.waited_ns * _SECOND_NS,
        step_s=found.step_ns * _SECOND_NS,
        write_s=found.write_ns * _SECOND_NS,
        read_s=found.read_ns * _SECOND_NS,
    )


def clear() -> None:
    """Close the files, end the threads, free the buffers, and forget states not yet asked for.

    Files and threads are kept from run to run, and opened again where needed.  States of a
    pullback that is never called are kept, too, until this is.  A pullback that is called
    afterwards makes them again.
    """
    if native.LIBRARY is not None and sys.platform == "linux":
        native.LIBRARY.ms_loop_clear()


@cache
def _register() -> None:
    """Tell XLA of the handlers.  Raises ArgumentError where there are none."""
    instead = "call it outside of jit, or use jax.lax.scan with jax.checkpoint"
    native.require("multistage.jax.scan inside jit", instead)
    if sys.platform != "linux":
        raise ArgumentError(f"multistage.jax.scan inside jit needs Linux; {instead}")
    library, ffi = native.library(), cast(Any, jax.ffi)
    for name in ("begin", "turn", "save", "load"):
        handler = ffi.pycapsule(getattr(library, f"ms_xla_{name}"))
        ffi.register_ffi_target(f"multistage_{name}", handler, platform="cpu")


def opened(tier: TierName) -> tuple[str, int]:
    """Return the folder of a tier, "" for memory, and its capacity, -1 without a limit.

    Raises
    ------
    ArgumentError
        For a tier that compiled programs cannot use; without the C core; on other devices than
        CPUs.
    StoreError
        If it cannot be used.
    """
    _register()
    if (device := jax.default_backend()) != "cpu":
        raise ArgumentError(
            f"multistage.jax.scan runs on CPUs, the default device is {device!r}; set "
            "JAX_PLATFORMS=cpu, or use jax.lax.scan with jax.checkpoint"
        )
    store = open_store(tier)
    if store.name not in ("file", "memory") or not isinstance(tier, str | os.PathLike):
        raise ArgumentError(
            f"tier {store.name!r} cannot be used inside a compiled program; give a folder, as in "
            "'file:///scratch', or 'memory:'"
        )
    url = TierUrl(tier) if isinstance(tier, str) else None
    if url is not None and (url.option("threads") or url.option("cpus")):
        raise ArgumentError(
            f"tier {url.shown}: threads= and cpus= are not for compiled programs; leave them out"
        )
    store.check()
    folder = ""
    if store.name == "file":
        name = os.fsdecode(tier) if url is None else unquote(url.path)
        folder = str(folder_path(name, "folder").resolve())
    return folder, -1 if store.capacity_bytes is None else store.capacity_bytes


# The devices of a program would each decide how long its blocks are, while they exchange data
# within steps.  How many they are is known when it is lowered.
_alone: Any = Primitive("multistage_alone")
_alone.def_abstract_eval(lambda run: run)


@_alone.def_impl  # type: ignore[untyped-decorator]
def _alone_now(run: jax.Array) -> Any:
    with jax.disable_jit(False):
        return jax.jit(_alone.bind)(run)


def _lower_alone(context: Any, run: Any) -> list[Any]:
    devices = context.module_context.axis_context
    mesh = getattr(devices, "mesh", None)
    count = devices.num_devices if mesh is None else mesh.size
    if count > 1:
        raise ArgumentError(
            f"multistage.jax.scan takes gradients in programs for one device, this one is for "
            f"{count}; leave its inputs on one, or use jax.lax.scan with jax.checkpoint"
        )
    return [run]


mlir.register_lowering(_alone, _lower_alone)


@dataclass(frozen=True, slots=True)
class Site:
    """Where in a program a loop is, and what its runs have in common; see `loop_options_t`."""

    folder: str
    capacity_bytes: int
    steps: int
    least_every: int
    most_every: int
    buffer_bytes: int
    site: int

    def _given(self) -> dict[str, Any]:
        """Return what XLA gives the handlers of this site."""
        return {
            name: value if isinstance(value, str) else np.int64(value)
            for name, value in asdict(self).items()
        }

    def begin(self, inputs: Arrays) -> tuple[jax.Array, jax.Array]:
        """Return the number of a run of this execution and the steps of its blocks.

        The loop's inputs are operands, which nothing reads: all states of a run follow from them,
        and JAX moves a call that has none out of an outer loop.
        """
        made = (shaped((), jnp.uint32), shaped((), jnp.int32))
        call = jax.ffi.ffi_call("multistage_begin", made)

        @custom_vmap
        def begun(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            run, every = call(*inputs, **self._given())
            return _alone.bind(run), every

        @begun.def_vmap
        def _batched(_size: int, _batched: object, *inputs: jax.Array) -> tuple[Any, Any]:
            return begun(*inputs), (False, False)

        once: Any = jax.custom_jvp(begun)
        once.defjvp(_refuse_again)
        found: tuple[jax.Array, jax.Array] = once(*inputs)
        return found

    def turn(self, run: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the run to load of, the steps of its blocks, and the next token.

        Branches of a batch that become a select share places for what their reverse sweeps need,
        so that members may hold the number of a run of another branch; see `ms_loop_turn`.
        """
        made = (shaped((), jnp.uint32), shaped((), jnp.int32), shaped((), jnp.uint32))
        call = jax.ffi.ffi_call("multistage_turn", made)

        @custom_vmap
        def turned(run: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            number, every, after = call(run, token, **self._given())
            return number, every, after

        @turned.def_vmap
        def _turn_batch(_size: int, _batched: object, *given: jax.Array) -> tuple[Any, Any]:
            return turned(*given), (False, False, False)

        number, every, after = turned(run, token)
        return number, every, after

    def load(self, numbers: Arrays, witness: jax.Array, first: Arrays) -> Loaded:
        """Return the next token, the last j <= k that is there, and the state before block j.

        `numbers` are run, token, k, the steps of the run and those of a block; `first` is state 0,
        which is there always: a pullback can be called again, or by an outer loop that JAX has
        moved its forward sweep out of.
        """
        number = shaped((), jnp.uint32), shaped((), jnp.int32)

        @custom_vmap
        def loaded(numbers: Arrays, _witness: jax.Array, first: Arrays) -> Loaded:
            made = (*number, *(shaped(a.shape, a.dtype) for a in first))
            call = jax.ffi.ffi_call("multistage_load", made)
            token, j, *leaves = call(*numbers, *first, **self._given())
            return token, j, tuple(leaves)

        @loaded.def_vmap
        def _load_batch(size: int, batched: Any, numbers: Arrays, *given: Any) -> tuple[Any, Any]:
            many = wide(size, batched[2], typed(given[1], first))
            return loaded(numbers, given[0], many), (False, False, (True,) * len(many))

        found: Loaded = loaded(numbers, witness, first)
        return found


def _refuse_again(_primals: object, _tangents: object) -> NoReturn:
    raise ArgumentError(
        "multistage.jax has first derivatives, in reverse mode; for others (hessian, grad of "
        "grad) use jax.lax.scan with jax.checkpoint, or diffrax.DirectAdjoint"
    )


def require_first(arrays: Arrays) -> None:
    """Raise ArgumentError where a derivative is taken of a derivative."""
    first: Any = jax.custom_jvp(lambda *_: None)
    first.defjvp(_refuse_again)
    first(*arrays)


def require_unmapped(arrays: Arrays) -> None:
    """Raise ArgumentError for arrays of `shard_map`, whose devices would have a run each.

    Also for those whose type says how they are divided over a mesh: JAX would compare it with that
    of residuals, which are on none.
    """
    types = [jax.typeof(array) for array in arrays]
    if any(one.manual_axis_type.varying for one in types):
        raise ArgumentError(
            "multistage.jax takes no gradients inside shard_map; use jax.lax.scan with "
            "jax.checkpoint there, or programs for one device"
        )
    for one in types:
        if jax.sharding.AxisType.Explicit in one.sharding.mesh.axis_types:
            raise ArgumentError(
                "multistage.jax.scan takes gradients of arrays on one device, and here is one on "
                f"a mesh, {one}; put it on one, or use jax.lax.scan with jax.checkpoint"
            )


# The steps of a batch are taken together, so that a run, its token and its blocks are never
# batched; a witness, an array of the shape of the batch, has a load know it.


@custom_vmap
def most(number: jax.Array) -> jax.Array:
    """Return the most of a number that members of a batch hold."""
    return number


@most.def_vmap
def _most_of_batch(_size: int, _batched: object, number: jax.Array) -> tuple[Any, bool]:
    return most(number.max(0)), False


def typed(arrays: Arrays, like: Arrays) -> Arrays:
    """Return arrays of the dtypes of others: JAX may give numbers of Python for what it knows."""
    return tuple(jnp.asarray(a, b.dtype) for a, b in zip(arrays, like, strict=True))


def wide(size: int, batched: Sequence[bool], arrays: Arrays) -> Arrays:
    """Return arrays of a batch."""
    return tuple(
        array if is_batched else jnp.broadcast_to(array, (size, *jnp.shape(array)))
        for array, is_batched in zip(arrays, batched, strict=True)
    )


def _saved(
    run: jax.Array, token: jax.Array, k: jax.Array, witness: jax.Array, *leaves: jax.Array
) -> tuple[jax.Array, jax.Array]:
    call: Any = jax.ffi.ffi_call("multistage_save", shaped((), jnp.uint32))
    return call(run, token, k, *leaves), witness


_save: Any = custom_vmap(_saved)


@_save.def_vmap  # type: ignore[untyped-decorator]
def _save_batch(size: int, batched: list[bool], *given: jax.Array) -> tuple[Any, Any]:
    return _save(*given[:3], *wide(size, batched[3:], given[3:])), (False, True)


def save(
    run: jax.Array, token: jax.Array, k: jax.Array, witness: jax.Array, leaves: Arrays
) -> tuple[jax.Array, jax.Array]:
    """Save the state before block k; return the next token and the witness."""
    found: tuple[jax.Array, jax.Array] = _save(run, token, k, witness, *leaves)
    return found
