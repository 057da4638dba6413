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
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Tape
from ..errors import MultistageError, StateError
from .replay import Surroundings
from .streams import Home

_Kind: TypeAlias = tuple[torch.Size, torch.dtype]


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
    """

    name: str
    buffers: tuple[tuple[nn.Module, str], ...] = ()
    draws: bool = False
    graded: bool = False
    changes_input: bool = False


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
        self._around: dict[int, Surroundings] = {}
        self._kinds: dict[int, list[_Kind]] = {}  # of the tensors each dropped stage saved
        self._wants: dict[int, tuple[bool, ...]] = {}  # of the leaves of each state, at first
        self._saved: dict[int, _State] = {}
        self._tapes: dict[int, list[Tensor | None]] = {}
        self._given: dict[int, list[weakref.ref[Tensor] | None]] = {}
        self._versions: dict[int, list[int]] = {}  # of tensors, when they were saved
        self._inputs: dict[int, _State] = {}  # of the tapes that were made again
        self._live: _State | None = None
        self._next = 0  # place in the actions
        self._at = len(stages)  # the lowest stage whose adjoint has begun
        self._home = Home()
        self._lock = threading.RLock()

    def forward(self, state: Any) -> Any:
        """Run all stages; return the last state."""
        first = _State.of(state)
        self._saved[0] = first.cloned() if self._traits[0].changes_input else first
        for action in self._actions_left():
            match action:
                case Save(step):
                    self._saved[step] = _State.of(state)
                case Advance(start, stop):
                    for i in range(start, stop):
                        state = self._dropped(i, state)
                case Tape(step):
                    if step < len(self._stages):
                        state = self._run_first(step, state, contextlib.nullcontext())
                case EndForward():
                    break
                case _:
                    raise AssertionError(f"{action} in the forward sweep")
        return state

    def _actions_left(self) -> Iterator[Action]:
        """Yield the actions from where the last one left off."""
        while self._next < len(self._actions):
            action = self._actions[self._next]
            self._next += 1
            yield action

    def _run_first(self, i: int, state: Any, hooks: AbstractContextManager[Any]) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
        trait = self._traits[i]
        around = Surroundings.capture(self._stages[i], trait.name, tensors, trait.buffers)
        self._wants[i] = _wants(pytree.tree_leaves(state))
        with hooks:
            state = self._stages[i](state)
        around.after_first_run()
        self._around[i] = around
        return state

    def _dropped(self, i: int, state: Any) -> Any:
        """Run stage i; its graph keeps numbers in place of tensors."""
        kinds: list[_Kind] = []

        def pack(tensor: Tensor) -> int:
            kinds.append((tensor.shape, tensor.dtype))
            return len(kinds) - 1

        def unpack(number: int) -> Tensor:
            return self._tensor(i, number)

        self._kinds[i] = kinds
        return self._run_first(i, state, torch.autograd.graph.saved_tensors_hooks(pack, unpack))

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
                if i >= self._at:
                    with self._home.context():
                        self._start_over()
                with self._home.context():
                    self._drive(i)
            self._at = i
            tensor = self._take(i, number)
            self._home.hand(tensor)
            return tensor

    def _take(self, i: int, number: int) -> Tensor:
        tape, given = self._tapes[i], self._given[i]
        tensor = tape[number]
        if tensor is None:
            # Asked for twice, as a custom Function may: nobody else may hold it any more.
            reference = given[number]
            tensor = reference() if reference is not None else None
            if tensor is None:
                self._live = self._inputs[i]
                with self._home.context():
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
            self._live = _State.of(
                self._stages[i](state.fresh(self._wants[i], self._traits[i].changes_input))
            )

    def _tape(self, i: int, *, alone: bool) -> None:
        """Run stage i again, catching what it saves; if `alone`, its output is not wanted."""
        state = self._live
        assert state is not None
        tape: list[Tensor | None] = []
        versions: list[int] = []

        expected = len(self._kinds[i])

        def catch(tensor: Tensor) -> None:
            tape.append(tensor.detach())
            versions.append(tensor._version)
            if alone and len(tape) == expected:
                raise _Complete

        output = None
        with (
            contextlib.suppress(_Complete),
            torch.enable_grad(),
            self._around[i].again(),
            torch.autograd.graph.saved_tensors_hooks(catch, _never),
        ):
            inputs = state.fresh(self._wants[i], self._traits[i].changes_input)
            output = self._stages[i](inputs)
        kinds = [(tensor.shape, tensor.dtype) for tensor in tape if tensor is not None]
        if kinds != self._kinds[i]:
            raise StateError(
                f"stage {self._traits[i].name} saved other tensors when it was run again than at "
                f"first ({len(kinds)} and {len(self._kinds[i])}, or other shapes); a stage must "
                "do the same every time"
            )
        self._tapes[i], self._given[i] = tape, [None] * len(tape)
        self._versions[i] = versions
        self._inputs[i] = state
        self._live = None if alone else _State.of(output)

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


class _Complete(Exception):
    """All that a stage saves is caught: the rest of it need not run."""


def _never(_packed: object) -> Tensor:
    raise AssertionError("the graph of a run again is never walked")


def _wants(leaves: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


@dataclass(slots=True)
class _State:
    """A state without its graph, held by reference: whoever writes to it is found out."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    versions: list[int]

    @classmethod
    def of(cls, state: Any) -> _State:
        leaves, spec = pytree.tree_flatten(state)
        return cls._holding([x.detach() if isinstance(x, Tensor) else x for x in leaves], spec)

    @classmethod
    def _holding(cls, leaves: list[Any], spec: pytree.TreeSpec) -> _State:
        return cls(leaves, spec, [x._version if isinstance(x, Tensor) else 0 for x in leaves])

    def cloned(self) -> _State:
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self._holding(leaves, self.spec)

    def fresh(self, wants: tuple[bool, ...], to_be_changed: bool) -> Any:
        """Return the state for a stage to run on, of leaves unless the stage writes to them.

        `wants` says which tensors want gradients: those that did at first.
        Raises RuntimeError if a tensor was written to since it was kept.
        """
        for leaf, version in zip(self.leaves, self.versions, strict=True):
            if isinstance(leaf, Tensor) and leaf._version != version:
                raise RuntimeError(
                    "a state that a stage is to be run again from, the chain's input or between "
                    "two stages, has been modified by an inplace operation"
                )
        leaves = [
            leaf.detach().requires_grad_(wanted) if isinstance(leaf, Tensor) else leaf
            for leaf, wanted in zip(self.leaves, wants, strict=True)
        ]
        if to_be_changed:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(leaves, self.spec)
