"""What a stage must find when it is run again, to do exactly what it did.

Random numbers, autocast, the training flags, and the buffers it changes (batch
norm's statistics): captured before the first run, put back around each later
one.  Buffers are exchanged as objects, not copied over, so that a replay
neither counts twice nor touches a tensor that a graph may have saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StateError


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


def refuse_hidden_draws(modules: Iterable[Any], name: str) -> None:
    """Refuse modules that draw random numbers no generator tells of.

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

    def context(self) -> Any:
        """Return a context with these settings; weights cast anew, not taken from a cache."""
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )


@contextlib.contextmanager
def autocast(settings: Sequence[Autocast]) -> Iterator[None]:
    """Return a context with the settings of several device types."""
    with contextlib.ExitStack() as stack:
        for each in settings:
            stack.enter_context(each.context())
        yield


@dataclass(slots=True)
class Surroundings:
    """What one run of a stage depends on besides its input.

    Parameters
    ----------
    stage : callable
    name : str
        For messages.
    buffers : sequence of (module, buffer name)
        Those the stage changes.
    """

    stage: Any
    name: str
    random: RandomState | None
    autocast: tuple[Autocast, ...]
    training: tuple[bool, ...]
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)  # of parameters
    others: list[tuple[Tensor, int]] = field(default_factory=list)  # and of other buffers

    @classmethod
    def capture(
        cls,
        stage: Any,
        name: str,
        tensors: Sequence[Tensor],
        buffers: Sequence[tuple[nn.Module, str]],
    ) -> Surroundings:
        """Look around before a stage runs on `tensors`."""
        is_module = isinstance(stage, nn.Module)
        involved = [*tensors, *(stage.parameters() if is_module else ())]
        devices = random_devices(involved)
        kept = [(module, key, module._buffers[key]) for module, key in buffers]
        changing = {(id(module), key) for module, key in buffers}
        others = (
            [
                (buffer, buffer._version)
                for module in stage.modules()
                for key, buffer in module._buffers.items()
                if buffer is not None and (id(module), key) not in changing
            ]
            if is_module
            else []
        )
        return cls(
            stage=stage,
            name=name,
            random=RandomState.capture(devices),
            autocast=Autocast.capture(device_types(involved)),
            training=tuple(m.training for m in stage.modules()) if is_module else (),
            buffers=[(m, k, b.detach().clone()) for m, k, b in kept if b is not None],
            versions=[(p, p._version) for p in stage.parameters()] if is_module else [],
            others=others,
        )

    def after_first_run(self) -> None:
        """Check what the run changed; forget the random state if nothing was drawn."""
        assert self.random is not None
        devices = [device for device, _ in self.random.devices]
        if self.random.same_as(RandomState.capture(devices)):
            self.random = None
        for buffer, version in self.others:
            if buffer._version != version:
                raise StateError(
                    f"stage {self.name} changed a buffer that it left alone when it was "
                    "profiled; profile it in the mode it is trained in, or keep its tape"
                )
        self.others = []

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Make everything as it was; put the present back at the end.

        Raises
        ------
        StateError
            If a parameter was changed since.
        """
        for parameter, version in self.versions:
            if parameter._version != version:
                raise StateError(
                    f"a parameter of stage {self.name} was changed in place between forward and "
                    "backward; the stage cannot be run again as it was"
                )
        with contextlib.ExitStack() as stack:
            if self.random is not None:
                stack.callback(RandomState.capture([d for d, _ in self.random.devices]).restore)
                self.random.restore()
            for module, key, value in self.buffers:
                stack.callback(module._buffers.__setitem__, key, module._buffers[key])
                module._buffers[key] = value.clone()
            if self.training:
                modules = list(self.stage.modules())
                now = [module.training for module in modules]
                if tuple(now) != self.training:
                    stack.callback(_set_training, modules, now)
                    _set_training(modules, self.training)
            for settings in self.autocast:
                stack.enter_context(settings.context())
            yield


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag
