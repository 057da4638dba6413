"""The streaming schedule's own books; `test_timed` and `test_actions` judge its schedules."""

from __future__ import annotations

from multistage.plan.sweep import Sweep, SweepRun


def test_parked_states_are_held_in_ascending_order() -> None:
    """The next anchor is held while a tail is reversed, those below it when the tail is over."""
    run = SweepRun(Sweep(4, 2.0, 10, backlog=3), 20, None)
    for token, step in enumerate((3, 5, 7)):
        run.writing.append((token, step, True))
        run.readable.append(step)
        run.parked.add(step)
    run.used = run.staged = 3
    for step in (7, 3, 5):
        run._hold(step)
    assert run.held == [3, 5, 7]
    assert not run.readable and not run.parked and run.staged == 0
    assert [staged for _, _, staged in run.writing] == [False, False, False]
