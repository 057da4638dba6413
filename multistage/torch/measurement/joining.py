"""Neighbouring stages that a plan treats alike, run as one.

A plan runs most stages in stretches: a segment is run forward, its tapes are made one
after the other and used up one after the other, and no action needs a state inside.
Run as one stage, a stretch has one environment, one set of hooks and one look at the
generators, in place of one for each of its stages; which operators run, in which order,
and what is kept of them remain the same.

Bytes that stages return and values in the states between them are looked at as ever.
Where they are other than planned for, the run is undone and the stages run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ...actions import Action, Advance, EndForward, Free, Load, Put, Reverse, Save, Tape
from ...model.stages import StageCosts
from ..environment.scope import Scope
from ..environment.states import leaves_of
from .traits import ApartError, Count, Sizes, Traits

Calls: TypeAlias = Sequence[Callable[..., object]]
_MOST_NAMES = 3  # in the name of a stretch


class Joined:
    """Stages run as one.

    Parameters
    ----------
    stages : sequence of callables
    sizes : sequence of Sizes or None
        Of each; empty for stages that no plan parts, whose states between are not looked at.
    """

    def __init__(self, stages: Calls, sizes: Sequence[Sizes | None] = ()) -> None:
        self._stages, self.sizes = tuple(stages), tuple(sizes)
        self.is_bound = any(getattr(stage, "is_bound", False) for stage in stages)
        self._values: list[tuple[object, ...] | None] = [None] * (len(self._stages) - 1)

    def __call__(self, state: object) -> object:
        """Run the stages from a state."""
        box = [state]
        del state
        return self.run(box)

    def run(
        self, box: list[object], between: Callable[[int, object], None] | None = None
    ) -> object:
        """Run the stages from the state in a box, which is emptied: nothing here holds it longer.

        `between` is called with the number of each stage but the last, and what it returned.
        """
        state = box.pop()
        last = len(self._stages) - 1
        for number, stage in enumerate(self._stages):
            state = stage(state)
            if between is not None and number < last and self.sizes:
                between(number, state)
        return state

    def look(
        self, devices: Container[torch.device], count: Count | None, number: int, state: object
    ) -> None:
        """Compare a state inside with those that the plan is for.

        Parameters
        ----------
        devices : container of torch.device
            Whose generators are watched while the stages run.
        count : Count or None
            Of the bytes that they save.
        number : int
            Of the stage that returned the state.
        state : pytree

        Raises
        ------
        LargerError
            If it is larger.
        ApartError
            If it holds other values beside its tensors, or lies on another device.
        """
        leaves = leaves_of(state)
        sizes, following = self.sizes[number : number + 2]
        if sizes is not None:
            sizes.returned(number, leaves)
        if count is not None and following is not None:
            count.end()
            count.begin(following)
        if not all(x.device in devices for x in leaves if isinstance(x, Tensor)):
            raise ApartError
        values = tuple([x for x in leaves if not isinstance(x, Tensor)])
        known = self._values[number]
        if known is None:
            if Sizes.way(leaves, 0) is None:
                raise ApartError
            self._values[number] = values
        elif known != values:
            raise ApartError


def grouped(stages: Calls, groups: Sequence[Sequence[int]]) -> list[Callable[..., object]]:
    """Return one callable for each group of stages."""
    return [
        stages[group[0]] if len(group) == 1 else Joined([stages[i] for i in group])
        for group in groups
    ]


Stretches: TypeAlias = tuple[Calls, Sequence[Traits], Sequence[Action]]


@dataclass(slots=True)
class Running:
    """The stages of a plan as they are run, worked out once.

    Attributes
    ----------
    joins : bool
        Whether stages may be run as one: until one is found to be other than planned for.
    """

    joins: bool = True
    _found: dict[bool, tuple[Sequence[Action], Stretches]] = field(default_factory=dict)

    def of(
        self,
        stages: Calls,
        groups: Sequence[Sequence[int]],
        traits: Sequence[Traits],
        costs: StageCosts,
        actions: Sequence[Action],
        *,
        joins: bool,
    ) -> Stretches:
        """Return stages, what groups of them do, and their plan's actions by their numbers."""
        found = self._found.get(joins)
        if found is None or found[0] is not actions:
            traits = [
                replace(trait, remade=trait.ways[stage.way - 1]) if stage.way else trait
                for trait, stage in zip(traits, costs.stages, strict=True)
            ]
            alone = grouped(stages, groups), traits, actions
            found = self._found[joins] = actions, stretched(*alone) if joins else alone
        return found[1]


