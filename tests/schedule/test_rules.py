"""Rules on tapes, and on checkpoints that are lost; `test_actions` has the others."""

from __future__ import annotations

import pytest
from replays import actions_of

from multistage.actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Tape,
)
from multistage.errors import ScheduleError
from multistage.model.stages import Stage, StageCosts
from multistage.schedule.rules import Rules, check

# The last step's tape stands beside the tapes of the steps before it.
TURN = actions_of("S0 0>2 T2 | R2 L0 F0 T0 R1 R0")


def test_the_tape_of_a_turn_takes_a_slot_beside_other_tapes() -> None:
    assert check(TURN, 3, 2, tape_slots=1.5).peak_slots == 1.5
    with pytest.raises(ScheduleError, match=r"Reverse\(1\), which makes a tape beside 1 held"):
        check(TURN, 3, 1, tape_slots=1.5)
    assert check(TURN, 3, 1, tape_slots=0.5).peak_slots == 1


def test_a_turn_needs_no_slot_where_the_state_is_its_tape() -> None:
    assert check(TURN, 3, 1, tape_slots=1.5, state_is_tape=True).peak_slots == 1


def test_a_turn_needs_no_slot_without_other_tapes() -> None:
    alone = [Advance(0, 1), Tape(1), EndForward(), Reverse(1), Load(0), Reverse(0)]
    assert check(alone, 2, 0, tape_slots=100.0).peak_slots == 0


ASIDE = [Tape(0), Tape(1), EndForward(), Load(0), Reverse(1), Reverse(0)]


def test_a_live_state_put_aside_takes_a_slot() -> None:
    """Overwritten in place, the live arrays pass the tape on: what was in them is kept."""
    assert check(ASIDE, 2, 1, state_is_tape=True).peak_slots == 1
    assert check(ASIDE, 2, 2, state_is_tape=True, in_place=True).peak_slots == 2
    with pytest.raises(ScheduleError, match=r"puts live state 0 aside, needs 1 fast slot"):
        check(ASIDE, 2, 1, state_is_tape=True, in_place=True)


def test_a_later_live_state_is_used_up_by_a_tape_reversed_in_place() -> None:
    schedule = [Save(0), Tape(0), EndForward(), Reverse(0), Save(1), Free(1), Free(0)]
    check(schedule, 1, 2, state_is_tape=True)
    with pytest.raises(ScheduleError, match=r"Save\(1\) but the live state is None"):
        check(schedule, 1, 2, state_is_tape=True, in_place=True)


@pytest.mark.parametrize("action", [Tape(1), Advance(1, 2), Load(0)], ids=str)
def test_nothing_overwrites_the_only_tape(action: Action) -> None:
    with pytest.raises(ScheduleError, match="only its latest tape, and that of step 0"):
        check([Tape(0), action], 2, 9, tape_slots=0.0, one_tape=True)


def test_actions_that_keep_the_live_state_may_precede_the_reverse_of_the_only_tape() -> None:
    schedule = [Save(0), Put(0), Tape(0), EndForward(), Save(1), Await(0), Drop(0), Free(0)]
    check([*schedule, Free(1), Reverse(0)], 1, 2, tape_slots=9.0, one_tape=True)


def test_an_offer_and_an_await_are_judged_before_their_answer() -> None:
    rules = Rules(3, 1)
    rules.apply(Save(0), None)
    rules.apply(Put(0), 0)
    rules.apply(Advance(0, 1), None)
    before = repr(rules)
    for action, rule in (
        (Offer(2), "neither live nor held"),
        (Offer(1), "needs 1 fast slot"),
        (Await(1), "no such transfer"),
    ):
        with pytest.raises(ScheduleError, match=rule):
            rules.expect(action)
        assert repr(rules) == before
    rules.expect(Await(0))
    assert repr(rules) == before


# A schedule that looks at no answer, and a transfer of it that fails.
STATIC = actions_of("P0 a0 0>1 P1 a1 1>2 T2 | R2 G1 a2 L1 R1 F1 D1 G0 a3 L0 R0 F0 D0")


@pytest.mark.parametrize("lost", [{0}, {1}, {2}, {3}, {0, 1}, {2, 3}, {0, 1, 2, 3}])
def test_a_lost_checkpoint_may_be_asked_for_of_an_executor_that_recovers(lost: set[int]) -> None:
    for recovers in (True, False):
        rules = Rules(3, 1, recovers=recovers)

        def sweep(rules: Rules = rules) -> None:
            gone = set()
            for action in STATIC:
                answer: int | bool | None = None
                if isinstance(action, Put | Get):
                    answer = rules.next_token
                    if isinstance(action, Get) and (action.step in lost):
                        gone.add(answer)
                elif isinstance(action, Await):
                    answer = action.token not in lost | gone
                rules.apply(action, answer)
            rules.finish()

        if recovers:
            sweep()
            assert rules.used == 0
        else:
            with pytest.raises(ScheduleError):
                sweep()


def test_state_0_is_recovered_without_a_slot() -> None:
    rules = Rules(1, 1, recovers=True)
    schedule = [Put(0), Await(0), Get(0), Await(1), Load(0), Save(0), Free(0)]
    for action in [*schedule, Tape(0), EndForward(), Reverse(0), Drop(0)]:
        answer = rules.next_token if isinstance(action, Put | Get) else action != Await(1)
        rules.apply(action, answer)
    rules.finish()


def test_recovering_takes_no_more_slots_than_there_are() -> None:
    rules = Rules(3, 1, recovers=True)
    for action in STATIC[:10]:
        rules.apply(action, rules.next_token if isinstance(action, Put | Get) else True)
    rules.apply(Await(2), False)
    rules.apply(Load(0), None)
    rules.apply(Save(0), None)
    with pytest.raises(ScheduleError, match=r"Load\(1\) needs 1 fast slot"):
        rules.apply(Load(1), None)
    rules.apply(Free(0), None)
    rules.apply(Load(1), None)
    assert rules.used == 1


@pytest.mark.parametrize("action", [Offer(5), Offer(5, tape=True)], ids=str)
def test_an_offer_beyond_the_last_stage_is_judged_before_its_bytes_are_counted(
    action: Action,
) -> None:
    costs = StageCosts.uniform(2, Stage("a", 1.0, 2.0, output_bytes=10, tape_bytes=30), 5)
    with pytest.raises(ScheduleError, match=r"action 0: Offer.* but (state|tape) 5 is n"):
        check([action], costs=costs, tier_bytes={0: 100})
