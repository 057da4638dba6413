"""The accounting in bytes against objects that hold each other, as tensors do."""

from __future__ import annotations

import random
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
from replays import actions_of

from multistage.actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Tape,
)
from multistage.errors import ArgumentError, ScheduleError
from multistage.model.stages import Stage, StageCosts
from multistage.schedule.rules import Rules, check
from tests.chain_schedules import MIXED, offload_all, small_chain


class Breach(Exception):
    """What an illegal schedule does."""


def need(condition: object) -> None:
    if not condition:
        raise Breach


@dataclass(eq=False)
class Buffer:
    """Memory that lives as long as something refers to it."""

    nbytes: int
    state: int  # the state in it, -1 if it is landing
    start: Buffer | None = None  # a tape's input, None while only the tier has it
    is_late: bool = False  # whether it is a tape made in the reverse sweep, which holds its input


class Memory:
    """What is in memory, found by following references; nothing is counted along the way."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.n = costs, len(costs.stages)
        self.states = [costs.input_bytes, *(s.output_bytes for s in costs.stages)]
        self.tape_bytes = [s.tape_bytes for s in costs.stages]
        self.first = Buffer(costs.input_bytes, 0)
        self.live: Buffer | None = self.first
        self.saved: dict[int, Buffer] = {}
        self.tapes: dict[int, Buffer] = {}
        self.queue: list[tuple[str, bool, int, Buffer] | None] = []  # kind, is tape, step, buffer
        self.tier: set[tuple[bool, int]] = set()
        self.todo: int | None = None

    def resident(self) -> int:
        held = {self.first, *self.saved.values(), *self.tapes.values()}
        held |= {tape.start for tape in self.tapes.values() if tape.start}
        held |= {entry[3] for entry in self.queue if entry and entry[0] == "staged"}
        held |= {self.live} if self.live else set()
        gradients = [self.costs.input_gradient_bytes]
        gradients += [stage.gradient_bytes for stage in self.costs.stages]
        gradient = 0 if self.todo is None else gradients[self.todo]
        return sum(b.nbytes for b in held) + gradient

    def under_way(self, is_tape: bool, step: int) -> list[int]:
        queue = enumerate(self.queue)
        return [k for k, entry in queue if entry and entry[1:3] == (is_tape, step)]

    def at_hand(self, step: int) -> Buffer | None:
        """Return where a held tape's input is, other than where the tape refers to."""
        tape, saved = self.tapes.get(step - 1), self.saved.get(step)
        found = [b for b in (tape, saved, self.live) if b and b.state == step]
        return self.first if step == 0 else found[0] if found else None

    def apply(self, action: Action) -> None:
        last = self.n if self.todo is None else self.todo
        live = None if self.live is None else self.live.state
        match action:
            case Advance(start, stop):
                need(live == start < stop <= last)
                self.live = Buffer(self.states[stop], stop)
            case Tape(step):
                need(live == step < last and step not in self.tapes)
                made = Buffer(self.tape_bytes[step], step + 1, self.live, self.todo is not None)
                self.live = self.tapes[step] = made
            case Reverse(step):
                need(self.todo is not None and step == self.todo - 1)
                if step in self.tapes:
                    need(self.tapes[step].state >= 0 and not self.under_way(True, step))
                    need(self.tapes[step].start or self.at_hand(step))
                    self.live = None if live == step + 1 else self.live
                    self._outlive(self.tapes.pop(step))
                else:
                    need(live == step)
                    self.live = None
                self.todo = step
            case Save(step):
                need(live == step and step not in self.saved)
                assert self.live
                self.saved[step] = self.live
            case Load(step):
                tape = self.tapes.get(step - 1)
                inside = tape if tape and tape.state == step else None
                need(step == 0 or inside or (step in self.saved and self.saved[step].state >= 0))
                need(inside or step not in self.saved or self.saved[step].state >= 0)
                self.live = self.at_hand(step)
            case Free(step):
                tokens = self.under_way(False, step)
                need(step in self.saved and all(self._is_staged(k) for k in tokens))
                del self.saved[step]
            case Put(step, _, is_tape):
                need((is_tape, step) not in self.tier)
                held = self.tapes if is_tape else self.saved
                need(step not in held or held[step].state >= 0)
                need(step in held or (not is_tape and live == step))
                need(not (is_tape and held[step].is_late))
                self.tier.add((is_tape, step))
                staged = Buffer(self.states[step] if not is_tape else 0, -2)
                kind = "write" if step in held else "staged"
                self.queue.append((kind, is_tape, step, held.get(step, staged)))
            case Get(step, _, is_tape):
                held = self.tapes if is_tape else self.saved
                need((is_tape, step) in self.tier and step not in held)
                size = (self.tape_bytes if is_tape else self.states)[step]
                held[step] = Buffer(size, -1)
                self.queue.append(("read", is_tape, step, held[step]))
            case Await(token):
                need(0 <= token < len(self.queue) and self.queue[token])
                entry = self.queue[token]
                assert entry
                self.queue[token] = None
                if entry[0] == "read":
                    entry[3].state = entry[2] + entry[1]
            case Evict(step, _, is_tape):
                tokens = [k for k in self.under_way(is_tape, step) if self._writes(k)]
                held = self.tapes if is_tape else self.saved
                need(tokens and step in held and self.queue[tokens[0]][3] is held[step])
                self.queue[tokens[0]] = None
                gone = held.pop(step)
                if is_tape:
                    self._outlive(gone)
                else:
                    self._unpin(gone, None)
            case Drop(step, _, is_tape):
                need((is_tape, step) in self.tier and not self.under_way(is_tape, step))
                self.tier.remove((is_tape, step))
            case EndForward():
                need(self.todo is None and live == self.n)
                self.todo, self.live = self.n, None

    def _is_staged(self, token: int) -> bool:
        entry = self.queue[token]
        return entry is not None and entry[0] == "staged"

    def _writes(self, token: int) -> bool:
        entry = self.queue[token]
        return entry is not None and entry[0] == "write"

    def _outlive(self, gone: Buffer) -> None:
        """Keep the state inside a tape that goes, where it is live or saved."""
        kept = Buffer(self.states[gone.state], gone.state)
        self.live = kept if self.live is gone else self.live
        for step, buffer in self.saved.items():
            self.saved[step] = kept if buffer is gone else buffer
        for entry in self.queue:
            if entry and entry[3] is gone and not entry[1]:
                self.queue[self.queue.index(entry)] = (*entry[:3], kept)
        self._unpin(gone, kept)

    def _unpin(self, gone: Buffer, kept: Buffer | None) -> None:
        """Take what is gone from tapes that start from it; late ones hold the state by itself."""
        for tape in self.tapes.values():
            if tape.start is gone:
                tape.start = (kept or gone) if tape.is_late else None

    def finish(self) -> None:
        need(self.todo == 0 and not (self.saved or self.tapes or self.tier or any(self.queue)))


