"""What the chunks of a sequence find around them: generators, buffers, environment, settings.

Generators that the cell draws from and buffers it changes are part of every
checkpoint; a chunk that is run again gets them back.  All else that the cell
refers to (see `environment`) must be the same at every step: it is compared
after each chunk of the first run, and reinstalled around the backward.

Buffers that steps change which the first step left alone, such as statistics of a batch norm
of each step, are part of no checkpoint: runs in the backward pass find their last values, and
they are put back at its end.  Results that depend on those values differ from those of the
first run, which is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ...errors import StateError
from ..environment.captured import Environment
from ..environment.copies import cloned, put_back, version_of
from ..environment.randomness import Generators, State, device_types
from ..environment.settings import Settings
from ..environment.turns import TURN
from ..tensors.checksums import digest
from ..tensors.states import copied
from .cells import Cells
from .facts import Facts
from .hooks import hooks_on, refuse_hooks_on_parameters


class Surroundings:
    """What a cell depends on beside its state and inputs, over one sequence.

    The settings that count are those of the devices of the tensors that are involved: state,
    inputs and parameters.
    """

    def __init__(
        self, cells: Cells, facts: Facts, generators: Generators, involved: Sequence[Tensor]
    ) -> None:
        self._cells, self._facts, self._generators = cells, facts, generators
        self.settings = Settings.capture(device_types(involved))
        self._late: list[tuple[nn.Module, str]] = []  # buffers that the first step left alone
        self._environment = self._captured()
        self._versions = [(p, p._version) for p in facts.parameters]
        self._hooks = hooks_on(facts.parameters)
        # A buffer of several modules is one tensor, and stays one.
        groups: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, key in facts.buffers:
            groups.setdefault(id(module._buffers[key]), []).append((module, key))
        self._groups = list(groups.values())
        storages = [b.untyped_storage()._cdata for b in self._buffers()]
        self._overlap = len(set(storages)) < len(storages)
        self._random: Sequence[State] = ()
        self.compared = True  # whether results of repeated runs are

    def _captured(self, others: Sequence[tuple[nn.Module, str]] = ()) -> Environment:
        """Capture what is around; beside buffers known to change, some others may."""
        changing = [*self._facts.buffers, *self._late, *others]
        return Environment(self._cells.scope, self._cells.name, changing, keep_values=False)

    def turn(self) -> AbstractContextManager[None]:
        """Wait until no other thread uses what the cell shares with it."""
        return TURN.taken() if any(self._facts.draws) or self._groups else nullcontext()

    def names(self) -> list[str]:
        """Return names of the tensors of `now`, for messages."""
        drawn = zip(self._generators.names, self._facts.draws, strict=True)
        names = [f"the state of {name}" for name, draws in drawn if draws]
        return names + [f"buffer {group[0][1]}" for group in self._groups]

    def now(self) -> list[Tensor]:
        """Return copies of what a later run must find: generators' states and buffers."""
        found: list[Tensor] = []
        self._random = self._generators.capture()
        if any(self._facts.draws):
            masked = zip(self._random, self._facts.draws, strict=True)
            rows = self._generators.to_tensors([s if draws else None for s, draws in masked])
            found = [row for row, draws in zip(rows, self._facts.draws, strict=True) if draws]
        return [*found, *cloned(self._buffers())] if self._groups else found

    def reinstall(self, tensors: Sequence[Tensor]) -> None:
        """Put back what `now` returned once."""
        rest = list(tensors)
        draws = self._facts.draws
        if any(draws):
            states = iter(self._generators.from_tensors(rest[: sum(draws)]))
            self._generators.restore([next(states) if drawn else None for drawn in draws])
            rest = rest[sum(draws) :]
        if not rest:
            return
        if self._overlap:
            copies = cloned(self._buffers())
            for copy, value in zip(copies, rest, strict=True):
                copy.copy_(value)
        else:
            copies = [copied(value) for value in rest]
        for group, copy in zip(self._groups, copies, strict=True):
            for module, key in group:
                module._buffers[key] = copy

    def tensors(self) -> list[Tensor]:
        """Return parameters and all buffers, those of the chunk that runs."""
        return [*self._facts.parameters, *(b for _, _, b in self._cells.scope.buffers())]

    def _buffers(self) -> list[Tensor]:
        found = [group[0][0]._buffers[group[0][1]] for group in self._groups]
        return [buffer.detach() for buffer in found if buffer is not None]

    # ---------------------------------------------------------------- comparing

    def after(self, first: int, last: int) -> list[Tensor]:
        """Return `now` after steps of the first run.

        Raises
        ------
        StateError
            If they changed what they were not known to change, or drew from
            generators they were not known to draw from.
        """
        before, found = self._random, self.now()
        if before != self._random:
            drawn = self._generators.drawn(before, self._random)
            known = dict(zip(self._generators.names, self._facts.draws, strict=True))
            for name in drawn:
                if not known[name]:
                    raise StateError(
                        f"{self._cells.name} draws from {name} at steps {first} to {last - 1}, "
                        "and did not in its first step; say so by random=True (if another thread "
                        "draws from it meanwhile, give that thread a generator of its own)"
                    )
        when = f"at steps {first} to {last - 1}"
        refuse_changed(self._cells.name, self._environment.differences(), when)
        if hooks_on(self._facts.parameters) != self._hooks:
            refuse_hooks_on_parameters(self._cells.name, when)
        return found

    def refuse_graphs(self, first: int, last: int) -> None:
        """Raise StateError if a buffer carries a graph on to the next chunk."""
        for module, key in [*(group[0] for group in self._groups), *self._late]:
            refuse_graph(self._cells.name, module, key, f"at steps {first} to {last - 1}")

    def refuse_statistics(self, written: Sequence[Tensor], first: int, last: int) -> None:
        """Raise StateError if some tensors that kernels wrote to are not buffers of modules."""
        if written:
            known = {b.untyped_storage()._cdata for _, _, b in self._cells.scope.buffers()}
            for tensor in written:
                if tensor.untyped_storage()._cdata not in known:
                    raise StateError(
                        f"{self._cells.name} updates statistics of batch norm, of shape "
                        f"{tuple(tensor.shape)}, that are no buffer of a module of it (at steps "
                        f"{first} to {last - 1}), and would once more when it is run again; "
                        "register them as buffers (register_buffer)"
                    )

    def late_buffers(self) -> list[str]:
        """Return the names of buffers that steps changed and the first step did not."""
        name_of = self._environment.found.name_of
        return [name_of(b) for m, k in self._late if (b := m._buffers[k]) is not None]

    def _others(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Return the buffers that are not known to change."""
        known = {(id(module), key) for module, key in [*self._facts.buffers, *self._late]}
        return [
            each
            for each in self._cells.scope.buffers()
            if (id(each[0]), each[1]) not in known and not each[2].is_inference()
        ]

    @contextmanager
    def _finding_late(self) -> Iterator[None]:
        """Find the buffers that a first run writes to, and the first step did not.

        By their bits too: batch norm's kernels leave the version as it is.
        """
        others = self._others()
        if not others:
            yield
            return
        before = [(digest(buffer), version_of(buffer)) for _, _, buffer in others]
        self._environment = self._captured([(module, key) for module, key, _ in others])
        yield
        name_of, late = self._environment.found.name_of, []
        for (module, key, buffer), was in zip(others, before, strict=True):
            if module._buffers.get(key) is not buffer:
                refuse_changed(self._cells.name, [name_of(buffer)], "at later steps")
            if (digest(buffer), version_of(buffer)) != was:
                late.append((module, key))
                if not self.compared:
                    raise StateError(
                        f"{self._cells.name} changes {name_of(buffer)} at later steps, and not in "
                        "its first; this needs results of repeated runs to be compared: leave out "
                        "check='off'"
                    )
        self._late += late
        self._environment = self._captured()

    @contextmanager
    def _buffers_put_back(self, buffers: Iterable[Tensor | None]) -> Iterator[None]:
        kept = [(b, b.detach().clone(), version_of(b)) for b in buffers if b is not None]
        try:
            yield
        finally:
            for buffer, value, version in kept:
                put_back(buffer, value, version)

    # ------------------------------------------------------------ running again

    @contextmanager
    def no_draws(self, first: int, last: int) -> Iterator[None]:
        """Raise StateError if gradients of steps draw from generators that their runs draw from.

        These are not where plain training leaves them for its backward pass.
        """
        if not any(self._facts.draws):
            yield
            return
        masked = [b"" if draws else None for draws in self._facts.draws]
        before = self._generators.capture_those(masked)
        yield
        after = self._generators.capture_those(masked)
        if before != after:
            pairs = zip(self._generators.names, before, after, strict=True)
            drawn = [name for name, a, b in pairs if a != b]
            raise StateError(
                f"{self._cells.name} draws from {', '.join(drawn)} in its backward pass (at steps "
                f"{first} to {last - 1}), which runs it again and draws other numbers than plain "
                "training; draw in its forward and save what the gradient needs, or give it "
                "memory enough to keep every tape, or planner='keep'"
            )

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Make everything what it was when the sequence began; put the present back at the end.

        Raises
        ------
        StateError
            If a parameter or another tensor of the cell was changed since.
        """
        for parameter, version in self._versions:
            if parameter._version != version:
                raise StateError(
                    f"a parameter of {self._cells.name}, of shape {tuple(parameter.shape)}, was "
                    "changed in place between forward and backward"
                )
        with (
            self._environment.again(buffers=False, random=False),
            self.settled(keep=False, known=True),
            self._buffers_put_back(module._buffers[key] for module, key in self._late),
        ):
            yield

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Run some steps to see what they cost; everything is put back."""
        environment, others = self._environment, self._others()
        with self.replaying(), self._buffers_put_back(buffer for _, _, buffer in others):
            self._environment = self._captured([(module, key) for module, key, _ in others])
            try:
                yield
            finally:
                self._environment = environment

    @contextmanager
    def settled(self, *, keep: bool, known: bool = False) -> Iterator[None]:
        """Keep the modules' own buffers, as objects; with `keep`, with the values at the end.

        Generators are put back as they were unless `keep`; with `known` those alone that the
        cell draws from, since other threads may draw from others.  Settings are as they
        were when the sequence began, autocast without its cache of weights, which
        would belong to the graph of some other step.
        """
        owned = [[(m, k, m._buffers[k]) for m, k in group] for group in self._groups]
        random = None if keep else self._generators.capture()
        try:
            with self.settings.context(), self._finding_late() if keep else nullcontext():
                yield
        finally:
            if random is not None:
                masked = zip(random, self._facts.draws, strict=True)
                states = [s if draws or not known else None for s, draws in masked]
                self._generators.restore(states)
            for group in owned:
                module, key, buffer = group[0]
                value = module._buffers[key]
                for module, key, own in group:
                    module._buffers[key] = own
                if keep and value is not buffer and value is not None and buffer is not None:
                    with torch.no_grad():
                        buffer.copy_(value)


def refuse_changed(name: str, found: Sequence[str], when: str) -> None:
    """Raise StateError if a cell changed something."""
    if found:
        raise StateError(
            f"{name} changes {', '.join(found[:4])} when it runs ({when}), and would once more "
            "when it is run again; return it in the state, and take it from there; "
            "what no gradient goes through, as a count, may be a buffer from the first "
            "step on"
        )


def refuse_graph(name: str, module: nn.Module, key: str, when: str) -> None:
    """Raise StateError if a buffer carries a graph."""
    buffer = module._buffers.get(key)
    if buffer is not None and buffer.requires_grad:
        raise StateError(
            f"{name} keeps a tensor with a graph in buffer {key!r} of {type(module).__name__} "
            f"({when}): a gradient goes through it from step to step, so that it is part of the "
            "state; return it in the state, and take it from there, or detach it"
        )
