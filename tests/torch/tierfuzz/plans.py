"""Random legal plans of chains with a slow tier."""

from __future__ import annotations

import random

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
    Put,
    Reverse,
    Save,
    Tape,
)


class Items:
    """What a random plan keeps, and when it moves."""

    def __init__(self, rng: random.Random, n: int) -> None:
        self.rng, self.n = rng, n
        self.nodes: list[tuple[int, int, bool]] = []  # first stage, last stage, whether taped
        twice = rng.choice([0.2, 0.8])  # as often states lie in a tape too
        start = 0
        while start < n:
            taped = rng.random() < 0.6
            stop = start if taped else min(n - 1, start + rng.randrange(4))
            self.nodes.append((start, stop, taped))
            start = stop + 1
        self.items: list[tuple[int, bool]] = []  # in the order they are made
        taped = set()
        for start, _, is_tape in self.nodes:
            inside = start - 1 in taped
            if start and (not inside or rng.random() < twice):
                self.items.append((start, False))
            if is_tape:
                self.items.append((start, True))
                taped.add(start)
        self.tier = [item for item in self.items if rng.random() < 0.7]


def random_plan(rng: random.Random, n: int) -> list[Action]:
    """Return a legal plan of n stages with random nodes, items in the tier and times to move."""
    plan = Items(rng, n)
    kept, actions = set(plan.items), []
    waiting: list[tuple[int, bool]] = []

    def made(item: tuple[int, bool]) -> None:
        if item in plan.tier:
            actions.append(Put(item[0], tape=item[1]))
            waiting.append(item)
        while waiting and rng.random() < 0.5:
            step, tape = waiting.pop(0)
            actions.append(Evict(step, tape=tape))

    for start, stop, taped in plan.nodes:
        if (start, False) in kept:
            actions.append(Save(start))
            made((start, False))
        if taped:
            actions.append(Tape(start))
            made((start, True))
        else:
            actions.append(Advance(start, stop + 1))
    actions += [Evict(step, tape=tape) for step, tape in waiting]
    actions.append(EndForward())
    tokens: dict[tuple[int, bool], int] = {}
    away = list(plan.tier)
    fast = {item for item in plan.items if item not in plan.tier}
    count = len(plan.tier)

    def get(item: tuple[int, bool]) -> None:
        nonlocal count
        away.remove(item)
        actions.append(Get(item[0], tape=item[1]))
        tokens[item] = count
        count += 1

    def have(item: tuple[int, bool]) -> None:
        if item in away:
            get(item)
        if item in tokens:
            actions.append(Await(tokens.pop(item)))
            fast.add(item)

    for start, stop, taped in reversed(plan.nodes):
        while away and rng.random() < 0.5:
            get(away[-1])
        if start:
            have((start, False) if (start, False) in kept else (start - 1, True))
        if taped:
            have((start, True))
            actions.append(Reverse(start))
            if (start, True) in plan.tier:
                actions.append(Drop(start, tape=True))
        else:
            for i in range(stop, start - 1, -1):
                actions.append(Load(start))
                if i > start:
                    actions.append(Advance(start, i))
                actions.append(Reverse(i))
        if (start, False) in kept:
            actions.append(Free(start))
            if (start, False) in plan.tier:
                actions.append(Drop(start))
    return actions