def judge(actions: Iterable[Action], costs: StageCosts) -> None:
    """Raise Breach unless the schedule is legal."""
    memory = Memory(costs)
    for action in actions:
        memory.apply(action)
    memory.finish()


SMALL = [(offload_all(4), small_chain(1, 4)), (MIXED, small_chain(2, 5))]


def spoilt(actions: list[Action]) -> list[list[Action]]:
    """Return the schedule with each action left out, done twice, and exchanged with the next."""
    found = [actions[:k] + actions[k + 1 :] for k in range(len(actions))]
    found += [actions[:k] + actions[k : k + 1] + actions[k:] for k in range(len(actions))]
    pairs = range(len(actions) - 1)
    return found + [[*actions[:k], actions[k + 1], actions[k], *actions[k + 2 :]] for k in pairs]


@pytest.mark.parametrize(("actions", "costs"), SMALL)
def test_every_small_change_of_a_schedule_is_judged_as_the_oracle_does(
    actions: list[Action], costs: StageCosts
) -> None:
    judge(actions, costs)
    check(actions, costs=costs)
    refused = 0
    for changed in spoilt(actions):
        try:
            judge(changed, costs)
            check(changed, costs=costs)
        except Breach:
            refused += 1
            with pytest.raises(ScheduleError):
                check(changed, costs=costs)
                pytest.fail(f"not caught: {changed}")
    assert refused > 2 * len(actions)


