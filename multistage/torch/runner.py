"""One forward and backward of a chain of stages, by a plan.

The graph is the one plain autograd builds: every stage runs once in the
forward sweep with gradients on, so parameters, hooks, DistributedDataParallel
and `torch.autograd.grad` see what they always see, and gradients are
accumulated in the same order.  Only what the graph *saves* differs.  A stage
whose tape the plan does not keep runs under saved-tensor hooks that keep a
number in place of each tensor.  When the backward pass asks for the first of
them, the plan's actions are performed up to that stage: states are run forward
again without a tape, and the stage itself once more with the tensors it saves
caught in order.

Order.  The engine runs nodes by the order of their making, the latest first,
so all nodes of a stage run before any of the one below.  A stage is done with
when one below it asks.  Should a finished stage be asked again (a second
backward with `retain_graph`, or devices whose threads interleave), the sweep
starts over from state 0: slower, and right.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Tape
from ..errors import MultistageError, StateError
from .environment import Environment
from .inside import Inside
from .randomness import Generators, State
from .saved import Caught, Complete, Kind, difference, kind_of, nodes_made
from .scope import Scope
from .settings import Settings
from .states import KeptState, refuse_shared, tensors_in, wants_of
from .streams import Home
from .turns import TURN


@dataclass(frozen=True, slots=True)
class Traits:
    """What a stage does besides computing its output.

    Attributes
    ----------
    name : str
    buffers : tuple of (module, buffer name)
        Buffers it changes.
    draws : bool
        Whether it draws random numbers.
    graded : bool
        Whether it must be run with a graph to give the same bits.
    changes_input : bool
        Whether it writes to its input; true of a first stage only, others are
        joined to the stage before.
    differentiates : bool
        Whether it computes gradients inside of its forward.
    unhooked : bool
        Whether it fails under saved-tensor hooks, as `torch.func` does, so that
        its tape must be kept.
    scope : Scope, optional
        What it refers to; searched for if not given.
    """

    name: str
    buffers: tuple[tuple[nn.Module, str], ...] = ()
    draws: bool = False
    graded: bool = False
    changes_input: bool = False
    differentiates: bool = False
    unhooked: bool = False
    scope: Scope | None = None


class Run:
    """One forward pass under a plan; lives as long as the graph it made.

    Parameters
    ----------
    stages, traits : sequences of equal length
    actions : sequence of Action
        Of a plan; its last stage is the loss.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[Any], Any]],
        traits: Sequence[Traits],
        actions: Sequence[Action],
    ) -> None:
        self._stages, self._traits, self._actions = stages, traits, actions
        self._scopes = [t.scope or Scope.of(s) for s, t in zip(stages, traits, strict=True)]
        self._around: dict[int, Environment] = {}
        self._settings: Settings | None = None  # of the forward sweep
        self._holds_in: int | None = None  # a backward pass in which they were found to hold
        self._devices: set[torch.device] = set()
        self._generators = Generators()
        self._random: tuple[State, ...] = ()  # of the generators, between two stages
        self._kinds: dict[int, list[Kind]] = {}  # of the tensors each dropped stage saved
        self._wants: dict[int, tuple[bool, ...]] = {}  # of the leaves of each state, at first
        self._saved: dict[int, KeptState] = {}
        self._tapes: dict[int, list[Tensor | None]] = {}
        self._given: dict[int, list[weakref.ref[Tensor] | None]] = {}
        self._versions: dict[int, list[int]] = {}  # of tensors, when they were saved
        self._inputs: dict[int, KeptState] = {}  # of the tapes that were made again
        self._live: KeptState | None = None
        self._next = 0  # place in the actions
        self._at = len(stages)  # the lowest stage whose adjoint has begun
        self._home = Home()
        self._lock = threading.RLock()
        self._shares = any(trait.draws or trait.buffers for trait in traits)  # with other threads

    def forward(self, state: Any) -> Any:
        """Run all stages; return the last state.

        Raises
        ------
        StateError
            If a stage changes what it did not change when it was profiled.
        """
        with self._turn():
            return self._forward(state)

    def _turn(self) -> AbstractContextManager[None]:
        return TURN.taken() if self._shares else contextlib.nullcontext()

    def _forward(self, state: Any) -> Any:
        self._watch({t.device for scope in self._scopes for t in scope.look().tensors})
        self._watch({t.device for t in tensors_in(state)})
        self._settings = settings = Settings.capture(self._device_types())
        first = KeptState.of(state)
        if self._traits[0].changes_input:
            refuse_shared(tensors_in(state))
            first = first.cloned()
        self._saved[0] = first
        for action in self._actions_left():
            match action:
                case Save(step):
                    self._saved[step] = KeptState.of(state)
                case Advance(start, stop):
                    for i in range(start, stop):
                        state = self._dropped(i, state)
                case Tape(step):
                    if step < len(self._stages):
                        state = self._run_first(step, state)
                case EndForward():
                    break
                case _:
                    raise AssertionError(f"{action} in the forward sweep")
        changed = settings.differences(Settings.capture(self._device_types()))
        if changed:
            raise StateError(
                f"a stage changed a setting and left it changed: {', '.join(changed)}; stages "
                "cannot be run again as they were: change it outside of the chain"
            )
        self._random = ()
        return state

    def _watch(self, devices: set[torch.device]) -> None:
        """Look at the generators of these devices too."""
        if torch.cuda.is_initialized():
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        if not self._random or not devices <= self._devices:
            self._devices |= devices
            own = {id(g): (name, g) for scope in self._scopes for name, g in scope.generators()}
            others = [d for d in self._devices if d.type not in ("cpu", "meta")]
            self._generators = Generators(sorted(others, key=str), own.values())
            self._random = self._generators.capture()

    def _device_types(self) -> list[str]:
        return sorted({"cpu", *(device.type for device in self._devices)} - {"meta"})

    def _actions_left(self) -> Iterator[Action]:
        """Yield the actions from where the last one left off."""
        while self._next < len(self._actions):
            action = self._actions[self._next]
            self._next += 1
            yield action

    def _run_first(
        self,
        i: int,
        state: Any,
        hooks: AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008
    ) -> Any:
        """Run stage i in the forward sweep; remember and verify its environment."""
        leaves = pytree.tree_leaves(state)
        if any(isinstance(x, Tensor) and x.device not in self._devices for x in leaves):
            self._watch({t.device for t in tensors_in(state)})
        self._wants[i] = wants_of(leaves)
        trait = self._traits[i]
        around = self._around[i] = Environment(
            self._scopes[i], f"stage {trait.name}", trait.buffers
        )
        with hooks:
            state = self._stages[i](state)
        before, self._random = self._random, self._generators.capture()
        if around.drew(self._generators, before, self._random):
            self._shares = True
        around.verify()
        around.let_graphs_go()
        TURN.moved()
        return state

    def _dropped(self, i: int, state: Any) -> Any:
        """Run stage i; its graph keeps numbers in place of tensors."""
        kinds: list[Kind] = []
        begun = nodes_made()
        # Until it is through.
        inside: Inside | None = Inside(self._traits[i].name, self._traits[i].differentiates)

        def pack(tensor: Tensor) -> int:
            kinds.append(kind_of(tensor, self._around[i].places(), begun))
            if inside is not None:
                inside.keep(tensor)
            return len(kinds) - 1

        def unpack(number: int) -> Tensor:
            return self._tensor(i, number) if inside is None else inside.give(number)

        self._kinds[i] = kinds
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        try:
            return self._run_first(i, state, hooks)
        finally:
            inside = None

    # ---------------------------------------------------------------- backward

    def _tensor(self, i: int, number: int) -> Tensor:
        """Return the tensor that stage i saved as its `number`-th."""
        if torch.is_grad_enabled():
            raise MultistageError(
                "double backward (create_graph=True) through a chain with recomputed stages is "
                "not supported; give it memory enough to keep every tape"
            )
        with self._lock:
            for j in [j for j in self._tapes if j > i]:
                self._forget(j)  # nothing above is asked for any more
            if i not in self._tapes:
                with self._as_at_first():
                    if i >= self._at:
                        self._start_over()
                    self._drive(i)
            self._at = i
            tensor = self._take(i, number)
            self._home.hand(tensor)
            return tensor

    @contextlib.contextmanager
    def _as_at_first(self) -> Iterator[None]:
        """Return to the stream and the settings of the forward sweep."""
        settings = self._settings
        assert settings is not None
        task = torch._C._current_graph_task_id()  # of the backward pass; -1 outside of any
        if task < 0 or task != self._holds_in:
            self._holds_in = task if settings.hold() else None
        holds = self._holds_in == task
        hold = contextlib.nullcontext() if holds else settings.context()
        with self._turn(), self._home.context(), hold:
            yield

    def _take(self, i: int, number: int) -> Tensor:
        tape, given = self._tapes[i], self._given[i]
        tensor = tape[number]
        if tensor is None:
            # Asked for twice, as a custom Function may: nobody else may hold it any more.
            reference = given[number]
            tensor = reference() if reference is not None else None
            if tensor is None:
                self._live = self._inputs[i]
                with self._as_at_first():
                    self._tape(i, alone=True)
                self._live = None
                return self._take(i, number)
        if tensor._version != self._versions[i][number]:
            # Autograd's own check, which hooks bypass.
            raise RuntimeError(
                f"a tensor that stage {self._traits[i].name} saved for its gradient has been "
                "modified by an inplace operation; plain training fails here too"
            )
        # From here on it lives as long as the node that asked wants it.
        tape[number], given[number] = None, weakref.ref(tensor)
        return tensor

    def _drive(self, i: int) -> None:
        """Perform the plan's actions until the adjoint of stage i may begin."""
        self._at = -1  # should an action fail, the next request starts over
        for action in self._actions_left():
            match action:
                case Reverse(step):
                    self._live = None
                    if step == i:
                        return
                    if step in self._tapes:
                        self._forget(step)
                case Load(step):
                    self._live = self._saved[step]
                case Save(step):
                    assert self._live is not None
                    self._saved[step] = self._live
                case Free(step):
                    del self._saved[step]
                case Advance(start, stop):
                    for j in range(start, stop):
                        self._advance(j)
                case Tape(step):
                    self._tape(step, alone=self._actions[self._next] == Reverse(step))
                case _:
                    raise AssertionError(f"{action} in the reverse sweep")
        raise AssertionError(f"the plan ended without stage {i}")

    def _forget(self, i: int) -> None:
        del self._tapes[i], self._given[i], self._inputs[i], self._versions[i]

    def _advance(self, i: int) -> None:
        state = self._live
        assert state is not None
        self._live = None
        with torch.set_grad_enabled(self._traits[i].graded), self._around[i].again():
            self._live = KeptState.of(
                self._stages[i](state.fresh(self._wants[i], self._traits[i].changes_input))
            )

    def _tape(self, i: int, *, alone: bool) -> None:
        """Run stage i again, catching what it saves; if `alone`, its output is not wanted.

        Raises
        ------
        StateError
            If it saves something else than when it first ran.
        """
        state = self._live
        assert state is not None
        first = self._kinds[i]
        caught, output = self._catch(i, state, len(first) if alone else None)
        if alone and not self._are_alike(first, caught.kinds):
            # Or it would have saved more: look at all it saves.
            del caught, output
            caught, output = self._catch(i, state, None)
        if [kind[:-1] for kind in caught.kinds] != [kind[:-1] for kind in first]:
            raise StateError(
                f"stage {self._traits[i].name} saved other tensors when it was run again than at "
                f"first ({difference(first, caught.kinds)}); a stage must do the same every time"
            )
        self._tapes[i], self._given[i] = caught.tape, [None] * len(caught.tape)
        self._versions[i] = caught.versions
        self._inputs[i] = state
        self._live = None if alone else KeptState.of(output)
        TURN.moved()

    def _are_alike(self, first: Sequence[Kind], again: Sequence[Kind]) -> bool:
        """Whether saved tensors agree, and the numbers of nodes made before each."""
        assert self._settings is not None
        if any(each.enabled for each in self._settings.autocast):
            # A cast that came from autocast's cache at first is a node of its own now.
            return [kind[:-1] for kind in first] == [kind[:-1] for kind in again]
        return first == again

    def _catch(self, i: int, state: KeptState, enough: int | None) -> tuple[Caught, Any]:
        """Run stage i again up to `enough` saved tensors, to the end if None."""
        # Not with the output in it, whose graph leads here.
        caught = Caught()
        output = None
        changes_input = self._traits[i].changes_input
        begun = 0

        inside = Inside(self._traits[i].name, self._traits[i].differentiates)

        def catch(tensor: Tensor) -> int:
            if len(caught.tape) == enough:  # the stage has suppressed what should have ended it
                raise Complete
            caught.tape.append(tensor.detach())
            caught.versions.append(tensor._version)
            caught.kinds.append(kind_of(tensor, around.places(), begun))
            inside.keep(tensor)
            if len(caught.tape) == enough:
                raise Complete
            return len(caught.tape) - 1

        around = self._around[i]
        with (
            contextlib.suppress(Complete),
            contextlib.closing(inside),
            torch.enable_grad(),
            around.again(),
            torch.autograd.graph.saved_tensors_hooks(catch, inside.give),
        ):
            inputs = state.fresh(self._wants[i], changes_input)
            begun = nodes_made()
            output = self._stages[i](inputs)
        return caught, output

    def _start_over(self) -> None:
        """Stand where the forward sweep ended, by running forward again."""
        self._tapes.clear()
        self._given.clear()
        self._inputs.clear()
        self._versions.clear()
        self._saved = {0: self._saved[0]}
        self._at = len(self._stages)
        self._live = self._saved[0]
        self._next = 0
        for action in self._actions_left():
            match action:
                case Save(step):
                    self._saved[step] = self._live
                case Advance(start, stop):
                    for j in range(start, stop):
                        self._advance(j)
                case Tape(step):
                    if step < len(self._stages):
                        self._advance(step)  # the graph has its tape
                case EndForward():
                    break
                case _:
                    raise AssertionError(f"{action} in the forward sweep")
        self._live = None
