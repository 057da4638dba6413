"""What a sweep of a chain holds: in fast memory, in its tier or on the way, or lost.

What does not come back is computed again from the nearest state at hand.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...actions import Answer, Await, Drop, Evict, Get, Offer, Put
from ...backends.lifetimes import Birth, end
from ...errors import CheckpointWarning, MultistageError, StateError
from ...execute.sweep import Moved, Sweep, Wait
from ...states.slots import Kept
from ..environment.states import KeptState
from ..measurement.saved import Caught, written_to
from ..tensors.checksums import digest
from ..tensors.geometry import is_plain
from ..tiers.groups import Origin, TensorGroup, Watch
from ..tiers.lane import ChainTier, TierLane, Transfer
from .stages import StageRunner, storages_of_all

_LAST = 4  # transfers, whose rate is that of now


class CannotTravel(MultistageError):
    """A tape holds what no tier can: the chain is planned without one."""


class HeldTape:
    """What a stage saved for its gradient.

    Parameters
    ----------
    caught : Caught
    state : KeptState or None
        That it was made from, which it holds on to.

    Attributes
    ----------
    output : KeptState or None
        The state that the stage made, if the tape holds it.
    group : TensorGroup or None
        What of it travels, once it was packed.
    is_whole : bool
        Whether it holds all that the stage saved, and not what is made again from the rest.
    """

    __slots__ = (
        "_given",
        "_inputs",
        "_left",
        "_parts",
        "_sources",
        "_spare",
        "_stage",
        "_sums",
        "_tensors",
        "_versions",
        "group",
        "is_whole",
        "output",
        "state",
    )  # fmt: skip

    def __init__(self, caught: Caught, state: KeptState | None) -> None:
        self._tensors, self._versions, self._parts = caught.tape, caught.versions, caught.parts
        self._stage = caught.stage
        # Operations of torch ask for each once: then nothing is run again from the state.
        self._left = len(caught.tape) - caught.own if caught.counts_alone else -1
        self._given: list[weakref.ref[Tensor] | None] = [None] * len(caught.tape)
        self._inputs: dict[int, Watch] = {}
        self.group: TensorGroup | None = None
        self._spare: KeptState | None = None
        self._sums: dict[int, int | None] = {}
        self.state = state
        self.output: KeptState | None = None
        self.is_whole = caught.without is None
        self._sources = () if caught.without is None else caught.without.sources

    @classmethod
    def staying(cls, caught: Caught, state: KeptState) -> HeldTape:
        """Return one that does not travel; it lets its state go if nothing is run again from it."""
        again = caught.without is not None or not caught.counts_alone
        return cls(caught, state if again else None)

    def guard(self, storages: Set[int], every: Set[int]) -> None:
        """Notice other bits, in these storages, of what the rest is made again from.

        Of parameters, which lie in the others of `every`, a stage's environment does.
        """
        if self.is_whole:
            return
        if self.state is not None and not storages_of_all(self.state.tensors()).isdisjoint(every):
            self.state.summed()
        sources = [(number, self._tensors[number]) for number in self._sources]
        for number, tensor in sources:
            if tensor is not None and not storages_of_all([tensor]).isdisjoint(storages):
                self._sums[number] = digest(tensor)

    def rest(self) -> Sequence[Tensor | None] | None:
        """Return the tensors that it holds; None if a source was written to since it was saved.

        Raises
        ------
        StateError
            If one was without a new version.
        """
        for number in self._sources:
            tensor = self._tensors[number]
            if tensor is not None and tensor._version != self._versions[number]:
                return None
        for number, before in self._sums.items():
            tensor = self._tensors[number]
            if tensor is not None and digest(tensor) != before:
                raise StateError(
                    f"a tensor that stage {self._stage} saved for its gradient, part of an output, "
                    "holds other numbers than in the forward pass, though no version says so: "
                    "NumPy or .data wrote to it; call backward before, or write to a clone"
                )
        return self._tensors

    def complete(self, made: Mapping[int, Tensor]) -> None:
        """Take the tensors that it did not hold."""
        for number, tensor in made.items():
            self._tensors[number], self._versions[number] = tensor, tensor._version
        self.is_whole = True

    def packed(
        self,
        known: dict[int, Origin],
        stays: Container[int],
        inputs: Container[int],
        output: KeptState | None,
    ) -> None:
        """Sort what the stage saved, so that the tape can leave fast memory.

        Parameters
        ----------
        known : dict of int to Origin
            The storages that may leave.
        stays, inputs : container of int
            Storages, by address: held elsewhere; of the state before, which is away at
            times and is not part of this tape.
        output : KeptState or None
            The state that the stage made, unless it is held elsewhere.
        """
        for number, tensor in enumerate(self._tensors):
            if tensor is not None and is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata in inputs:
                    origin = Origin.of(storage, known)
                    self._inputs[number] = Watch(tensor, origin, self._versions[number])
                    self._tensors[number] = None
        self.output = output
        others = [] if output is None else output.held()
        held = [*zip(self._tensors, self._versions, strict=True), *others]
        self.group = group = TensorGroup(held, known, stays)
        self._tensors, self._versions = group.tensors, group.versions

    def leave(self) -> None:
        """Release the states beside it."""
        self._spare = None if self.output is None else self.output.emptied()
        self.output = self.state = None

    def returned(self) -> None:
        """Take the state beside it that came back."""
        if self._spare is not None:
            count = len(self._given)
            self.output = self._spare.filled(self._tensors[count:], self._versions[count:])
            self._spare = None

    def begin(self) -> None:
        """Release the output: the adjoint of the stage begins, and those above are done."""
        self.output = None
        count = len(self._given)
        del self._tensors[count:], self._versions[count:]

    def is_input(self, number: int) -> bool:
        """Whether the `number`-th tensor lies in the state before, which is not held on to."""
        return number in self._inputs

    def take(self, number: int) -> Tensor | None:
        """Return the tensor saved as the `number`-th and hold it no more; None if it is gone.

        Raises
        ------
        RuntimeError
            If it was written to since it was saved.
        """
        while self._parts and number < self._parts[-1]:
            # The stages above are done with: what nothing has asked for goes.
            part = self._parts.pop()
            self._tensors[part:] = [None] * (len(self._tensors) - part)
        if number in self._inputs:
            watch = self._inputs[number]
            # Where the state before is lost, another group may be bringing these bytes.
            memory = watch.origin.bytes() if watch.origin.is_there else None
            if memory is None:
                return None
            if watch.spoilt:
                raise written_to(self._stage)
            return watch.tensor(memory)
        tensor = self._tensors[number]
        if tensor is None:
            # Asked for twice, as a custom Function may: nothing else may hold it any more.
            reference = self._given[number]
            tensor = None if reference is None else reference()
            if tensor is None:
                return None
        if tensor._version != self._versions[number]:
            raise written_to(self._stage)
        # From here on it lives as long as the node that asked wants it.
        if self._given[number] is None:
            self._left -= 1
            if not self._left:
                self.state = None
        self._tensors[number], self._given[number] = None, weakref.ref(tensor)
        return tensor


@dataclass(eq=False, slots=True)
class _Sent:
    """A state or a tape in the tier, or on its way there or back."""

    group: TensorGroup
    transfer: Transfer
    empty: KeptState | None = None  # of a state
    tape: HeldTape | None = None  # whose group is not in fast memory
    landed: bool = False
    lost: bool = False


class Holdings:
    """What a sweep holds.

    Parameters
    ----------
    stages : StageRunner
    origin : KeptState
        State 0.
    staying : set of int
        Storages of the chain's input and output.
    tier : ChainTier or None
        None for a plan that sends nothing away.

    Attributes
    ----------
    held, tapes : dict
        Those of the sweep.
    known : dict of int to Origin
        The storages that may leave.
    leaving : set of int
        States that fast memory releases, alone or inside of a tape.
    stall_s : float
        Seconds that computing waited for transfers.
    """

    def __init__(
        self, stages: StageRunner, origin: KeptState, staying: set[int], tier: ChainTier | None
    ) -> None:
        self.held: dict[int, Kept | None] = {}
        self.tapes: dict[int, Kept] = {}
        self.origin, self.staying = origin, staying
        self.known: dict[int, Origin] = {}
        self.leaving: set[int] = set()
        self.stall_s = 0.0
        self._stages, self._tier = stages, tier
        self._sent: dict[tuple[int, bool], _Sent] = {}  # by step, and whether it is a tape
        self._tokens: list[tuple[int, bool, bool]] = []  # of all transfers: whether they write
        self._told = False
        self._begin()
        if tier is not None:
            self._open = tier.open()
            tier.runs += 1
            weakref.finalize(self, _leave, self._sent, self._open, tier, Birth.here())

    def _begin(self) -> None:
        """Note when a forward sweep begins."""
        self._began_s, self._stalled_s = time.perf_counter(), self.stall_s
        self._begun_s = time.thread_time()

    def handed_out(self, output: Sequence[Tensor]) -> None:
        """Notice other bits of what is held and lies in the input, the output or a parameter.

        Of other states checksums were taken before, unless all stages are operations of torch
        alone: nothing else can write to them.
        """
        held = [kept.state for kept in self.held.values() if kept is not None]
        tapes = [kept.state for kept in self.tapes.values() if kept.state is not None]
        if not (held or tapes):
            return
        storages = self.staying | storages_of_all(output)
        every = storages | self._stages.region()
        for state in held:
            assert isinstance(state, KeptState)
            if not state.sums and not storages_of_all(state.tensors()).isdisjoint(every):
                state.summed()
        for tape in tapes:
            assert isinstance(tape, HeldTape)
            tape.guard(storages, every)

    def turn(self) -> None:
        """Note how busy the machine was with other work: the forward sweep is over."""
        if self._tier is None:
            return
        thread_s = time.thread_time() - self._begun_s
        computed_s = time.perf_counter() - self._began_s - (self.stall_s - self._stalled_s)
        # Where torch computes in other threads, or on a device, this thread's time says nothing.
        alone = self._tier.device.type == "cpu" and torch.get_num_threads() == 1
        self._tier.busier = max(1.0, computed_s / thread_s if alone and thread_s > 0 else 1.0)

    def clear(self) -> None:
        """Release what is in the tier or on its way."""
        for step, tape in [*self._sent]:
            self._forget(step, tape)
        self._tokens.clear()
        self._begin()

    def _forget(self, step: int, tape: bool) -> None:
        sent = self._sent.pop((step, tape), None)
        if sent is not None:
            self._open.drop(sent.transfer)

    # -------------------------------------------------------------- in fast memory

    def at_hand(self, i: int) -> KeptState | None:
        """Return state i if it is in fast memory."""
        if i == 0:
            return self.origin
        kept = self.held.get(i)
        if kept is not None:
            assert isinstance(kept.state, KeptState)
            return kept.state
        tape = self.tape(i - 1)
        return None if tape is None else tape.output

    def tape(self, i: int) -> HeldTape | None:
        """Return the tape of stage i if it is held here."""
        kept = self.tapes.get(i)
        if kept is None:
            return None
        assert kept.state is None or isinstance(kept.state, HeldTape)
        return kept.state

    # ----------------------------------------------------------------- actions

    def write(self, sweep: Sweep, action: Offer | Put) -> Answer:
        """Queue the way of a state or tape to the tier."""
        step = action.step
        if action.tape:
            held = self.tape(step)
            assert held is not None and held.group is not None
            self._send(step, True, held.group)
            return None
        state = self.at_hand(step)
        assert state is not None
        group = TensorGroup(state.held(), self.known, self.staying)
        self._send(step, False, group).empty = state.emptied()
        return None

    def _send(self, step: int, tape: bool, group: TensorGroup) -> _Sent:
        """Queue the way of a group to the tier.

        Raises
        ------
        CannotTravel
            If some of its tensors cannot be transferred.
        """
        if group.stuck:
            raise CannotTravel(
                f"stage {self._name(step, tape)} saves a tensor that cannot travel to a tier "
                f"({group.stuck[0]}); train this chain without tiers=, or within a larger limit"
            )
        sent = self._sent[step, tape] = _Sent(group, self._open.write(group.lines()))
        self._tokens.append((step, tape, True))
        return sent

    def evict(self, sweep: Sweep, action: Evict) -> Answer:
        """Wait until a state or tape has left, and release it; False if it is lost."""
        step = action.step
        if action.tape:
            tape = sweep.tapes.pop(step).state
            assert isinstance(tape, HeldTape)
            self._sent[step, True].tape = tape
            tape.leave()
        else:
            kept = sweep.held.pop(step)
            assert kept is not None and isinstance(kept.state, KeptState)
            kept.state.verify()
        sent = self._sent[step, action.tape]
        written = self._wait(sent.transfer)
        sent.group.let_go()
        if not written:
            self._lose(step, action.tape, sent)
        return written

    def read(self, sweep: Sweep, action: Get) -> Answer:
        """Make room for a state or tape, and queue its way back."""
        self._tokens.append((action.step, action.tape, False))
        sent = self._sent[action.step, action.tape]
        if not sent.lost:
            sent.transfer = self._open.fetch(sent.transfer, sent.group.make_room())
            sent.group.on_its_way(sent.transfer)
        return None

    def wait(self, sweep: Sweep, action: Await) -> Answer:
        """Wait for what is on its way back; False if it is lost.

        Writes are waited for where what was written leaves fast memory.
        """
        step, is_tape, is_write = self._tokens[action.token]
        assert not is_write
        sent = self._sent[step, is_tape]
        if not sent.lost:
            for transfer in (sent.transfer, *sent.group.fillers()):
                self._wait(transfer)
            if not sent.group.came_back():
                self._lose(step, is_tape, sent)
        sent.landed = True
        if sent.lost:  # it is computed again when it is needed
            sweep.lost.add(~step if is_tape else step)
        elif is_tape:
            tape, sent.tape = sent.tape, None
            assert tape is not None
            tape.returned()
            sweep.tapes[step] = Kept(tape, ())
        else:
            assert sent.empty is not None
            state = sent.empty.filled(sent.group.tensors, sent.group.versions)
            sweep.held[step] = Kept(state, ())
        return not sent.lost

    def _wait(self, transfer: Transfer) -> bool:
        began = time.perf_counter()
        done = self._open.wait(transfer)
        self.stall_s += time.perf_counter() - began
        return done

    def drop(self, sweep: Sweep, action: Drop) -> Answer:
        """Free the tier's copy; of a write that is not done, cancel it."""
        self._forget(action.step, action.tape)
        return None

    # -------------------------------------------------------------- what is lost

    def _lose(self, step: int, tape: bool, sent: _Sent) -> None:
        sent.lost = True
        if self._told:
            return
        self._told = True
        what = "tape" if tape else "output"
        warnings.warn(
            f"tier {self._tier_name!r}: the {what} of stage {self._name(step, tape)} is "
            f"lost ({sent.transfer.error}); it is computed again, and so is what else is lost "
            "in this iteration",
            CheckpointWarning,
            stacklevel=5,
        )

    @property
    def _tier_name(self) -> str:
        assert self._tier is not None
        return self._tier.store.name

    def _name(self, step: int, tape: bool) -> str:
        number, traits = step if tape else step - 1, self._stages.traits
        return traits[number].name if 0 <= number < len(traits) else str(step)

    def find(self, sweep: Sweep, step: int) -> Kept:
        """Return a state inside of a tape, the live one, or one computed again."""
        state = self.at_hand(step)
        if state is None and step == sweep.at:
            (live,) = sweep.live
            state = live if isinstance(live, KeptState) else KeptState.of(live)
        return Kept(self.state(step) if state is None else state, ())

    def find_tape(self, sweep: Sweep, step: int) -> HeldTape:
        """Return a tape made again."""
        return self.tape_again(step, None)

    def state(self, i: int) -> KeptState:
        """Return state i; compute it from the nearest one at hand if it is lost."""
        start = i
        while (state := self.at_hand(start)) is None:
            start -= 1
        for j in range(start, i):
            state = self._stages.advance(j, [state])
        return state

    def whole_tape(self, i: int, tape: HeldTape) -> HeldTape:
        """Return the tape of stage i with all that the stage saved."""
        if tape.is_whole:
            return tape
        rest, made = tape.rest(), None
        if rest is not None and tape.state is not None:
            made = self._stages.remake(i, tape.state, rest)
        if made is None:
            return self.tape_again(i, tape)
        tape.complete(made)
        return tape

    def tape_again(self, i: int, tape: HeldTape | None) -> HeldTape:
        """Make the tape of stage i again, which is lost or used up."""
        state = None if tape is None else tape.state
        if state is None:
            state = self.state(i)
        caught, _ = self._stages.catch(i, state, alone=True)
        return HeldTape.staying(caught, state)

    # ------------------------------------------------- what `execute.late` asks

    def awaited(self, sweep: Sweep, action: Wait) -> Callable[[float], bool] | None:
        """Return what waits, no longer than some seconds, until an action would not wait."""
        if isinstance(action, Put):
            return None  # it is queued at once
        moved = self.moved(action)
        sent = self._sent[moved.step, moved.is_tape]
        transfers = [sent.transfer]
        if not moved.is_write:
            transfers = [] if sent.lost else [sent.transfer, *sent.group.fillers()]
        return partial(self._ended, transfers)

    def _ended(self, transfers: list[Transfer], timeout_s: float) -> bool:
        """Wait for transfers, no longer than so many seconds; return whether all have ended."""
        began = time.perf_counter()
        done = all(
            each.done.wait(max(0.0, began + timeout_s - time.perf_counter())) for each in transfers
        )
        self.stall_s += time.perf_counter() - began
        # A waiting thread then notices that the tier was closed, or that its thread is gone.
        return done or not self._open.is_alive

    def moved(self, action: Wait | Offer) -> Moved:
        """Return what an action waits for, or offers."""
        if not isinstance(action, Await):
            return Moved(action.step, action.tape, True, 0, self._tier_name)
        return Moved(*self._tokens[action.token], 0, self._tier_name)

    def behind_s(self) -> float:
        """Return the seconds since the oldest write was queued that has not ended, else 0."""
        transfers = (each.transfer for each in self._sent.values())
        queued = [t.queued_s for t in transfers if t.is_write and not t.done.is_set()]
        return time.perf_counter() - min(queued) if queued else 0.0

    def seen_s(self, *, writes: bool) -> float:
        """Return the seconds that transfers take for a byte now; 0 if unknown.

        The one in flight counts if it has taken longer than the others did.
        """
        transfers = [s.transfer for s in self._sent.values() if s.transfer.is_write == writes]
        done = sorted(
            (each for each in transfers if each.done.is_set() and not each.error),
            key=lambda each: each.ended_s,
        )
        last = done[-_LAST:]
        nbytes = sum(each.nbytes for each in last)
        seen_s = sum(each.seconds for each in last) / nbytes if nbytes else 0.0
        under_way = [t for t in transfers if t.begun and not t.done.is_set() and t.nbytes]
        if under_way:
            before_s = done[-1].ended_s if done else 0.0
            since_s = max(under_way[0].queued_s, before_s)
            took_s = (time.perf_counter() - since_s) / under_way[0].nbytes
            seen_s = max(seen_s, took_s)
        return seen_s

    def cancel(self, timeout_s: float) -> None:
        """Cancel all transfers; wait so many seconds for those in flight to end."""
        under_way = [s.transfer for s in self._sent.values() if not s.transfer.done.is_set()]
        for transfer in reversed(under_way):
            self._open.cancel(transfer)
        self._ended(under_way, timeout_s)

    def stuck(self) -> list[int]:
        """Return states, and tapes as ~step, whose cancelled transfers have not ended."""
        return [
            ~step if tape else step
            for (step, tape), each in self._sent.items()
            if each.transfer.cancelled and not each.transfer.done.is_set()
        ]

    def abandon(self, sweep: Sweep) -> None:
        """Give up all that is in the tier or on its way."""
        self.clear()
        sweep.lost.clear()


def _leave(
    sent: dict[tuple[int, bool], _Sent], lane: TierLane, tier: ChainTier, birth: Birth
) -> None:
    """Free what a run has left in its tier; close the tier after one that was broken off."""
    tier.runs -= 1
    finished = all(each.landed or each.lost for each in sent.values())
    for each in sent.values():
        lane.drop(each.transfer)
    if not finished and not tier.runs and tier.opened is lane:
        end(tier.leave, birth)
