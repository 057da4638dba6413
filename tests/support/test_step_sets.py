"""Compact sets and maps against the built-in ones."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from multistage.support.step_sets import StepMap, StepSet

STEPS = st.one_of(st.integers(0, 40), st.integers(1000, 1050), st.integers(0, 10**12))


@given(st.lists(st.tuples(st.booleans(), STEPS)), STEPS)
def test_a_step_set_is_a_set(changes: list[tuple[bool, int]], last: int) -> None:
    ours, known = StepSet(), set()
    for inside, step in changes:
        if inside:
            ours.add(step)
            known.add(step)
        else:
            ours.discard(step)
            known.discard(step)
        assert (step in ours) == (step in known)
        assert len(ours) == len(known)
    assert list(ours) == sorted(known)
    assert list(ours.descending()) == sorted(known, reverse=True)
    assert list(ours.descending(last)) == sorted((s for s in known if s <= last), reverse=True)


@given(st.lists(st.tuples(st.sampled_from("+-"), STEPS, st.integers(0, 2**62))))
def test_a_step_map_is_a_dict(changes: list[tuple[str, int, int]]) -> None:
    ours, known = StepMap(), {}
    for what, step, value in changes:
        assert ours.get(step) == known.get(step)
        if what == "+":
            ours[step] = known[step] = value
        else:
            assert ours.pop(step) == known.pop(step, None)
        assert ours.get(step) == known.get(step)
        assert len(ours) == len(known)
    for step, value in known.items():
        assert ours.get(step) == value
    ours.clear()
    assert len(ours) == 0


def test_they_are_small() -> None:
    tracemalloc.start()
    steps, numbers = StepSet(), StepMap()
    for step in range(0, 800_000, 8):
        steps.add(step)
        numbers[step] = step
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(steps) == len(numbers) == 100_000
    assert held < 24 * 100_000