@pytest.mark.parametrize(("actions", "costs"), SMALL)
def test_an_action_left_out_is_caught_in_slots_too(
    actions: list[Action], costs: StageCosts
) -> None:
    """But for a tape reversed at once, which `Reverse` makes by itself."""
    n = len(costs.stages)
    check(actions, n, 99)
    for k, gone in enumerate(actions):
        if isinstance(gone, Tape) and actions[k + 1] == Reverse(gone.step):
            continue
        with pytest.raises(ScheduleError):
            check(actions[:k] + actions[k + 1 :], n, 99)
            pytest.fail(f"deleting {gone} at {k} was not caught")


def possible(draw: random.Random, n: int, tokens: int) -> Action:
    i, is_tape = draw.randrange(n), draw.random() < 0.5
    kinds: list[Action] = [
        Advance(i, draw.randint(i + 1, n)),
        Tape(i),
        Tape(i),
        Reverse(i),
        Save(i),
        Load(i),
        Free(i),
        Put(i, tape=is_tape),
        Get(i, tape=is_tape),
        Await(draw.randint(0, tokens)),
        Evict(i, tape=is_tape),
        Drop(i, tape=is_tape),
        EndForward(),
    ]
    return draw.choice(kinds)


@pytest.mark.long(but="[0-1]")
@pytest.mark.parametrize("seed", range(12))
def test_random_actions_are_judged_and_counted_as_by_the_oracle(seed: int) -> None:
    draw = random.Random(seed)
    performed = 0
    for walk in range(12):
        costs = small_chain(100 * seed + walk, draw.randint(1, 4))
        rules, memory = Rules.in_bytes(costs), Memory(costs)
        n = len(costs.stages)
        for _ in range(400):
            action = possible(draw, n, rules.next_token)
            answer = rules.next_token if isinstance(action, Put | Get) else None
            before, there = repr(rules), deepcopy(memory)
            try:
                there.apply(action)
            except Breach:
                with pytest.raises(ScheduleError):
                    rules.apply(action, answer)
                    pytest.fail(f"not caught: {action} in {before}")
                assert repr(rules) == before
                continue
            rules.apply(action, answer)
            memory = there
            performed += 1
            assert rules.memory.resident_bytes == memory.resident(), action
    assert performed > 500


@pytest.mark.parametrize(("actions", "costs"), SMALL)
def test_bytes_are_those_of_the_oracle_after_each_action(
    actions: list[Action], costs: StageCosts
) -> None:
    rules, memory = Rules.in_bytes(costs), Memory(costs)
    for action in actions:
        rules.apply(action, rules.next_token if isinstance(action, Put | Get) else True)
        memory.apply(action)
        assert rules.memory.resident_bytes == memory.resident(), action
    rules.finish()


@pytest.mark.parametrize(("actions", "costs"), SMALL)
def test_a_byte_less_than_the_peak_is_refused_and_changes_nothing(
    actions: list[Action], costs: StageCosts
) -> None:
    peak = check(actions, costs=costs).peak_bytes
    assert peak is not None
    check(actions, costs=costs, memory_bytes=peak)
    with pytest.raises(ScheduleError, match=rf"needs {peak} bytes .* limit is {peak - 1}; free"):
        check(actions, costs=costs, memory_bytes=peak - 1)
    rules = Rules.in_bytes(costs, memory_bytes=peak - 1)
    for action in actions:
        before = repr(rules)
        try:
            rules.apply(action, rules.next_token if isinstance(action, Put | Get) else True)
        except ScheduleError:
            assert repr(rules) == before
            break
    else:
        pytest.fail("the limit was exceeded in silence")


