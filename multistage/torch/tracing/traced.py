"""The stages of a model that was not written as a chain, and what they hold for.

The model's `forward` is recorded on a sample (`recording.py`), and its graph cut
wherever a single tensor passes that takes part in the gradient: at the
articulation points of the undirected graph that lie on the way from input to
output, as OpenAI's gradient-checkpointing found them for TensorFlow; and where
much lies between two of them, where the fewest bytes pass.  What else may pass
a cut: inputs, and what depends on no parameter (masks, tables of positions).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from ...errors import ArgumentError
from ..environment.randomness import device_types
from ..environment.settings import Settings
from ..measurement.measure import Profile
from .calling import aliases, layouts
from .cutting import Staying, cuts, ways_to_count, why_uncut
from .parts import Code, Part, parts_of
from .recorded import Recorded
from .recording import record
from .watching import has_hooks


class Stages(list[Part]):
    """The stages of a model, in order.

    They hold for what the model was recorded with: `differences` lists what is
    other, and `again` records the model again.

    Attributes
    ----------
    model : nn.Module
        Whose parameters and buffers they use.
    called_whole : dict
        Paths of modules that were not looked into, with the cause.

    Examples
    --------
    >>> import torch
    >>> from multistage.torch import to_chain
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> stages = to_chain(model, torch.randn(3, 4))
    >>> len(stages), stages.model is model
    (3, True)
    """

    def __init__(self, model: nn.Module, sample: object, recorded: Recorded) -> None:
        found = cuts(recorded)
        super().__init__(parts_of(model, recorded, found))
        self.model = model
        self.called_whole = recorded.closed
        self._staying = ways_to_count(recorded, found)
        self._conditions = _Conditions(model, sample, recorded)
        # For `Sequential`, which looks at the conditions before a run, not in it.
        self.bare: list[Part] = list(self)
        self[0] = copy(self[0])
        self[0].before = self.check

    def differences(self, state: object) -> str | None:
        """Return what differs from when the model was recorded, None if nothing does."""
        return next(self._conditions.differences(state), None)

    def check(self, state: object) -> None:
        """Raise ArgumentError if the stages do not hold for an input."""
        if (found := self.differences(state)) is not None:
            raise ArgumentError(
                f"{type(self.model).__name__} was traced for something else: {found}; call "
                "to_chain again, or let Sequential do it"
            )

    def counted(self, profile: Profile) -> list[Profile]:
        """Return a profile by all ways to count what passes several cuts.

        The first counts it once, with the input, as plain training does.
        """
        return [counted_by(profile, way) for way in self._staying]

    def same_stages(self, other: Stages | None) -> bool:
        """Whether others make the same calls, but for constants."""
        return other is not None and [p.name for p in self] == [p.name for p in other]

    def again(self, sample: object) -> Stages:
        """Return the stages for another input, or for the model as it is now."""
        return stages_of_model(self.model, sample)


def counted_by(profile: Profile, way: Staying) -> Profile:
    """Return a profile in which what stays is counted once, with the input."""
    stages = []
    for group, stage in zip(profile.groups, profile.costs.stages, strict=True):
        here = way.at[group[-1]] if group[-1] < len(way.at) else 0
        here = min(here, stage.output_bytes)
        stages.append(
            replace(
                stage,
                output_bytes=stage.output_bytes - here,
                tape_bytes=stage.tape_bytes - here,
            )
        )
    costs = profile.costs
    input_bytes = costs.input_bytes + way.nbytes
    return replace(profile, costs=replace(costs, stages=tuple(stages), input_bytes=input_bytes))


class _Conditions:
    """What the stages of a model depend on besides what the model holds by then."""

    def __init__(self, model: nn.Module, sample: object, recorded: Recorded) -> None:
        self._given, self._attributes = recorded.given, recorded.attributes
        leaves = self._given(sample)
        self._aliases, self._layouts = aliases(leaves), layouts(leaves)
        self._device_types = device_types([])
        self._settings = Settings.capture(self._device_types)
        modules = dict(model.named_modules())
        self._opened = [(path, modules[path]) for path in recorded.opened]
        self._children = [
            (path, module, tuple(module._modules.values()))
            for path, module in (("", model), *self._opened)
        ]
        self._readings = [(Code(reading.graph), reading.value) for reading in recorded.readings]
        self._extras = SimpleNamespace(**recorded.extras)

    def differences(self, state: object) -> Iterator[str]:
        """Yield what differs now."""
        try:
            leaves = self._given(state)
        except ArgumentError as error:
            yield str(error)
            return
        if aliases(leaves) != self._aliases:
            yield "other arguments are the same tensor"
        if layouts(leaves) != self._layouts:
            yield "an input has other strides, or another requires_grad"
        if Settings.capture(self._device_types) != self._settings:
            yield "the settings of torch's backends or autocast are others"
        for path, module, children in self._children:
            if tuple(module._modules.values()) != children:
                yield f"module {path!r} has other children"
        for path, module in self._opened:
            if has_hooks(module):
                yield f"module {path!r} has hooks, which its stages do not call"
        for _, _, found in self._attributes.differences():
            yield found
        for read, value in self._readings:
            with torch.no_grad():
                now = read(self._extras, *leaves)
            if now != value:
                yield f"forward reads a value of its input, which is {now!r} and was {value!r}"


def stages_of_model(model: nn.Module, sample: object) -> Stages:
    """Record a model on a sample, and cut it.

    Raises
    ------
    ArgumentError
        If it cannot be recorded or cut.
    """
    recorded = record(model, sample)
    stages = Stages(model, sample, recorded)
    if len(stages) == 1:
        raise ArgumentError(f"{type(model).__name__} cannot be cut: {why_uncut(recorded)}")
    return stages
