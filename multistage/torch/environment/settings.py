"""Settings outside of any module that decide what a computation computes.

Autocast; which kernels may run (attention's backends, cuDNN, oneDNN, precision
of matrix products, orders of contraction, deterministic algorithms); the default dtype and device;
how many threads share a sum; whether denormal numbers are flushed; modes that
intercept functions and operators.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
    set_eval_frame,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast settings of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls, device_types: Sequence[str]) -> tuple[Autocast, ...]:
        """Return the present settings."""
        return tuple(
            cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in device_types
        )

    def context(self) -> torch.autocast:
        """Return a context with these settings; weights cast again, not taken from a cache."""
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )


@contextlib.contextmanager
def casting_anew() -> Iterator[None]:
    """Return a context in which autocast casts weights each time, and keeps no cast.

    But in regions inside, where it is not enabled around: they end with the cache of theirs.
    """
    before, core = torch.is_autocast_cache_enabled(), torch._C
    torch.set_autocast_cache_enabled(before and not core._is_any_autocast_enabled())
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Return a context in which operators are deterministic; those that cannot be warn."""
    before = _deterministic()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        _set_deterministic(before)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings at one moment; equal to others that let the same kernels run."""

    autocast: tuple[Autocast, ...]
    flags: tuple[object, ...]
    modes: tuple[object, ...]  # what the function modes are: each `with` makes new ones
    function_modes: tuple[TorchFunctionMode, ...] = field(compare=False)
    operator_modes: tuple[TorchDispatchMode, ...] = field(compare=False)

    @classmethod
    def capture(cls, device_types: Sequence[str]) -> Settings:
        """Return the present settings; autocast's of some device types."""
        core = torch._C
        modes = [core._get_function_stack_at(i) for i in range(core._len_torch_function_stack())]
        others = [core._get_dispatch_stack_at(i) for i in range(core._len_torch_dispatch_stack())]
        return cls(
            Autocast.capture(device_types),
            tuple([flag.get() for flag in _FLAGS]),
            tuple([(type(mode), getattr(mode, "device", None)) for mode in modes]),
            tuple(modes),
            tuple(others),
        )

    def differences(self, now: Settings) -> list[str]:
        """Return the names of settings that are others now."""
        pairs = zip(_FLAGS, self.flags, now.flags, strict=True)
        found = [f"{flag.name} ({a} and {b})" for flag, a, b in pairs if a != b]
        if self.autocast != now.autocast:
            found.append("autocast")
        if self.modes != now.modes:
            found.append("modes that intercept functions, such as a default device")
        return found

    def hold(self) -> bool:
        """Whether they are the present ones, with nothing to enter for them."""
        now = Settings.capture([each.device_type for each in self.autocast])
        return (
            now == self
            and now.function_modes == self.function_modes
            and now.operator_modes == self.operator_modes
            and not any(each.enabled for each in self.autocast)
            and get_eval_frame_callback() is None
        )

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Return a context with these settings, whatever they are outside of it."""
        now = Settings.capture(())
        with contextlib.ExitStack() as stack:
            stack.callback(set_eval_frame, set_eval_frame(None))
            if now.flags != self.flags:
                stack.callback(_set_flags, now.flags)
                _set_flags(self.flags)
            if now.function_modes != self.function_modes:
                stack.callback(_set_function_modes, now.function_modes)
                _set_function_modes(self.function_modes)
            for mode in self.operator_modes:
                # Torch's own and ours observe, and should not count twice.
                observes = type(mode).__module__.split(".", 1)[0] in ("torch", "multistage")
                if mode not in now.operator_modes and not observes:
                    _push_mode(mode)
                    stack.callback(_pop_mode)
            present = Autocast.capture([each.device_type for each in self.autocast])
            for each, around in zip(self.autocast, present, strict=True):
                # Where none is around, regions inside have caches of their own.
                if each.enabled or each != around:
                    stack.enter_context(each.context())
            yield


def uncompiled(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Have a function run as it is written where `torch.compile` compiles what calls it.

    And what it calls, unless that was compiled by itself: it is to be the same when it is
    measured, run, and run again in a backward pass outside of what is compiled.
    """

    @wraps(function)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        before = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    # As torch.compiler.disable does, which imports the compiler, for seconds: neither inlined in
    # what calls it nor compiled by itself.
    vars(run).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="multistage runs it")
    made: Any = run
    set_code_exec_strategy(
        made.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    )
    return run