def stages(*sizes: tuple[int, int], first: int = 0) -> StageCosts:
    """Return a chain by the bytes of its outputs and tapes."""
    return StageCosts(tuple(Stage("a", 1, 1, *each, 0, 3) for each in sizes), first)


PAIR = stages((100, 130), (1, 7))


@pytest.mark.parametrize(
    ("costs", "actions", "resident"),
    [
        # A run of stages needs two states at a time, and nothing of them after.
        (stages((10, 10), (100, 100), (90, 90), (4, 4), first=5), "0>4", 5 + 4),
        # An evicted state leaves though a tape starts from it,
        (stages((100, 100), (1, 1)), "0>1 S1 P1 T1 E1", 1),
        # but stays with a tape of the reverse sweep, until that is reversed,
        (PAIR, "0>1 S1 P1 1>2 | L1 T1 E1", 100 + 7),
        (PAIR, "0>1 S1 P1 1>2 | L1 T1 E1 R1", 0),
        # as does the state in an evicted tape.
        (PAIR, "T0 P0t 1>2 | L1 T1 E0t", 100 + 7),
    ],
)
def test_bytes_of_what_leaves_and_what_stays(
    costs: StageCosts, actions: str, resident: int
) -> None:
    rules, memory = Rules.in_bytes(costs), Memory(costs)
    for action in actions_of(actions):
        rules.apply(action, 0 if isinstance(action, Put) else True)
        memory.apply(action)
    assert rules.memory.resident_bytes == memory.resident() == resident
    if actions == "0>4":
        assert rules.memory.peak_bytes == 5 + 100 + 90 + 3


def test_a_tier_counts_bytes() -> None:
    costs = small_chain(1, 4)
    room = sum(stage.tape_bytes for stage in costs.stages[:3])
    actions = offload_all(4)
    assert check(actions, costs=costs, tier_bytes={0: room}).tier_peak == {0: room}
    with pytest.raises(ScheduleError, match=rf"tier 0 is full: .* of {room - 1} bytes"):
        check(actions, costs=costs, tier_bytes={0: room - 1})
    offered = [Offer(a.step, tape=True) if isinstance(a, Put) else a for a in actions]
    with pytest.raises(ScheduleError, match="no write of tape 2"):
        check(offered, costs=costs, tier_bytes={0: room - 1})


def test_a_tape_needs_the_state_it_starts_from() -> None:
    costs = small_chain(3, 2)
    gone = [Tape(0), Put(0, tape=True), Tape(1), Evict(0, tape=True), EndForward()]
    with pytest.raises(ScheduleError, match=r"Reverse\(1\) but state 1, which it starts from"):
        check([*gone, Reverse(1)], costs=costs)
    back = [Get(0, tape=True), Reverse(1)]
    with pytest.raises(ScheduleError, match=r"Reverse\(1\) but state 1"):
        check([*gone, *back], costs=costs)
    check(
        [*gone, Get(0, tape=True), Await(1), Reverse(1), Reverse(0), Drop(0, tape=True)],
        costs=costs,
    )


def test_a_tape_of_the_reverse_sweep_is_not_written() -> None:
    costs = StageCosts((Stage("a", 1, 1, 100, 130), Stage("b", 1, 1, 1, 7)))
    late = [Advance(0, 2), EndForward(), Load(0), Tape(0), Put(0, tape=True)]
    with pytest.raises(ScheduleError, match="tape 0 was made in the reverse sweep"):
        check(late, costs=costs)


@pytest.mark.parametrize("lost", range(4))
def test_a_transfer_that_fails_takes_its_copy_with_it(lost: int) -> None:
    with pytest.raises(ScheduleError):
        check(MIXED, costs=small_chain(2, 5), survive=lambda token: token != lost)
    rules = Rules.in_bytes(small_chain(2, 5), recovers=True)
    for action in MIXED:
        answer: int | bool | None = None
        if isinstance(action, Put | Get):
            answer = rules.next_token
        elif isinstance(action, Await):
            answer = action.token != lost
        elif isinstance(action, Evict):
            answer = rules.token_of(action) != lost
        rules.apply(action, answer)
    rules.finish()


