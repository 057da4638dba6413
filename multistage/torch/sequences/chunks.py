"""Time steps put together into chunks, the stages of a chain.

A chunk is run forward, taped and reversed as a whole.  Short steps are put together
since each chunk has overheads, and since planners of chains take some hundred stages.

The costs of a chunk follow from those of its steps, on the safe side: while it runs
forward it holds the outputs that its steps have returned, and while it is reversed the
gradients of its inputs; what its tape gives back on the way is not counted off.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ...model.stages import Stage, StageCosts

_LOOK_BACK = 0.7  # of a full chunk: from here on it may end, where the state is smallest


@dataclass(frozen=True, slots=True)
class Steps:
    """What the time steps of a sequence cost.

    Attributes
    ----------
    stages : sequence of Stage
        By step: the tape is the graph, the state after the step and y included.
    graph_bytes, y_bytes, x_gradient_bytes : sequence of int
        By step: what the graph keeps alive that was not there before the step, y, and the
        gradients of x_t.
    input_bytes, input_gradient_bytes : int
        Of state 0.
    parameters : sequence of collections of int
        By step: the parameters that it uses.
    parameter_bytes : sequence of int
        Of each parameter: a chunk adds up the gradients of those that its steps use.
    graded : bool
        Whether a run that keeps nothing has graphs, too.
    overhead_s : float
        Seconds of a chunk beside its steps, each time it is run or reversed.
    """

    stages: Sequence[Stage]
    graph_bytes: Sequence[int]
    y_bytes: Sequence[int]
    x_gradient_bytes: Sequence[int]
    input_bytes: int
    input_gradient_bytes: int
    parameters: Sequence[tuple[int, ...]] = ()
    parameter_bytes: Sequence[int] = ()
    graded: bool = False
    overhead_s: float = 0.0

    def __len__(self) -> int:
        return len(self.stages)

    def plain(self) -> StageCosts:
        """Return the costs of all steps as one stage without overhead: of plain autograd."""
        whole = self._chunk(0, len(self.stages), 0.0)
        return StageCosts((whole,), self.input_bytes, self.input_gradient_bytes)

    def chained(self, cuts: Sequence[int]) -> StageCosts:
        """Return the costs of the chain of the chunks between some cuts."""
        pairs = itertools.pairwise(cuts)
        known: dict[tuple[object, ...], Stage] = {}  # chunks of equal steps are equal
        found = []
        for start, stop in pairs:
            parameters = tuple(self.parameters[start:stop])
            key = (parameters, *map(id, self.stages[start:stop]))
            stage = known.get(key)
            if stage is None:
                stage = known[key] = self._chunk(start, stop, self.overhead_s)
            found.append(stage)
        return StageCosts(tuple(found), self.input_bytes, self.input_gradient_bytes)

    def cuts(self, count: int) -> list[int]:
        """Return the cuts of about so many chunks, of about equal tapes and with small states.

        Examples
        --------
        >>> small, large = (Stage("", 1.0, 2.0, size, 100) for size in (10, 50))
        >>> steps = Steps([large, large, small] * 3, [100] * 9, [0] * 9, [0] * 9, 10, 10)
        >>> steps.cuts(3)
        [0, 3, 6, 9]
        """
        n = len(self.stages)
        weights = [nbytes + 1 for nbytes in self.graph_bytes]  # never all 0
        most = sum(weights) / max(1, count)
        cuts, taken, best = [0], 0, -1
        for t, stage in enumerate(self.stages):
            taken += weights[t]
            if taken > most * (1 + 1e-9) and t > cuts[-1]:
                cut = best if best > cuts[-1] else t
                cuts.append(cut)
                taken = sum(weights[cut : t + 1])
                best = -1
            if taken >= _LOOK_BACK * most and t + 1 < n:
                size = stage.output_bytes
                if best <= cuts[-1] or size <= self.stages[best - 1].output_bytes:
                    best = t + 1
        return [*cuts, n]

    def _chunk(self, start: int, stop: int, overhead_s: float) -> Stage:
        stages = self.stages[start:stop]
        last = stages[-1]
        tape = max(last.output_bytes, sum(self.graph_bytes[start:stop]))
        taping = max(stage.tape_overhead_bytes for stage in stages)
        if self.graded:
            forward = tape + taping
        else:
            before, ys, forward = 0, 0, 0  # the input of the chunk is counted elsewhere
            for stage, y in zip(stages, self.y_bytes[start:stop], strict=True):
                ys += y
                here = before + stage.output_bytes + stage.forward_overhead_bytes + ys
                forward, before = max(forward, here), stage.output_bytes
        back, above = 0, 0  # the gradients of the chunk's output and input are counted elsewhere
        used = [self.parameters[t] if self.parameters else () for t in range(start, stop)]
        sizes = self.parameter_bytes
        own = {numbers: sum(sizes[i] for i in numbers) for numbers in set(used)}
        every = sum(sizes[i] for i in set().union(*used))
        for number, stage in reversed(list(enumerate(stages))):
            below = stages[number - 1].gradient_bytes if number else 0
            others = every - own[used[number]]
            back = max(back, stage.backward_overhead_bytes + above + below + others)
            above = below
        xs = sum(self.x_gradient_bytes[start:stop])
        return Stage(
            name=last.name if stop == start + 1 else f"{stop - start} steps",
            forward_s=sum(stage.forward_s for stage in stages) + overhead_s,
            backward_s=sum(stage.backward_s for stage in stages) + 2 * overhead_s,
            output_bytes=last.output_bytes,
            tape_bytes=tape,
            gradient_bytes=last.gradient_bytes,
            forward_overhead_bytes=max(0, forward - last.output_bytes),
            tape_overhead_bytes=taping,
            backward_overhead_bytes=back + xs,
        )