def stretched(stages: Calls, traits: Sequence[Traits], actions: Sequence[Action]) -> Stretches:
    """Return stages joined where a plan never parts them, and its actions by their numbers.

    Stages whose tapes are kept in part, that need a graph to run, that differentiate, that have
    kernels fill what they saved, or that write to the chain's input stay alone: what is kept
    while they run is theirs.  So do all where a tier takes part.
    """
    starts = _starts(traits, actions)
    if len(starts) == len(stages) or any(isinstance(action, Put) for action in actions):
        return stages, traits, actions
    ends = [*starts[1:], len(stages)]
    place = {start: number for number, start in enumerate([*starts, len(stages)])}
    groups = list(zip(starts, ends, strict=True))
    return (
        [
            stages[a] if b == a + 1 else Joined(stages[a:b], [t.sizes for t in traits[a:b]])
            for a, b in groups
        ],
        [traits[a] if b == a + 1 else _together(stages[a:b], traits[a:b]) for a, b in groups],
        [new for action in actions if (new := _renumbered(action, place)) is not None],
    )


def _together(stages: Calls, traits: Sequence[Traits]) -> Traits:
    names = [trait.name for trait in traits]
    name = "+".join(names) if len(names) <= _MOST_NAMES else f"{names[0]} to {names[-1]}"
    scopes = [t.scope or Scope([s]) for s, t in zip(stages, traits, strict=True)]
    scope = Scope([value for each in scopes for value in each.values])
    return Traits.together(name, traits, scope, _sum([trait.sizes for trait in traits]))


def _starts(traits: Sequence[Traits], actions: Sequence[Action]) -> list[int]:
    """Return the first stages of the longest stretches that no action parts."""
    alone = [i for i, t in enumerate(traits) if t.remade or not t.is_simple]
    parted = {0, *alone, *(i + 1 for i in alone)}
    before: tuple[type, int] = EndForward, 0  # what ran last, and where it stood when done
    for action in [*_with_tapes(actions), EndForward()]:
        begin = end = 0  # where stages are parted anyhow
        match action:
            case Advance(start, stop) if start == stop:
                continue
            case Advance(start, stop):
                begin, end = start, stop
            case Tape(step):
                begin, end = step, step + 1
            case Reverse(step):
                begin, end = step + 1, step
            case Save(step) | Load(step) | Free(step):
                begin = step
        if before != (type(action), begin):
            parted |= {before[1], begin}
        before = type(action), end
    return sorted(parted - {len(traits)})


def _with_tapes(actions: Sequence[Action]) -> Iterator[Action]:
    """Yield actions with the tapes that a `Reverse` makes itself, so that stretches have them."""
    held: set[int] = set()
    for action in actions:
        if isinstance(action, Tape):
            held.add(action.step)
        elif isinstance(action, Reverse):
            if action.step not in held:
                yield Tape(action.step)
            held.discard(action.step)
        yield action


def _sum(sizes: Sequence[Sizes | None]) -> Sizes | None:
    """Return the bytes that stages save together, and those that the last returns."""
    known = [each for each in sizes if each is not None]
    if len(known) < len(sizes):
        return None
    saved = [each.saved_bytes for each in known if each.saved_bytes is not None]
    together = sum(saved) if len(saved) == len(known) else None
    varies = any(each.varies for each in known)
    return replace(known[-1].fresh(), saved_bytes=together, varies=varies)


def _renumbered(action: Action, place: dict[int, int]) -> Action | None:
    """Return an action by the numbers of stretches; None where one inside of it continues."""
    match action:
        case Advance(start, stop):
            # Where it stops may lie in a stretch that continues: the next action runs the rest.
            inner = [place[i] for i in range(start, stop) if i in place]
            return Advance(inner[0], inner[-1] + 1) if inner else None
        case Tape(step) | Reverse(step) | Save(step) | Load(step) | Free(step):
            return type(action)(place[step]) if step in place else None
        case _:
            return action