def test_tapes_in_slots() -> None:
    """A tape beyond the first takes its slots from its Get to its Evict."""
    actions = offload_all(3)
    assert check(actions, 3, 2, tape_slots=2.0).peak_slots == 2
    with pytest.raises(ScheduleError, match="needs 2 fast slot"):
        check(actions, 3, 1, tape_slots=2.0)
    assert check(actions, 3, 2, tape_slots=2.0, tier_slots={0: 4}).tier_peak == {0: 4}
    with pytest.raises(ScheduleError, match="is full: 2 of 3 states"):
        check(actions, 3, 2, tape_slots=2.0, tier_slots={0: 3})
    with pytest.raises(ScheduleError, match="only its latest tape, which cannot travel"):
        check([Tape(0), Put(0, tape=True)], 4, 2, one_tape=True)


@pytest.mark.parametrize(
    ("actions", "rule"),
    [
        ([Put(0, tape=True)], "tape 0 is not held"),
        ([Tape(0), Put(0, tape=True), Put(0, tape=True)], "already has that tape"),
        ([Evict(0)], "no write of checkpoint 0 to tier 0 is in flight"),
        ([Save(0), Put(0), Await(0), Evict(0)], "no write of checkpoint 0"),
        ([Put(0), Save(0), Evict(0)], "not from a fast slot"),
        ([Save(0), Put(0), Put(0, 1), Evict(0)], "another write from the same copy"),
        ([Get(0, tape=True)], "has no tape 0"),
        ([Tape(0), Put(0, tape=True), Get(0, tape=True)], "it is held already"),
        ([Drop(0, tape=True)], "has no tape 0"),
        ([Tape(0), Put(0, tape=True), Drop(0, tape=True)], "before its transfer was awaited"),
        ([Tape(0), Put(0, tape=True), EndForward(), Reverse(0)], "write of its tape"),
        (
            [
                *[Tape(0), Put(0, tape=True), Evict(0, tape=True), EndForward()],
                *[Get(0, tape=True), Reverse(0)],
            ],
            "before Await(1) of its tape's Get",
        ),
        (
            [
                *[Tape(0), Put(0, tape=True), Evict(0, tape=True), EndForward()],
                *[Get(0, tape=True), Put(0, 1, tape=True)],
            ],
            "before Await(1) of its Get",
        ),
        (
            [
                *[Tape(0), Put(0, tape=True), Evict(0, tape=True), EndForward()],
                *[Get(0, tape=True), Await(1), Reverse(0)],
            ],
            "left tapes in a tier: [(0, 0)]",
        ),
    ],
)
def test_each_rule_of_tapes_that_travel(actions: list[Action], rule: str) -> None:
    with pytest.raises(ScheduleError, match=r"^action") as raised:
        check(actions, 1, 3)
    assert rule in str(raised.value)


def test_bad_arguments() -> None:
    costs = small_chain(1, 3)
    with pytest.raises(ArgumentError, match="need costs"):
        check([], 3, 3, memory_bytes=4)
    with pytest.raises(ArgumentError, match="leave out slots"):
        check([], 3, 3, costs=costs)
    with pytest.raises(ArgumentError, match="the costs have 3 stages"):
        check([], 7, costs=costs)
    with pytest.raises(ArgumentError, match=r"must be multistage\.StageCosts"):
        check([], costs=3)
    with pytest.raises(ArgumentError, match=r"memory_bytes=-1"):
        check([], costs=costs, memory_bytes=-1)
    with pytest.raises(ArgumentError, match="of the chain's input"):
        check([], costs=replace(costs, input_bytes=50), memory_bytes=9)
    with pytest.raises(ArgumentError, match=r"tier_bytes\[0\]=-1"):
        check([], costs=costs, tier_bytes={0: -1})
