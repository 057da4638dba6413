"""The stages of a chain, run for the first time and again.

A stage runs once in the forward sweep, in an environment that is captured then, and
again in that environment (`multistage.torch.environment`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ...errors import StateError
from ..environment.captured import Environment, exchanges_memory
from ..environment.randomness import Generators, Own, State
from ..environment.scope import Scope
from ..environment.settings import Settings
from ..environment.states import KeptState, leaves_of, tensors_in, wants_of
from ..environment.turns import TURN
from ..measurement.checking import Check, complain
from ..measurement.joining import Calls, Joined
from ..measurement.saved import Caught, Complete, Kind, Saved, difference, never, nodes_made
from ..measurement.traits import Count, OnceMore, Traits
from ..tensors.checksums import Digests
from ..tensors.streams import Home

# The live state, in a list of one: a stage takes it out, and nothing holds it while it runs.
Box: TypeAlias = list[object]
_HOST = frozenset({torch.device("cpu")})  # whose generators are always watched


class StageRunner:
    """The stages of one run, each run for the first time and again.

    Parameters
    ----------
    stages, traits : sequences of equal length
    check : {"error", "warn", "off"}
        What to do where a run again saves other numbers than the first: they are compared by
        checksums, of tensors in host memory.
    is_known : bool
        Whether a run like this one was within the sizes planned for.
    """

    def __init__(
        self,
        stages: Calls,
        traits: Sequence[Traits],
        *,
        check: Check = "off",
        is_known: bool = False,
    ) -> None:
        self._stages, self.traits, self._check = stages, traits, check
        self._scopes = [t.scope or Scope([s]) for s, t in zip(stages, traits, strict=True)]
        self._around: dict[int, Environment] = {}
        self._before: list[Environment] = []  # the sweep, where nothing in it changes them
        self._settings: Settings | None = None  # of the forward sweep
        self._holds_in: int | None = None  # a backward pass in which they were found to hold
        self._devices: set[torch.device] = set()
        self._own: dict[int, tuple[str, Own]] = {}  # generators of the stages, with names
        self._watched = 0  # of these
        self._generators = Generators()
        self._random: tuple[State, ...] = ()  # of the generators, between two stages
        self._is_random_old = False  # whether stages that draw nothing ran since
        # Kinds and checksums of the tensors that each stage saved where its graph holds numbers.
        self._first: dict[int, tuple[list[Kind], list[int | None]]] = {}
        self._wants: dict[int, tuple[bool, ...]] = {}  # of the leaves of each state, at first
        self._home = Home()
        # Nothing but operations of torch sees the states between stages.
        self.is_closed = all(trait.is_pure for trait in traits)
        # Operations of torch alone save and return as much each time.
        self._looks = not (is_known and self.is_closed)
        self._own_stays = not exchanges_memory()  # parameters, in their memory
        # With other threads: generators, buffers, the stages of a captured graph.
        self._shares = any(trait.draws or trait.buffers for trait in traits)
        self._shares |= any(getattr(stage, "is_bound", False) for stage in stages)

    def __len__(self) -> int:
        return len(self._stages)

    def turn(self) -> AbstractContextManager[None]:
        """Wait until no other thread uses what these stages share with it."""
        return TURN.taken() if self._shares else nullcontext()

    @contextmanager
    def sweep(self, state: object) -> Iterator[None]:
        """Run the forward sweep in this context.

        Raises
        ------
        StateError
            If a stage leaves a setting changed.
        OnceMore
            If a stage is larger than planned for; all that stages did is undone.
        """
        if self.is_closed:  # at once: between stages each would find the caches empty
            self._before = [self._captured(i) for i in range(len(self))]
        captured = [around.found for around in self._before]
        every = captured or [scope.seen_last() for scope in self._scopes]
        devices = {t.device for t in tensors_in(state)}.union(*[f.devices() for f in every])
        self._watched = -1
        self._watch(devices, [each for found in every for each in found.generators])
        self._settings = settings = Settings.capture(self._device_types())
        try:
            yield
        except OnceMore:
            self._undo()
            raise
        finally:
            self._before = []
        self._random = ()
        if self.is_closed:  # which has changed no setting and no attribute
            return
        # Not earlier: what is undone must come back with its graph.
        for around in self._around.values():
            around.let_graphs_go()
        changed = settings.differences(Settings.capture(self._device_types()))
        if changed:
            raise StateError(
                f"a stage changed a setting and left it changed: {', '.join(changed)}; stages "
                "cannot be run again as they were: change it outside of the chain"
            )

    def _captured(self, i: int) -> Environment:
        """Return the environment of stage i as it is, but for values."""
        trait = self.traits[i]
        return Environment(self._scopes[i], f"stage {trait.name}", trait.buffers, keep_values=False)

    def _undo(self) -> None:
        self._generators.restore(self._random)  # as they were before the stage that failed
        for number in sorted(self._around, reverse=True):
            self._around[number].undo()

    def returned(self, i: int, leaves: Sequence[object]) -> None:
        """Look at the size of state i, which the stage before returned."""
        sizes = self.traits[i - 1].sizes if i and self._looks else None
        if sizes is not None:
            sizes.returned(i - 1, leaves)

    def _watch(self, devices: set[torch.device], own: Iterable[tuple[str, Own]]) -> None:
        """Look at the generators of these devices too, and at these of the stages' own."""
        if torch.cuda.is_initialized():
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        self._own |= {id(g): (name, g) for name, g in own}
        if len(self._own) == self._watched and devices <= self._devices:
            return
        self._devices |= devices
        self._watched = len(self._own)
        others = [d for d in self._devices if d.type not in ("cpu", "meta")]
        ordered = sorted(others, key=str)
        self._generators = Generators(ordered, self._own.values(), of_torch=self.is_closed)
        self._random = self._generators.capture()

    def _device_types(self) -> list[str]:
        return sorted({"cpu", *(device.type for device in self._devices)} - {"meta"})

    def _call(self, i: int, box: Box, between: Callable[[int, object], None] | None) -> object:
        """Run stage i from the state in a box, which is emptied."""
        stage = self._stages[i]
        return stage.run(box, between) if isinstance(stage, Joined) else stage(box.pop())

    def first(
        self,
        i: int,
        box: Box,
        unpack: Callable[[int, int], Tensor] | None = None,
        *,
        holds: bool = False,
    ) -> tuple[object, Caught]:
        """Run stage i in the forward sweep from the state in a box, which is emptied.

        Remembers and verifies its environment.

        Parameters
        ----------
        i : int
        box : list of one pytree
            The state, which is taken out of it.
        unpack : callable, optional
            `unpack(i, number)` returns a tensor in the backward pass; the graph holds numbers.
            By default it holds the tensors.
        holds : bool
            Whether what it saves is to be returned, rather than released.
        """
        leaves = leaves_of(box[0])
        self._wants[i] = wants_of(leaves)
        trait, stage = self.traits[i], self._stages[i]
        around = self._before[i] if self._before else self._captured(i)
        self._around[i] = around
        if self._looks or not trait.is_blind:  # nothing is undone otherwise
            around.keep()
        if unpack is not None:
            around.sum()
        count, sizes, between = None, None, None
        self.returned(i, leaves)
        if self._looks:
            devices = {x.device for x in leaves if isinstance(x, Tensor)}
            self._watch(devices | around.found.devices(), around.found.generators)
            sizes = None if trait.unhooked else trait.sizes
            if sizes is not None:
                way = sizes.way(leaves, around.found.number)
                count = None if sizes.knows(way) else Count(i, sizes)
            if isinstance(stage, Joined) and stage.sizes:
                between = partial(stage.look, self._devices | _HOST, count)
                if count is not None and stage.sizes[0] is not None:
                    count.begin(stage.sizes[0])
        del leaves
        if trait.may_draw and self._is_random_old:
            self._random = self._generators.capture()
        caught = Caught(trait.name, holds=holds)
        with self._saved(i, caught, count, unpack):
            state = self._call(i, box, between)
        if sizes is not None and count is not None:
            count.end()
            sizes.counted(way, count.nbytes)
        self._is_random_old = not trait.may_draw
        if trait.may_draw:
            before, self._random = self._random, self._generators.capture()
            if around.drew(self._generators, before, self._random, trait.draws):
                self._shares = True
        if not self.is_closed:
            around.verify()
        TURN.moved()
        return state, caught

    def _saved(
        self,
        i: int,
        caught: Caught,
        count: Count | None,
        unpack: Callable[[int, int], Tensor] | None,
    ) -> AbstractContextManager[object]:
        """Return what sees what stage i saves as it first runs, if it runs under any hooks."""
        if unpack is None:
            if count is None:
                return nullcontext()
            return Saved(count.add, through=True, stage=self.traits[i].name)
        caught.places, caught.count = self._around[i].places(), count
        if caught.holds:
            caught.without, caught.first = self.traits[i].remade, True
        # What a tier has is run again only if it is lost.
        again = not caught.holds or caught.without is not None
        trait = self.traits[i]
        if self._check != "off" and again and not (trait.fills or trait.is_pure):
            caught.digests = Digests()
        caught.counts_alone = trait.is_pure
        caught.leaves_own = trait.is_pure and self._own_stays
        self._first[i] = caught.kinds, caught.sums
        caught.begun = nodes_made()
        return Saved(caught.see, partial(unpack, i), self._refusing(i), stage=self.traits[i].name)

    def _refusing(self, i: int) -> Callable[[int], Tensor] | None:
        """Return what refuses that stage i differentiates in forward; None if it is known to."""
        trait = self.traits[i]

        def refuse(number: int) -> Tensor:
            raise StateError(
                f"stage {trait.name} computes gradients inside of its forward, which it did not "
                "do when it was profiled, or while it writes to its input; write it without the "
                "operation in place, or raise the memory limit until its tape is kept"
            )

        return None if trait.differentiates else refuse

    def as_at_first(self) -> AbstractContextManager[None]:
        """Return a context with the stream and the settings of the forward sweep."""
        settings = self._settings
        assert settings is not None
        task = torch._C._current_graph_task_id()  # of the backward pass; -1 outside of any
        if task < 0 or task != self._holds_in:
            self._holds_in = task if settings.hold() else None
        holds = self._holds_in == task
        if holds and self._home.stream is None:
            return self.turn()
        return self._at_home(nullcontext() if holds else settings.context())

    @contextmanager
    def _at_home(self, hold: AbstractContextManager[None]) -> Iterator[None]:
        with self.turn(), self._home.context(), hold:
            yield

    def hand(self, tensor: Tensor) -> None:
        """Let the current stream use what was made on that of the forward sweep."""
        self._home.hand(tensor)

    def advance(self, i: int, box: Box) -> KeptState:
        """Run stage i again from the state in a box, which is emptied, without a tape."""
        with torch.set_grad_enabled(self.traits[i].graded), self._around[i].again():
            state = box.pop()
            assert isinstance(state, KeptState)
            given = [state.fresh(self._wants[i], self.traits[i].changes_input)]
            del state
            return KeptState.of(self._call(i, given, None))

    def catch(self, i: int, state: KeptState, *, alone: bool) -> tuple[Caught, KeptState | None]:
        """Run stage i again; return what it saves and, unless `alone`, its output.

        If `alone`, its whole tape, as its adjoint is next.

        Raises
        ------
        StateError
            If it saves something else than when it first ran.
        """
        first, _ = self._first[i]
        stops = alone and not self.traits[i].fills
        enough = len(first) if stops else None
        caught, output = self._catch(i, state, enough, alone=alone)
        if stops and not self._are_alike(first, caught.kinds):
            # Or it would have saved more: look at all it saves.
            del caught, output
            caught, output = self._catch(i, state, None, alone=True)
            stops = False
        if not stops and [kind[:-1] for kind in caught.kinds] != [kind[:-1] for kind in first]:
            raise StateError(
                f"stage {self.traits[i].name} saved other tensors when it was run again than at "
                f"first ({difference(first, caught.kinds)}); a stage must do the same every time"
            )
        self._compare(i, enumerate(caught.sums))
        kept = None if alone else KeptState.of(output)
        TURN.moved()
        return caught, kept

    def remake(
        self, i: int, state: KeptState, tape: Sequence[Tensor | None]
    ) -> dict[int, Tensor] | None:
        """Return what the tape of stage i does not hold, by number; None if it is not known how."""
        remade, around = self.traits[i].remade, self._around[i]
        if remade is None or not remade.fits(tape):
            return None
        # Whatever is known to draw is kept; operators of one's own may draw now and then.
        is_pure = self.traits[i].is_pure
        with torch.no_grad(), nullcontext() if is_pure else around.again():
            own = around.read(remade.names)
            made = remade.make(state.fresh(self._wants[i], False), tape, own)
        if self._first[i][1]:
            digests = Digests()
            self._compare(i, [(n, digests.of(tensor)) for n, tensor in made.items()])
        TURN.moved()
        return made

    def _compare(self, i: int, sums: Iterable[tuple[int, int | None]]) -> None:
        """Compare checksums of what stage i saves, by number, with those of its first run."""
        kinds, first = self._first[i]
        pairs = [(number, now, first[number]) for number, now in sums]
        number = next((n for n, now, then in pairs if now != then and None not in (now, then)), -1)
        if number < 0:
            return
        complain(
            self._check,
            f"stage {self.traits[i].name} saved other numbers for its gradient when it was run "
            f"again than at first (number {number}, of shape {tuple(kinds[number][0])}): "
            "the stage, or one that made its input again, depends on what is not seen, such as a "
            "large container, an object of an extension, a file or a clock; make that part of the "
            "state, keep it in a buffer or an attribute, or continue with check='warn'",
        )

    def _are_alike(self, first: Sequence[Kind], again: Sequence[Kind]) -> bool:
        """Whether saved tensors agree, and the numbers of nodes made before each."""
        assert self._settings is not None
        if any(each.enabled for each in self._settings.autocast):
            # A cast that came from autocast's cache at first is a node of its own now.
            return [kind[:-1] for kind in first] == [kind[:-1] for kind in again]
        return first == again

    def _catch(
        self, i: int, state: KeptState, enough: int | None, *, alone: bool
    ) -> tuple[Caught, object]:
        """Run stage i again up to `enough` saved tensors, to the end if None."""
        # Not with the output in it, whose graph leads here.
        around, output = self._around[i], None
        digests = Digests() if self._first[i][1] else None
        name = self.traits[i].name
        caught = Caught(name, around.places(), digests=digests, enough=enough)
        caught.counts_alone = self.traits[i].is_pure
        caught.leaves_own = caught.counts_alone and self._own_stays
        caught.without = None if alone else self.traits[i].remade
        with (
            suppress(Complete),
            torch.enable_grad(),
            around.again(),
            Saved(caught.see, never, self._refusing(i), stage=name),
        ):
            given = [state.fresh(self._wants[i], self.traits[i].changes_input)]
            caught.begun = nodes_made()
            output = self._call(i, given, caught.part)
        return caught, output

    def storages(self, i: int) -> set[int]:
        """Return the addresses of storages of the environment of stage i."""
        return storages_of_all(self._around[i].found.tensors)

    def region(self) -> set[int]:
        """Return the addresses of storages of the environments of all stages."""
        return storages_of_all(t for each in self._around.values() for t in each.found.tensors)


def storages_of_all(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of strided tensors."""
    return {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}
