"""What a case's run is told: costs, budget, tiers, planner."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from multistage import PLANNERS, Budget, Costs, Plan, Tier, plan
from multistage.actions import (
    Advance,
    Await,
    Drop,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Schedule,
    Tape,
)
from multistage.model.costs import NOT_KEPT
from multistage.states.layout import places

from .cases import Case
from .stores import LateStore

_STEP_S = 1e-3


def state_bytes(case: Case) -> int:
    """Return the bytes of a state as budgets count them."""
    return places([leaf.nbytes for leaf in case.leaves])[1]


def tape_bytes(case: Case) -> int:
    """Return the bytes of a tape, by the operators' own reckoning."""
    own = 8 * max(2, int(sum(leaf.nbytes for leaf in case.leaves) * case.tape_factor / 8))
    return own * (case.block or 1)


def budget(case: Case) -> Budget | str:
    """Return the budget: slots, or the bytes of so many and a few more."""
    if case.in_bytes is None:
        return f"{case.slots} slots"
    return Budget(bytes=case.slots * state_bytes(case) + case.in_bytes)


def tiers(case: Case, folder: Path) -> list[Any] | None:
    """Return what goes to `tiers=`: names, and stores of our own."""
    found: list[Any] = []
    few = 3 * max(4096, state_bytes(case))
    for name in case.tiers:
        if name in ("late", "lossy"):
            found.append(LateStore(random.Random(case.seed), name == "lossy"))
        else:
            found.append(name.format(folder=folder, few=few))
    return found or None


def costs(case: Case) -> Costs | None:
    """Return the costs: right ones, ones that contradict the chain, or None to measure them."""
    if case.costs == "measured":
        return None
    tape, write, read = (ratio * _STEP_S for ratio in case.ratios)
    names = case.tiers or (("durable",) if case.play == "durable" else ())
    taped = case.tape and not (case.one_tape and case.block)  # blocks keep states there
    held = tape_bytes(case) if taped else 0
    if taped and case.tape not in ("arrays", "none", "number"):  # those of states beside its own
        shared = sum(2 * leaf.nbytes + 64 for leaf in case.leaves)
        held += (shared + 64) * (case.block or 1)
    right = Costs(
        _STEP_S,
        2 * _STEP_S,
        tape_step_s=tape if taped else None,
        state_bytes=state_bytes(case),
        tape_bytes=NOT_KEPT if case.one_tape and taped else held,
        tiers=tuple(Tier(f"tier {k}", write, read) for k, _ in enumerate(names)),
    )
    match case.costs:
        case "tapes are states":
            return replace(right, tape_step_s=None, tape_bytes=0)
        case "states are tapes":
            return replace(right, tape_step_s=tape, tape_bytes=max(1, right.state_bytes // 16))
        case "small tapes":
            return replace(right, tape_bytes=max(1, held // 16))
        case "large tapes":
            return replace(right, tape_bytes=held * 16)
        case "small states":
            return replace(right, state_bytes=max(1, right.state_bytes // 16))
        case "large states":
            return replace(right, state_bytes=right.state_bytes * 16)
        case "no tier":
            return right.without_tiers()
        case "another tier":
            return replace(right, tiers=(*right.tiers, Tier("another", write, read)))
        case "kept tapes":
            return replace(right, tape_bytes=held)
    return right


def planner(case: Case, n: int) -> Any:
    """Return what goes to `planner=`.  Raises MultistageError where a plan cannot be made."""
    kind, _, name = case.planner.rpartition(":")
    if kind == "":
        return name
    if kind == "plan":
        given = costs(case)
        if given is None or case.until:
            return name
        return plan(given, f"{case.slots} slots", n, name)

    def called(found: Costs, slots: int, n: int | None) -> Plan:
        if name == "auto":
            made = plan(found, Budget(slots=slots), n or 1)
        else:
            made = PLANNERS[name](found, slots, n)
        return replace(made, make=_mutant(case.mutation, made.make)) if case.mutation[0] else made

    return called


def _mutant(mutation: tuple[str, float], make: Callable[[], Schedule]) -> Callable[[], Schedule]:
    """Return a maker of schedules in which one action is not as it should be."""
    what, where = mutation
    source = random.Random(where)
    at = int(10 ** (2.2 * where))

    def schedule() -> Schedule:
        inner, answer, number = make(), None, 0
        early: set[int] = set()  # slots that were freed too early
        while True:
            try:
                action: Any = inner.send(answer)
            except StopIteration:
                return
            number += 1
            answer = None
            if isinstance(action, Free) and action.step in early:
                early.discard(action.step)
                continue
            if number < at:
                answer = yield action
                continue
            match what, action:
                case "delete", Await():
                    answer = True  # as if it had been waited for
                case "delete", Free() | Drop() | Save() | Load() | Advance() | Tape():
                    pass
                case "twice", Free() | Drop() | Save() | Load() | Await() | Advance() | Tape():
                    yield action
                    answer = yield action
                case "free early", Put(step) | Offer(step):
                    answer = yield action
                    if answer is not None:
                        early.add(step)
                        yield Free(step)
                    if source.random() < 0.5:
                        continue
                case "other step", Load(step) | Free(step) | Drop(step) | Get(step) if step:
                    answer = yield type(action)(step - 1)
                case "swap", Free() | Save() | Load() | Drop() | Advance() | Reverse():
                    following = next(inner, None)
                    if isinstance(following, Put | Offer | Get | Await):
                        answer = yield following
                        yield action
                    else:
                        if following is not None:
                            yield following
                        yield action
                case _:
                    answer = yield action
                    continue
            yield from _rest(inner, answer, early)
            return

    return schedule


def _rest(inner: Schedule, answer: Any, early: set[int]) -> Schedule:
    """Pass the rest of a schedule on, without the frees that came too early."""
    while True:
        try:
            action = inner.send(answer)
        except StopIteration:
            return
        if isinstance(action, Free) and action.step in early:
            early.discard(action.step)
            answer = None
            continue
        answer = yield action
