"""Computations taped by pyadjoint: arrays that are overwritten, as Firedrake's are, or new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy_adjoint
import pyadjoint
from pyadjoint import AdjFloat, Block, Control, ReducedFunctional

SIZE = 40
Built = tuple[Any, list[Any]]  # a functional, and what it is differentiated by


def vector(values: Any) -> Any:
    values = np.ascontiguousarray(values)
    return numpy_adjoint.ndarray(values.shape, values.dtype, buffer=values)


def wave(phase: float) -> Any:
    x = np.linspace(0, 2 * np.pi, SIZE, endpoint=False)
    return vector(0.5 + 0.3 * np.sin(x + phase))


def plain(value: Any) -> Any:
    return np.asarray(value).view(np.ndarray)


def roll(values: Any, by: int) -> Any:
    """Shift values in a ring; `tape_worker` has a ring of several ranks."""
    return np.roll(values, by)


def total(values: Any) -> float:
    """Sum values."""
    return float(values.sum())


class Product(Block):  # type: ignore[misc]
    """c x, c x y, or c x^2 + 0.1 x shifted by one: what all tangents and adjoints are known of."""

    def __init__(self, c: float, *given: Any, square: bool = False) -> None:
        super().__init__()
        self.c, self.square = c, square
        for each in given:
            self.add_dependency(each)

    def value(self, inputs: Any) -> Any:
        x = plain(inputs[0])
        if self.square:
            return self.c * x * x + 0.1 * roll(x, 1)
        return self.c * x * (plain(inputs[1]) if len(inputs) > 1 else 1.0)

    def by(self, inputs: Any, idx: int) -> Any:
        """Return the diagonal of the derivative."""
        if self.square:
            return 2 * self.c * plain(inputs[0])
        return self.c * (plain(inputs[1 - idx]) if len(inputs) > 1 else np.ones(SIZE))

    def recompute_component(self, inputs: Any, *_: Any) -> Any:
        return vector(self.value(inputs))

    def evaluate_adj_component(
        self, inputs: Any, adjoints: Any, variable: Any, idx: int, *_: Any
    ) -> Any:
        found = self.by(inputs, idx) * adjoints[0]
        return found + 0.1 * roll(adjoints[0], -1) if self.square else found

    def evaluate_tlm_component(self, inputs: Any, tangents: Any, *_: Any) -> Any:
        total = np.zeros(SIZE)
        for idx, tangent in enumerate(tangents):
            if tangent is not None:
                total = total + self.by(inputs, idx) * plain(tangent)
                if self.square:
                    total = total + 0.1 * roll(plain(tangent), 1)
        return total

    def evaluate_hessian_component(
        self, inputs: Any, seconds: Any, adjoints: Any, variable: Any, idx: int, *_: Any
    ) -> Any:
        found = self.evaluate_adj_component(inputs, seconds, variable, idx)
        if self.square:
            tangent = self.get_dependencies()[0].tlm_value
            return found if tangent is None else found + 2 * self.c * adjoints[0] * plain(tangent)
        if len(inputs) > 1:
            tangent = self.get_dependencies()[1 - idx].tlm_value
            return found if tangent is None else found + self.c * adjoints[0] * plain(tangent)
        return found


class Energy(Block):  # type: ignore[misc]
    """Half the sum of squares."""

    def __init__(self, x: Any) -> None:
        super().__init__()
        self.add_dependency(x)

    def recompute_component(self, inputs: Any, *_: Any) -> Any:
        return AdjFloat(0.5 * total(plain(inputs[0]) ** 2))

    def evaluate_adj_component(self, inputs: Any, adjoints: Any, *_: Any) -> Any:
        return float(adjoints[0]) * plain(inputs[0])

    def evaluate_tlm_component(self, inputs: Any, tangents: Any, *_: Any) -> Any:
        return AdjFloat(total(plain(inputs[0]) * plain(tangents[0])))

    def evaluate_hessian_component(self, inputs: Any, seconds: Any, adjoints: Any, *_: Any) -> Any:
        tangent = plain(self.get_dependencies()[0].tlm_value)
        return float(seconds[0]) * plain(inputs[0]) + float(adjoints[0]) * tangent


def run(block: Any, into: Any = None) -> Any:
    """Tape a block; its output overwrites `into`, or is new."""
    pyadjoint.get_working_tape().add_block(block)
    with pyadjoint.stop_annotating():
        made = block.recompute_component([v.saved_output for v in block.get_dependencies()])
        if into is not None:
            np.ndarray.__setitem__(into, Ellipsis, plain(made))
            made = into
    block.add_output(made.create_block_variable())
    return made


def copied(x: Any, into: Any = None) -> Any:
    return run(Product(1.0, x), into)


def stepped(x: Any, into: Any = None) -> Any:
    return run(Product(0.7, x, square=True), into)


def overwritten(steps: Any) -> Built:
    """One array that every step overwrites."""
    m, u = wave(0), vector(np.zeros(SIZE))
    for i in steps:
        if i == 0:
            copied(m, u)
        stepped(u, u)
    return run(Energy(u)), [m]


def fresh(steps: Any) -> Built:
    """Every step returns a new array."""
    u = m = wave(0)
    for _ in steps:
        u = stepped(u)
    return run(Energy(u)), [m]


def used_later(steps: Any) -> Built:
    """What step 0 makes is read in every third step only (issues 211 and 260 of pyadjoint)."""
    m, u, f = wave(0), vector(np.zeros(SIZE)), vector(np.zeros(SIZE))
    for i in steps:
        if i == 0:
            copied(m, f)
            copied(m, u)
        if i % 3 == 2:
            run(Product(1.2, u, f), u)
        stepped(u, u)
    return run(Energy(u)), [m]


def observed(steps: Any) -> Built:
    """A misfit in every step, summed as numbers."""
    m, u, total = wave(0), vector(np.zeros(SIZE)), AdjFloat(0.0)
    for i in steps:
        if i == 0:
            copied(m, u)
        stepped(u, u)
        total = total + run(Energy(u))
    return total, [m]


def leapfrog(steps: Any) -> Built:
    """Two arrays, with values made in between."""
    m = wave(0)
    u, old, new = (vector(np.zeros(SIZE)) for _ in range(3))
    for i in steps:
        if i == 0:
            copied(m, u)
            copied(m, old)
        run(Product(0.9, u, old), new)
        stepped(new, new)
        copied(u, old)
        copied(new, u)
    return run(Energy(u)), [m]


def two_before(steps: Any) -> Built:
    """Each step reads what the two before it returned, without copies."""
    m = wave(0)
    u, old = copied(m), copied(m)
    for _ in steps:
        u, old = stepped(run(Product(0.9, u, old))), u
    return run(Energy(u)), [m]


def source_in_each_step(steps: Any) -> Built:
    """A control for each step, made in it."""
    u, controls = wave(0.5), []
    for i in steps:
        f = copied(vector(1 + 0.05 * plain(wave(i))))
        controls.append(f)
        u = stepped(run(Product(1.0, u, f)))
    return run(Energy(u)), controls


def middle(steps: Any) -> Built:
    """The state after step 1 is the control."""
    u, controls = vector(plain(wave(0))), []
    for i in steps:
        u = stepped(u)
        if i == 1 or not controls:
            controls = [u]
    return run(Energy(u)), controls


BUILT: dict[str, Callable[[Any], Built]] = {
    each.__name__: each
    for each in (
        overwritten, fresh, used_later, observed, leapfrog, two_before, source_in_each_step, middle
    )
}  # fmt: skip


OPEN: list[Any] = []  # what `enable` returned: the last tape stays pyadjoint's working one


def reduced(
    built: Callable[[Any], Built], n: int, enabled: Callable[[Any], Any] | None = None
) -> tuple[Any, Any]:
    """Tape n timesteps; return the reduced functional, and what `enabled` returns."""
    tape = pyadjoint.Tape()
    pyadjoint.set_working_tape(tape)
    pyadjoint.continue_annotation()
    found = None
    try:
        found = None if enabled is None else enabled(tape)
        OPEN.append(found)
        functional, controls = built(tape.timestepper(iter(range(n))))
    finally:
        pyadjoint.pause_annotation()
    return ReducedFunctional(functional, [Control(m) for m in controls], tape=tape), found


def answers(functional: Any, *, at_first: bool = True) -> list[bytes]:
    """Return what a user asks for, bit for bit: values, gradients, tangents, second derivatives."""
    found = [*functional.derivative()] if at_first else []
    for phase in (0.4, 0.8):
        moved = [vector(plain(wave(phase + k))) for k in range(len(functional.controls))]
        found.append(functional(moved))
        found += functional.derivative()
        directions = [vector(np.cos(plain(each))) for each in moved]
        found.append(functional.tlm(directions))
        found += functional.hessian(directions)
        found += functional.derivative()
    return [np.asarray(each).tobytes() for each in found]