def leave_hooks_alone() -> None:
    """Keep a compiler at work in this process from compiling what runs here.

    Hooks on saved tensors are called while a compiled stage runs, and torch.compile would
    take them for parts of it.  It is not imported for that: a compiled stage has done so.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None or "multistage" in _left_alone:
        return
    _left_alone.add("multistage")
    rules.add("multistage")


_left_alone: set[str] = set()  # packages that torch.compile leaves alone on our request


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _flags() -> Iterator[_Flag]:
    # Not through torch.backends, whose properties take five times as long to read.
    core: Any = torch._C
    yield _Flag("the default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield _Flag("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads)
    yield _Flag("flushing of denormal numbers", _flushes, torch.set_flush_denormal)
    yield _Flag("deterministic algorithms", _deterministic, _set_deterministic)
    mha = torch.backends.mha  # attention's kernel where no gradient is required
    yield _Flag("torch.backends.mha", mha.get_fastpath_enabled, mha.set_fastpath_enabled)
    yield _Flag("torch.backends.opt_einsum", _einsum, _set_einsum)
    yield _Flag("matmul precision", _matmul_precision, _set_matmul_precision)
    cuda = torch.backends.cuda.is_built()
    for key in _PRECISIONS:
        if key[0] == "cuda" and not cuda:
            continue
        name = f"torch.backends' fp32_precision of {' '.join(key)}"
        get, put = core._get_fp32_precision_getter, core._set_fp32_precision_setter
        yield _Flag(name, partial(get, *key), partial(put, *key))
    for name in (
        "cudnn_enabled",
        "cudnn_benchmark",
        "cudnn_deterministic",
        "mkldnn_enabled",
        "mkldnn_deterministic",
        "nnpack_enabled",
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_bf16_reduced_precision_reduction",
        "cublas_allow_fp16_accumulation",
        "math_sdp_allow_fp16_bf16_reduction",
    ):
        if name.startswith("cu") and not cuda:
            continue
        if hasattr(core, f"_get_{name}") and hasattr(core, f"_set_{name}"):
            setter = getattr(core, f"_set_{name}")
            if name.endswith("_reduced_precision_reduction"):
                setter = _unpacking(setter)
            yield _Flag(f"torch.backends' {name}", getattr(core, f"_get_{name}"), setter)
    if hasattr(core, "_get_sdp_priority_order"):
        order = lambda: tuple(core._get_sdp_priority_order())  # noqa: E731
        yield _Flag("attention's order of backends", order, core._set_sdp_priority_order)
    for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3"):
        if hasattr(core, f"_get_{name}_sdp_enabled") and hasattr(core, f"_set_sdp_use_{name}"):
            getter, setter = f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}"
            yield _Flag(f"attention's backend {name}", getattr(core, getter), getattr(core, setter))


_DENORMAL = float.fromhex("0x1p-1074")


def _flushes() -> bool:
    """Whether this thread takes denormal numbers for zero, which torch tells nobody."""
    return _DENORMAL == 0.0


_PRECISIONS = (
    ("generic", "all"),
    *((backend, kind) for backend in ("cuda", "mkldnn") for kind in ("all", "matmul", "conv")),
    ("cuda", "rnn"),
    ("mkldnn", "rnn"),
)


def _matmul_precision() -> str | None:
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:  # set by `fp32_precision`, read above
        return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch._C._set_float32_matmul_precision(value)


def _einsum() -> tuple[bool, str | None]:
    order: Any = torch.backends.opt_einsum
    return order.enabled, order.strategy


def _set_einsum(value: tuple[bool, str | None]) -> None:
    # Assignments are kept beside the module that `flags` writes to, and come before it.
    order: Any = torch.backends.opt_einsum
    for key, each in zip(("enabled", "strategy"), value, strict=True):
        vars(order if key in vars(order) else order.m)[key] = each


def _deterministic() -> tuple[bool, bool, bool]:
    core = torch._C
    return (
        core._get_deterministic_algorithms(),
        core._get_deterministic_algorithms_warn_only(),
        core._get_deterministic_fill_uninitialized_memory(),
    )


def _set_deterministic(value: tuple[bool, bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])
    torch._C._set_deterministic_fill_uninitialized_memory(value[2])


def _unpacking(setter: Callable[..., None]) -> Callable[[Any], None]:
    return lambda value: setter(*value) if isinstance(value, tuple) else setter(value)


_FLAGS = tuple(_flags())


def _set_flags(wanted: Sequence[object]) -> None:
    for flag, value in zip(_FLAGS, wanted, strict=True):
        # Read again: setting one may have set another.
        if flag.get() != value:
            flag.set(value)


def _set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Exchange the whole stack, without entering or leaving any."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
